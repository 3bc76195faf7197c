"""
Several devices
===============

A model that is cut into two stages, planned for two devices, before you have them: no process group is
needed to plan.
"""

import torch
from torch import nn
from torch.nn import functional

import irc

# %%
# A model of equal blocks, with its loss inside.


class Model(nn.Module):
    """Blocks of a perceptron, and a loss of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
        )
        self.head = nn.Linear(64, 100)

    def forward(self, x, labels):
        return functional.cross_entropy(self.head(self.blocks(x)), labels)


torch.manual_seed(0)
batch = torch.randn(128, 64), torch.randint(0, 100, (128,))

# %%
# Two stages, four micro-batches of a batch. irc chooses where to cut, the schedule and what each stage
# keeps, so that the simulated step is short.

plan = irc.pipeline(Model(), batch, stages=2, micro_batches=4, budget="2MiB", costs="analytic").plan
print(plan.summary())

# %%
# On real devices each rank runs its stage: ``torchrun --nproc-per-node 2 train.py``, with the same call in
# train.py. :doc:`/howto/pipelines` has the loop.
