"""Points of a plan's front: what other budgets would cost, and what some more bytes would buy."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...ir import BudgetError, Plan, TimeLimitError, format_bytes
from ...passes import PlanMemory, Planner, Program

__all__ = ["NEXT_BYTES", "FrontPoint", "front_of", "next_budget"]

NEXT_BYTES = 100 << 20
"""The bytes more whose worth a report tells."""

_POINTS = 7
_SECONDS = 8.0
"""The time of the processor that all points together may take."""

_NOTHING = 5e-5
"""Overheads below this are written as none."""

PLAN, SMALLEST, NEXT = "this plan", "smallest budget", "100 MiB more"


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A plan of the same step within another budget.

    Args:
        budget_bytes: The budget.
        peak_bytes: Predicted peak.
        overhead: Predicted extra time, as a fraction of the step's.
        bound: What no schedule within the budget goes below.
        name: What it is beyond a point of the front; or "".
    """

    budget_bytes: int
    peak_bytes: int
    overhead: float
    bound: float
    name: str = ""


def front_of(program: Program, plan: Plan, chooser: PlanMemory) -> list[FrontPoint]:
    """Plans a program within some budgets around its plan's, each in a part of some seconds.

    Args:
        program: The program with costs that the plan is of.
        plan: Its plan.
        chooser: The pass that chose it.

    Returns:
        Points in order of their budgets, the plan's own among them; none if nothing was timed, or for the
        first of several plans.
    """
    here = FrontPoint(plan.budget_bytes, plan.peak_bytes, plan.overhead, plan.lower_bound_overhead, PLAN)
    if program.costs is None or not program.costs.has_times:
        return []
    smallest, largest = plan.minimum_budget_bytes, plan.baseline_peak_bytes
    apart = max(largest - smallest, 0) / (_POINTS - 1)
    wanted = {round(smallest + apart * k): "" for k in range(_POINTS)}
    wanted[smallest] = SMALLEST
    if plan.budget_bytes + NEXT_BYTES < largest:
        wanted[plan.budget_bytes + NEXT_BYTES] = NEXT
    wanted.pop(plan.budget_bytes, None)
    planner = Planner(program)
    started = time.thread_time()
    found = [here]
    for place, (budget_bytes, name) in enumerate(sorted(wanted.items(), key=lambda each: each[1] == "")):
        left = _SECONDS - (time.thread_time() - started)
        if left <= 0:
            break
        within = _within(chooser, budget_bytes, left / (len(wanted) - place))
        try:
            other = within.choose(planner).plan
        except (BudgetError, TimeLimitError):
            continue
        if other is not None:
            found.append(
                FrontPoint(budget_bytes, other.peak_bytes, other.overhead, other.lower_bound_overhead, name)
            )
    return sorted(found, key=lambda point: point.budget_bytes)


def _within(chooser: PlanMemory, budget_bytes: int, seconds: float) -> PlanMemory:
    return replace(chooser, budget=budget_bytes, time_limit=max(seconds, 0.1))


def next_budget(front: Sequence[FrontPoint]) -> str:
    """Says what some more bytes would buy; "" if it is not known."""
    here = next((point for point in front if point.name == PLAN), None)
    if here is None:
        return ""
    if here.overhead < _NOTHING:
        return "The step takes as long as one that has all memory: more would buy nothing."
    more = next((point for point in front if point.name == NEXT), None)
    if more is None:
        full = min((p.budget_bytes for p in front if p.overhead < _NOTHING), default=math.inf)
        return (
            f"{format_bytes(int(full) - here.budget_bytes)} more would end all recomputation."
            if full < math.inf
            else ""
        )
    saved = max(here.overhead - more.overhead, 0.0)
    return (
        f"The next {format_bytes(NEXT_BYTES)} would save {saved:.2%} of a step: the overhead is "
        f"{more.overhead:.2%} in {format_bytes(more.budget_bytes)}, and {here.overhead:.2%} now."
    )
