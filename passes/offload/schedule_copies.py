"""Schedules copies beside a given order of computations, as the memory demands and allows."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...ir import (
    Compute,
    Direction,
    Graph,
    Loss,
    Node,
    Schedule,
    Storage,
    Tier,
    liveness,
    step_times,
    with_frees,
)
from .swaps import Gap, Swap, gaps, with_swaps

__all__ = ["EFFORT", "Copies", "Order", "schedule_copies"]


@dataclass(eq=False)
class Order:
    """An order of computations, with its memory if nothing is swapped.

    Args:
        graph: The training graph.
        forward: The operations before the loss.
        backward: The operations after it.
        seconds: The time of each operation.
        workspace_bytes: The workspace of each operation.
    """

    graph: Graph
    forward: Sequence[Node]
    backward: Sequence[Node]
    seconds: Mapping[Node, float]
    workspace_bytes: Mapping[Node, int]
    gaps: list[Gap] = field(init=False)
    event_seconds: list[float] = field(init=False)
    event_bytes: np.ndarray = field(init=False)
    """The most that is alive at each event: the computations, and the loss in between."""

    def __post_init__(self) -> None:
        self.gaps = gaps(self.graph, self.forward, self.backward)
        before, after = ([self.seconds[node] for node in part] for part in (self.forward, self.backward))
        self.event_seconds = [*before, 0.0, *after]
        kept = with_frees(self.graph, self.forward, self.backward)
        timeline = liveness(kept, self.workspace_bytes)
        pairs = zip(kept.instructions, timeline.during_bytes, strict=True)
        self.event_bytes = np.array([n for i, n in pairs if isinstance(i, Compute | Loss)], dtype=np.int64)

    def schedule(self, swaps: Sequence[Swap]) -> Schedule:
        """Makes the schedule with some swaps."""
        return with_swaps(self.graph, self.forward, self.backward, swaps)


@dataclass(frozen=True, slots=True)
class Copies:
    """Swaps with their times.

    Args:
        swaps: The swaps in the order of their releases.
        step_seconds: The time of the step with them.
    """

    swaps: tuple[Swap, ...]
    step_seconds: float


_ROUNDS = 4
_HOPELESS = 1.1
_PROMISING = 1.01
"""A step may be slower than the limit by this factor to be timed anew, and to have other rules tried."""

_BETTER = 1e-6

EFFORT = 2_500
"""Events times tries to find better rules: a few tries for ResNet-50, hundreds for tiny graphs."""


def schedule_copies(
    order: Order,
    storages: Iterable[Storage],
    tiers: Sequence[Tier],
    budget_bytes: int,
    *,
    below_seconds: float = math.inf,
    effort: int = EFFORT,
) -> Copies | None:
    """Swaps some of `storages` so that the step fits; None if that is not enough.

    Copies out begin when a storage is made. Memory is given back when it is needed: among the storages whose
    copy has ended, that of the one that is read last; if none has ended, computing waits for the next. Copies
    back begin as early as memory allows, in the order in which they are needed. Copies of what never left are
    left out, and the rest is timed anew.

    If computing waits, other rules are tried, and kept if they are faster: copies back that fit go before
    those that do not; the storage that is waited for the longest stays, or goes to another tier; or memory is
    given back as soon as its copy has ended.

    Args:
        order: The order, with what it takes.
        storages: The storages that may be swapped; one that does not have to leave stays.
        tiers: The tiers, the fastest first; a full one is passed over.
        budget_bytes: The most that may be alive at once.
        below_seconds: A limit: only faster steps are asked for, and what is much slower is not timed anew.
        effort: The effort in events times tries; 0 keeps to the rules of the first paragraph.
    """
    rules = _Rules({storage: tuple(tiers) for storage in storages})
    search = _Search(order, tiers, budget_bytes, below_seconds, effort)
    best = search.narrowed(rules)
    if best is not None and best.copies.step_seconds <= _PROMISING * below_seconds:
        best = search.improved(best, rules)
    return None if best is None else best.copies


@dataclass(frozen=True, slots=True)
class _Rules:
    """The rules of a run.

    Args:
        tiers_of: The storages that may be swapped, with the tiers they may go to.
        since: The events that make some of them for the first time that counts: they stay until then.
        early: Gaps whose memory is given back as soon as the copy out has ended.
        overtakes: Whether a copy back that fits may go before one that does not.
    """

    tiers_of: Mapping[Storage, tuple[Tier, ...]]
    since: Mapping[Storage, int] = field(default_factory=dict[Storage, int])
    early: frozenset[Gap] = frozenset()
    overtakes: bool = False


@dataclass(frozen=True, slots=True)
class _Timed:
    """The result of a run.

    Args:
        copies: The swaps and their time.
        waited: For each storage, how long computing waited for its copies, in seconds.
        is_exact: Whether the copies out that were timed are those of the swaps: no more, and none earlier.
    """

    copies: Copies
    waited: Mapping[Storage, float]
    is_exact: bool


@dataclass(eq=False)
class _Search:
    """Looks for the rules with the fastest step; the arguments are those of `schedule_copies`."""

    order: Order
    tiers: Sequence[Tier]
    budget_bytes: int
    below_seconds: float
    effort: int

    def narrowed(self, rules: _Rules) -> _Timed | None:
        """Returns the best of some runs, each with only what was away in the one before."""
        best: _Timed | None = None
        for _ in range(_ROUNDS):
            found = _Run(self.order, rules, self.tiers, self.budget_bytes).run()
            if found is None or found.copies.step_seconds > _HOPELESS * self.below_seconds:
                break
            if best is None or found.copies.step_seconds < best.copies.step_seconds:
                best = found
            if found.is_exact:
                break
            since = _begun(found.copies.swaps)
            rules = replace(rules, tiers_of={s: rules.tiers_of[s] for s in since}, since=since)
        if best is None or best.is_exact:
            return best
        swaps = best.copies.swaps
        times = step_times(self.order.schedule(swaps), self.order.seconds, self.tiers)
        return replace(best, copies=Copies(swaps, times.step_seconds))

    def improved(self, best: _Timed, rules: _Rules) -> _Timed:
        """Changes the rules, one at a time, as long as that helps and something is waited for."""
        least = math.fsum(self.order.event_seconds) * (1 + _BETTER)
        changes = _changes(best, rules)
        while best.copies.step_seconds > least and self.effort >= len(self.order.event_seconds):
            changed = next(changes, None)
            if changed is None:
                break
            self.effort -= len(self.order.event_seconds)
            found = self.narrowed(changed)
            if found is not None and found.copies.step_seconds < best.copies.step_seconds * (1 - _BETTER):
                best, changes = found, _changes(found, changed)
        return best


def _begun(swaps: Sequence[Swap]) -> dict[Storage, int]:
    """Maps each storage to the event behind which its copy out begins, as in `with_swaps`."""
    begun: dict[Storage, int] = {}
    for swap in swaps:
        begun[swap.gap.storage] = min(swap.gap.made, begun.get(swap.gap.storage, swap.gap.made))
    return begun


def _changes(found: _Timed, rules: _Rules) -> Iterator[_Rules]:
    """Yields rules that differ in one thing, first in what computing waited for the longest."""
    if not rules.overtakes:
        yield replace(rules, overtakes=True)
    swaps = found.copies.swaps
    tiers = {swap.gap.storage: swap.tier for swap in swaps}
    for storage in sorted(tiers, key=lambda storage: -found.waited.get(storage, 0.0)):
        elsewhere = tuple(tier for tier in rules.tiers_of[storage] if tier.name != tiers[storage])
        if elsewhere:
            yield replace(rules, tiers_of={**rules.tiers_of, storage: elsewhere})
        yield replace(rules, tiers_of={s: where for s, where in rules.tiers_of.items() if s is not storage})
    for swap in sorted(swaps, key=lambda swap: -swap.gap.before):
        if swap.gap not in rules.early:
            yield replace(rules, early=rules.early | {swap.gap})


class _Run:
    """One way through the step, with the clock of `step_times`."""

    def __init__(self, order: Order, rules: _Rules, tiers: Sequence[Tier], budget_bytes: int) -> None:
        self.order = order
        self.rules = rules
        self.budget_bytes = budget_bytes
        self.alive = order.event_bytes.copy()
        """Bytes at each event, without what is away and not asked back for."""
        self.by_made: dict[int, list[Gap]] = {}
        self.by_after: dict[int, list[Gap]] = {}
        for gap in order.gaps:
            if gap.storage in rules.tiers_of and gap.made >= rules.since.get(gap.storage, 0):
                self.by_made.setdefault(gap.made, []).append(gap)
                self.by_after.setdefault(gap.after, []).append(gap)
        self.now = 0.0
        self.free_at: dict[object, float] = {}
        self.left_bytes = {tier.name: tier.capacity_bytes for tier in tiers}
        self.tier_of: dict[Storage, Tier] = {}
        self.begun: dict[Storage, int] = {}
        """The events behind which copies out began."""
        self.copied_at: dict[Storage, float] = {}
        self.open: dict[Gap, None] = {}
        """Gaps that the present event is in, and whose storage is still there."""
        self.closing: dict[int, list[Gap]] = {}
        """Gaps that were opened, by the events that they end before."""
        self.away: list[Gap] = []
        """Gaps whose storage is away, by the events that they end before."""
        self.left_at: dict[Gap, int] = {}
        """The events before which these left."""
        self.arriving: dict[int, list[tuple[float, Storage]]] = {}
        """The storages that come back before an event, with the ends of their copies."""
        self.swaps: list[Swap] = []
        self.waited: dict[Storage, float] = {}

    def run(self) -> _Timed | None:
        for event, seconds in enumerate(self.order.event_seconds):
            for gap in self.closing.pop(event, ()):
                self.open.pop(gap, None)
            if not self._make_room(event):
                return None
            if self.rules.early:
                self._release_early(event)
            if self.away:
                self._fetch(event)
            for end, storage in sorted(self.arriving.pop(event, ()), key=lambda pair: pair[0]):
                self._wait(storage, end)
            self.now += seconds
            for gap in self.by_made.get(event, ()):
                self._copy_out(gap)
            for gap in self.by_after.get(event, ()):
                if gap.storage in self.tier_of:
                    self.open[gap] = None
                    self.closing.setdefault(gap.before, []).append(gap)
        return _Timed(Copies(tuple(self.swaps), self.now), self.waited, self.begun == _begun(self.swaps))

    def _copy_out(self, gap: Gap) -> None:
        """Begins the copy of a storage that was made, to the tier that has it first."""
        storage = gap.storage
        if storage in self.tier_of:
            return
        best: tuple[float, Tier] | None = None
        for tier in self.rules.tiers_of[storage]:
            start = max(self.now, self.free_at.get(tier.channel(Direction.OUT), 0.0))
            end = start + tier.copy_seconds(storage.nbytes, Direction.OUT)
            if self.left_bytes[tier.name] >= storage.nbytes and (best is None or end < best[0]):
                best = end, tier
        if best is not None:
            end, tier = best
            self.free_at[tier.channel(Direction.OUT)] = self.copied_at[storage] = end
            self.left_bytes[tier.name] -= storage.nbytes
            self.tier_of[storage] = tier
            self.begun[storage] = gap.made

    def _make_room(self, event: int) -> bool:
        """Gives memory back until the event fits."""
        while self.alive[event] > self.budget_bytes:
            if not self.open:
                return False
            gap = min(self.open, key=self._rank)
            self._wait(gap.storage, self.copied_at[gap.storage])
            self._release(gap, event)
        return True

    def _rank(self, gap: Gap) -> tuple[float, int]:
        return max(self.copied_at[gap.storage] - self.now, 0.0), -gap.before

    def _release_early(self, event: int) -> None:
        """Gives back what is to leave early and was copied, unless it would come back at once."""
        for gap in [gap for gap in self.open if gap in self.rules.early and gap.before > event + 1]:
            if self.copied_at[gap.storage] <= self.now:
                self._release(gap, event)

    def _release(self, gap: Gap, event: int) -> None:
        del self.open[gap]
        self.left_at[gap] = event
        bisect.insort(self.away, gap, key=lambda gap: (gap.before, gap.after))
        self.alive[event : gap.before] -= gap.storage.nbytes

    def _wait(self, storage: Storage, end: float) -> None:
        if end > self.now:
            self.waited[storage] = self.waited.get(storage, 0.0) + end - self.now
            self.now = end

    def _fetch(self, event: int) -> None:
        """Begins the copies back that are due, and in their order those that fit until they are read."""
        stay: list[Gap] = []
        for index, gap in enumerate(self.away):
            if event == gap.before or self._fits(gap, event):
                self._copy_back(gap, event)
            elif self.rules.overtakes:
                stay.append(gap)
            else:
                stay += self.away[index:]
                break
        self.away = stay

    def _fits(self, gap: Gap, event: int) -> bool:
        """Whether a storage that is away, and did not just leave, may come back."""
        most = self.budget_bytes - gap.storage.nbytes
        if self.alive[event] > most or event == self.left_at[gap]:
            return False
        return int(self.alive[event : gap.before].max()) <= most

    def _copy_back(self, gap: Gap, event: int) -> None:
        storage = gap.storage
        tier = self.tier_of[storage]
        self.alive[event : gap.before] += storage.nbytes
        channel = tier.channel(Direction.IN)
        end = max(self.now, self.free_at.get(channel, 0.0)) + tier.copy_seconds(storage.nbytes, Direction.IN)
        self.free_at[channel] = end
        self.arriving.setdefault(gap.before, []).append((end, storage))
        self.swaps.append(Swap(gap, tier.name, self.left_at[gap], event))
