"""Known ways to plan with copies to a tier: Large Model Support, checkpoints that are swapped, POFO."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from ...ir import Direction, Tier
from ..remat.chain import articulations
from ..remat.problem import CheckpointProblem, Solution
from ..remat.strategies import every_k, per_block, segments, sqrt_n
from .offload_problem import OffloadProblem
from .pofo import pofo
from .schedule_copies import Order
from .swaps import Gap, Swap

__all__ = [
    "LOOK_AHEADS",
    "OFFLOAD_STRATEGIES",
    "known_offload_solutions",
    "lms",
    "lms_all",
    "ome",
    "swap_all",
]

LOOK_AHEADS = (1, 2, 5, 10, 20, 50, 100)
"""The distances, in operations before the first reader, at which a storage is fetched."""

_SMALL_PART = 2e-5
"""Storages up to this fraction of the peak that keeps all stay."""


def swap_all(work: OffloadProblem, deadline: float = math.inf) -> Iterator[Solution]:
    """Computes nothing twice; what is over the budget is copied, at the times of `schedule_copies`.

    Args:
        work: The problem.
        deadline: `time.thread_time()` after which nothing is tried.
    """
    if time.thread_time() >= deadline:
        return
    fitted = work.with_copies(work.problem.keep_all)
    if fitted is not None:
        yield fitted


# ---------------------------------------------------------------------- Large Model Support


def lms_all(work: OffloadProblem, look_ahead: int) -> Solution:
    """Large Model Support: all that forward makes and backward reads is copied out and fetched again.

    Memory is not looked at; see `_Ahead` for the times.

    Args:
        work: The problem; its budget does not matter.
        look_ahead: The distance, in operations before its first reader in backward, at which a storage is
            fetched.

    Source:
        Le et al., TFLMS: Large Model Support in TensorFlow by Graph Rewriting (2018).
    """
    order = work.order(work.problem.keep_all)
    gaps = _crossing(work.problem, order)
    ahead = _Ahead(order, gaps, work.tiers, look_ahead)
    return work.simulate(order.schedule(ahead.swaps))


def lms(work: OffloadProblem, deadline: float = math.inf) -> Iterator[Solution]:
    """Large Model Support at all its settings: all storages, and as few as the budget allows.

    A setting tells which these are: the largest, or the earliest (`n_tensors` of TFLMS).

    Args:
        work: The problem.
        deadline: `time.thread_time()` after which nothing more is tried.
    """
    for look_ahead in LOOK_AHEADS:
        if time.thread_time() >= deadline:
            return
        yield lms_all(work, look_ahead)
    problem = work.problem
    order = work.order(problem.keep_all)
    crossing = _crossing(problem, order)
    for gaps in (crossing, sorted(crossing, key=lambda gap: -gap.storage.nbytes)):
        chosen = _fastest(work, order, gaps, deadline)
        if chosen is not None:
            yield chosen


# ---------------------------------------------------------------------- checkpoints that are swapped


def ome(work: OffloadProblem, deadline: float = math.inf) -> Iterator[Solution]:
    """Recomputation between checkpoints, of which the earliest are swapped until the budget holds.

    The checkpoints are those of known rules: sqrt(n), every k, blocks, articulations of forward and every
    second, fourth, ... of them. For each rule it yields the fastest schedule within the budget, over all
    look-aheads.

    Args:
        work: The problem.
        deadline: `time.thread_time()` after which nothing more is tried.
    """
    for solution in _checkpointings(work.problem):
        if time.thread_time() >= deadline:
            return
        if solution.peak_bytes <= work.budget_bytes:
            yield solution
            continue
        order = work.order(solution)
        chosen = _fastest(work, order, _crossing(work.problem, order), deadline)
        if chosen is not None:
            yield chosen


def _checkpointings(problem: CheckpointProblem) -> Iterator[Solution]:
    yield sqrt_n(problem)
    for exponent in range(1, max(len(problem.forward) - 1, 0).bit_length()):
        yield every_k(problem, 2**exponent)
    yield from per_block(problem)
    cuts = sorted(articulations(problem))
    strides = {2**exponent for exponent in range(len(cuts).bit_length())} | {math.isqrt(len(cuts))}
    for stride in sorted(strides - {0}):
        yield segments(problem, cuts[::stride])


# ---------------------------------------------------------------------- swaps at fixed distances


def _crossing(problem: CheckpointProblem, order: Order) -> list[Gap]:
    """The gaps that forward ends in, but those of tiny storages; the earliest made first."""
    loss = len(order.forward)
    threshold = problem.keep_all.peak_bytes * _SMALL_PART
    gaps = (gap for gap in order.gaps if gap.after < loss < gap.before)
    return sorted((gap for gap in gaps if gap.storage.nbytes > threshold), key=lambda gap: gap.made)


@dataclass(eq=False)
class _Ahead:
    """Swaps at fixed distances, without regard to memory.

    A copy out begins when the storage is made. Its memory is given back at the first event behind the last
    reader in forward at which the copy has ended. It is fetched `look_ahead` operations before its first
    reader in backward; what has not left by then stays.

    Args:
        order: The order.
        gaps: The gaps to swap in.
        tiers: The tiers, the fastest first; a full one is passed over.
        look_ahead: The distance in operations.
    """

    order: Order
    gaps: Sequence[Gap]
    tiers: Sequence[Tier]
    look_ahead: int

    def __post_init__(self) -> None:
        self.swaps: list[Swap] = []
        self.step_seconds = 0.0
        self._run()

    @property
    def peak_bytes(self) -> int:
        """The most that is alive at once."""
        alive = self.order.event_bytes.copy()
        for swap in self.swaps:
            alive[swap.release : swap.fetch] -= swap.gap.storage.nbytes
        return int(alive.max(initial=0))

    def _run(self) -> None:
        made: dict[int, list[Gap]] = {}
        due: dict[int, list[Gap]] = {}
        read: dict[int, list[Gap]] = {}
        for gap in self.gaps:
            made.setdefault(gap.made, []).append(gap)
            due.setdefault(max(gap.before - self.look_ahead, gap.after + 2), []).append(gap)
            read.setdefault(gap.before, []).append(gap)
        left_bytes = {tier.name: tier.capacity_bytes for tier in self.tiers}
        free_at: dict[object, float] = {}
        copying: list[tuple[float, int, Gap]] = []
        copied: dict[int, list[Gap]] = {}
        going: dict[Gap, Tier] = {}
        away: dict[Gap, tuple[Tier, int]] = {}
        arrives: dict[Gap, float] = {}
        turns = count()
        now = 0.0

        def copy(tier: Tier, gap: Gap, direction: Direction) -> float:
            channel = tier.channel(direction)
            start = max(now, free_at.get(channel, 0.0))
            free_at[channel] = end = start + tier.copy_seconds(gap.storage.nbytes, direction)
            return end

        for event, seconds in enumerate(self.order.event_seconds):
            while copying and copying[0][0] <= now:
                gap = heappop(copying)[2]
                copied.setdefault(max(gap.after + 1, event), []).append(gap)
            for gap in copied.pop(event, ()):
                if gap in going:
                    away[gap] = going.pop(gap), event
            for gap in sorted(due.get(event, ()), key=lambda gap: gap.before):
                going.pop(gap, None)
                # what leaves and is fetched at once has gained nothing
                tier, release = away.pop(gap, (None, event))
                if tier is not None and release < event:
                    arrives[gap] = copy(tier, gap, Direction.IN)
                    self.swaps.append(Swap(gap, tier.name, release, event))
            now = max([now, *(arrives[gap] for gap in read.get(event, ()) if gap in arrives)])
            now += seconds
            for gap in made.get(event, ()):
                nbytes = gap.storage.nbytes
                tier = next((tier for tier in self.tiers if left_bytes[tier.name] >= nbytes), None)
                if tier is not None:
                    left_bytes[tier.name] -= nbytes
                    going[gap] = tier
                    heappush(copying, (copy(tier, gap, Direction.OUT), next(turns), gap))
        self.step_seconds = now


def _fastest(work: OffloadProblem, order: Order, gaps: Sequence[Gap], deadline: float) -> Solution | None:
    """Over all look-aheads, the fastest schedule within the budget that swaps as few of `gaps` as it can."""
    found: list[tuple[float, int, Sequence[Swap]]] = []
    computed = sum(order.event_seconds)
    for look_ahead in LOOK_AHEADS:
        if time.thread_time() >= deadline:
            break
        fewest = _fewest(work, order, gaps, look_ahead)
        if fewest is None:
            break  # what is fetched earlier takes more
        found.append((fewest.step_seconds, look_ahead, fewest.swaps))
        if fewest.step_seconds <= computed * (1 + 1e-9):
            break  # nothing is waited for
    for _, _, swaps in sorted(found, key=lambda entry: entry[:2]):
        solution = work.simulate(order.schedule(swaps))
        if solution.peak_bytes <= work.budget_bytes:
            return solution
    return None


def _fewest(work: OffloadProblem, order: Order, gaps: Sequence[Gap], look_ahead: int) -> _Ahead | None:
    """Swaps in the first few gaps that fit, found by halving; None if all of them do not fit."""
    low, high = 0, len(gaps)
    best = _Ahead(order, gaps, work.tiers, look_ahead)
    if best.peak_bytes > work.budget_bytes:
        return None
    while low < high:
        middle = (low + high) // 2
        fewer = _Ahead(order, gaps[:middle], work.tiers, look_ahead)
        if fewer.peak_bytes <= work.budget_bytes:
            best, high = fewer, middle
        else:
            low = middle + 1
    return best


# ---------------------------------------------------------------------- all of them

OFFLOAD_STRATEGIES: Mapping[str, Callable[[OffloadProblem, float], Iterator[Solution]]] = {
    "lms": lms,
    "ome": ome,
    "pofo": pofo,
    "swap": swap_all,
}
"""The strategies that copy, by name, given the problem and the `time.thread_time()` at which to stop.

Among the schedules of one strategy, the fastest within the budget counts.
"""


def known_offload_solutions(
    work: OffloadProblem, *, deadline: float = math.inf
) -> Iterator[tuple[str, Solution]]:
    """Yields the schedules of all these strategies, each with its name; some may be over the budget.

    Args:
        work: The problem.
        deadline: `time.thread_time()` after which nothing more is tried.
    """
    for name, strategy in OFFLOAD_STRATEGIES.items():
        yield from ((name, solution) for solution in strategy(work, deadline))
