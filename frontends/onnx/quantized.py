"""Quantised values that never leave their dequantisation, and so need not be of their own element type.

Such a value stays a float tensor of whole numbers, through which gradients pass; and constants of two or
four bits, which torch cannot compute with, are held in a wider type.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

__all__ = ["held_type", "only_dequantised", "widened"]

# Operators whose results hold values of their first operand and no others.
_HAND_ON = {
    "Concat",
    "DepthToSpace",
    "Expand",
    "Flatten",
    "Gather",
    "Identity",
    "MaxPool",
    "Reshape",
    "Slice",
    "SpaceToDepth",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
}

_WIDER: dict[ir.DataType, torch.dtype] = {
    ir.DataType.INT2: torch.int8,
    ir.DataType.INT4: torch.int8,
    ir.DataType.UINT2: torch.uint8,
    ir.DataType.UINT4: torch.uint8,
    ir.DataType.FLOAT4E2M1: torch.float32,
}


def _arrives_only_at(value: ir.Value, places: set[tuple[str, int]]) -> bool:
    pending, seen, arrived = [value], {value}, False
    while pending:
        current = pending.pop()
        if current.is_graph_output():
            return False
        for use in current.uses():
            op, index = use.node.op_type, use.idx
            if use.node.domain not in ("", "ai.onnx", "com.microsoft"):
                return False
            if op in _HAND_ON and (index == 0 or op == "Concat"):
                pending.extend(o for o in use.node.outputs if o not in seen)
                seen.update(use.node.outputs)
            elif (op, index) not in places or (op == "QuantizeLinear" and not held_type(use.node)):
                return False
            else:
                arrived = True
    return arrived


def only_dequantised(value: ir.Value) -> bool:
    """Whether everything that a value's elements arrive at is a DequantizeLinear."""
    return _arrives_only_at(value, {("DequantizeLinear", 0)})


def held_type(node: ir.Node) -> ir.DataType | None:
    """The element type that a QuantizeLinear quantises to, where its result is only dequantised."""
    if not only_dequantised(node.outputs[0]):
        return None
    given = node.attributes.get("output_dtype")
    if given is not None and given.as_int():
        return ir.DataType(given.as_int())
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    if zero is None:
        return ir.DataType.UINT8
    const = zero.const_value
    return const.dtype if const is not None else zero.dtype or node.outputs[0].dtype


def widened(value: ir.Value, tensor: ir.TensorProtocol) -> torch.Tensor | None:
    """A constant of two or four bits in a wider type, where it is only dequantised; else `None`."""
    dtype = _WIDER.get(tensor.dtype)
    places = {("DequantizeLinear", 0), ("DequantizeLinear", 2), ("QuantizeLinear", 2)}
    if dtype is None or not _arrives_only_at(value, places):
        return None
    return torch.from_numpy(tensor.numpy().astype("float32")).to(dtype)
