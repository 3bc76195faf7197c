"""The pass that lets go of each parameter's gradient within backward instead of when backward returns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from ...ir import (
    ACCUMULATE_GRADIENT,
    APPLY_GRADIENT,
    RECEIVE,
    SEND,
    Argument,
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
    UsageError,
    Value,
    allocation_bytes,
)
from ..costs.table import StepCost
from ..program import Program

if TYPE_CHECKING:
    from ..costs.optimizer_costs import OptimizerFactory

__all__ = ["ReleaseGradients", "release_gradients"]

_MODES = ("accumulate", "apply")


@dataclass(frozen=True, slots=True)
class ReleaseGradients:
    """Adds to the graph, for each parameter, the operation that disposes of its gradient.

    The gradient is then no longer delivered: its storage is an ordinary one that dies after that operation.
    The bytes that take its place exist before and after the step: `Graph.reserved_bytes`.

    Args:
        mode: `accumulate` adds each gradient to `.grad` right after it is made. `apply` takes the step of
            an optimizer, after the last operation that reads the parameter and the last point of backward
            at which an operation that reads it could be worth running again.
        optimizer: For `apply`: makes the optimizer of a list of parameters. Not part of the text form.
        known: The known costs of its step for parameters of some types; the others are measured. Not part of
            the text form.
    """

    name: ClassVar[str] = "release-gradients"

    mode: str = "accumulate"
    optimizer: OptimizerFactory | None = field(default=None, metadata={"in_text": False})
    known: Mapping[TensorType, StepCost] = field(
        default_factory=dict[TensorType, StepCost], metadata={"in_text": False}
    )

    def check(self) -> None:
        """Refuses an unknown mode, and `apply` without an optimizer or an optimizer without `apply`.

        Raises:
            UsageError: IRC413.
        """
        if self.mode not in _MODES:
            raise UsageError(
                "IRC413",
                f"there is no way {self.mode!r} to release gradients",
                help=f"choose one of {', '.join(_MODES)}",
            )
        if (self.mode == "apply") != (self.optimizer is not None):
            raise UsageError(
                "IRC413",
                "gradients are applied by an optimizer, and no other way takes one",
                help="give irc.optimize optimizer_in_backward=lambda params: torch.optim.SGD(params, ...)",
            )

    def run(self, program: Program, /) -> Program:
        """Makes backward release the gradients; returns the same program if none is delivered.

        Raises:
            UsageError: IRC413 for wrong options, or after a pass that looked at the operations; IRC508 when
                the optimizer does not work.
            UnsupportedError: IRC413 for sparse gradients; IRC508 when the optimizer cannot take its steps
                parameter by parameter.
        """
        self.check()
        if program.costs is not None or program.schedule is not None:
            raise UsageError(
                "IRC413",
                f"{self.name} comes after the operations' costs were found",
                help="put it before them: release-gradients{...},cost{...},plan-memory{...}",
            )
        if sparse := program.graph.sparse_gradients:
            raise UnsupportedError(
                "IRC413",
                f"the gradient of {sparse[0]} is sparse, so that no bytes can be reserved for it: it grows",
                help="give the embedding sparse=False, or leave out accumulate_gradients= and "
                "optimizer_in_backward=; the stages of a pipeline always accumulate",
            )
        costs: Mapping[Value, StepCost] | None = None
        if self.optimizer is not None:
            from ..costs.optimizer_costs import step_costs

            parameters = [entry.value for entry, _ in _delivered(program.graph)]
            costs = {value: self.known[value.type] for value in parameters if value.type in self.known}
            costs |= step_costs(self.optimizer, [value for value in parameters if value not in costs])
        original = None if program.original is None else release_gradients(program.original, costs)
        graph = release_gradients(program.graph, costs)
        return replace(program, graph=graph, original=original, eager=None)


def _delivered(graph: Graph) -> list[tuple[Input, list[Output]]]:
    """The parameters whose gradients the graph delivers, each with the outputs of all its names."""
    entries = {i.value: i for i in graph.inputs if i.role is InputRole.PARAMETER}
    by_target = {f"parameter:{entry.target}": entry for entry in entries.values()}
    found: dict[Value, list[Output]] = {}
    for output in graph.outputs:
        if output.role is OutputRole.GRADIENT and output.value is not None and output.target in by_target:
            found.setdefault(graph.tied[by_target[output.target].value], []).append(output)
    return [(entries[first], outputs) for first, outputs in found.items()]


def release_gradients(graph: Graph, costs: Mapping[Value, StepCost] | None = None) -> Graph:
    """The graph with a node for each gradient that it delivered to a parameter.

    Args:
        graph: A training graph.
        costs: The costs of the optimizer's step for each parameter. Without it gradients are accumulated.
    """
    done = {output for _, parts in _delivered(graph) for output in parts}
    held = _held(graph, done)
    positions = _Positions(graph)
    made: defaultdict[int, list[Node]] = defaultdict(list)
    releases: defaultdict[int, list[Node]] = defaultdict(list)
    reserved_bytes = graph.reserved_bytes
    names = {node.name for node in graph.nodes}
    for parameter, parts in _delivered(graph):
        gradients = sorted((o.value for o in parts if o.value is not None), key=positions.made)
        at = positions.made(gradients[-1])
        gradient, nodes = _own_gradient(graph, parameter, gradients, held)
        made[at].extend(nodes)
        held.add(gradient.storage)
        cost = None if costs is None else costs[parameter.value]
        if cost is not None:
            at = max(
                at, positions.last_read(gradient.storage), positions.last_needed(parameter.value.storage)
            )
        releases[at].append(_release(names, parameter, gradient, cost))
        reserved_bytes += gradient.storage.nbytes if cost is None else cost.state_bytes
    nodes = tuple(_woven(graph.nodes, made, releases))
    outputs = tuple(replace(output, value=None) if output in done else output for output in graph.outputs)
    return replace(graph, nodes=nodes, outputs=outputs, reserved_bytes=reserved_bytes)


def _own_gradient(
    graph: Graph, parameter: Input, gradients: Sequence[Value], held: set[Storage]
) -> tuple[Value, list[Node]]:
    """Puts the gradient of a parameter into a storage that nobody else holds; returns the nodes for that too.

    Args:
        graph: The graph.
        parameter: The parameter.
        gradients: The gradients of the parameter under each of its names, in the order in which they are
            made; they are summed up as the autograd engine does.
        held: Storages that are held by others.
    """
    gradient, *others = gradients
    nodes: list[Node] = []
    for number, other in enumerate(others):
        own = _value(graph, f"sum_{number}_{parameter.target}", gradient.type)
        nodes.append(_node(graph, own, "aten.add.Tensor", (gradient, other)))
        gradient = own
    if gradient.storage in held:
        own = _value(graph, f"own_{parameter.target}", gradient.type)
        memory_format = ("memory_format", Symbol("memory_format", "contiguous_format"))
        nodes.append(_node(graph, own, "aten.clone.default", (gradient,), memory_format))
        gradient = own
    return gradient, nodes


def _held(graph: Graph, done: set[Output]) -> set[Storage]:
    """The storages that a gradient may not give away.

    They are those of inputs, of other results, of what forward makes, and of what pipeline stages exchange: a
    neighbour may still read it when the next micro-batch is added to `.grad`.
    """
    others = (o.value for o in graph.outputs if o not in done and o.value is not None)
    forward = (s for s, node in graph.producers.items() if node.region is Region.FORWARD)
    exchanged = (v.storage for n in graph.nodes if n.op in (SEND, RECEIVE) for v in (*n.operands, *n.values))
    results = (value.storage for value in others)
    return {*graph.static_storages, *graph.tangent_storages, *results, *forward, *exchanged}


def _woven(nodes: Sequence[Node], *insertions: Mapping[int, list[Node]]) -> Iterator[Node]:
    """Inserts nodes after given indices."""
    for index in range(-1, len(nodes)):
        if index >= 0:
            yield nodes[index]
        for inserted in insertions:
            yield from inserted.get(index, ())


def _release(names: set[str], parameter: Input, gradient: Value, cost: StepCost | None) -> Node:
    """Makes the node that applies a gradient at some cost, or accumulates it; its name is none of `names`."""
    verb, op = ("accumulate", ACCUMULATE_GRADIENT) if cost is None else ("apply", APPLY_GRADIENT)
    return Node(
        name=_unused(f"{verb}_{parameter.target}", names),
        op=op,
        arguments=(parameter.value, gradient),
        keywords=() if cost is None else cost.keywords,
        results=(),
        region=Region.BACKWARD,
        traits=frozenset({Trait.EFFECT}),
    )


def _value(graph: Graph, name: str, like: TensorType) -> Value:
    """A new contiguous value in a storage of its own."""
    type = TensorType.contiguous(like.shape, like.dtype, like.device)
    storage_name = _unused(name, {storage.name for storage in graph.storages})
    storage = Storage(storage_name, allocation_bytes(type.nbytes, type.device), type.device)
    written = {i.value.name for i in graph.inputs} | {v.name for node in graph.nodes for v in node.values}
    return Value(_unused(name, written), type, storage)


def _node(
    graph: Graph, made: Value, op: str, operands: tuple[Value, ...], *keywords: tuple[str, Argument]
) -> Node:
    """Makes the backward operation of a new value."""
    return Node(
        name=_unused(made.name, {node.name for node in graph.nodes}),
        op=op,
        arguments=operands,
        keywords=keywords,
        results=(made,),
        region=Region.BACKWARD,
    )


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


class _Positions:
    """Positions among the nodes of a graph after which a gradient may be released; -1 is before the first."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.index = {node: index for index, node in enumerate(graph.nodes)}
        self.makers = {value: node for node in graph.nodes for value in node.values}
        self.readers: dict[Storage, list[Node]] = {}
        for node in graph.operations:
            for storage in graph.reads(node):
                self.readers.setdefault(storage, []).append(node)
        self.boundary = sum(node.region is Region.FORWARD for node in graph.nodes) - 1
        self.useful: dict[Node, int] = {}
        """For each forward operation, the last backward operation that running it again could serve."""
        for node in reversed(graph.operations):
            if node.region is Region.FORWARD:
                passing = (s for s in graph.allocates(node) if s not in graph.output_storages)
                self.useful[node] = max(map(self.last_needed, passing), default=-1)

    def made(self, gradient: Value) -> int:
        """The node that makes a gradient, or the last one of forward if backward does not make it."""
        maker = self.makers.get(gradient)
        return self.boundary if maker is None else max(self.index[maker], self.boundary)

    def last_read(self, storage: Storage) -> int:
        """The last operation that reads a storage."""
        return max((self.index[node] for node in self.readers.get(storage, ())), default=-1)

    def last_needed(self, storage: Storage) -> int:
        """The last backward operation that reads a storage, or profits from a run of what reads it."""
        readers = self.readers.get(storage, ())
        return max((self.useful.get(node, self.index[node]) for node in readers), default=-1)
