"""When copies run beside a given order of computations: as the memory demands and allows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ir import Compute, Direction, Graph, Loss, Node, Schedule, Storage, Tier, liveness, with_frees
from .swaps import Gap, Swap, gaps, with_swaps

__all__ = ["Order", "schedule_copies"]


@dataclass(eq=False)
class Order:
    """An order of computations, with its memory where nothing is swapped.

    Args:
        graph: The training graph.
        forward: What runs before the loss.
        backward: What runs after it.
        seconds: Time of each operation.
        workspace_bytes: Workspace of each operation.
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
        """The schedule with some swaps."""
        return with_swaps(self.graph, self.forward, self.backward, swaps)


@dataclass(frozen=True, slots=True)
class Copies:
    """Swaps with their times.

    Args:
        swaps: In the order of their releases.
        step_seconds: Time of the step with them.
    """

    swaps: tuple[Swap, ...]
    step_seconds: float


_ROUNDS = 4
_HOPELESS = 1.1


def schedule_copies(
    order: Order,
    storages: Iterable[Storage],
    tiers: Sequence[Tier],
    budget_bytes: int,
    *,
    below_seconds: float = math.inf,
) -> Copies | None:
    """Swaps some of `storages` so that the step fits; None where that is not enough.

    Copies out begin when a storage is made. Memory is given back where it is needed: of those whose copy
    has ended, that of the one that is read last; if none has ended, computing waits for the next. Copies
    back begin as early as memory allows, in the order in which they are needed. Copies of what never left
    are left out, and the rest is timed anew.

    Args:
        order: What runs, and what that takes.
        storages: What may be swapped; a storage that does not have to leave stays.
        tiers: Where to, the fastest first; a full one is passed over.
        budget_bytes: The most that may be alive at once.
        below_seconds: Only faster steps are asked for: what is much slower is not timed anew.
    """
    allowed = set(storages)
    best: Copies | None = None
    for _ in range(_ROUNDS):
        found = _Run(order, allowed, tiers, budget_bytes).run()
        if found is None or found.step_seconds > _HOPELESS * below_seconds:
            break
        if best is None or found.step_seconds < best.step_seconds:
            best = found
        used = {swap.gap.storage for swap in found.swaps}
        if used == allowed:
            break
        allowed = used
    return best


class _Run:
    def __init__(self, order: Order, allowed: set[Storage], tiers: Sequence[Tier], budget_bytes: int) -> None:
        self.order = order
        self.budget_bytes = budget_bytes
        self.tiers = tiers
        self.alive = order.event_bytes.copy()
        """Bytes at each event, without what is away and not asked back for."""
        self.by_made: dict[int, list[Gap]] = {}
        self.by_after: dict[int, list[Gap]] = {}
        for gap in order.gaps:
            if gap.storage in allowed:
                self.by_made.setdefault(gap.made, []).append(gap)
                self.by_after.setdefault(gap.after, []).append(gap)
        self.now = 0.0
        self.free_at: dict[object, float] = {}
        self.left_bytes = {tier.name: tier.capacity_bytes for tier in tiers}
        self.tier_of: dict[Storage, Tier] = {}
        self.copied_at: dict[Storage, float] = {}
        self.open: dict[Gap, None] = {}
        """Gaps that the present event is in, and whose storage is still there."""
        self.away: dict[Gap, int] = {}
        """Gaps whose storage is away, with the event before which it left."""
        self.arrives_at: dict[Gap, float] = {}
        self.swaps: list[Swap] = []

    def run(self) -> Copies | None:
        events = len(self.order.event_seconds)
        for event in range(events):
            for gap in [gap for gap in self.open if gap.before <= event]:
                del self.open[gap]
            if not self._make_room(event):
                return None
            self._fetch(event)
            for gap in [gap for gap in self.arrives_at if gap.before == event]:
                self.now = max(self.now, self.arrives_at.pop(gap))
            self.now += self.order.event_seconds[event]
            for gap in self.by_made.get(event, ()):
                self._copy_out(gap)
            for gap in self.by_after.get(event, ()):
                if gap.storage in self.tier_of:
                    self.open[gap] = None
        return Copies(tuple(self.swaps), self.now)

    def _copy_out(self, gap: Gap) -> None:
        """Begins the copy of a storage that was made, to the tier that has it first."""
        storage = gap.storage
        if storage in self.tier_of:
            return
        best: tuple[float, Tier] | None = None
        for tier in self.tiers:
            start = max(self.now, self.free_at.get(tier.channel(Direction.OUT), 0.0))
            end = start + tier.copy_seconds(storage.nbytes, Direction.OUT)
            if self.left_bytes[tier.name] >= storage.nbytes and (best is None or end < best[0]):
                best = end, tier
        if best is not None:
            end, tier = best
            self.free_at[tier.channel(Direction.OUT)] = self.copied_at[storage] = end
            self.left_bytes[tier.name] -= storage.nbytes
            self.tier_of[storage] = tier

    def _make_room(self, event: int) -> bool:
        """Gives memory back until the event fits."""
        while self.alive[event] > self.budget_bytes:
            here = [gap for gap in self.open if gap.before > event]
            if not here:
                return False
            gap = min(here, key=self._rank)
            self.now = max(self.now, self.copied_at[gap.storage])
            del self.open[gap]
            self.away[gap] = event
            self.alive[event : gap.before] -= gap.storage.nbytes
        return True

    def _rank(self, gap: Gap) -> tuple[float, int]:
        return max(self.copied_at[gap.storage] - self.now, 0.0), -gap.before

    def _fetch(self, event: int) -> None:
        """Begins the copies back that are due, and in their order those that fit until they are read."""
        for gap in sorted(self.away, key=lambda gap: (gap.before, gap.after)):
            tier = self.tier_of[gap.storage]
            if event < gap.before:
                most = int(self.alive[event : gap.before].max()) + gap.storage.nbytes
                if most > self.budget_bytes or event == self.away[gap]:
                    return
            self.alive[event : gap.before] += gap.storage.nbytes
            channel = tier.channel(Direction.IN)
            start = max(self.now, self.free_at.get(channel, 0.0))
            end = start + tier.copy_seconds(gap.storage.nbytes, Direction.IN)
            self.free_at[channel] = self.arrives_at[gap] = end
            self.swaps.append(Swap(gap, tier.name, self.away.pop(gap), event))
