"""Copies to tiers at random places of a valid schedule."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from irc.ir import (
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
    Tier,
    Trait,
    Wait,
    values_in,
)

__all__ = ["TIERS", "away_at_the_loss", "waited_for", "waits_that_matter", "with_random_copies", "without"]

TIERS = tuple(Tier(name, 1 << 40, 1e9, 2e9) for name in ("near", "far"))
"""Tiers that `with_random_copies` uses."""

_Placed = tuple[float, Instruction]


def with_random_copies(
    schedule: Schedule, seed: int, tiers: Sequence[Tier] = TIERS, *, rate: float | None = None
) -> Schedule:
    """A schedule in which storages are away between uses of them.

    Any storage that can be copied is, by a draw, copied to a tier somewhere after it is made, and then,
    between two uses of it, freed and fetched back, once or more; also across the loss, and where it is made
    again in between. Now and then the copy is made and nothing more.

    Args:
        schedule: Valid, without copies.
        seed: Of all draws.
        tiers: Where to.
        rate: How likely each storage is copied; None draws that too.
    """
    draw = random.Random(seed)
    rate = draw.choice((0.1, 0.4, 0.8, 1.0)) if rate is None else rate
    placed: list[_Placed] = list(enumerate(schedule.instructions))
    gaps = _gaps(schedule)
    for storage in sorted(schedule.graph.copyable_storages & gaps.keys(), key=lambda storage: storage.name):
        if draw.random() < rate:
            placed += _copies(storage, gaps[storage], draw, draw.choice(tiers).name)
    placed.sort(key=lambda pair: pair[0])
    return replace(schedule, instructions=tuple(instruction for _, instruction in placed))


def _copies(storage: Storage, gaps: Sequence[_Gap], draw: random.Random, tier: str) -> Iterator[_Placed]:
    """The copies of one storage, each with its place: a number between those of two instructions."""
    first = draw.randrange(len(gaps))
    offload, wait = sorted(draw.uniform(gaps[first].made, gaps[first].until) for _ in range(2))
    yield offload, Offload(storage, tier)
    yield wait, Wait(storage)
    if draw.random() < 0.05:
        return
    for index, gap in enumerate(gaps[first:]):
        if index == 0 or draw.random() < 0.6:
            free, fetch, arrived = sorted(draw.uniform(max(gap.after, wait), gap.until) for _ in range(3))
            yield free, Free(storage)
            yield fetch, Fetch(storage, tier)
            yield arrived, Wait(storage)


class _Gap(NamedTuple):
    """Instructions between which a storage is there and not used.

    Args:
        made: That made it.
        after: That used it before.
        until: That uses it next.
    """

    made: int
    after: int
    until: int


def _gaps(schedule: Schedule) -> dict[Storage, list[_Gap]]:
    found: dict[Storage, list[_Gap]] = {}
    last: dict[Storage, tuple[int, int]] = {}
    for step, instruction in enumerate(schedule.instructions):
        match instruction:
            case Compute(node, retained):
                for storage in schedule.graph.reads(node):
                    if storage in last:
                        found.setdefault(storage, []).append(_Gap(*last[storage], step))
                        last[storage] = last[storage][0], step
                last.update((storage, (step, step)) for storage in retained)
            case Free(storage):
                del last[storage]
            case _:
                pass
    return found


def away_at_the_loss(schedule: Schedule, tier: str) -> Schedule:
    """What stays for backward goes to a tier as soon as it is made, and comes back before its use."""
    loss = next(k for k, i in enumerate(schedule.instructions) if isinstance(i, Loss))
    placed: list[_Placed] = list(enumerate(schedule.instructions))
    gaps = _gaps(schedule)
    for storage in sorted(schedule.graph.copyable_storages & gaps.keys(), key=lambda storage: storage.name):
        for made, after, until in gaps[storage]:
            if after < loss < until:
                placed += [(made + 0.1, Offload(storage, tier)), (after + 0.2, Wait(storage))]
                placed += [(after + 0.3, Free(storage)), (until - 0.2, Fetch(storage, tier))]
                placed.append((until - 0.1, Wait(storage)))
    placed.sort(key=lambda pair: pair[0])
    return replace(schedule, instructions=tuple(instruction for _, instruction in placed))


def without(schedule: Schedule, step: int) -> Schedule:
    """The schedule without one instruction."""
    return replace(schedule, instructions=(*schedule.instructions[:step], *schedule.instructions[step + 1 :]))


SHAPE_OF = {
    "aten.bernoulli.p": (0,),
    "aten.copy.default": (0,),
    "aten.empty_like.default": (0,),
    "aten.max_pool2d_with_indices_backward.default": (1,),
    "aten.new_empty_strided.default": (0,),
    "aten.zeros_like.default": (0,),
}
"""The operands of which an operation looks at the shape and not at the numbers."""


def waits_that_matter(schedule: Schedule) -> set[int]:
    """The `Wait`s without which the copied numbers would be wrong where somebody uses them.

    Not those for a copy that is never fetched, or whose numbers reach no output, gradient or buffer: a
    schedule may compute what nobody reads.
    """
    graph = schedule.graph
    needed = {o.value.storage for o in graph.outputs if o.value is not None}
    in_tier: set[Storage] = set()
    found: set[int] = set()
    for step, instruction in reversed(list(enumerate(schedule.instructions))):
        match instruction:
            case Compute(node):
                allocated = set(graph.allocates(node))
                if allocated & needed or node.traits & {Trait.EFFECT}:
                    needed -= allocated
                    needed |= _numbers_read(graph, node)
            case Fetch(storage):
                if storage in needed:
                    needed.remove(storage)
                    in_tier.add(storage)
            case Offload(storage):
                if storage in in_tier:
                    in_tier.remove(storage)
                    needed.add(storage)
            case Wait(storage) if storage in (needed if waited_for(schedule, step) is Fetch else in_tier):
                found.add(step)
            case _:
                pass
    return found


def waited_for(schedule: Schedule, step: int) -> type[Offload] | type[Fetch]:
    """What a `Wait` waits for."""
    waited = schedule.instructions[step]
    assert isinstance(waited, Wait)
    copies = (i for i in reversed(schedule.instructions[:step]) if isinstance(i, Offload | Fetch))
    return type(next(i for i in copies if i.storage is waited.storage))


def _numbers_read(graph: Graph, node: Node) -> set[Storage]:
    shapes = SHAPE_OF.get(node.op, ())
    read = (argument for k, argument in enumerate(node.arguments) if k not in shapes)
    keywords = (argument for _, argument in node.keywords)
    return {value.storage for each in (*read, *keywords) for value in values_in(each)}
