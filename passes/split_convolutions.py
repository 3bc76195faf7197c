"""The pass that takes the backward of a convolution apart: its two gradients need not be made together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from ..ir import DType, Node, TensorType, Value
from .program import Program

__all__ = ["SplitConvolutions"]

_JOINT = "aten.convolution_backward.default"
_MASK = 10


@dataclass(frozen=True, slots=True)
class SplitConvolutions:
    """Makes of each convolution's backward one operation for the weight's gradient and one for the input's.

    Kernels, numbers and time are the same; but the weight's gradient may wait until memory is plenty.
    Where a transposed convolution gives the input's gradient bit for bit, it stands for the second half:
    it does not read the convolution's input, which is then free before its gradient is made.

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024) split for time; here it is for memory.
    """

    name: ClassVar[str] = "split-convolutions"

    def run(self, program: Program, /) -> Program:
        """The program with a rewritten graph; `original` is the graph as it was."""
        graph = program.graph
        nodes = tuple(part for node in graph.nodes for part in _parts(node))
        if len(nodes) == len(graph.nodes):
            return program
        return replace(program, graph=replace(graph, nodes=nodes), original=program.original or graph)


def _parts(node: Node) -> Iterator[Node]:
    """The node itself, or the two that it falls into."""
    if node.op != _JOINT or len(node.arguments) != _MASK + 1:
        yield node
        return
    into_data, into_weight, into_bias = node.results
    if into_data is None or (into_weight is None and into_bias is None):
        yield node
        return
    weight_half = replace(
        node,
        name=f"{node.name}_weight",
        arguments=(*node.arguments[:_MASK], (False, into_weight is not None, into_bias is not None)),
        results=(None, into_weight, into_bias),
    )
    if _is_transposable(node):
        yield weight_half
        yield _transposed(node, into_data)
    else:
        yield replace(
            node,
            name=f"{node.name}_input",
            arguments=(*node.arguments[:_MASK], (True, False, False)),
            results=(into_data, None, None),
        )
        yield weight_half


def _is_transposable(node: Node) -> bool:
    """Whether a transposed convolution runs the same kernel as the input's gradient.

    Seen of oneDNN, for float32, in one and two dimensions, without groups; for a kernel of one element,
    or one channel, it takes others.
    """
    gradient, data, weight = (cast(Value, argument).type for argument in node.arguments[:3])
    plain = len(data.shape) <= 4 and all(
        type == TensorType.contiguous(type.shape, DType.FLOAT32, "cpu") for type in (gradient, data, weight)
    )
    transposed, groups = node.arguments[7], node.arguments[9]
    return (
        plain
        and not transposed
        and groups == 1
        and data.shape[1] > 1
        and any(size > 1 for size in weight.shape[2:])
    )


def _transposed(node: Node, into_data: Value) -> Node:
    gradient, data, weight, _, stride, padding, dilation = node.arguments[:7]
    assert isinstance(gradient, Value) and isinstance(data, Value) and isinstance(weight, Value)
    space = len(data.type.shape) - 2
    strides, paddings, dilations = (_each(argument, space) for argument in (stride, padding, dilation))
    missing = tuple(
        wide - ((narrow - 1) * step - 2 * pad + spread * (kernel - 1) + 1)
        for wide, narrow, step, pad, spread, kernel in zip(
            data.type.shape[2:],
            gradient.type.shape[2:],
            strides,
            paddings,
            dilations,
            weight.type.shape[2:],
            strict=True,
        )
    )
    return replace(
        node,
        name=f"{node.name}_input",
        op="aten.convolution.default",
        arguments=(gradient, weight, None, strides, paddings, dilations, True, missing, 1),
        results=(into_data,),
        is_sequence=False,
    )


def _each(argument: object, space: int) -> tuple[int, ...]:
    """A setting of a convolution, once for each dimension."""
    sizes = cast(tuple[int, ...], argument)
    return sizes if len(sizes) == space else sizes * space
