"""Reads the memory of a plan from a written folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...ir import Plan, StepMemory, VerificationError
from ...ir.files import read_json
from ...passes import Costs, Program
from ..artifact import TIMELINE, read_planned, undamaged
from ..source import Source

__all__ = ["read_memory"]


def read_memory(folder: Path) -> tuple[Plan, Source, Program]:
    """Reads the plan of a folder with its memory, and the program that it is of; nothing of it runs.

    Args:
        folder: Of `irc optimize MODEL -o DIR`.

    Raises:
        UsageError: IRC431 when a file is missing or damaged.
        VerificationError: IRC129 when the memory is not that of the plan; as `read_planned`.
    """
    planned = read_planned(folder, TIMELINE)
    with undamaged(folder / TIMELINE):
        memory = StepMemory.from_json(read_json((folder / TIMELINE).read_text()))
    plan, schedule = planned.plan, planned.schedule
    if memory.planned.peak_bytes != plan.peak_bytes:
        raise VerificationError(
            "IRC129",
            f"{folder / TIMELINE} has a peak of {memory.planned.peak_bytes:,} bytes, not the "
            f"{plan.peak_bytes:,} of the plan",
        )
    seconds = {step.name: step.end_seconds - step.start_seconds for step in memory.planned.steps}
    costs = Costs(
        {node: seconds.get(node.name, 0.0) for node in schedule.graph.operations},
        {node: planned.by_name.get(node.name, 0) for node in schedule.graph.operations},
        plan.costs,
        memory.planned.has_seconds,
    )
    return replace(plan, memory=memory), planned.source, Program(schedule.graph, costs, schedule, plan)
