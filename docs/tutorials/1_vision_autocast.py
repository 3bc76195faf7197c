"""
A vision model under autocast
=============================

This tutorial trains a small residual network under autocast, within 60% of the memory that it takes without
irc. You plan the training step, see where its memory goes, and compare the losses with those of the
original.
"""

import copy

import torch
from torch import nn
from torch.nn import functional

import irc

# %%
# The model and a batch
# ---------------------
#
# The forward runs under autocast in bfloat16. irc captures it with the element types that autocast chooses.
# The forward returns the loss, so irc needs no loss function.


class Block(nn.Module):
    """Two convolutions beside their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x):
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(y)))


class Network(nn.Module):
    """Blocks, and a loss of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(16) for _ in range(6)))
        self.head = nn.Linear(16, 10)

    def forward(self, images, labels):
        with torch.autocast("cpu", torch.bfloat16):
            features = self.blocks(self.stem(images)).mean((-2, -1))
            scores = self.head(features)
        return functional.cross_entropy(scores.float(), labels)


torch.manual_seed(0)
model = Network()
batch = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
original = copy.deepcopy(model)

# %%
# Plan the step
# -------------
#
# ``irc.optimize`` takes the model, the arguments of one step and a budget. ``"60%"`` is a part of the peak
# memory of the original step. You can also give bytes, such as ``"40MiB"``.

fitted = irc.optimize(model, batch, budget="60%")
print(fitted.plan.summary())

# %%
# The summary shows the predicted peak, and the overhead: the time that the plan adds to the step. The bound
# says that no schedule within this budget, with this order of backward, adds less. :doc:`/reference/output`
# explains each line.
#
# See the memory by module
# ------------------------
#
# The next table shows how many bytes of each module the plan keeps for backward, and how many it
# recomputes. Equal layers share a row: ``blocks.*``.

print(fitted.plan.explain(by="module", top=8))

# %%
# Train
# -----
#
# The training loop does not change. This one trains the original, and then the planned module. The losses
# of the two are equal bit for bit.

for module in (original, fitted):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(type(module).__name__, losses)
