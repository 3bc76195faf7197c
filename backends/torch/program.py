"""Compiles a schedule to Python functions, with a description of its inputs and gradients."""

from __future__ import annotations

import linecache
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...ir import (
    INDICES,
    PAUSE,
    RECEIVE,
    SEND,
    STRIDED_VALUES,
    Compute,
    Gradients,
    Graph,
    Input,
    InputRole,
    Loss,
    Node,
    Output,
    OutputRole,
    Region,
    Rounding,
    Schedule,
    Storage,
    Trait,
    UnsupportedError,
    Value,
    output_dependencies,
    overwritten,
    tensor_names,
)
from ...torch_support.autocast import nodes_that_autocast_sees
from .emit import LengthForms, NumberSlots, emit_source, is_partial, saved_values
from .offload.table import CopyTable, copy_table

__all__ = ["Program", "Released", "compile_program"]


@dataclass(frozen=True, slots=True)
class Released:
    """A parameter whose gradient is released within backward.

    Args:
        index: The index of the parameter among the static inputs.
        depends: The forward outputs whose gradients its own gradient is computed from.
        tied: The indices of the same tensor under other names.
    """

    index: int
    depends: frozenset[int]
    tied: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A compiled schedule. It holds no parameter, so modules can share it.

    Args:
        statics: The graph's inputs except the tangents, in order.
        tangents: The tangent of each forward output; None for an output whose gradient is not taken.
        gradients: The index of each static input's gradient among the gradients; None if it has none.
        depends: The forward outputs whose gradients each gradient is computed from.
        differentiable: The indices of the static inputs to which a gradient flows. Others that require a
            gradient are not part of the autograd graph, as in eager.
        kind: The way in which gradients of parameters are delivered.
        released: The parameters whose gradients are released within backward, by name.
        read_by_backward: The indices of the static inputs that backward reads as forward leaves them.
        read_again: The ones of them that only recomputations read.
        written: The indices of the static inputs that forward writes.
        forward: The emitted function.
        backward: The emitted function. It also takes the outputs that have a gradient if `is_partial`, and a
            `GradientSink` if gradients are released.
        is_partial: Whether parts of backward come only from some outputs.
        feeds: The outputs that are computed from each output, for outputs that others are computed from.
        parts: The sets of outputs whose gradients meet in an operation that reads values of forward.
        constants: The values of the constant inputs.
        generators: The generators of the user's that it draws from, by their names in the graph. They follow
            the static inputs; the numbers of a call that it computes with follow them, then its length.
        source: The emitted source.
        overwritten: The indices of the saved values that backward overwrites.
        forwards_in_flight: The number of live forwards that the plan counted.
        exchanges: Whether it is a pipeline stage that sends or receives; both functions take a mailbox then.
        pauses: Whether backward is a generator that yields once.
        copies: The copies to tiers; both functions take a `Session` last if there are any.
        several_uses: The inputs whose gradient eager adds up use by use, in words.
        noticed_roundings: The roundings that steps have shown.
        autocast_sees: The operations of backward that autocast may cast for, if backward is called under it.
        indices: For each gradient that is the values of a sparse one, the index of its indices.
        strided: Those of them whose values are strided in eager.
        growing: The static inputs to whose sparse `.grad` a step has added.
    """

    statics: tuple[Input, ...]
    tangents: tuple[Input | None, ...]
    gradients: tuple[int | None, ...]
    depends: tuple[frozenset[int], ...]
    differentiable: tuple[int, ...]
    kind: Gradients
    released: Mapping[str, Released]
    read_by_backward: tuple[int, ...]
    read_again: frozenset[int]
    written: tuple[int, ...]
    forward: Callable[..., tuple[list[Tensor], list[Tensor]]]
    backward: Callable[..., Any]
    constants: Mapping[str, Tensor]
    source: str = field(repr=False)
    overwritten: frozenset[int] = frozenset()
    forwards_in_flight: int = 1
    is_partial: bool = False
    parts: frozenset[frozenset[int]] = frozenset()
    feeds: Mapping[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    exchanges: bool = False
    pauses: bool = False
    copies: CopyTable = field(default_factory=CopyTable)
    generators: Mapping[str, torch.Generator] = field(default_factory=dict[str, torch.Generator])
    several_uses: Mapping[int, str] = field(default_factory=dict[int, str])
    noticed_roundings: dict[Rounding, None] = field(
        default_factory=dict[Rounding, None], compare=False, repr=False
    )
    autocast_sees: tuple[Node, ...] = ()
    indices: Mapping[int, int] = field(default_factory=dict[int, int])
    strided: frozenset[int] = frozenset()
    growing: set[int] = field(default_factory=set[int], compare=False, repr=False)

    def gradients_through(self, output: int) -> tuple[str, ...]:
        """Names the tensors whose gradients are computed from that of an output."""
        released = [(at.index, at.depends) for at in self.released.values()]
        returned = [(k, self.depends[g]) for k, g in enumerate(self.gradients) if g is not None]
        values = [self.statics[k].value for k, outputs in (*released, *returned) if output in outputs]
        names = tensor_names(self.statics)
        return tuple(dict.fromkeys(name for value in values for name in names[value]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        functions = ("forward", "backward")  # they are compiled from the source again
        return _from_source, (
            {f.name: getattr(self, f.name) for f in fields(self) if f.name not in functions},
        )


def compile_program(
    schedule: Schedule,
    constants: Mapping[str, Tensor],
    generators: Mapping[str, torch.Generator] = MappingProxyType({}),
    slots: NumberSlots = MappingProxyType({}),
    lengths: LengthForms | None = None,
) -> Program:
    """Compiles the Python that `emit_source` writes for `schedule`.

    Args:
        schedule: A verified schedule.
        constants: The tensors of the graph's constant inputs, by target.
        generators: The generators of the user's that the graph draws from, by name.
        slots: The scalar operands that come with each call.
        lengths: The operations with polynomials of the length that comes with each call.

    Raises:
        UnsupportedError: IRC334 if one of these is not given, as for a written plan or a pipeline.
    """
    graph = schedule.graph
    if not generators.keys() >= set(graph.generators):
        raise UnsupportedError(
            "IRC334",
            "the forward draws from a torch.Generator of its own, which a written plan, the stages of a "
            "pipeline and graphs of Dynamo do not hold",
            help="call irc.optimize, or draw from torch's generator (leave out generator=)",
        )
    source = emit_source(schedule, slots, lengths)
    forward, backward = _functions(source)
    statics = tuple(i for i in graph.inputs if i.role is not InputRole.TANGENT)
    tangents = _tangents(graph)
    dependencies = output_dependencies(graph)
    released = _released(graph, statics, dependencies)
    written = _written(graph)
    effects = [node for node in graph.nodes if Trait.EFFECT in node.traits]
    unread = written - {value.storage for node in effects for value in node.values}
    read_by_backward, recomputed_from = _read_by_backward(schedule)
    return Program(
        statics=statics,
        tangents=tangents,
        gradients=_gradient_indices(graph, statics),
        depends=_gradient_dependencies(graph, dependencies),
        differentiable=_differentiable(graph, statics, released),
        kind=graph.gradients,
        released=released,
        read_by_backward=_indices(statics, read_by_backward - unread),
        read_again=frozenset(_indices(statics, recomputed_from - unread)),
        written=_indices(statics, written),
        forward=forward,
        backward=backward,
        constants=constants,
        source=source,
        overwritten=_overwritten(schedule),
        forwards_in_flight=graph.forwards_in_flight,
        is_partial=is_partial(graph),
        parts=frozenset(_parts(graph, dependencies)),
        feeds=_feeds(graph, {index for index, tangent in enumerate(tangents) if tangent is not None}),
        exchanges=any(node.op in (SEND, RECEIVE) for node in graph.operations),
        pauses=any(node.op == PAUSE for node in graph.operations),
        copies=copy_table(schedule),
        generators=dict(generators),
        several_uses=dict(_several_uses(graph, statics)),
        autocast_sees=tuple(nodes_that_autocast_sees(_backward(graph))),
        indices=_sparse_indices(graph),
        strided=frozenset(k for k, each in enumerate(_gradients(graph)) if each.part == STRIDED_VALUES),
    )


# ---------------------------------------------------------------------- the emitted functions

_numbers = count(1)
"""The numbers of programs, for the file names in their tracebacks."""


def _functions(source: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compiles an emitted source to forward and backward; tracebacks show its lines."""
    filename = f"<irc program {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace)
    weakref.finalize(namespace["forward"], linecache.cache.pop, filename, None)
    return namespace["forward"], namespace["backward"]


def _from_source(known: Mapping[str, Any]) -> Program:
    """Makes a program from a pickle: compiles its source."""
    forward, backward = _functions(known["source"])
    return Program(**known, forward=forward, backward=backward)


# ---------------------------------------------------------------------- inputs and gradients


def _indices(statics: Sequence[Input], storages: AbstractSet[Storage]) -> tuple[int, ...]:
    """Returns the indices of the static inputs in these storages."""
    return tuple(k for k, static in enumerate(statics) if static.value.storage in storages)


def _tangents(graph: Graph) -> tuple[Input | None, ...]:
    """Returns the tangent of each forward output; None for an output without one."""
    tangents = {i.target: i for i in graph.inputs if i.role is InputRole.TANGENT}
    count = sum(o.role is OutputRole.OUTPUT for o in graph.outputs)
    return tuple(tangents.get(str(index)) for index in range(count))


def _gradients(graph: Graph) -> list[Output]:
    return [output for output in graph.outputs if output.role is OutputRole.GRADIENT]


def _gradient_indices(graph: Graph, statics: Sequence[Input]) -> tuple[int | None, ...]:
    """Returns, for each static input, the index of its gradient; None if it has no gradient."""
    gradients = enumerate(_gradients(graph))
    indices = {gradient.target: index for index, gradient in gradients if gradient.part != INDICES}
    return tuple(indices.get(_gradient_target(static)) for static in statics)


def _sparse_indices(graph: Graph) -> dict[int, int]:
    """Returns the index of the indices of each sparse gradient, by the index of its values."""
    gradients = _gradients(graph)
    places = {each.target: index for index, each in enumerate(gradients) if each.part == INDICES}
    values = ((k, each) for k, each in enumerate(gradients) if each.part and each.part != INDICES)
    return {index: places[each.target] for index, each in values}


def _gradient_target(static: Input) -> str:
    return f"{static.role.value}:{static.target}"


def _gradient_dependencies(
    graph: Graph, dependencies: Mapping[Value, frozenset[int]]
) -> tuple[frozenset[int], ...]:
    """Returns, for each gradient, the forward outputs whose gradients it is computed from."""
    values = (gradient.value for gradient in _gradients(graph))
    nothing = frozenset[int]()
    return tuple(nothing if value is None else dependencies.get(value, nothing) for value in values)


def _differentiable(
    graph: Graph, statics: Sequence[Input], released: Mapping[str, Released]
) -> tuple[int, ...]:
    """Returns the indices of the static inputs to which a gradient flows, as a result or released."""
    flows = {gradient.target for gradient in _gradients(graph) if gradient.value is not None}
    flows |= {f"{InputRole.PARAMETER.value}:{name}" for name in released}
    return tuple(k for k, i in enumerate(statics) if i.requires_grad and _gradient_target(i) in flows)


_SUM, _COPY = "aten.add.Tensor", "aten.clone.default"


def _several_uses(graph: Graph, statics: Sequence[Input]) -> Iterator[tuple[int, str]]:
    """Yields the inputs whose gradient eager adds up use by use, with the lines that use them."""
    producers = {value: node for node in graph.nodes for value in node.values}
    gradients = {o.target: o.value for o in _gradients(graph) if not o.part}
    released = {node.operands[0]: node.operands[1] for node in graph.releases}
    for index, static in enumerate(statics):
        gradient = released.get(static.value, gradients.get(_gradient_target(static)))
        maker = producers.get(gradient) if gradient is not None else None
        if maker is not None and maker.op == _COPY:  # it is laid out as the parameter is
            maker = producers.get(maker.operands[0])
        is_sum = maker is not None and maker.op == _SUM
        # what is released is added at once, as in eager
        if is_sum or (static.adds_apart and static.value not in released):
            readers = [n for n in graph.nodes if n.region is Region.FORWARD and static.value in n.operands]
            lines = sorted({str(n.at.source) for n in readers if n.at is not None and n.at.source})
            where = f" ({', '.join(lines)})" if lines else ""
            how = "a forward uses several times" if is_sum else "a reentrant checkpoint reads"
            yield index, f"{static.role.value} {static.target}, which {how}{where}"


def _released(
    graph: Graph, statics: Sequence[Input], dependencies: Mapping[Value, frozenset[int]]
) -> dict[str, Released]:
    """Returns the parameters whose gradients are released within backward, by name."""
    index = {static.value: k for k, static in enumerate(statics)}
    names = {static.value: static.target for static in statics}
    found: dict[str, Released] = {}
    for node in sorted(graph.releases, key=lambda node: index[node.operands[0]]):
        parameter, gradient = node.operands
        tied = (index[v] for v, first in graph.tied.items() if first is parameter and v is not parameter)
        depends = dependencies.get(gradient, frozenset())
        found[names[parameter]] = Released(index[parameter], depends, tuple(tied))
    return found


def _backward(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.region is Region.BACKWARD)


# ---------------------------------------------------------------------- reads and writes


def _written(graph: Graph) -> set[Storage]:
    """Returns the static storages that operations write in place."""
    writes = (node for node in graph.nodes if Trait.EFFECT in node.traits and node.releases is None)
    return {node.operands[0].storage for node in writes} & graph.static_storages


def _overwritten(schedule: Schedule) -> frozenset[int]:
    """Returns the indices of the saved values whose memory results of backward take."""
    operations = schedule.halves[1]
    taken = {value.storage for node in operations for value in overwritten(node)}
    taken |= {n.operands[0].storage for n in operations if Trait.EFFECT in n.traits and n.releases is None}
    saved = saved_values(schedule)
    return frozenset(index for index, value in enumerate(saved) if value.storage in taken)


def _read_by_backward(schedule: Schedule) -> tuple[set[Storage], set[Storage]]:
    """Returns the storages that backward reads, and those of them that only recomputations read."""
    graph = schedule.graph
    loss = next(k for k, i in enumerate(schedule.instructions) if isinstance(i, Loss))
    nodes = [i.node for i in schedule.instructions[loss:] if isinstance(i, Compute)]
    nodes = [node for node in nodes if node.releases is None]
    gradients = {o.value.storage for o in _gradients(graph) if o.value is not None}
    read = gradients.union(*map(graph.reads, nodes))
    planned = gradients.union(*(graph.reads(node) for node in nodes if node.region is Region.BACKWARD))
    return read, read - planned


# ---------------------------------------------------------------------- dependencies between outputs

_DETACH = "aten.detach.default"


def _parts(graph: Graph, dependencies: Mapping[Value, frozenset[int]]) -> Iterator[frozenset[int]]:
    """Yields, for each operation that reads gradients and values of forward, the outputs of the gradients."""
    for node in graph.operations:
        if any(value not in dependencies for value in node.operands):
            through = [dependencies[value] for value in node.operands if value in dependencies]
            yield frozenset[int]().union(*through)


def _feeds(graph: Graph, differentiable: AbstractSet[int]) -> dict[int, frozenset[int]]:
    """Returns the differentiable outputs that others are computed from, with the indices of the others."""
    outputs = [o.value for o in graph.outputs if o.role is OutputRole.OUTPUT]
    values = {index: value for index in differentiable if (value := outputs[index]) is not None}
    made_of: dict[Value, frozenset[int]] = defaultdict(frozenset)
    for index, value in values.items():
        made_of[value] |= {index}
    for node in graph.operations:
        if node.region is Region.FORWARD and node.op != _DETACH:
            through = frozenset[int]().union(*(made_of[value] for value in node.operands))
            for value in node.values:
                made_of[value] |= through
    found: dict[int, frozenset[int]] = defaultdict(frozenset)
    for index, value in values.items():
        for source in made_of[value] - {index}:
            found[source] |= {index}
    return dict(found)
