"""The pass that computes the gradients of loss heads in forward, so that no logits are made twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from ...ir import (
    Argument,
    DType,
    Graph,
    InputRole,
    Node,
    Region,
    Storage,
    Symbol,
    TensorType,
    Trait,
    Value,
    allocation_bytes,
    is_linear,
)
from ..program import Program
from .row_regions import LOSS, LOSS_GRADIENT, MEAN, TOTAL, RowRegion, row_regions

__all__ = ["LossGradientsInForward"]


@dataclass(frozen=True, slots=True)
class LossGradientsInForward:
    """Computes the gradients of a loss head in forward, for a sum of losses whose gradient is one.

    Backward multiplies them by the gradient of the loss, and for a mean divides by the weight of the classes.
    In tiles of rows, each tile of the logits then exists once: forward makes it, and the gradients from it.
    A head is eligible if its operations of backward are linear in the gradient of one cross entropy, a mean
    or a sum without weights of classes. The numbers are rounded otherwise than the model's own: the
    operations carry `reordered`.

    Source:
        Hsu et al., Liger Kernel: Efficient Triton Kernels for LLM Training (2024), section 3.2.
    """

    name: ClassVar[str] = "loss-gradients-in-forward"

    def run(self, program: Program, /) -> Program:
        """Rewrites the program's graph; returns the same program if it has no such head."""
        graph = program.graph
        heads = [head for region in row_regions(graph) for head in _heads(graph, region)]
        if not heads:
            return program
        for head in heads:
            graph = head.in_forward(graph)
        return replace(program, graph=graph, original=program.original or program.graph)


@dataclass(frozen=True, slots=True)
class _Head:
    """A loss head whose gradients can be computed in forward.

    Args:
        region: Its operations.
        gradient: The operation that makes the gradient of the scores.
        moved: The nodes that go to forward: those of the region's backward, and the views that they read.
    """

    region: RowRegion
    gradient: Node
    moved: frozenset[Node]

    def in_forward(self, graph: Graph) -> Graph:
        """The graph with its gradients computed in forward, and multiplied in backward."""
        taken = {value.name for node in graph.nodes for value in node.values}
        taken |= {node.name for node in graph.nodes} | {storage.name for storage in graph.storages}
        taken |= {entry.value.name for entry in graph.inputs}
        nodes = list(_scale(self.gradient, taken))
        scale = nodes[-1].values[0] if nodes else self.gradient.operands[0]
        one = _made("one", scale.type, taken)
        forward = [n for n in graph.nodes if n.region is Region.FORWARD]
        forward.append(_full(one, near=self.gradient))
        products: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            if node not in self.moved:
                continue
            unscaled, products[node] = node, []
            for value in node.values:
                if value in self.region.needed:
                    unscaled, product = _product(unscaled, value, scale, taken, value in self.region.sums)
                    products[node].append(product)
            if node is self.gradient:
                unscaled = _of_sum(unscaled, one)
            forward.append(_in_forward(unscaled))
        backward: list[Node] = []
        for node in graph.nodes:
            if node is self.gradient:
                backward += nodes
            if node in self.moved:
                backward += products[node]
            elif node.region is Region.BACKWARD:
                backward.append(node)
        return replace(graph, nodes=(*forward, *backward))


def _heads(graph: Graph, region: RowRegion) -> Iterator[_Head]:
    """Yields the loss head that a region is, if its gradients can be computed in forward."""
    backward = region.half(Region.BACKWARD)
    gradients = [node for node in backward if node.op == LOSS_GRADIENT]
    losses = [node for node in region.nodes if node.op == LOSS]
    if len(gradients) != 1 or len(losses) != 1:
        return
    (gradient,), (loss,) = gradients, losses
    given, weight = gradient.operands[0], gradient.arguments[-1]
    is_plain = gradient.arguments[4] in (MEAN, TOTAL) and weight is loss.results[1]
    if gradient.arguments[3] is not None:
        return  # weights may add up to zero: rows that weigh nothing have no number then, others zeros
    if not is_plain or given.type.shape or given.type.dtype not in (DType.FLOAT32, DType.FLOAT64):
        return
    moved = _movable(graph, backward, gradient)
    if moved is None or not _all_linear(backward, gradient):
        return
    if any(value.type.dtype is DType.FLOAT16 for node in backward for value in node.values):
        return  # the scale of a loss keeps their gradients from underflow
    yield _Head(region, gradient, moved)


def _movable(graph: Graph, backward: Iterable[Node], gradient: Node) -> frozenset[Node] | None:
    """The nodes that a head's backward needs in forward; None if some of them need backward."""
    makers = {value: node for node in graph.nodes for value in node.values}
    tangents = {entry.value for entry in graph.inputs if entry.role is InputRole.TANGENT}
    found, pending = set(backward), list(backward)
    while pending:
        node = pending.pop()
        for value in node.operands[1:] if node is gradient else node.operands:
            if value in tangents:
                return None
            maker = makers.get(value)
            if maker is None or maker.region is Region.FORWARD or maker in found:
                continue
            if not maker.is_view:
                return None
            found.add(maker)
            pending.append(maker)
    return frozenset(found)


def _all_linear(backward: Iterable[Node], gradient: Node) -> bool:
    """Whether all that is computed from a gradient of scores is linear in it."""
    reached = set(gradient.values)
    for node in backward:
        if not reached.isdisjoint(node.operands):
            if not is_linear(node, reached):
                return False
            reached.update(node.values)
    return True


def _in_forward(node: Node) -> Node:
    return replace(node, region=Region.FORWARD)


def _of_sum(gradient: Node, one: Value) -> Node:
    """The gradient of the scores for the sum of their losses, whose gradient is one."""
    _, scores, classes, weights, _, not_counted, _ = gradient.arguments
    return replace(gradient, arguments=(one, scores, classes, weights, TOTAL, not_counted, one))


def _product(node: Node, value: Value, scale: Value, taken: set[str], is_sum: bool) -> tuple[Node, Node]:
    """A node that makes a gradient before it is scaled, and the one that scales it: a sum in its place."""
    if is_sum:
        before = Value(_unused(f"{value.name}_unscaled", taken), value.type, value.storage)
        traits, op = frozenset((Trait.EFFECT, Trait.REORDERED)), "aten.mul_.Tensor"
    else:
        before = _made(f"{value.name}_unscaled", value.type, taken)
        traits, op = frozenset((Trait.REORDERED,)), "aten.mul.Tensor"
    made = replace(node, results=tuple(before if v is value else v for v in node.results))
    if is_sum:
        made = replace(made, traits=made.traits | {Trait.PINNED})
    name = _unused(f"{node.name}_scaled", taken)
    return made, Node(name, op, (before, scale), (value,), region=Region.BACKWARD, traits=traits, at=node.at)


def _scale(gradient: Node, taken: set[str]) -> Iterator[Node]:
    """Yields what divides the gradient of a mean by the weight of all classes; by one if no row counts."""
    if gradient.arguments[4] == TOTAL:
        return
    given, weight = gradient.operands[0], gradient.arguments[-1]
    assert isinstance(weight, Value)
    nothing = _made(f"{weight.name}_is_zero", replace(weight.type, dtype=DType.BOOL), taken)
    divisor = _made(f"{weight.name}_divisor", weight.type, taken)
    scale = _made(f"{gradient.name}_scale", given.type, taken)
    yield _backward(nothing, "aten.eq.Scalar", (weight, 0), gradient)
    yield _backward(divisor, "aten.masked_fill.Scalar", (weight, nothing, 1), gradient)
    yield _backward(scale, "aten.div.Tensor", (given, divisor), gradient)


def _backward(made: Value, op: str, arguments: tuple[Argument, ...], near: Node) -> Node:
    traits = frozenset((Trait.REORDERED,))
    return Node(made.name, op, arguments, (made,), region=Region.BACKWARD, traits=traits, at=near.at)


def _full(one: Value, near: Node) -> Node:
    """The gradient that a sum of losses has: one."""
    keywords = (
        ("dtype", Symbol("dtype", one.type.dtype.value)),
        ("device", Symbol("device", one.type.device)),
    )
    return Node(one.name, "aten.full.default", ((), 1.0), (one,), keywords=keywords, at=near.at)


def _made(name: str, type: TensorType, taken: set[str]) -> Value:
    unused = _unused(name, taken)
    type = TensorType.contiguous(type.shape, type.dtype, type.device)
    return Value(unused, type, Storage(unused, allocation_bytes(type.nbytes, type.device), type.device))


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
