"""
A graph under a budget, step by step
====================================

This tutorial runs the main steps of ``irc.optimize`` one at a time: capture, costs and plan. It prints the
result of each step. Read it if you want to write a pass, or to understand a plan.
"""

import torch
from torch import nn

from irc.frontends.torch import capture
from irc.ir import liveness, print_graph, print_schedule
from irc.passes import PassManager, Program, parse_passes

# %%
# Capture
# -------
#
# ``capture`` turns a model of three layers into a graph. The graph holds forward and backward. It states
# the bytes of each storage, the memory that tensors lie in. :doc:`/reference/ir` describes the text.

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
# Costs
# -----
#
# The pass ``cost`` finds the time and the workspace of each operation. A workspace is memory that an
# operation takes only while it runs. ``profile=cpu`` takes the costs from the described machine ``cpu``.
# ``profile=device`` measures your own machine.

program = PassManager(parse_passes("cost{profile=cpu}")).run(program)
for node in program.graph.operations[:4]:
    microseconds = program.costs.seconds[node] * 1e6
    print(f"{node.name:12} {microseconds:8.2f} us {program.costs.workspace_bytes[node]:6} B")

# %%
# The memory of the original step
# -------------------------------
#
# ``program.baseline`` is the schedule that keeps everything. ``liveness`` computes the bytes that are in
# memory while each instruction runs.

timeline = liveness(program.baseline, program.costs.workspace_bytes)
print("peak of the step that keeps all:", timeline.peak_bytes, "bytes")

# %%
# The plan
# --------
#
# The pass ``plan-memory`` finds a schedule within 95% of this peak. A schedule is a list of instructions:
# it computes operations, frees storages, and calls for the loss between forward and backward. If the plan
# recomputes an operation, the operation appears twice.

planned = PassManager(parse_passes("plan-memory{budget=95%}")).run(program)
print(print_schedule(planned.schedule))
print(planned.plan.summary())

# %%
# The command line runs the same passes on the text of a graph. If you write the text from above to
# ``program.irc``, this command prints the graph with its schedule::
#
#     irc opt program.irc --passes 'cost{profile=cpu},plan-memory{budget=95%}'
#
# :doc:`/howto/write_a_pass` shows how to add a pass of your own.
