"""
Several devices
===============

This tutorial cuts a model into two stages for two devices. Planning needs neither the devices nor a process
group, so you can plan before you have them.
"""

import torch
from torch import nn
from torch.nn import functional

import irc

# %%
# The model and a batch
# ---------------------
#
# The model has six equal blocks. Its forward returns the loss.


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
# Plan the pipeline
# -----------------
#
# A stage is the part of the model that one device runs. A batch of 128 rows is split into four
# micro-batches of 32 rows, so that both devices work at the same time. The budget is 2 MiB for each device.
# irc chooses where to cut, and what each stage keeps for backward, so that the simulated step is short.
# ``costs="analytic"`` takes the times from a described machine instead of measuring them.

plan = irc.pipeline(Model(), batch, stages=2, micro_batches=4, budget="2MiB", costs="analytic").plan
print(plan.summary())

# %%
# The summary shows the schedule, the predicted time of a step, and the peak of each device.
#
# Run it on two devices
# ---------------------
#
# Put the same call and a training loop into ``train.py``, and start one process for each device::
#
#     torchrun --nproc-per-node 2 train.py
#
# :doc:`/howto/pipelines` has the loop. :doc:`/explanation/pipelines` explains the schedules.
