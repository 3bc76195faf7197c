"""Which constants of a graph are trained.

The ONNX format does not say which of its numbers are weights; torch's exporter does, in metadata, and is
believed: its parameters are **parameters** of any rank, and its float buffers **buffers**. Where nothing is
said, this is the rule for each float initializer, `Constant` and `ConstantOfShape`, by where its values
arrive (through operators that only move them):

1. Running statistics of a BatchNormalization are **buffers**, whatever else reads them.
2. **Constants** are: what only sets bounds, shapes, scales, ratios or conditions; rank 0; masks, that is
   values with an infinity or of a magnitude from 1e30, or only zeros and one fill of -1e4 or less; initial
   states of recurrent layers that are all zero.
3. One element of rank 1 or more is a **parameter** where only a weight can stand (Conv, Gemm, MatMul,
   PRelu, a normalisation, a recurrent layer), or as an initializer with a name of the user's own in an
   arithmetic operator; exporters' names (`val_7`, `onnx::Mul_12`, ...) make it a constant.
4. More elements are a **parameter** when they come from an initializer. From a `Constant`, or a
   `ConstantOfShape` whose shape is written in the file, they are when they arrive at a weight's place or an
   arithmetic operator. Ones and zeros in a `Constant` for an InstanceNormalization are how an exporter writes
   that there is no scale and no bias.

Everything else is a constant. Tables that torch keeps as buffers (positions, input means) cannot be told from
weights and count as parameters: freeze them with `requires_grad_(False)`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .tensors import FLOATS, torch_dtype

__all__ = ["Kind", "Leaf", "leaf_of"]


class Kind(enum.Enum):
    """What a leaf of the graph becomes in the module."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A float or other tensor that the file itself holds.

    Args:
        value: The graph value.
        tensor: Its elements, or for a repeated one a single element.
        shape: Its shape.
        kind: What it becomes.
        persistent: Whether a buffer is part of the state.
    """

    value: ir.Value
    tensor: ir.TensorProtocol
    shape: tuple[int, ...]
    kind: Kind
    persistent: bool = True


# Operators that hand on the values they get.
_MOVES = {
    "Cast",
    "CastLike",
    "Compress",
    "Concat",
    "DequantizeLinear",
    "Expand",
    "Flatten",
    "Identity",
    "QuantizeLinear",
    "Reshape",
    "Slice",
    "Split",
    "SplitToSequence",
    "SequenceAt",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
}
_MOVES_FIRST_ONLY = _MOVES - {"Concat"}

_COMPARE = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not")
# Operators whose floats are scales only.
_QLINEAR = (
    *("Add", "AveragePool", "Concat", "Conv", "GlobalAveragePool", "LeakyRelu", "MatMul", "Mul"),
    *("Sigmoid", "Softmax"),
)
# Operands that set how an operator works and are not data; `None` stands for all of them.
_SETTINGS: dict[str, set[int] | None] = {
    **dict.fromkeys(
        (*_COMPARE, "ConstantOfShape", "Range", "NonZero", "Shape", "Size", "ArgMax", "ArgMin"), None
    ),
    "CastLike": {1},
    "Clip": {1, 2},
    "Compress": {1},
    "CumProd": {1},
    "CumSum": {1},
    "DFT": {1, 2},
    "DequantizeLinear": {1, 2},
    "Dropout": {1, 2},
    "DynamicQuantizeMatMul": {2, 3},
    "Expand": {1},
    "GroupQueryAttention": {7, 8},
    "MatMulIntegerToFloat": {2, 3, 4, 5},
    "MatMulNBits": {2, 3, 4},
    "MelWeightMatrix": None,
    "NonMaxSuppression": {2, 3, 4},
    "OneHot": {1, 2},
    "Pad": {1, 2, 3},
    "QGemm": None,
    **dict.fromkeys((f"QLinear{name}" for name in _QLINEAR), None),
    "QuantizeLinear": {1, 2},
    "RandomNormalLike": None,
    "RandomUniformLike": None,
    "Reshape": {1},
    "ReverseSequence": {1},
    "Resize": {1, 2, 3},
    "Slice": {1, 2, 3, 4},
    "STFT": {1, 2, 3},
    "SequenceAt": {1},
    "Split": {1},
    "SplitToSequence": {1},
    "Squeeze": {1},
    "Tile": {1},
    "TopK": {1},
    "Trilu": {1},
    "Unsqueeze": {1},
    "Upsample": {1},
    "Where": {0},
}
_STATISTICS = {"BatchNormalization": {3, 4}}
_STATES = {"LSTM": {5, 6}, "GRU": {5}, "RNN": {5}}
_WEIGHTS: dict[str, set[int]] = {
    "BatchNormalization": {1, 2},
    "Conv": {1, 2},
    "ConvTranspose": {1, 2},
    "GRU": {1, 2, 3},
    "Gather": {0},
    "EmbedLayerNormalization": {2, 3, 4, 5, 6},
    "FusedConv": {1, 2},
    "FusedGemm": {0, 1, 2},
    "FusedMatMul": {0, 1},
    "Gemm": {0, 1, 2},
    "GroupNormalization": {1, 2},
    "InstanceNormalization": {1, 2},
    "LSTM": {1, 2, 3, 7},
    "LayerNormalization": {1, 2},
    "MatMul": {0, 1},
    "PRelu": {1},
    "RMSNormalization": {1},
    "RNN": {1, 2, 3},
    "SimplifiedLayerNormalization": {1},
    "SkipLayerNormalization": {2, 3, 4},
    "SkipSimplifiedLayerNormalization": {2, 3},
}
_ARITHMETIC = {"Add", "Div", "Mul", "Sub", "Sum", "Einsum"}
_SPEC = "pkg.torch.export.graph_signature.InputSpec."
_EXPORTERS_NAME = re.compile(
    r"\d+|val_\d+|onnx::.*|_?tensor_constant\d*|.*Constant(_\d+)?_output_\d+|.*const.*", re.I
)


def _sinks(value: ir.Value) -> Iterator[tuple[str, int]]:
    """Operator and operand number of everything that the value's elements arrive at."""
    pending, seen = [value], {value}
    while pending:
        current = pending.pop()
        if current.is_graph_output():
            yield "", 0
        for use in current.uses():
            op, index = use.node.op_type, use.idx
            if op == "Concat" or (op in _MOVES_FIRST_ONLY and index == 0):
                pending.extend(o for o in use.node.outputs if o not in seen)
                seen.update(use.node.outputs)
            else:
                yield op, index


def _is_setting(op: str, index: int) -> bool:
    places = _SETTINGS.get(op, set())
    return places is None or index in places


def _fills(tensor: ir.TensorProtocol) -> bool:
    """Whether the values are those of a mask that is added or selected."""
    array = np.asarray(tensor.numpy())
    if array.size == 0:
        return False
    peak = float(np.max(np.abs(array)))
    if np.isinf(peak) or peak >= 1e30:
        return True
    if peak < 1e4:
        return False
    low = array.min()
    return bool(low <= -1e4 and np.all((array == 0) | (array == low)))


def _is_plain(value: ir.Value, tensor: ir.TensorProtocol) -> bool:
    node = value.producer()
    array = np.asarray(tensor.numpy())
    return node is not None and node.op_type == "Constant" and bool(np.all(array == 0) or np.all(array == 1))


def _classify(value: ir.Value, tensor: ir.TensorProtocol, shape: tuple[int, ...], named: bool) -> Kind:
    if torch_dtype(tensor.dtype) not in FLOATS:
        return Kind.CONSTANT
    sinks = list(_sinks(value))
    if any(i in _STATISTICS.get(op, ()) for op, i in sinks):
        return Kind.BUFFER
    told = value.metadata_props.get(_SPEC + "kind")
    if told == "PARAMETER":
        return Kind.PARAMETER
    sinks = [(op, i) for op, i in sinks if not _is_setting(op, i)]
    if told == "BUFFER" and sinks:
        return Kind.BUFFER
    if not shape or not sinks or _fills(tensor):
        return Kind.CONSTANT
    if all(i in _STATES.get(op, ()) for op, i in sinks) and not np.any(np.asarray(tensor.numpy())):
        return Kind.CONSTANT
    weight = any(i in _WEIGHTS.get(op, ()) for op, i in sinks)
    arithmetic = any(op in _ARITHMETIC for op, _ in sinks)
    if int(np.prod(shape)) == 1:
        own = named and not _EXPORTERS_NAME.fullmatch(value.name or "")
        return Kind.PARAMETER if weight or (own and arithmetic) else Kind.CONSTANT
    if not named and all(op == "InstanceNormalization" for op, _ in sinks) and _is_plain(value, tensor):
        return Kind.CONSTANT
    return Kind.PARAMETER if named or weight or arithmetic else Kind.CONSTANT


def leaf_of(value: ir.Value) -> Leaf | None:
    """The leaf that a value is, or `None` when it is computed."""
    node = value.producer()
    if node is None:
        if not value.is_initializer() or value.const_value is None:
            return None
        shape = tuple(value.const_value.shape.numpy())
        kind = _classify(value, value.const_value, shape, named=True)
        persistent = value.metadata_props.get(_SPEC + "persistent") != "False"
        return Leaf(value, value.const_value, shape, kind, persistent)
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Constant":
        tensor = _constant(node)
        if tensor is None:
            return None
        shape = tuple(tensor.shape.numpy())
        return Leaf(value, tensor, shape, _classify(value, tensor, shape, named=False))
    if node.op_type == "ConstantOfShape" and node.inputs[0] is not None:
        return _repeated(value, node, node.inputs[0])
    return None


def _constant(node: ir.Node) -> ir.TensorProtocol | None:
    for name, attribute in node.attributes.items():
        if name == "value":
            return attribute.as_tensor()
        if name == "value_float":
            return ir.tensor(np.float32(attribute.as_float()))
        if name == "value_int":
            return ir.tensor(np.int64(attribute.as_int()))
        if name == "value_floats":
            return ir.tensor(np.array(attribute.as_floats(), np.float32))
        if name == "value_ints":
            return ir.tensor(np.array(attribute.as_ints(), np.int64))
    return None


def _repeated(value: ir.Value, node: ir.Node, sizes: ir.Value) -> Leaf | None:
    """A `ConstantOfShape` whose shape stands in the file, if it is a weight; else it folds like any node."""
    source = leaf_of(sizes)
    if source is None:
        return None
    shape = tuple(int(n) for n in np.asarray(source.tensor.numpy()).reshape(-1))
    attribute = node.attributes.get("value")
    tensor = ir.tensor(np.zeros(1, np.float32)) if attribute is None else attribute.as_tensor()
    kind = _classify(value, tensor, shape, named=False)
    return None if kind is Kind.CONSTANT else Leaf(value, tensor, shape, kind)
