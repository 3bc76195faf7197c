"""The pass that takes the backward of a convolution apart: its two gradients need not be made together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ...ir import DType, Graph, Node, TensorType, Value
from ..costs.table import Costs, signature
from ..program import Program

if TYPE_CHECKING:
    from ..costs.profiling import Measured

__all__ = ["SplitConvolutions", "rejoined"]

_JOINT = "aten.convolution_backward.default"
_MASK = 10


@dataclass(frozen=True, slots=True)
class SplitConvolutions:
    """Splits each convolution's backward into an operation for the weight's gradient and one for the input's.

    Kernels, numbers and time are the same; but the weight's gradient may wait until memory is plenty. If a
    transposed convolution gives the input's gradient bit for bit, it replaces the second half: it does not
    read the convolution's input, which is then free before its gradient is made.

    Args:
        transpose: Whether to look for such convolutions, which runs each here, on tensors of its real sizes.
        measure: Whether these runs are measured, so that the costs need no others.

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024) split for time; here it is for memory.
    """

    name: ClassVar[str] = "split-convolutions"

    transpose: bool = True
    measure: bool = field(default=False, metadata={"in_text": False})

    def run(self, program: Program, /) -> Program:
        """Rewrites the program's graph; `original` is the graph as it was."""
        graph = program.graph
        joint = [node for node in graph.nodes if _is_divisible(node)]
        if not joint:
            return program
        measured = _compare(joint, measure=self.measure) if self.transpose else {}
        nodes = tuple(part for node in graph.nodes for part in _parts(node, transpose=self.transpose))
        return replace(
            program,
            graph=replace(graph, nodes=nodes),
            original=program.original or graph,
            measured={**program.measured, **measured},
        )


def _is_divisible(node: Node) -> bool:
    """Whether a node makes the gradients of a convolution's input and of its weight or bias."""
    if node.op != _JOINT or len(node.arguments) != _MASK + 1:
        return False
    into_data, into_weight, into_bias = node.results
    return into_data is not None and (into_weight is not None or into_bias is not None)


def _parts(node: Node, *, transpose: bool) -> Iterator[Node]:
    """The node itself, or the two that it is split into."""
    if not _is_divisible(node):
        yield node
        return
    into_data, into_weight, into_bias = node.results
    weight_half = replace(
        node,
        name=f"{node.name}_weight",
        arguments=(*node.arguments[:_MASK], (False, into_weight is not None, into_bias is not None)),
        results=(None, into_weight, into_bias),
    )
    if transpose and _is_plain(node) and _compared[_kernels(node)]:
        yield weight_half
        yield _transposed(node)
    else:
        yield replace(
            node,
            name=f"{node.name}_input",
            arguments=(*node.arguments[:_MASK], (True, False, False)),
            results=(into_data, None, None),
        )
        yield weight_half


def rejoined(original: Graph, split: Graph, costs: Costs) -> Graph:
    """Takes only those convolutions apart for which that can save memory.

    Args:
        original: The graph before.
        split: The graph that `SplitConvolutions` made of it.
        costs: The costs of the operations of both.
    """
    joint = {node.name: node for node in original.nodes if node.op == _JOINT}
    parts = {node.name: node for node in split.nodes}
    whole: dict[str, Node] = {}
    """The convolutions that stay whole, by the names of their parts."""
    for name, node in joint.items():
        halves = [parts[half] for half in (f"{name}_weight", f"{name}_input") if half in parts]
        if len(halves) == 2:
            made_bytes = sum(s.nbytes for s in split.allocates(halves[0]))
            held_bytes = sum(s.nbytes for s in split.reads(halves[0]) if s not in split.static_storages)
            workspace_bytes = max(costs.workspace_bytes[half] for half in halves)
            if workspace_bytes <= costs.workspace_bytes[node] or made_bytes > held_bytes:
                continue
        whole |= {part: node for part in (name, *(half.name for half in halves))}
    return replace(split, nodes=tuple(dict.fromkeys(whole.get(node.name, node) for node in split.nodes)))


def _is_plain(node: Node) -> bool:
    """Whether a transposed convolution may run the same kernel as the input's gradient.

    oneDNN's does for float32, in one and two dimensions, without groups; for one image, one channel, or a
    kernel of one element, torch may take others.
    """
    gradient, data, weight = (cast(Value, argument).type for argument in node.arguments[:3])
    sizes = list(data.shape)
    plain = len(sizes) <= 4 and all(
        type == TensorType.contiguous(type.shape, DType.FLOAT32, "cpu") for type in (gradient, data, weight)
    )
    transposed, groups = node.arguments[7], node.arguments[9]
    return (
        plain
        and not transposed
        and groups == 1
        and sizes[0] > 1
        and sizes[1] > 1
        and any(size > 1 for size in weight.shape[2:])
    )


_compared: dict[tuple[str, int, bool], bool] = {}
"""Whether both kernels give the same bits, by `_kernels`."""


def _kernels(node: Node) -> tuple[str, int, bool]:
    """The operation with its types, the number of threads, and whether oneDNN is in use."""
    import torch

    return signature(node), torch.get_num_threads(), bool(torch.backends.mkldnn.enabled)


def _compare(nodes: Iterable[Node], *, measure: bool) -> dict[str, Measured]:
    """Compares the kernels of convolutions that were not compared before, and returns what was measured.

    What a transposed convolution takes can depend on the machine and on settings: each runs once on made-up
    numbers, as does the operation that it is to replace, and the bits are compared.
    """
    plain = {_kernels(node): node for node in nodes if _is_plain(node)}
    missing = {key: node for key, node in plain.items() if key not in _compared}
    if not missing:
        return {}
    import torch

    from ..costs.profiling import first_runs, runner

    given: list[torch.Tensor] = []
    pairs = [part for node in missing.values() for part in (node, _transposed(node))]
    found: list[bool] = []

    def look(node: Node, results: Any) -> None:
        if node.op == _JOINT:
            given.append(results[0])
        else:
            joint = given.pop()
            found.append(torch.equal(joint, results) and joint.stride() == results.stride())

    measured: dict[str, Measured] = {}
    with torch.no_grad():
        if measure:
            measured |= zip(map(signature, pairs), first_runs(pairs, look), strict=True)
        else:
            for node in pairs:
                look(node, runner(node)())
    _compared.update(zip(missing, found, strict=True))
    return measured


def _transposed(node: Node) -> Node:
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
        results=node.results[:1],
        is_sequence=False,
    )


def _each(argument: object, space: int) -> tuple[int, ...]:
    """A setting of a convolution, once for each dimension."""
    sizes = cast(tuple[int, ...], argument)
    return sizes if len(sizes) == space else sizes * space
