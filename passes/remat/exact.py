"""Small graphs: all places where something may run again in one programme, and stages at all moments."""

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
"""Up to this many places where something may run again, one programme has them all."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The outcome of an exact search.

    Args:
        best: The best schedule found, or None.
        is_proved: There is none better in the class, or none at all.
    """

    best: Solution | None
    is_proved: bool


def is_small(problem: CheckpointProblem) -> bool:
    """Whether every place where something may run again fits into one programme."""
    if len(problem.backward) > _SMALL_BACKWARD:
        return False
    return sum(map(len, complete(problem))) <= _SMALL_CHOICES


def best_of_class(problem: CheckpointProblem, budget_bytes: int, *, deadline: float) -> Exact:
    """The best schedule of the class of `CheckpointProblem`, and of the best the one with the smallest peak.

    Args:
        problem: The recomputation problem of a small graph.
        budget_bytes: The most that may be alive at once.
        deadline: `time.monotonic()` at which to stop.
    """
    everything = complete(problem)
    limit_bytes = budget_bytes
    best: Solution | None = None
    while (left := deadline - time.monotonic()) > 0:
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
    """Seconds of recomputation that every schedule within the budget, with this order of first runs, needs.

    A stage stands at each moment, and no storage counts as free.

    Args:
        problem: The recomputation problem of a small graph.
        budget_bytes: The most that may be alive at once.
        deadline: `time.monotonic()` at which to stop.
    """
    relaxation = Relaxation(problem, budget_bytes, range(problem.time_steps), small_bytes=-1)
    solved = relaxation.solve(seconds=deadline - time.monotonic(), gap=0.0)
    return 0.0 if solved.is_infeasible else solved.bound_seconds
