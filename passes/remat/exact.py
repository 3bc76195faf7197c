"""Solves small graphs: one programme over all that may run again, with a cut at each time step."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .cut_ilp import Relaxation
from .problem import CheckpointProblem, Solution
from .retention_ilp import RetentionProgramme
from .solution_merging import complete

__all__ = ["Exact", "best_of_class", "is_small", "lower_bound"]

_SMALL_BACKWARD = 64
_SMALL_CHOICES = 600
"""The most positions at which something may run again that one programme has."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The outcome of an exact search.

    Args:
        best: The best schedule found, or None.
        is_proved: Whether it is proved that the class has none better, or none at all.
    """

    best: Solution | None
    is_proved: bool


def is_small(problem: CheckpointProblem) -> bool:
    """Whether every position at which something may run again fits into one programme."""
    if len(problem.backward) > _SMALL_BACKWARD:
        return False
    return sum(map(len, complete(problem))) <= _SMALL_CHOICES


def best_of_class(problem: CheckpointProblem, budget_bytes: int, *, deadline: float) -> Exact:
    """Finds the best schedule of the class of `CheckpointProblem`; of equal ones the one of least peak.

    Args:
        problem: The recomputation problem of a small graph.
        budget_bytes: The most that may be alive at once.
        deadline: `time.thread_time()` at which to stop.
    """
    everything = complete(problem)
    limit_bytes = budget_bytes
    best: Solution | None = None
    while (left := deadline - time.thread_time()) > 0:
        programme = RetentionProgramme(problem, everything, limit_bytes, {})
        chosen = programme.solve(seconds=left, gap=0.0)
        if chosen.is_infeasible:
            return Exact(best, True)
        solution = chosen.solution
        if solution is None or not chosen.is_best:
            return Exact(best, False)
        if best is not None and solution.seconds > best.seconds:
            return Exact(best, True)
        best, limit_bytes = solution, solution.peak_bytes - 1
    return Exact(best, False)


def lower_bound(problem: CheckpointProblem, budget_bytes: int, *, deadline: float) -> float:
    """A lower bound of the recomputation, in seconds, of schedules with this order of first runs that fit.

    A cut stands at each time step, and no storage counts as free.

    Args:
        problem: The recomputation problem of a small graph.
        budget_bytes: The most that may be alive at once.
        deadline: `time.thread_time()` at which to stop.
    """
    relaxation = Relaxation(problem, budget_bytes, range(problem.time_steps), small_bytes=-1)
    solved = relaxation.solve(seconds=deadline - time.thread_time(), gap=0.0)
    return 0.0 if solved.is_infeasible else solved.bound_seconds
