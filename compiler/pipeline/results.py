"""Results of a pipeline's last stage that no operation makes: arguments, buffers and constants."""

from __future__ import annotations

from dataclasses import replace

from ...frontends.torch import Captured, refuse_assignments
from ...ir import (
    Delivery,
    Input,
    InputRole,
    Node,
    Origin,
    Output,
    OutputRole,
    Region,
    Sharing,
    Storage,
    TensorType,
    Trait,
    UnsupportedError,
    Value,
    allocation_bytes,
)

__all__ = ["own_results"]


def own_results(captured: Captured) -> Captured:
    """The same step, with copies of the inputs that the model returns.

    The last stage has only the inputs that its operations read, and a micro-batch is a part of its batch's
    memory; a copy is made where it is handed out, and counted.

    Raises:
        UnsupportedError: IRC338 for a forward that changes attributes; IRC489 for a result that is a trained
            parameter, or memory that forward writes or that is not one block; or a written argument, which
            one rank alone would see.
    """
    refuse_assignments(captured.signature, "a pipeline")
    graph = captured.graph
    static = [entry for entry in graph.inputs if entry.role is not InputRole.TANGENT]
    written = {n.operands[0].storage for n in graph.nodes if Trait.EFFECT in n.traits}
    for entry in static:
        if entry.role is not InputRole.BUFFER and entry.value.storage in written:
            raise UnsupportedError(
                "IRC489",
                f"the model writes into {entry.role.value} {entry.target}, which other stages, or the "
                "micro-batches in flight, would not see as it was",
                help="write into a copy (clone()) instead, or into parameters after the step",
            )
    copies: dict[int, Node] = {}
    deliveries: list[Delivery] = []
    outputs = [output for output in graph.outputs if output.role is OutputRole.OUTPUT]
    for delivery in captured.signature.deliveries:
        if delivery.origin is Origin.INPUT:
            index = delivery.index
            if index not in copies:
                _check(static[index], written, has_gradient=delivery.sharing is Sharing.VIEW)
                copies[index] = _copy(static[index].value)
            place = len(outputs) + list(copies).index(index)
            delivery = replace(delivery, origin=Origin.OUTPUT, index=place)
        deliveries.append(delivery)
    if not copies:
        return captured
    added = [
        Output(copy.results[0], OutputRole.OUTPUT, str(len(outputs) + k))
        for k, copy in enumerate(copies.values())
    ]
    gradients = [output for output in graph.outputs if output.role is not OutputRole.OUTPUT]
    count = len(graph.nodes) - sum(node.region is not Region.FORWARD for node in graph.nodes)
    nodes = (*graph.nodes[:count], *copies.values(), *graph.nodes[count:])
    made = replace(graph, nodes=nodes, outputs=(*outputs, *added, *gradients))
    signature = replace(captured.signature, deliveries=tuple(deliveries))
    return replace(captured, graph=made, signature=signature)


def _check(entry: Input, written: set[Storage], *, has_gradient: bool) -> None:
    if entry.role is InputRole.PARAMETER and entry.requires_grad and has_gradient:
        raise UnsupportedError(
            "IRC489",
            f"the model returns parameter {entry.target}, and the pipeline takes no gradient from there",
            help="return a value that is computed from it, or detach()",
        )
    if entry.value.storage in written:
        raise UnsupportedError(
            "IRC489",
            f"the model returns {entry.role.value} {entry.target}, which its forward writes",
            help="return a copy (clone())",
        )
    type = entry.value.type
    dense = sorted((stride, size) for size, stride in zip(type.shape, type.strides, strict=True) if size > 1)
    expected = 1
    for stride, size in dense:
        if stride != expected:
            raise UnsupportedError(
                "IRC489",
                f"the model returns {entry.role.value} {entry.target}, which is not one block of memory",
                help="return a copy (clone()), or pass a contiguous tensor",
            )
        expected *= size


def _copy(value: Value) -> Node:
    name = f"result_{value.name}"
    type: TensorType = value.type
    storage = Storage(name, allocation_bytes(type.nbytes, type.device), type.device)
    return Node(name, "aten.clone.default", (value,), (Value(name, type, storage),))
