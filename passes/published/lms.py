"""Large Model Support, and swaps at fixed distances before their reads, as it makes them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from ...ir import Direction, Tier
from ..offload.offload_problem import OffloadProblem
from ..offload.schedule_copies import Order
from ..offload.swaps import Gap, Swap
from ..remat.problem import CheckpointProblem, Solution
from ..strategy_registry import Asked, Strategy
from .chain import SMALL_PART

__all__ = ["LMS", "LOOK_AHEADS", "crossing_gaps", "fastest", "lms", "lms_all"]

LOOK_AHEADS = (1, 2, 5, 10, 20, 50, 100)
"""The distances, in operations before the first reader, at which a storage is fetched."""


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
    gaps = crossing_gaps(work.problem, order)
    ahead = _Ahead(order, gaps, work.tiers, look_ahead)
    return work.simulate(order.schedule(ahead.swaps))


def lms(problem: CheckpointProblem, asked: Asked) -> Iterator[Solution]:
    """Large Model Support at all its settings: all storages, and as few as the budget allows.

    A setting tells which these are: the largest, or the earliest (`n_tensors` of TFLMS).
    """
    work = OffloadProblem(problem, asked.tiers, asked.budget_bytes)
    for look_ahead in LOOK_AHEADS:
        if time.thread_time() >= asked.deadline:
            return
        yield lms_all(work, look_ahead)
    order = work.order(problem.keep_all)
    earliest = crossing_gaps(problem, order)
    for gaps in (earliest, sorted(earliest, key=lambda gap: -gap.storage.nbytes)):
        chosen = fastest(work, order, gaps, asked.deadline)
        if chosen is not None:
            yield chosen


LMS = Strategy(
    "lms", "Le et al. 2018", lms, copies=True, without_budget=tuple(f"lms-{ahead}" for ahead in LOOK_AHEADS)
)


def crossing_gaps(problem: CheckpointProblem, order: Order) -> list[Gap]:
    """The gaps that forward ends in, but those of tiny storages; the earliest made first."""
    loss = len(order.forward)
    threshold = problem.keep_all.peak_bytes * SMALL_PART
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


def fastest(work: OffloadProblem, order: Order, gaps: Sequence[Gap], deadline: float) -> Solution | None:
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
