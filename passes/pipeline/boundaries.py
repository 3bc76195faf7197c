"""The values that cross from one pipeline stage to another, and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...ir import InputRole, Output, OutputRole, Region, Storage, UnsupportedError, Value
from .placement import Dataflow, Placement

__all__ = ["Boundary", "boundary_bytes", "boundary_values", "delivered_at", "reader_stages"]


@dataclass(frozen=True)
class Boundary:
    """The values that cross from one stage to the next, for each micro-batch.

    Args:
        activations: Values that go forward, in the order in which they are made.
        gradients: Values that come back, in the order in which they are made.
    """

    activations: tuple[Value, ...]
    gradients: tuple[Value, ...]

    @property
    def forward_bytes(self) -> int:
        """Bytes that go forward."""
        return sum(value.storage.nbytes for value in self.activations)

    @property
    def backward_bytes(self) -> int:
        """Bytes that come back."""
        return sum(value.storage.nbytes for value in self.gradients)


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A value that other stages read than the one that makes it.

    Args:
        value: The value to send.
        boundaries: The boundaries that it crosses.
    """

    value: Value
    boundaries: range


def _crossings(flow: Dataflow, placement: Placement, count: int) -> tuple[list[_Crossing], list[_Crossing]]:
    """The values that go forward and those that come back, in the order in which stages send them.

    Raises:
        UnsupportedError: IRC480.
    """
    graph, stages = flow.graph, placement.stages
    made: dict[Storage, int] = {s: stages[n] for s, n in graph.producers.items() if n in stages}
    made |= dict.fromkeys(graph.tangent_storages, count - 1)
    backward = {s for s, n in graph.producers.items() if n.region is Region.BACKWARD} | graph.tangent_storages
    last: dict[Storage, int] = {}
    first: dict[Storage, int] = {}
    for value, stage in _reads(flow, placement, count):
        storage = value.storage
        last[storage] = max(last.get(storage, 0), stage)
        first[storage] = min(first.get(storage, count), stage)
    values = {v.storage: v for v in _made_values(flow)}
    # the order in which stages send: what they relay, tangents, what they make
    onward = sorted((s for s in made if s not in backward), key=made.__getitem__)
    inward = sorted(
        (s for s in made if s in backward), key=lambda s: (-made[s], s not in graph.tangent_storages)
    )
    forth = ((s, range(made[s], last.get(s, -1))) for s in onward)
    back = ((s, range(first.get(s, count), made[s])) for s in inward)
    return (
        [_Crossing(_crossing(flow, values[s]), between) for s, between in forth if between],
        [_Crossing(_crossing(flow, values[s]), between) for s, between in back if between],
    )


def boundary_values(flow: Dataflow, placement: Placement, count: int) -> tuple[Boundary, ...]:
    """The values that cross each of the boundaries between `count` stages.

    Raises:
        UnsupportedError: IRC480.
    """
    forth: list[list[Value]] = [[] for _ in range(count - 1)]
    back: list[list[Value]] = [[] for _ in range(count - 1)]
    for found, crossings in zip((forth, back), _crossings(flow, placement, count), strict=True):
        for crossing in crossings:
            for boundary in crossing.boundaries:
                found[boundary].append(crossing.value)
    return tuple(Boundary(tuple(there), tuple(here)) for there, here in zip(forth, back, strict=True))


def boundary_bytes(flow: Dataflow, placement: Placement, count: int) -> list[tuple[int, int]]:
    """The bytes that go forward and come back across each of the boundaries between `count` stages.

    Raises:
        UnsupportedError: IRC480.
    """
    sums: list[list[int]] = []
    for crossings in _crossings(flow, placement, count):
        changes = [0] * count
        for crossing in crossings:
            changes[crossing.boundaries.start] += crossing.value.storage.nbytes
            changes[crossing.boundaries.stop] -= crossing.value.storage.nbytes
        sums.append(list(itertools.accumulate(changes[:-1])))
    return list(zip(*sums, strict=True))


def _made_values(flow: Dataflow) -> Iterable[Value]:
    """A value of each storage that is made; the first one if it has several."""
    for node in reversed(flow.graph.operations):
        yield from reversed(node.values)
    yield from (i.value for i in flow.graph.inputs if i.role is InputRole.TANGENT)


def _reads(flow: Dataflow, placement: Placement, count: int) -> Iterable[tuple[Value, int]]:
    """The values that are read, without views, each with a stage that reads it."""
    graph = flow.graph
    for node, stage in placement.stages.items():
        if node not in placement.dropped:
            for operand in node.operands:
                yield from ((value, stage) for value in flow.bases(operand))
    for output in graph.outputs:
        if output.value is None:
            continue
        if output.role is OutputRole.OUTPUT:
            yield from ((value, count - 1) for value in flow.bases(output.value))
            continue
        readers = reader_stages(flow, placement, output)
        for part in placement.parts_of(output.value):
            for value in flow.bases(part):
                maker = flow.makers.get(value)
                stage = count - 1 if maker is None else placement.stages.get(maker, count - 1)
                yield value, delivered_at(readers, stage)


def reader_stages(flow: Dataflow, placement: Placement, output: Output) -> tuple[int, ...]:
    """The stages that keep the input that a gradient belongs to."""
    return placement.reader_stages.get(flow.owners[output.target].value.storage, (0,))


def delivered_at(readers: Sequence[int], stage: int) -> int:
    """The stage that keeps a part of a gradient made in `stage`: the last of `readers` up to there."""
    return max((reader for reader in readers if reader <= stage), default=readers[0])


def _crossing(flow: Dataflow, value: Value) -> Value:
    """The value, if it can be sent."""
    maker = flow.makers.get(value)
    shared = [v for v in maker.values if v.storage is value.storage] if maker is not None else [value]
    if len(shared) > 1:
        raise UnsupportedError(
            "IRC480",
            f"{value} crosses from one pipeline stage to another, and shares its memory with {shared[1]}",
            at=maker.at if maker is not None else None,
            help="return copies there (clone), or choose other stages",
        )
    return value
