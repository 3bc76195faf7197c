"""Quantised values that are only turned back into floats, and so need not be of their own element type.

Such a value stays a float tensor of whole numbers, through which gradients pass; and constants of two or
four bits, which torch cannot compute with, are held in a wider type.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

__all__ = ["held_type", "widened"]

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


# Where a quantised value may arrive as floats: what reads it there computes the same, and passes gradients.
_READERS = {
    ("DequantizeLinear", 0),
    ("MatMulIntegerToFloat", 0),
    ("MatMulInteger", 0),
    ("ConvInteger", 0),
}
_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}


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
            elif (op, index) not in places or not _reads(use.node):
                return False
            else:
                arrived = True
    return arrived


def _reads(node: ir.Node) -> bool:
    """Whether what a reader gives can be of another type too."""
    if node.op_type == "QuantizeLinear":
        return held_type(node) is not None
    if node.op_type in ("MatMulInteger", "ConvInteger"):
        output = node.outputs[0]
        return not output.is_graph_output() and all(_casts_to_float(use.node) for use in output.uses())
    return True


def _casts_to_float(node: ir.Node) -> bool:
    to = node.attributes.get("to")
    return node.op_type == "Cast" and to is not None and to.as_int() in _FLOATS


def held_type(node: ir.Node) -> ir.DataType | None:
    """The element type that a node quantises to, where its result can stay in floats; else `None`."""
    if not _arrives_only_at(node.outputs[0], _READERS):
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
