"""Cuts a training graph into one training graph for each pipeline stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...ir import (
    PAUSE,
    RECEIVE,
    SEND,
    Graph,
    InputRole,
    Node,
    Output,
    OutputRole,
    Region,
    Storage,
    Symbol,
    TensorType,
    Trait,
    UnsupportedError,
    Value,
    allocation_bytes,
)
from .placement import Dataflow, Placement, place_backward

__all__ = ["Boundary", "StageGraph", "boundary_bytes", "boundary_values", "cut"]


@dataclass(frozen=True)
class Boundary:
    """What crosses from one stage to the next, for each micro-batch.

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


@dataclass(frozen=True)
class StageGraph:
    """One stage of a training graph.

    Args:
        index: Its place.
        graph: What it runs for one micro-batch; it exchanges values by `irc.send` and `irc.receive`.
        before: What it exchanges with the stage before it; nothing for the first.
        after: What it exchanges with the stage after it; nothing for the last.
    """

    index: int
    graph: Graph
    before: Boundary
    after: Boundary


def cut(
    graph: Graph, forward: Mapping[Node, int], count: int, *, split_backward: bool = False
) -> tuple[StageGraph, ...]:
    """The training graphs of the stages; together they compute what the whole graph does.

    What several stages read is relayed from stage to stage. What depends on nothing trained is computed in
    each stage anew. The gradient of a parameter that several stages read is left in parts, one in each of
    these stages.

    Args:
        graph: As it was captured: gradients are delivered, nothing lives in a tier.
        forward: The stage of each operation in `Dataflow(graph).forward`, from 0 on; no operation is in an
            earlier stage than what it reads.
        count: How many stages there are.
        split_backward: Run first what other stages wait for, then a pause, then the rest of backward.

    Raises:
        UnsupportedError: IRC480 when a tensor that must cross shares its memory with another result, or
            operations that share memory that is overwritten are in different stages.
    """
    flow = Dataflow(graph)
    for group in flow.together:
        if len({forward[node] for node in group}) > 1:
            node = next(n for n in flow.graph.operations if n in group)
            raise UnsupportedError(
                "IRC480",
                f"{node.name} and what else touches the same buffer are in different stages",
                at=node.at,
                help="put them into one stage",
            )
    placement = place_backward(flow, forward, count)
    boundaries = boundary_values(flow, placement, count)
    none = Boundary((), ())
    return tuple(
        _Stage(
            flow,
            placement,
            index,
            count,
            boundaries[index - 1] if index else none,
            boundaries[index] if index + 1 < count else none,
        ).made(split_backward=split_backward)
        for index in range(count)
    )


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A value that other stages read than the one that makes it.

    Args:
        value: What is sent.
        boundaries: Those that it crosses.
    """

    value: Value
    boundaries: range


def _crossings(flow: Dataflow, placement: Placement, count: int) -> tuple[list[_Crossing], list[_Crossing]]:
    """What goes forward and what comes back, in the order in which stages send it.

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
    """What crosses each of the boundaries between `count` stages.

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
    """A value of each storage that is made; the first one where there are several."""
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
        reader_stages = _reader_stages(flow, placement, output)
        for part in placement.parts_of(output.value):
            for value in flow.bases(part):
                maker = flow.makers.get(value)
                stage = count - 1 if maker is None else placement.stages.get(maker, count - 1)
                yield value, _delivered_at(reader_stages, stage)


def _reader_stages(flow: Dataflow, placement: Placement, output: Output) -> tuple[int, ...]:
    """The stages that keep the input that a gradient belongs to."""
    return placement.reader_stages.get(flow.owners[output.target].value.storage, (0,))


def _delivered_at(reader_stages: Sequence[int], stage: int) -> int:
    """Where a part of a gradient that was made in `stage` stays: the last of `reader_stages` up to there."""
    return max(
        (reader for reader in reader_stages if reader <= stage),
        default=reader_stages[0],
    )


def _crossing(flow: Dataflow, value: Value) -> Value:
    """The value, where it can be sent."""
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


@dataclass
class _Stage:
    """The graph of one stage in the making."""

    flow: Dataflow
    placement: Placement
    index: int
    count: int
    before: Boundary
    after: Boundary
    wanted: dict[Node, None] = field(default_factory=dict[Node, None])
    """The nodes of the whole graph that the stage runs: its operations, those it repeats, and views."""
    statics: set[Value] = field(default_factory=set[Value])

    def made(self, *, split_backward: bool) -> StageGraph:
        stages, graph = self.placement.stages, self.flow.graph
        for node in graph.operations:
            if stages.get(node) == self.index and node not in self.placement.dropped:
                self.want(node)
        delivered = tuple(self.outputs())
        for output in delivered:
            if output.value is not None:
                self.read(output.value)
                if output.role is OutputRole.GRADIENT:
                    self.statics.add(self.flow.owners[output.target].value)
        sums = {node.results[0]: node for node in self.sums}
        for node in self.sums:
            for value in node.operands:
                if value not in sums:
                    self.read(value)
        nodes = [node for node in graph.nodes if node in self.wanted]
        forward = [node for node in nodes if node.region is Region.FORWARD]
        backward = [*(node for node in nodes if node.region is Region.BACKWARD), *self.sums]
        last = self.index == self.count - 1
        inputs = tuple(
            entry
            for entry in graph.inputs
            if (last if entry.role is InputRole.TANGENT else entry.value in self.statics)
        )
        own = {entry.value for entry in inputs}
        outputs = tuple(
            o for o in delivered if o.role is OutputRole.OUTPUT or self.flow.owners[o.target].value in own
        )
        arrived = _received(self.after.gradients, Region.BACKWARD)
        rest = _with_sends(backward, self.before.gradients, self.after.gradients, Region.BACKWARD)
        if split_backward:
            rest = _paused(rest)
        made = Graph(
            inputs,
            (
                *_received(self.before.activations, Region.FORWARD),
                *_with_sends(forward, self.after.activations, self.before.activations, Region.FORWARD),
                *arrived,
                *rest,
            ),
            outputs,
            loss_bytes=graph.loss_bytes if last else 0,
            loss_held_bytes=graph.loss_held_bytes if last else 0,
            loss_saved_bytes=graph.loss_saved_bytes if last else 0,
            annotations=graph.annotations,
        )
        return StageGraph(self.index, made, self.before, self.after)

    def want(self, node: Node) -> None:
        if node not in self.wanted:
            self.wanted[node] = None
            for value in node.operands:
                self.read(value)

    def read(self, value: Value) -> None:
        """What reading a value takes in this stage: views, what is repeated, and static inputs."""
        maker = self.flow.makers.get(value)
        if maker is None:
            if value.storage in self.flow.static:
                self.statics.add(value)
        elif maker.is_view or maker in self.flow.repeated:
            self.want(maker)

    def outputs(self) -> Iterable[Output]:
        """What the stage delivers: the model's outputs at the end, and gradients of what it has."""
        self.sums: list[Node] = []
        for output in self.flow.graph.outputs:
            if output.role is OutputRole.OUTPUT:
                if self.index == self.count - 1:
                    yield output
                continue
            reader_stages = _reader_stages(self.flow, self.placement, output)
            if self.index not in reader_stages:
                continue
            value = output.value
            if value is not None and len(reader_stages) > 1:
                value = self.own_part(value, reader_stages)  # the others have the rest
            yield replace(output, value=value)

    def own_part(self, gradient: Value, reader_stages: Sequence[int]) -> Value | None:
        """The sum of the parts of a gradient that stay in this stage."""
        mine = [
            part
            for part in self.placement.parts_of(gradient)
            if self.stage_of(part, reader_stages) == self.index
        ]
        if not mine:
            return None
        total = mine[0]
        for number, part in enumerate(mine[1:]):
            name = f"{gradient.name}_{self.index}_{number}"
            total = self.summand(name, "aten.add.Tensor", (total, part), gradient.type)
        payload_bytes = allocation_bytes(total.type.nbytes, total.type.device)
        if total.type.strides != gradient.type.strides or total.storage.nbytes > payload_bytes:
            # such as a number that is expanded: `.grad` is written in place
            contiguous = TensorType.contiguous(total.type.shape, total.type.dtype, total.type.device)
            memory_format = (("memory_format", Symbol("memory_format", "contiguous_format")),)
            name = f"{gradient.name}_{self.index}_own"
            total = self.summand(name, "aten.clone.default", (total,), contiguous, memory_format)
        return total

    def summand(
        self,
        name: str,
        op: str,
        operands: tuple[Value, ...],
        type: TensorType,
        keywords: tuple[tuple[str, Symbol], ...] = (),
    ) -> Value:
        """What an operation at the end of backward makes of parts of a gradient."""
        made = Value(name, type, Storage(name, allocation_bytes(type.nbytes, type.device), type.device))
        self.sums.append(Node(name, op, operands, (made,), keywords=keywords, region=Region.BACKWARD))
        return made

    def stage_of(self, part: Value, reader_stages: Sequence[int]) -> int:
        base = next(iter(self.flow.bases(part)))
        maker = self.flow.makers.get(base)
        last = self.count - 1
        stage = last if maker is None else self.placement.stages.get(maker, last)
        return _delivered_at(reader_stages, stage)


def _received(values: Sequence[Value], region: Region) -> list[Node]:
    """The nodes that receive what a neighbour sends."""
    return [_exchange(f"receive_{v.name}", RECEIVE, (v.name,), (v,), region) for v in values]


def _with_sends(
    nodes: Sequence[Node], values: Sequence[Value], relayed: Sequence[Value], region: Region
) -> list[Node]:
    """The nodes, and each value sent as soon as it is there: those that were received at once."""
    sends = {v: _exchange(f"send_{v.name}", SEND, (v, v.name), (), region) for v in values}
    found = [sends.pop(v) for v in values if v in relayed]
    for node in nodes:
        found.append(node)
        found.extend(sends.pop(value) for value in node.values if value in sends)
    return [*sends.values(), *found]  # those of tangents, which are there from the start


def _paused(backward: Sequence[Node]) -> list[Node]:
    """What the sends need, a pause, and the rest."""
    makers = {value: node for node in backward for value in node.values}
    needed: set[Node] = set()
    pending = [node for node in backward if node.op == SEND or node.traits & {Trait.RANDOM, Trait.EFFECT}]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(makers[value] for value in node.operands if value in makers)
    pause = _exchange("pause", PAUSE, (), (), Region.BACKWARD)
    return [
        *(node for node in backward if node in needed),
        pause,
        *(node for node in backward if node not in needed),
    ]


def _exchange(
    name: str,
    op: str,
    arguments: tuple[Value | str, ...],
    results: tuple[Value, ...],
    region: Region,
) -> Node:
    return Node(name, op, arguments, results, region=region, traits=frozenset({Trait.EXCHANGE}))
