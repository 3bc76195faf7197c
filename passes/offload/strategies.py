"""The schedules that every search with copies begins with: those of all strategies that copy."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from ..remat.problem import CheckpointProblem, Solution
from ..strategy_registry import Asked, Strategy, load_strategies
from .offload_problem import OffloadProblem

__all__ = ["known_offload_solutions"]


def _swap(problem: CheckpointProblem, asked: Asked) -> Iterator[Solution]:
    """Computes nothing twice; what is over the budget is copied, at the times of `schedule_copies`."""
    if time.thread_time() < asked.deadline:
        solution = OffloadProblem(problem, asked.tiers, asked.budget_bytes).with_copies(problem.keep_all)
        if solution is not None:
            yield solution


SWAP = Strategy("swap", "this project", _swap, copies=True)


def known_offload_solutions(
    work: OffloadProblem, *, deadline: float = math.inf
) -> Iterator[tuple[str, Solution]]:
    """Yields the schedules of all these strategies, each with its name; some may be over the budget.

    Args:
        work: The problem.
        deadline: `time.thread_time()` after which nothing more is tried.
    """
    asked = Asked(work.budget_bytes, 0, deadline, work.tiers)
    for strategy in load_strategies(copies=True):
        yield from ((strategy.name, solution) for solution in strategy.find(work.problem, asked))
