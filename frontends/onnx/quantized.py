"""Quantised values that are only turned back into floats, and so need not be of their own element type.

Such a value stays a float tensor of whole numbers, through which gradients pass; and constants of two or
four bits, which torch cannot compute with, are held in a wider type.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import torch

from .graphs import subgraphs

__all__ = ["Held"]

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


# Operators that quantise, and which of their operands are quantised values; besides those of QLinearConcat.
_QUANTISE: dict[str, set[int]] = {
    "DynamicQuantizeLinear": set(),
    "QGemm": {0, 3},
    "QLinearAdd": {0, 3},
    "QLinearAveragePool": {0},
    "QLinearConcat": set(),
    "QLinearConv": {0},
    "QLinearGlobalAveragePool": {0},
    "QLinearLeakyRelu": {0},
    "QLinearMatMul": {0, 3},
    "QLinearMul": {0, 3},
    "QLinearSigmoid": {0},
    "QLinearSoftmax": {0},
    "QuantizeLinear": set(),
}
# Operators that give floats or whole numbers, likewise.
_READ: dict[str, set[int]] = {
    "ConvInteger": {0},
    "DequantizeLinear": {0},
    "MatMulInteger": {0},
    "MatMulIntegerToFloat": {0},
}
_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}


class Held:
    """Finds the quantised values of a graph that can stay in floats.

    A value can if every operator at which its elements arrive reads floats as well, and gives floats, or
    quantised values of which the same holds.

    Args:
        graph: The graph, in order. The last nodes are looked at first, so that each is looked at once.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._known: dict[ir.Value, bool] = {}
        self._look_at(graph)

    def _look_at(self, graph: ir.Graph) -> None:
        for node in reversed(list(graph)):
            for inner in subgraphs(node):
                self._look_at(inner)
            if node.op_type in _QUANTISE:
                self._holds(node.outputs[0])

    def attributes(self, node: ir.Node) -> dict[str, int]:
        """Returns the attributes added to a node that quantises: whether it stays in floats."""
        if node.op_type not in _QUANTISE or not self._holds(node.outputs[0]):
            return {}
        if node.op_type != "QuantizeLinear":
            return {"_held": 1}
        dtype = _quantized_type(node)
        return {} if dtype is None else {"_held": 1, "output_dtype": int(dtype)}

    def widened(self, value: ir.Value, tensor: ir.TensorProtocol) -> torch.Tensor | None:
        """A constant of two or four bits in a wider type, if it is only dequantised; else `None`."""
        dtype = _WIDER.get(tensor.dtype)
        if dtype is None or not self._arrives_only_where(value, self._dequantises):
            return None
        return torch.from_numpy(tensor.numpy().astype("float32")).to(dtype)

    def _holds(self, value: ir.Value) -> bool:
        if value not in self._known:
            self._known[value] = self._arrives_only_where(value, self._reads_floats)
        return self._known[value]

    def _arrives_only_where(self, value: ir.Value, place: Callable[[ir.Node, int], bool]) -> bool:
        pending, seen, arrived = [value], {value}, False
        while pending:
            current = pending.pop()
            if current.is_graph_output():
                return False
            for use in current.uses():
                if use.node.domain not in ("", "ai.onnx", "com.microsoft"):
                    return False
                if use.node.op_type in _HAND_ON and (use.idx == 0 or use.node.op_type == "Concat"):
                    pending.extend(o for o in use.node.outputs if o not in seen)
                    seen.update(use.node.outputs)
                elif not place(use.node, use.idx):
                    return False
                else:
                    arrived = True
        return arrived

    def _dequantises(self, node: ir.Node, index: int) -> bool:
        if node.op_type == "DequantizeLinear":
            return index in (0, 2)
        return node.op_type == "QuantizeLinear" and index == 2 and self._holds(node.outputs[0])

    def _reads_floats(self, node: ir.Node, index: int) -> bool:
        op = node.op_type
        if op in _READ:
            whole = op in ("MatMulInteger", "ConvInteger")
            return index in _READ[op] and (not whole or _only_cast_to_floats(node.outputs[0]))
        joined = op == "QLinearConcat" and index >= 2 and index % 3 == 2
        if not joined and index not in _QUANTISE.get(op, ()):
            return False
        real = op == "QGemm" and (len(node.inputs) < 8 or node.inputs[7] is None)
        return real or self._holds(node.outputs[0])


def _only_cast_to_floats(value: ir.Value) -> bool:
    return not value.is_graph_output() and all(
        use.node.op_type == "Cast" and use.node.attributes["to"].as_int() in _FLOATS for use in value.uses()
    )


def _quantized_type(node: ir.Node) -> ir.DataType | None:
    """The element type that a QuantizeLinear quantises to."""
    given = node.attributes.get("output_dtype")
    if given is not None and given.as_int():
        return ir.DataType(given.as_int())
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    if zero is None:
        return ir.DataType.UINT8
    const = zero.const_value
    return const.dtype if const is not None else zero.dtype or node.outputs[0].dtype
