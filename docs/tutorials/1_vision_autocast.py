"""
A vision model under autocast
=============================

A small residual network trains in bfloat16, within 60% of its memory.
"""

import copy

import torch
from torch import nn
from torch.nn import functional

import irc

# %%
# The model and one batch of it. The forward runs under autocast, as in many training loops: irc captures it
# so, with the element types that autocast chooses.


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
# The plan. ``"60%"`` is a part of the peak of the step as it is; bytes (``"40MiB"``) are taken too.

fitted = irc.optimize(model, batch, budget="60%")
print(fitted.plan.summary())

# %%
# What becomes of the memory, module by module. Equal layers stand together: ``blocks.*``.

print(fitted.plan.explain(by="module", top=8))

# %%
# Training goes on as before. Losses are those of the original, bit for bit.

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
