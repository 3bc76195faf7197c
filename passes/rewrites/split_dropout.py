"""The pass that takes dropout apart: the random mask must be kept, the product with it need not be."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from ...ir import DType, Node, Storage, Value
from ..program import Program

__all__ = ["SplitDropout"]

_DROPOUT = "aten.native_dropout.default"


@dataclass(frozen=True, slots=True)
class SplitDropout:
    """Splits each dropout into an operation that draws its mask, and two products that make its output of it.

    An operation that draws random numbers runs once, so all of its results that backward reads are kept. Of a
    dropout taken apart that is the mask alone, a byte an element: the products can be computed again. In
    single and double precision on a CPU the numbers are the same: torch makes the output by these products.
    Other dropouts stay whole. Drawing makes an output too, which is dropped at once: forward takes longer by
    the products.
    """

    name: ClassVar[str] = "split-dropout"

    def run(self, program: Program, /) -> Program:
        """Rewrites the program's graph; `original` is the graph as it was."""
        graph = program.graph
        read = {value for node in graph.nodes for value in node.operands}
        read |= {output.value for output in graph.outputs if output.value is not None}
        nodes = tuple(part for node in graph.nodes for part in _parts(node, read))
        if len(nodes) == len(graph.nodes):
            return program
        return replace(program, graph=replace(graph, nodes=nodes), original=program.original or graph)


def _parts(node: Node, read: Collection[Value]) -> Iterator[Node]:
    """The node itself, or the three that it is split into."""
    if node.op != _DROPOUT or not _is_split_well(node) or node.results[0] not in read:
        yield node
        return
    (data, rate, *_), (output, mask) = node.arguments, node.results
    assert isinstance(rate, float) and output is not None
    drawn, product = _like(output, "drawn"), _like(output, "masked")
    yield replace(node, name=f"{node.name}_mask", results=(drawn, mask), annotation=None)
    times = Node(node.name, "aten.mul.Tensor", (), (output,), at=node.at)
    yield replace(times, name=f"{node.name}_masked", arguments=(data, mask), results=(product,))
    yield replace(times, arguments=(product, 1.0 / (1.0 - rate)), annotation=node.annotation)


def _is_split_well(node: Node) -> bool:
    """Whether the products give the same numbers in the same layout."""
    (data, rate, *train), (output, mask) = node.arguments, node.results
    return (
        isinstance(data, Value)
        and isinstance(rate, float)
        and rate < 1
        and train != [False]
        and output is not None
        and mask is not None
        and data.type == output.type
        and data.type.device == "cpu"
        and data.type.dtype in (DType.FLOAT32, DType.FLOAT64)
    )


def _like(value: Value, what: str) -> Value:
    """Another value of the same type, in memory of its own."""
    name = f"{value.name}_{what}"
    return Value(name, value.type, Storage(name, value.storage.nbytes, value.storage.device))
