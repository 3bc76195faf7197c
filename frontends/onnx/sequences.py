"""Lists of tensors and optional values whose structure is known at import: only cutting and joining run."""

from __future__ import annotations

import onnx_ir as ir
import torch

from .bounds import MOST_OPERATIONS, too_large
from .coverage import refusal, title
from .graphs import node_name
from .partial_evaluation import PartialValue, Tracer
from .program import Operand

__all__ = ["OPTIONALS", "SEQUENCES", "import_optional", "import_sequence"]

SEQUENCES = (
    "ConcatFromSequence",
    "SequenceAt",
    "SequenceConstruct",
    "SequenceEmpty",
    "SequenceErase",
    "SequenceInsert",
    "SequenceLength",
    "SplitToSequence",
)
OPTIONALS = ("Optional", "OptionalGetElement", "OptionalHasElement")


def import_sequence(tracer: Tracer, node: ir.Node) -> None:
    """An operator on lists; a list of known length is the values it holds."""
    op, out = node.op_type, node.outputs[0]
    values = [v for v in node.inputs if v is not None and v.name]
    if op == "SplitToSequence":
        _split(tracer, node, values)
        return
    if op in ("SequenceConstruct", "SequenceEmpty"):
        tracer.bind_list(out, values)
        return
    items = tracer.list_of(values[0])
    if items is None:
        tracer.node(node)
    elif op == "SequenceLength":
        tracer.bind(out, PartialValue(torch.tensor(len(items))))
    elif op == "ConcatFromSequence":
        tracer.node(node, inputs=items)
    else:
        _pick(tracer, node, values, list(items))


def _pick(tracer: Tracer, node: ir.Node, values: list[ir.Value], items: list[ir.Value]) -> None:
    """Operators that take a position, which may be left out if it is the end."""
    at = {"SequenceAt": 1, "SequenceErase": 1, "SequenceInsert": 2}[node.op_type]
    inserts = node.op_type == "SequenceInsert"
    position = len(items) if inserts else -1
    if len(values) > at:
        known = tracer.known(values[at])
        if not known.constant or known.tensor is None:
            tracer.node(node)
            return
        position = int(known.tensor.item())
    if not -len(items) <= position < len(items) + inserts:
        raise refusal(
            tracer.model,
            node,
            f"at position {position} of a list of {len(items)}",
            "check the model: no run of it can succeed",
        )
    out = node.outputs[0]
    if node.op_type == "SequenceAt":
        tracer.alias(out, items[position])
    elif inserts:
        tracer.bind_list(out, [*items[:position], values[1], *items[position:]])
    else:
        del items[position]
        tracer.bind_list(out, items)


def _split(tracer: Tracer, node: ir.Node, values: list[ir.Value]) -> None:
    attribute = node.attributes.get("axis")
    axis, whole = 0 if attribute is None else attribute.as_int(), tracer.known(values[0]).tensor
    sizes = tracer.known(values[1]) if len(values) > 1 else None
    if whole is None or (sizes is not None and not sizes.constant):
        tracer.node(node)
        return
    count = size = whole.shape[axis]
    if sizes is not None and sizes.tensor is not None:
        count = sizes.tensor.numel() if sizes.tensor.ndim else -(-size // int(sizes.tensor.item()))
    if count > MOST_OPERATIONS:
        raise too_large(
            f"{title(tracer.model, node)} makes {count:,} tensors, and at most {MOST_OPERATIONS:,} can be"
            " told apart",
            node_name(node),
        )
    outputs = [ir.Value(name=f"{node.outputs[0].name}_{i}") for i in range(count)]
    tracer.node(node, outputs=outputs)
    tracer.bind_list(node.outputs[0], outputs)


def import_optional(tracer: Tracer, node: ir.Node) -> None:
    """An operator on a value that may be absent."""
    value = next((v for v in node.inputs if v is not None and v.name), None)
    out = node.outputs[0]
    if node.op_type == "Optional":
        if value is None:
            tracer.bind(out, PartialValue(None, Operand("absent")))
        else:
            tracer.alias(out, value)
        return
    is_list = value is not None and tracer.list_of(value) is not None
    known = None if value is None or is_list else tracer.known(value)
    there = is_list or (known is not None and known.tensor is not None)
    absent = value is None or (known is not None and known.absent)
    if node.op_type == "OptionalHasElement" and (there or absent):
        tracer.bind(out, PartialValue(torch.tensor(there)))
    elif node.op_type == "OptionalGetElement" and there and value is not None:
        tracer.alias(out, value)
    elif absent:
        raise refusal(
            tracer.model, node, "of a value that is absent", "check the model: no run of it can succeed"
        )
    else:
        tracer.node(node)
