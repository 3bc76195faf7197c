"""OME: recomputation between checkpoints, some of which are swapped."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from ..offload.offload_problem import OffloadProblem
from ..remat.problem import CheckpointProblem, Solution
from ..remat.strategies import every_k, per_block, segments, sqrt_n
from ..strategy_registry import Asked, Strategy
from .chain import articulations
from .lms import crossing_gaps, fastest

__all__ = ["OME", "ome"]


def ome(problem: CheckpointProblem, asked: Asked) -> Iterator[Solution]:
    """Recomputation between checkpoints, of which the earliest are swapped until the budget holds.

    The checkpoints are those of known rules: sqrt(n), every k, blocks, articulations of forward and every
    second, fourth, ... of them. For each rule it yields the fastest schedule within the budget, over all
    look-aheads.
    """
    work = OffloadProblem(problem, asked.tiers, asked.budget_bytes)
    for solution in _checkpointings(problem):
        if time.thread_time() >= asked.deadline:
            return
        if solution.peak_bytes <= work.budget_bytes:
            yield solution
            continue
        order = work.order(solution)
        chosen = fastest(work, order, crossing_gaps(problem, order), asked.deadline)
        if chosen is not None:
            yield chosen


OME = Strategy("ome", "the thesis on OME", ome, copies=True)


def _checkpointings(problem: CheckpointProblem) -> Iterator[Solution]:
    yield sqrt_n(problem)
    for exponent in range(1, max(len(problem.forward) - 1, 0).bit_length()):
        yield every_k(problem, 2**exponent)
    yield from per_block(problem)
    cuts = sorted(articulations(problem))
    strides = {2**exponent for exponent in range(len(cuts).bit_length())} | {math.isqrt(len(cuts))}
    for stride in sorted(strides - {0}):
        yield segments(problem, cuts[::stride])
