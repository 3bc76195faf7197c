"""Schedules found without regard to one budget: known rules, a ladder of evictions, the smallest peaks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from .eviction import evict_greedily
from .exact import best_of_class, is_small
from .problem import CheckpointProblem, Solution
from .solution_merging import SolutionMerger
from .strategies import known_strategies

__all__ = ["Candidates", "find_candidates"]


@dataclass(frozen=True)
class Candidates:
    """Schedules found without regard to one budget: the same for every budget.

    Args:
        candidates: The schedules, each with its name.
        is_complete: Whether all that is tried was tried before the deadline.
    """

    candidates: tuple[tuple[str, Solution], ...]
    is_complete: bool = True

    @property
    def minimum_bytes(self) -> int:
        """The smallest peak that a schedule was found for."""
        return min(solution.peak_bytes for _, solution in self.candidates)

    def fitting(self, budget_bytes: int) -> list[tuple[str, Solution]]:
        """The candidates within the budget, the fastest first; of equally fast ones the least peak first."""
        found = [pair for pair in self.candidates if pair[1].peak_bytes <= budget_bytes]
        return sorted(found, key=lambda pair: (pair[1].seconds, pair[1].peak_bytes))


_KNOWN_SECONDS = 3.0
"""The time that known strategies have whatever the deadline: all of them, unless a graph is very large."""

_RUNGS = 10
_RUN_SECONDS = 3.0
"""The time limit for eviction at one budget; a tenth of it is usual."""

_HALVING_SECONDS = 1.0
"""The time limit for eviction that shall reach a lower peak than any before."""

_LEAST_PEAK_SECONDS = 1.0
"""The time limit for the least peak of a small graph."""


def find_candidates(
    problem: CheckpointProblem, *, deadline: float = math.inf, is_thorough: bool = False
) -> Candidates:
    """Tries known strategies, greedy eviction at a ladder of budgets, and a search for the smallest peaks.

    Args:
        problem: The recomputation problem.
        deadline: `time.thread_time()` after which nothing more is tried.
        is_thorough: Whether the smallest peak is worth several integer programmes; small graphs always have
            it exactly.
    """
    top, floor = problem.keep_all.peak_bytes, problem.floor_bytes
    found: list[tuple[str, Solution]] = []
    latest = max(deadline, time.thread_time() + _KNOWN_SECONDS)
    for named in known_strategies(problem):
        found.append(named)
        if time.thread_time() >= latest:
            return Candidates(tuple(found), is_complete=False)
    for rung in reversed(range(_RUNGS)):
        if time.thread_time() >= deadline:
            return Candidates(tuple(found), is_complete=False)
        budget = floor + (top - floor) * rung // _RUNGS
        latest = min(deadline, time.thread_time() + _RUN_SECONDS)
        solution = evict_greedily(problem, budget, deadline=latest)
        if solution is not None:
            found.append(("eviction", solution))
    latest = time.thread_time() + (deadline - time.thread_time()) / 3  # the rest is for the budget itself
    lowest = min(s.peak_bytes for _, s in found)
    found += _halved(problem, lowest, deadline=latest)
    if is_small(problem):
        latest = min(latest, time.thread_time() + _LEAST_PEAK_SECONDS)
        lowest = min(s.peak_bytes for _, s in found)
        found += [("ilp", lower) for lower in _below(problem, lowest, deadline=latest)]
    elif is_thorough:
        seeds = sorted((s for _, s in found), key=lambda s: (s.peak_bytes, s.seconds))[:_LOW_SEEDS]
        found.append(("ilp", _lowest(problem, seeds, deadline=latest)))
    return Candidates(tuple(found))


def _below(problem: CheckpointProblem, peak_bytes: int, *, deadline: float) -> Iterator[Solution]:
    """Schedules below `peak_bytes`, each below the one before, down to the least of a small graph's class."""
    low, high = problem.floor_bytes - 1, peak_bytes
    while low < high - 1 and time.thread_time() < deadline:
        below = best_of_class(problem, high - 1, deadline=deadline).best
        if below is None:
            return
        yield below
        high = below.peak_bytes
        middle = (low + high) // 2
        halved = best_of_class(problem, middle, deadline=deadline).best if middle > low else None
        if halved is None:
            low = middle
        else:
            yield halved
            high = halved.peak_bytes


_LOW_SEEDS = 4
_LOW_ROUNDS = 10
_HALF_WINDOW = 6
_LOW_ENOUGH = 2e-3
"""Stop after a round that lowers the peak by less than this fraction."""


def _halved(
    problem: CheckpointProblem, peak_bytes: int, *, deadline: float
) -> Iterator[tuple[str, Solution]]:
    """Yields ever lower peaks by eviction, at halvings of what is left between the floor and `peak_bytes`."""
    low, high = problem.floor_bytes - 1, peak_bytes
    while high - low > max(problem.keep_all.peak_bytes >> 8, 1) and time.thread_time() < deadline:
        middle = (low + high) // 2
        latest = min(deadline, time.thread_time() + _HALVING_SECONDS)
        runs = (evict_greedily(problem, middle, distance_weight=w, deadline=latest) for w in (1.0, 0.0))
        lower = next((s for s in runs if s is not None), None)
        if lower is None:
            low = middle
        else:
            high = lower.peak_bytes
            yield "eviction", lower


def _lowest(problem: CheckpointProblem, seeds: list[Solution], *, deadline: float) -> Solution:
    """Returns the lowest peak from low schedules united, and from more that may run again around the peak."""
    work = SolutionMerger(problem, None, seeds[0], deadline)
    work.add()
    for idea in seeds[1:]:
        work.add(idea)
    assert work.best is not None
    for _ in range(_LOW_ROUNDS):
        before = work.best.peak_bytes
        if before <= problem.floor_bytes or time.thread_time() >= deadline:
            break
        work.look_around(_around_peak(problem, work.best))
        if work.best.peak_bytes > before * (1 - _LOW_ENOUGH):
            break
    return work.best


def _around_peak(problem: CheckpointProblem, solution: Solution) -> list[int]:
    """The steps of the base order around the largest memory."""
    peaks = problem.peaks(solution)
    time_step = max(range(len(peaks)), key=peaks.__getitem__)
    base = time_step if time_step < len(problem.forward) else time_step - 1
    return list(range(max(base - _HALF_WINDOW, 0), min(base + _HALF_WINDOW, len(problem.base))))
