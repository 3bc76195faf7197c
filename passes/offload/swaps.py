"""Storages that leave the device while nothing reads them: the gaps for that, and the schedule with them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ...ir import (
    Compute,
    Fetch,
    Free,
    Graph,
    Instruction,
    Loss,
    Node,
    Offload,
    Schedule,
    Storage,
    Wait,
    with_frees,
)

__all__ = ["Gap", "Swap", "gaps", "with_swaps"]


@dataclass(frozen=True, eq=False, slots=True)
class Gap:
    """A stretch of an order in which a storage is kept and not read.

    Events are the computations of the order, with the loss between forward and backward as one more.

    Args:
        storage: The storage.
        made: The event that makes it; it may be made again in a later one.
        after: The last event before the stretch that makes or reads it.
        before: The event behind the stretch that reads it.
    """

    storage: Storage
    made: int
    after: int
    before: int


@dataclass(frozen=True, slots=True)
class Swap:
    """A storage that is off the device for the events from `release` to `fetch`, the latter not included.

    Args:
        gap: The gap, with `gap.after < release < fetch <= gap.before`.
        tier: The tier that it goes to. All swaps of one storage name the same one.
        release: The event before which its memory is given back, once the copy has ended.
        fetch: The event before which memory is taken again and the copy back begins.
    """

    gap: Gap
    tier: str
    release: int
    fetch: int


def gaps(graph: Graph, forward: Sequence[Node], backward: Sequence[Node]) -> list[Gap]:
    """Lists the gaps of an order of computations, by their beginnings; only of what a tier can take."""
    copyable = graph.copyable_storages
    made: dict[Storage, int] = {}
    touched: dict[Storage, int] = {}
    found: list[Gap] = []
    for event, node in _events(forward, backward):
        for storage in graph.reads(node):
            if storage in copyable:
                if touched[storage] + 1 < event:
                    found.append(Gap(storage, made[storage], touched[storage], event))
                touched[storage] = event
        for storage in graph.allocates(node):
            made[storage] = touched[storage] = event
    return sorted(found, key=lambda gap: (gap.after, gap.before))


def _events(forward: Sequence[Node], backward: Sequence[Node]) -> Iterator[tuple[int, Node]]:
    """The computations with their events; that of the loss is left out."""
    yield from enumerate(forward)
    yield from enumerate(backward, len(forward) + 1)


def with_swaps(
    graph: Graph, forward: Sequence[Node], backward: Sequence[Node], swaps: Collection[Swap]
) -> Schedule:
    """Makes the schedule of `with_frees`, with some storages off the device for a part of a gap.

    A copy out is begun as soon as the storage is made, and once for all its swaps.

    Args:
        graph: The graph that the nodes belong to.
        forward: Operations to run before the loss.
        backward: Operations to run after it.
        swaps: The swaps; those of one storage do not overlap.
    """
    begun: dict[int, list[Instruction]] = {}
    leaving: dict[int, list[Instruction]] = {}
    coming: dict[int, list[Instruction]] = {}
    arriving: dict[int, list[Instruction]] = {}
    stored: set[Storage] = set()
    for swap in sorted(swaps, key=lambda swap: (swap.release, swap.gap.before)):
        gap, storage = swap.gap, swap.gap.storage
        out = leaving.setdefault(swap.release, [])
        if storage not in stored:
            stored.add(storage)
            begun.setdefault(gap.made, []).append(Offload(storage, swap.tier))
            out.append(Wait(storage))
        out.append(Free(storage))
    for swap in sorted(swaps, key=lambda swap: (swap.fetch, swap.gap.before)):
        coming.setdefault(swap.fetch, []).append(Fetch(swap.gap.storage, swap.tier))
        arriving.setdefault(swap.gap.before, []).append(Wait(swap.gap.storage))
    instructions: list[Instruction] = []
    event = -1
    for instruction in with_frees(graph, forward, backward).instructions:
        if isinstance(instruction, Compute | Loss):
            event += 1
            for ahead in (leaving, coming, arriving):
                instructions += ahead.get(event, ())
            instructions.append(instruction)
            instructions += begun.get(event, ())
        else:
            instructions.append(instruction)
    return Schedule(graph, tuple(instructions))
