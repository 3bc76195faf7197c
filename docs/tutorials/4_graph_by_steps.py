"""
A graph under a budget, step by step
====================================

What ``irc.optimize`` does, one pass at a time, with the program in its text form.
"""

import torch
from torch import nn

from irc.frontends.torch import capture
from irc.ir import liveness, print_graph, print_schedule
from irc.passes import PassManager, Program, parse_passes

# %%
# A model of three layers, captured: forward and backward are one graph, with the bytes of each storage.

torch.manual_seed(0)


class Model(nn.Module):
    """Three layers with an activation behind each, and the mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.square().mean()


captured = capture(Model(), (torch.randn(64, 16),))
program = Program(captured.graph)
print(print_graph(program.graph))

# %%
# Costs: the time of each operation, and its workspace. ``cpu`` is a described machine; ``device`` measures
# this one.

program = PassManager(parse_passes("cost{profile=cpu}")).run(program)
for node in program.graph.operations[:4]:
    microseconds = program.costs.seconds[node] * 1e6
    print(f"{node.name:12} {microseconds:8.2f} us {program.costs.workspace_bytes[node]:6} B")

# %%
# The schedule that keeps all, and its memory: bytes alive while each instruction runs.

timeline = liveness(program.baseline, program.costs.workspace_bytes)
print("peak of the step that keeps all:", timeline.peak_bytes, "bytes")

# %%
# A plan within 95% of it. The schedule is a straight line: compute, free, and the loss in between. What is
# computed a second time stands there twice.

planned = PassManager(parse_passes("plan-memory{budget=95%}")).run(program)
print(print_schedule(planned.schedule))
print(planned.plan.summary())

# %%
# The same on the command line: ``irc opt program.irc --passes 'cost{profile=cpu},plan-
# memory{budget=95%}'``.
