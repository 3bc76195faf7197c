"""Plans around a plan: what other budgets would cost, and what some more bytes would buy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from ...ir import BudgetError, Plan, TimeLimitError, format_bytes
from ...passes import PlanMemory, Planner, Program

__all__ = ["NEXT", "PLAN", "SMALLEST", "Front", "front_of", "next_budget"]

Front = Mapping[str, Plan]
"""Plans of one step within several budgets, in order of these, each by a name."""

PLAN, SMALLEST, NEXT = "this plan", "smallest budget", "100 MiB more"
"""The names of the plan itself, of the one with the least memory, and of the one with some more."""

_NEXT_BYTES = 100 << 20
_POINTS = 7
_SECONDS = 8.0
"""The time of the processor that all plans together may take."""

_NOTHING = 5e-5
"""Overheads below this are written as none."""


def front_of(program: Program, plan: Plan, chooser: PlanMemory) -> Front:
    """Plans a program within some budgets around its plan's, each in a part of some seconds.

    Args:
        program: The program with costs that the plan is of.
        plan: Its plan.
        chooser: The pass that chose it.

    Returns:
        The plans, the given one among them; none if no operation was timed.
    """
    if program.costs is None or not program.costs.has_times:
        return {}
    smallest, largest = plan.minimum_budget_bytes, plan.baseline_peak_bytes
    apart = max(largest - smallest, 0) / (_POINTS - 1)
    budgets = [(smallest, SMALLEST), (plan.budget_bytes + _NEXT_BYTES, NEXT)]
    budgets += [(round(smallest + apart * k), f"point {k}") for k in range(1, _POINTS)]
    wanted = {name: nbytes for nbytes, name in budgets if nbytes <= largest and nbytes != plan.budget_bytes}
    planner = Planner(program)
    started = time.thread_time()
    found = {PLAN: plan}
    for place, (name, nbytes) in enumerate(wanted.items()):
        left = _SECONDS - (time.thread_time() - started)
        if left <= 0:
            break
        within = replace(chooser, budget=nbytes, time_limit=left / (len(wanted) - place))
        try:
            other = within.choose(planner).plan
        except (BudgetError, TimeLimitError):
            continue
        if other is not None:
            found[name] = other
    return dict(sorted(found.items(), key=lambda each: each[1].budget_bytes))


def next_budget(front: Front) -> str:
    """Says what some more bytes would buy; "" if it is not known."""
    here, more = front.get(PLAN), front.get(NEXT)
    if here is None:
        return ""
    if here.overhead < _NOTHING:
        return "The step takes as long as one that has all memory: more would buy nothing."
    if more is None:
        full = next((each for each in front.values() if each.overhead < _NOTHING), None)
        if full is None:
            return ""
        return f"{format_bytes(full.budget_bytes - here.budget_bytes)} more would end all recomputation."
    saved = max(here.overhead - more.overhead, 0.0)
    return (
        f"The next {format_bytes(_NEXT_BYTES)} would save {saved:.2%} of a step: the overhead is "
        f"{more.overhead:.2%} in {format_bytes(more.budget_bytes)}, and {here.overhead:.2%} now."
    )
