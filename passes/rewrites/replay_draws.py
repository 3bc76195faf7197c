"""The pass that lets random operations run again: from a copy of the state that the generator had."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from ...ir import (
    GENERATOR_STATE,
    Graph,
    Node,
    Region,
    Storage,
    Trait,
    Value,
    allocation_bytes,
    generator_state_type,
)
from ...torch_support.draws import DROPOUT_BACKWARD, DROPOUT_MASK, DROPOUT_PRODUCT
from ..program import Program

__all__ = ["ReplayDraws"]

_DROPOUT = "aten.native_dropout.default"
_BACKWARD = "aten.native_dropout_backward.default"


@dataclass(frozen=True, slots=True)
class ReplayDraws:
    """Copies the state of the generator before each draw of forward, and takes dropout on the CPU apart.

    A draw runs once in the order of the graph, which moves the generator as eager does. With a copy of the
    state that it began from, it may run again, and gives the same bits: its results need not be kept. The
    copy is a storage as any other, of 5,056 bytes on the CPU and of 16 on a GPU; a draw of fewer bytes stays
    as it is.

    A dropout on the CPU becomes an operation that draws its mask, and one that makes its output of it:
    backward reads the mask alone, and drawing it again reads no data. These and the gradient take no
    workspace, where torch's kernels take one or two copies of the data.
    """

    name: ClassVar[str] = "replay-draws"

    def run(self, program: Program, /) -> Program:
        """Rewrites the program's graph; `original` is the graph as it was."""
        graph = program.graph
        if not any(Trait.RANDOM in node.traits for node in graph.nodes):
            return program
        nodes = tuple(self._rewritten(graph))
        if nodes == graph.nodes:
            return program
        return replace(program, graph=replace(graph, nodes=nodes), original=program.original or graph)

    def _rewritten(self, graph: Graph) -> Iterator[Node]:
        read = {value for node in graph.nodes for value in node.operands}
        read |= {output.value for output in graph.outputs if output.value is not None}
        for node in graph.nodes:
            for part in _parts(node, read):
                if _is_worth_a_state(part):
                    state = _state_before(part)
                    yield state
                    yield part.with_generator_state(state.values[0])
                else:
                    yield part


def _is_worth_a_state(node: Node) -> bool:
    """Whether a draw makes more than a state takes."""
    if Trait.RANDOM not in node.traits or node.region is not Region.FORWARD or node.op == GENERATOR_STATE:
        return False
    if node.generator_state is not None or not node.values:
        return False
    device = node.values[0].type.device
    return device != "meta" and sum(v.type.nbytes for v in node.values) > generator_state_type(device).nbytes


def _state_before(node: Node) -> Node:
    """The operation that copies the state from which a draw begins."""
    type = generator_state_type(node.generator)
    name = f"{node.name}_state"
    state = Value(name, type, Storage(name, allocation_bytes(type.nbytes, "cpu"), "cpu"))
    return Node(
        name, GENERATOR_STATE, (node.generator,), (state,), traits=frozenset({Trait.RANDOM}), at=node.at
    )


def _parts(node: Node, read: Collection[Value]) -> Iterator[Node]:
    """The node itself, or what a dropout or its backward becomes."""
    if node.op == _DROPOUT:
        yield from _dropout_parts(node, read)
    elif node.op == _BACKWARD and _is_plain(node.operands[0], node.results[0]):
        yield replace(node, op=DROPOUT_BACKWARD)
    else:
        yield node


def _dropout_parts(node: Node, read: Collection[Value]) -> Iterator[Node]:
    """The draw of a dropout's mask and the product with it; the dropout itself if their bits may differ."""
    (data, rate, *train), (output, mask) = node.arguments, node.results
    assert isinstance(data, Value) and isinstance(rate, float) and output is not None
    if (
        mask is None
        or mask.type.device != "cpu"
        or not mask.type.is_dense
        or rate >= 1
        or train == [False]
        or (output in read and not _is_plain(data, output))
    ):
        yield node
        return
    yield Node(
        f"{node.name}_mask",
        DROPOUT_MASK,
        (mask.type.shape, mask.type.strides, rate),
        (mask,),
        region=node.region,
        traits=node.traits,
        at=node.at,
        annotation=node.annotation,
    )
    if output in read:
        product = replace(node, op=DROPOUT_PRODUCT, arguments=(data, mask, rate), keywords=())
        yield replace(product, results=(output,), is_sequence=False, traits=frozenset())


def _is_plain(data: Value, output: Value | None) -> bool:
    """Whether irc's own operation gives the bits of torch's, in the same layout."""
    type = data.type
    return output is not None and type == output.type and type.device == "cpu" and type.is_dense
