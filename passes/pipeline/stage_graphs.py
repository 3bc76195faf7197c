"""Cuts a training graph into one training graph for each pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...ir import (
    PAUSE,
    RECEIVE,
    SEND,
    Graph,
    Input,
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
from .boundaries import Boundary, boundary_values, delivered_at, reader_stages
from .placement import Dataflow, Placement, place_backward

__all__ = ["StageGraph", "cut_graph"]


@dataclass(frozen=True)
class StageGraph:
    """One stage of a training graph.

    Args:
        index: The number of the stage.
        graph: The graph that it runs for one micro-batch; it exchanges values by `irc.send` and
            `irc.receive`.
        before: The values that it exchanges with the stage before it; none for the first.
        after: The values that it exchanges with the stage after it; none for the last.
    """

    index: int
    graph: Graph
    before: Boundary
    after: Boundary


def cut_graph(
    graph: Graph, forward: Mapping[Node, int], count: int, *, split_backward: bool = False
) -> tuple[StageGraph, ...]:
    """Makes the training graphs of the stages; together they compute what the whole graph does.

    A value that several stages read is relayed from stage to stage. A value that depends on nothing trained
    is computed in each stage anew. The gradient of a parameter that several stages read is left in parts, one
    in each of these stages.

    Args:
        graph: The graph as it was captured: gradients are delivered, nothing lives in a tier.
        forward: The stage of each operation in `Dataflow(graph).forward`, from 0 on; no operation is in an
            earlier stage than what it reads.
        count: The number of stages.
        split_backward: Whether to run first what other stages wait for, then a pause, then the rest of
            backward.

    Raises:
        UnsupportedError: IRC480 when a tensor that must cross shares its memory with another result, or
            operations that share memory that is overwritten are in different stages.
    """
    flow = Dataflow(graph)
    _check_together(flow, forward)
    placement = place_backward(flow, forward, count)
    none = Boundary((), ())
    boundaries = (none, *boundary_values(flow, placement, count), none)
    return tuple(
        _StageBuilder(flow, placement, index, count).build(
            boundaries[index], boundaries[index + 1], split_backward=split_backward
        )
        for index in range(count)
    )


def _check_together(flow: Dataflow, forward: Mapping[Node, int]) -> None:
    """Refuses stages that part operations which touch memory that is overwritten, or a draw from its state.

    Raises:
        UnsupportedError: IRC480.
    """
    for group in flow.together:
        if len({forward[node] for node in group}) > 1:
            node = next(n for n in flow.graph.operations if n in group)
            raise UnsupportedError(
                "IRC480",
                f"{node.name} and what else touches the same buffer or generator are in different stages",
                at=node.at,
                help="put them into one stage",
            )


@dataclass
class _StageBuilder:
    """Builds the graph of one stage.

    Args:
        flow: The dataflow of the whole graph.
        placement: The stage of every operation.
        index: The number of the stage.
        count: The number of stages.

    Attributes:
        wanted: The nodes of the whole graph that the stage runs: its operations, those it repeats, and views.
        statics: The static inputs that these read.
        sums: The operations at the end of backward that add up the parts of gradients.
    """

    flow: Dataflow
    placement: Placement
    index: int
    count: int
    wanted: dict[Node, None] = field(default_factory=dict[Node, None])
    statics: set[Value] = field(default_factory=set[Value])
    sums: list[Node] = field(default_factory=list[Node])

    def build(self, before: Boundary, after: Boundary, *, split_backward: bool) -> StageGraph:
        """Builds the graph between two boundaries."""
        for node in self.flow.graph.operations:
            if self.placement.stages.get(node) == self.index and node not in self.placement.dropped:
                self._want(node)
        delivered = tuple(self._outputs())
        self._want_outputs(delivered)
        inputs = self._inputs()
        own = {entry.value for entry in inputs}
        whole, is_last = self.flow.graph, self._is_last
        graph = Graph(
            inputs,
            self._nodes(before, after, split_backward=split_backward),
            tuple(o for o in delivered if o.role is OutputRole.OUTPUT or self._owner(o) in own),
            loss_bytes=whole.loss_bytes if is_last else 0,
            loss_held_bytes=whole.loss_held_bytes if is_last else 0,
            loss_saved_bytes=whole.loss_saved_bytes if is_last else 0,
            annotations=whole.annotations,
        )
        return StageGraph(self.index, graph, before, after)

    @property
    def _is_last(self) -> bool:
        return self.index == self.count - 1

    def _owner(self, output: Output) -> Value:
        """The input that a gradient belongs to."""
        return self.flow.owners[output.target].value

    # ------------------------------------------------------------------ what the stage needs

    def _want(self, node: Node) -> None:
        """Adds a node, and what has to be there for its operands to be read."""
        if node not in self.wanted:
            self.wanted[node] = None
            for value in node.operands:
                self._read(value)

    def _read(self, value: Value) -> None:
        """Adds what reading a value takes in this stage: views, what is repeated, and static inputs."""
        maker = self.flow.makers.get(value)
        if maker is None:
            if value.storage in self.flow.static:
                self.statics.add(value)
        elif maker.is_view or maker in self.flow.repeated:
            self._want(maker)

    def _want_outputs(self, delivered: Sequence[Output]) -> None:
        """Adds what the outputs and the sums at the end of backward read, and the inputs they belong to."""
        for output in delivered:
            if output.value is not None:
                self._read(output.value)
                if output.role is OutputRole.GRADIENT:
                    self.statics.add(self._owner(output))
        added = {node.results[0] for node in self.sums}
        for node in self.sums:
            for value in node.operands:
                if value not in added:
                    self._read(value)

    # ------------------------------------------------------------------ the parts of the graph

    def _inputs(self) -> tuple[Input, ...]:
        """The static inputs that the stage reads; for the last stage also the gradients of the outputs."""
        return tuple(
            entry
            for entry in self.flow.graph.inputs
            if (self._is_last if entry.role is InputRole.TANGENT else entry.value in self.statics)
        )

    def _nodes(self, before: Boundary, after: Boundary, *, split_backward: bool) -> tuple[Node, ...]:
        """The operations in their order, with what they exchange."""
        nodes = [node for node in self.flow.graph.nodes if node in self.wanted]
        forward = [node for node in nodes if node.region is Region.FORWARD]
        backward = [*(node for node in nodes if node.region is Region.BACKWARD), *self.sums]
        rest = _with_sends(backward, before.gradients, after.gradients, Region.BACKWARD)
        return (
            *_received(before.activations, Region.FORWARD),
            *_with_sends(forward, after.activations, before.activations, Region.FORWARD),
            *_received(after.gradients, Region.BACKWARD),
            *(_paused(rest) if split_backward else rest),
        )

    def _outputs(self) -> Iterator[Output]:
        """The model's outputs for the last stage, and the gradients of what the stage has."""
        for output in self.flow.graph.outputs:
            if output.role is OutputRole.OUTPUT:
                if self._is_last:
                    yield output
                continue
            readers = reader_stages(self.flow, self.placement, output)
            if self.index not in readers:
                continue
            value = output.value
            if value is not None and len(readers) > 1:
                value = self._own_part(value, readers)  # the others have the rest
            yield replace(output, value=value)

    # ------------------------------------------------------------------ gradients in parts

    def _own_part(self, gradient: Value, readers: Sequence[int]) -> Value | None:
        """The sum of the parts of a gradient that stay in this stage; None if none does."""
        mine = [
            part
            for part in self.placement.parts_of(gradient)
            if delivered_at(readers, self._stage_of(part)) == self.index
        ]
        if not mine:
            return None
        total = mine[0]
        for number, part in enumerate(mine[1:]):
            name = f"{gradient.name}_{self.index}_{number}"
            total = self._summand(name, "aten.add.Tensor", (total, part), gradient.type)
        payload_bytes = allocation_bytes(total.type.nbytes, total.type.device)
        if total.type.strides != gradient.type.strides or total.storage.nbytes > payload_bytes:
            # such as a number that is expanded: `.grad` is written in place
            contiguous = TensorType.contiguous(total.type.shape, total.type.dtype, total.type.device)
            memory_format = (("memory_format", Symbol("memory_format", "contiguous_format")),)
            name = f"{gradient.name}_{self.index}_own"
            total = self._summand(name, "aten.clone.default", (total,), contiguous, memory_format)
        return total

    def _summand(
        self,
        name: str,
        op: str,
        operands: tuple[Value, ...],
        type: TensorType,
        keywords: tuple[tuple[str, Symbol], ...] = (),
    ) -> Value:
        """Adds an operation to the end of backward; returns its result."""
        made = Value(name, type, Storage(name, allocation_bytes(type.nbytes, type.device), type.device))
        self.sums.append(Node(name, op, operands, (made,), keywords=keywords, region=Region.BACKWARD))
        return made

    def _stage_of(self, part: Value) -> int:
        """The stage that makes a part of a gradient."""
        maker = self.flow.makers.get(next(iter(self.flow.bases(part))))
        last = self.count - 1
        return last if maker is None else self.placement.stages.get(maker, last)


def _received(values: Sequence[Value], region: Region) -> list[Node]:
    """The nodes that receive what a neighbour sends."""
    return [_exchange(f"receive_{v.name}", RECEIVE, (v.name,), (v,), region) for v in values]


def _with_sends(
    nodes: Sequence[Node], values: Sequence[Value], relayed: Sequence[Value], region: Region
) -> list[Node]:
    """Adds the sends to the nodes: each value is sent as soon as it is made, a received one at once."""
    sends = {v: _exchange(f"send_{v.name}", SEND, (v, v.name), (), region) for v in values}
    found = [sends.pop(v) for v in values if v in relayed]
    for node in nodes:
        found.append(node)
        found.extend(sends.pop(value) for value in node.values if value in sends)
    return [*sends.values(), *found]  # those of tangents, which are there from the start


def _paused(backward: Sequence[Node]) -> list[Node]:
    """Puts what the sends need before a pause, and the rest behind it."""
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
