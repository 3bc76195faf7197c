"""Checks of solutions of the recomputation problem, and budgets to find them in."""

from __future__ import annotations

import pytest

from irc.ir import verify_schedule
from irc.passes import CheckpointProblem
from irc.passes.remat.problem import Solution

__all__ = ["budget_between", "verify"]


def budget_between(problem: CheckpointProblem, percent: int) -> int:
    """A budget between the floor and the peak of what keeps all."""
    floor, top = problem.floor_bytes, problem.keep_all.peak_bytes
    return floor + (top - floor) * percent // 100


def verify(problem: CheckpointProblem, solution: Solution, budget_bytes: int | None = None) -> None:
    """The schedule is valid, within the budget, and takes the time and the memory that are claimed."""
    verify_schedule(
        solution.schedule,
        problem.costs.workspace_bytes,
        budget_bytes=budget_bytes,
        peak_bytes=solution.peak_bytes,
    )
    assert solution.schedule.computed == solution.order
    assert solution.seconds == pytest.approx(sum(problem.costs.seconds[n] for n in solution.order))
    assert max(solution.during_bytes, default=0) <= solution.peak_bytes
    assert len(solution.during_bytes) == len(solution.order)
    assert solution.peak_bytes >= problem.floor_bytes
    assert all(solution.order.count(node) == 1 for node in problem.backward)
