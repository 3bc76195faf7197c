"""The graph of a call at every length of a range: captured at three of them, with sizes as polynomials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ...backends.torch import LengthFamily, LengthForms, LengthRange, tracing
from ...frontends.torch import Captured, lengths_alike
from ...ir import (
    Compute,
    Delivery,
    Free,
    Graph,
    Instruction,
    Schedule,
    Signature,
    UnsupportedError,
    UsageError,
    first_line,
    same_graph,
)
from ...ir.lengths import DiffersByLength, fit, generalize, numbers_by_length, specialize
from ...passes import Program
from ...torch_support.attribute_reads import Names
from ...torch_support.bits import same_bits
from ..captured_call import captured_call
from ..planned_program import prepared_call
from ..request import Request
from ..time_steps import has_kernels, seconds_to_capture
from .axis import LengthCall

__all__ = ["GraphFamily", "GraphsDiffer", "graph_family", "schedule_of"]

_FEWEST = 8
"""The number of lengths from which on one graph is made for all."""


class GraphsDiffer(UnsupportedError):
    """The graph of the largest length is not that of the others, though the same code made it."""


@dataclass(frozen=True)
class GraphFamily:
    """One graph for the calls of all lengths of a range.

    Args:
        first: The smallest length.
        last: The largest.
        captured: The call of the largest length.
        names: What was read of each submodule on the way.
        prepared: It, rewritten.
        general: The graph as it was captured, as it was rewritten and as it was before (None if it is the
            same), and the deliveries: with polynomials of the length in the place of sizes.
    """

    first: int
    last: int
    captured: Captured
    names: Names
    prepared: Program
    general: tuple[Graph, Graph, Graph | None, tuple[Delivery, ...]]

    def at(self, length: int) -> tuple[Captured, Program]:
        """The call of a length, captured and rewritten. Nothing is known of its eager run but at `last`."""
        if length == self.last:
            return self.captured, self.prepared
        graph, rewritten, original, deliveries = specialize(self.general, length)
        signature = replace(self.captured.signature, deliveries=deliveries)
        captured = replace(self.captured, graph=graph, signature=signature, eager=None)
        return captured, Program(rewritten, original=original)

    @cached_property
    def forms(self) -> LengthForms:
        """The operations and types of the rewritten graph, and of that before."""
        graphs = [graph for graph in reversed(self.general[1:3]) if graph is not None]
        nodes = {(node.name, node.op): node for graph in graphs for node in graph.nodes}
        values = [value for node in nodes.values() for value in node.values]
        values += [entry.value for graph in graphs for entry in graph.inputs]
        return LengthForms(nodes, {value.name: value.type for value in values})

    def range(self, family: LengthFamily, first: int, last: int, schedule: Schedule) -> LengthRange:
        """The lengths that a schedule of the graph at `last` is for.

        Raises:
            UnsupportedError: IRC351 if it has operations that the graph has not.
        """
        if any((node.name, node.op) not in self.forms.nodes for node in schedule.graph.nodes):
            raise UnsupportedError("IRC351", "the schedule has operations of its own")
        inputs = {entry.value.name: entry for entry in self.general[1].inputs}
        general = [inputs[entry.value.name] for entry in schedule.graph.inputs]
        statics = tuple(entry for entry in general if entry.role.value != "tangent")
        tangents = {entry.target: entry for entry in general if entry.role.value == "tangent"}
        outputs = sum(output.role.value == "output" for output in schedule.graph.outputs)
        by_output = tuple(tangents.get(str(index)) for index in range(outputs))
        return LengthRange(family, first, last, statics, by_output, self.general[3])


def schedule_of(known: Schedule, program: Program) -> Schedule:
    """A schedule for another length as that of a program, whose operations and storages have the same names.

    Args:
        known: The schedule.
        program: The call at the length, of `GraphFamily.at`.
    """
    graphs = [graph for graph in (program.original, program.graph) if graph is not None]
    nodes = {(node.name, node.op): node for graph in graphs for node in graph.nodes}
    storages = {storage.name: storage for graph in graphs for storage in graph.storages}

    def of(instruction: Instruction) -> Instruction:
        match instruction:
            case Compute(node, retained):
                there = frozenset(storages[storage.name] for storage in retained)
                return Compute(nodes[node.name, node.op], there)
            case Free(storage):
                return Free(storages[storage.name])
            case _:
                return instruction

    graph = replace(program.graph, nodes=tuple(nodes[node.name, node.op] for node in known.graph.nodes))
    return Schedule(graph, tuple(map(of, known.instructions)))


def graph_family(module: nn.Module, call: LengthCall, request: Request, last: int) -> GraphFamily:
    """Captures calls of a module up to a length, down to the smallest that is the same graph.

    Raises:
        IrcError: As `compile_call`.
        GraphsDiffer: IRC351 if the graph of the largest length is another one.
        UnsupportedError: IRC351 if the length decides something else than sizes.
    """
    if not call.is_plain:
        raise UnsupportedError("IRC351", "a tensor that has the length is not row-major")
    captured, names = _captured_at(module, call, request, last, with_eager=True)
    if has_kernels(captured.graph):
        raise UnsupportedError("IRC351", "recurrent layers are traced step by step")
    on_gpu = any(storage.device.startswith("cuda") for storage in captured.graph.storages)
    if on_gpu and any("convolution" in node.op for node in captured.graph.operations):
        raise UnsupportedError(
            "IRC351", "workspaces of convolutions on a GPU are not known for other lengths"
        )
    with tracing():
        first = lengths_alike(
            module,
            *call.at(last),
            call.axes,
            (call.first, last),
            captured.mode,
            loss=request.loss,
            time_limit=seconds_to_capture(request.plan.time_limit),
        )
    if last - first < _FEWEST:
        _captured_at(module, call, request, first - 1)
        raise UnsupportedError(
            "IRC351", f"length {last} takes another way through the model than {first - 1}"
        )
    lengths = last, first, first + (last - first) * 5 // 8
    others = [_captured_at(module, call, request, length)[0] for length in lengths[1:]]
    if any(not _is_alike(captured, other) for other in others):
        raise UnsupportedError("IRC351", "the calling convention differs between lengths")
    prepared = prepared_call(captured, request)
    try:
        graphs = generalize(_with_known_losses([captured, *others], lengths), lengths)
        general = _rewritten(captured, prepared, graphs, request, last)
    except DiffersByLength as error:
        raise GraphsDiffer("IRC351", f"lengths differ in more than sizes: {error}") from error
    if any(not number.is_most_at(first, last) for number in numbers_by_length(_storages(general))):
        raise UnsupportedError("IRC351", "a tensor is larger for a shorter length")
    return GraphFamily(first, last, captured, names, prepared, general)


def _captured_at(
    module: nn.Module, call: LengthCall, request: Request, length: int, *, with_eager: bool = False
) -> tuple[Captured, Names]:
    """The call at a length, as `captured_call` returns it.

    Raises:
        IrcError: As `captured_call`.
        UnsupportedError: IRC351 if the model itself raises at this length.
    """
    try:
        return captured_call(module, *call.at(length), request, with_eager=with_eager)
    except UsageError as error:
        if error.code != "IRC349" or length == call.length:
            raise
        cause = error.__cause__ or error
        raise UnsupportedError(
            "IRC351",
            f"a call with {call.name} of {length} is not valid, as the model raises {type(cause).__name__}: "
            f"{first_line(cause)}",
        ) from error


def _storages(general: tuple[Any, ...]) -> tuple[Any, ...]:
    graphs = [graph for graph in general[:3] if graph is not None]
    counted = [(graph.loss_bytes, graph.loss_held_bytes, graph.loss_saved_bytes) for graph in graphs]
    return (*(graph.storages for graph in graphs), *counted)


_General = tuple[Graph, Graph, Graph | None, tuple[Delivery, ...]]
_LOSS_BYTES = ("loss_bytes", "loss_held_bytes", "loss_saved_bytes")


def _with_known_losses(
    versions: Sequence[Captured], lengths: Sequence[int]
) -> list[tuple[Graph, tuple[Delivery, ...]]]:
    """The graphs with the largest bytes of the loss in each, if these are not polynomials of the length."""
    counted: dict[str, int] = {}
    for name in _LOSS_BYTES:
        found = [getattr(version.graph, name) for version in versions]
        if fit(lengths, found) is None:
            counted[name] = max(found)
    return [(replace(each.graph, **counted), each.signature.deliveries) for each in versions]


def _rewritten(
    captured: Captured, prepared: Program, general: tuple[Graph, Any], request: Request, last: int
) -> _General:
    """The graph and what rewrites make of it at the largest lengths, whatever they make of it at others.

    Raises:
        DiffersByLength: The rewrites change in what they do there.
    """
    request = request.with_known_steps(prepared)

    def at(length: int) -> tuple[Any, ...]:
        graph, deliveries = specialize(general, length)
        program = prepared_call(replace(captured, graph=graph, eager=None), request)
        return graph, program.graph, program.original, deliveries

    versions = [(captured.graph, prepared.graph, prepared.original, captured.signature.deliveries)]
    lengths = last, last - 1, last - 2
    found: Any = generalize([*versions, *map(at, lengths[1:])], lengths)
    known, its = specialize(found, last - 5), at(last - 5)
    if not all(same_graph(a, b) for a, b in zip(known[1:3], its[1:3], strict=True) if a is not None):
        raise DiffersByLength("a rewrite splits the graph by its sizes")
    return found


def _is_alike(first: Captured, second: Captured) -> bool:
    """Whether two captures have the same calling convention, constants and generators."""
    mine, its = (_without_sizes(each.signature) for each in (first, second))
    return (
        mine == its
        and first.mode == second.mode
        and first.roundings == second.roundings
        and first.generators.keys() == second.generators.keys()
        and first.constants.keys() == second.constants.keys()
        and all(_is_same(first.constants[key], second.constants[key]) for key in first.constants)
    )


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.stride() == b.stride() and same_bits(a, b))


def _without_sizes(signature: Signature) -> Signature:
    deliveries = tuple(replace(each, view=None) for each in signature.deliveries)
    return replace(signature, deliveries=deliveries)
