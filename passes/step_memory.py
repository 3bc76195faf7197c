"""The memory of a planned step beside that of the original, tensor by tensor."""

from __future__ import annotations

from dataclasses import replace

from ..ir import StepMemory, memory_timeline
from .program import Program

__all__ = ["step_memory"]


def step_memory(program: Program) -> StepMemory:
    """Returns the memory of a program's schedule, and of the step that computes nothing twice.

    The latter is of the graph as it was captured: before layers ran in tiles, in time steps or in kernels.

    Args:
        program: A program with costs and a schedule.
    """
    before = program.kernels or program
    assert program.costs is not None and program.schedule is not None and before.costs is not None
    original = replace(before, graph=before.original or before.graph)
    seconds = program.costs.seconds if program.costs.has_times else None
    seconds_before = before.costs.seconds if before.costs.has_times else None
    return StepMemory(
        memory_timeline(program.schedule, program.costs.workspace_bytes, seconds, program.tiers),
        memory_timeline(original.baseline, before.costs.workspace_bytes, seconds_before),
    )
