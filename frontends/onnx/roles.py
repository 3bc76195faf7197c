"""Decides which initializers and constants of a graph are trained.

The ONNX format does not say which of its numbers are weights; torch's exporter does, in metadata, and is
believed: its parameters are **parameters** of any rank, and its float buffers **buffers**. If it says
nothing, these rules decide for each float initializer, `Constant` and `ConstantOfShape`, by the operands at
which its values arrive (through operators that only move them):

1. Running statistics of a BatchNormalization are **buffers**, whatever else reads them.
2. **Constants** are: what only sets bounds, shapes, scales, ratios or conditions; rank 0; masks, that is
   values with an infinity or of a magnitude from 1e30, or only zeros and one fill of -1e4 or less; initial
   states of recurrent layers, and caches, that are all zero.
3. One element of rank 1 or more is a **parameter** if only a weight can be that operand (Conv, Gemm, MatMul,
   PRelu, a normalisation, a recurrent layer), or as an initializer with a name of the user's own in an
   arithmetic operator; exporters' names (`val_7`, `onnx::Mul_12`, ...) make it a constant.
4. More elements are a **parameter** when they come from an initializer. From a `Constant`, or a
   `ConstantOfShape` whose shape is written in the file, they are when they arrive at a weight's place or an
   arithmetic operator. Ones and zeros in a `Constant` for an InstanceNormalization are how an exporter writes
   that there is neither scale nor bias. Zeros along two or more axes that are not the operand of a weight
   are a mask that hides nothing: in a `Constant`, and in an initializer that torch's exporter does not
   describe while it describes others.
5. The result of a `DequantizeLinear` of constants is judged as an initializer of its name. It trains as a
   float; its codes, scale and zero point are constants.

Everything else is a constant. Tables that torch keeps as buffers (positions, input means) cannot be told from
weights and count as parameters, unless the user gives them another role.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from .tensors import FLOATS, torch_dtype

__all__ = ["SPEC", "Role", "role_of"]


class Role(enum.Enum):
    """Names what an initializer becomes in the module."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"


# Operators that pass on the values of an operand.
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
# Operands that configure an operator and are not data; `None` stands for all of them.
_SETTINGS: dict[str, set[int] | None] = {
    **dict.fromkeys(
        (*_COMPARE, "ConstantOfShape", "Range", "NonZero", "Shape", "Size", "ArgMax", "ArgMin"), None
    ),
    "CastLike": {1},
    "CenterCropPad": {1},
    "Clip": {1, 2},
    "Compress": {1},
    "CumProd": {1},
    "Col2Im": {1, 2},
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
    "MaxRoiPool": {1},
    "MaxUnpool": {1, 2},
    "NegativeLogLikelihoodLoss": {1, 2},
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
    "RoiAlign": {1, 2},
    "RotaryEmbedding": {1, 2, 3},
    "Slice": {1, 2, 3, 4},
    "STFT": {1, 2, 3},
    "SoftmaxCrossEntropyLoss": {1, 2},
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
_STATES = {
    "Attention": {4, 5},
    "CausalConvWithState": {3},
    "GRU": {5},
    "LSTM": {5, 6},
    "LinearAttention": {3},
    "RNN": {5},
    "TensorScatter": {0},
}
_WEIGHTS: dict[str, set[int]] = {
    "BatchNormalization": {1, 2},
    "CausalConvWithState": {1, 2},
    "Conv": {1, 2},
    "ConvTranspose": {1, 2},
    "DeformConv": {1, 3},
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
SPEC = "pkg.torch.export.graph_signature.InputSpec."
"""The prefix of the metadata in which torch's exporter says what an initializer was."""
_EXPORTERS_NAME = re.compile(
    r"\d+|val_\d+|onnx::.*|_?tensor_constant\d*|.*Constant(_\d+)?_output_\d+|.*const.*", re.I
)


def _sinks(value: ir.Value) -> Iterator[tuple[str, int]]:
    """Yields operator and operand number of everything at which the elements of a value arrive."""
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


def _is_mask(tensor: ir.TensorProtocol) -> bool:
    """Tells whether the values are those of a mask that is added or selected."""
    array = np.asarray(tensor.numpy())
    if array.size == 0:
        return False
    low, high = float(array.min()), float(array.max())
    peak = max(abs(low), abs(high))
    if np.isinf(peak) or peak >= 1e30:
        return True
    if peak < 1e4:
        return False
    return bool(low <= -1e4 and np.all((array == 0) | (array == low)))


_Decision = tuple[Role, str]
"""A role, and the reason for it."""


@dataclass(frozen=True)
class _Evidence:
    """Holds what the rules look at.

    Args:
        value: The graph value of the initializer.
        tensor: Its elements, or a single one if it is repeated.
        shape: Its shape.
        named: Whether it is an initializer, with a name; otherwise a node makes it.
    """

    value: ir.Value
    tensor: ir.TensorProtocol
    shape: tuple[int, ...]
    named: bool

    @cached_property
    def all_sinks(self) -> tuple[tuple[str, int], ...]:
        """The operands at which the values arrive, each by operator and number."""
        return tuple(_sinks(self.value))

    @cached_property
    def sinks(self) -> tuple[tuple[str, int], ...]:
        """The operands among them that are data."""
        return tuple((op, i) for op, i in self.all_sinks if not _is_setting(op, i))

    @cached_property
    def array(self) -> np.ndarray:
        """The elements."""
        return np.asarray(self.tensor.numpy())

    @cached_property
    def kind(self) -> str | None:
        """The kind of input that torch's exporter says it was."""
        return self.value.metadata_props.get(SPEC + "kind")

    @cached_property
    def weighted(self) -> list[str]:
        """The operators at which it arrives as a weight."""
        return sorted({op for op, i in self.sinks if i in _WEIGHTS.get(op, ())})

    @cached_property
    def is_in_arithmetic(self) -> bool:
        """Whether it arrives at an operator of plain arithmetic."""
        return any(op in _ARITHMETIC for op, _ in self.sinks)

    @cached_property
    def place(self) -> str:
        """The operators at which it arrives, in words."""
        if self.weighted:
            return f"a weight's place in {', '.join(self.weighted)}"
        return f"in {', '.join(sorted({op or 'an output' for op, _ in self.sinks}))}"

    def arrives_only_at(self, operands: dict[str, set[int]]) -> bool:
        """Tells whether it arrives at some of these operands, and at no other."""
        return all(i in operands.get(op, ()) for op, i in self.sinks)


def role_of(value: ir.Value, tensor: ir.TensorProtocol, shape: tuple[int, ...], named: bool) -> _Decision:
    """Decides the role of an initializer to which the user has given none, by the first rule that applies.

    Args:
        value: Its graph value.
        tensor: Its elements, or a single one if it is repeated.
        shape: Its shape.
        named: Whether it is an initializer, with a name; otherwise a node makes it.
    """
    evidence = _Evidence(value, tensor, shape, named)
    for rule in _RULES:
        decision = rule(evidence)
        if decision is not None:
            return decision
    return Role.CONSTANT, f"a Constant node {evidence.place}"


def _by_type(it: _Evidence) -> _Decision | None:
    if torch_dtype(it.tensor.dtype) not in FLOATS:
        return Role.CONSTANT, f"of type {it.tensor.dtype.name.lower()}"
    return None


def _as_statistics(it: _Evidence) -> _Decision | None:
    if any(i in _STATISTICS.get(op, ()) for op, i in it.all_sinks):
        return Role.BUFFER, "running statistics"
    return None


def _by_exporter(it: _Evidence) -> _Decision | None:
    if it.kind == "PARAMETER":
        return Role.PARAMETER, "the exporter says so"
    if it.kind == "BUFFER" and it.sinks:
        return Role.BUFFER, "the exporter says so"
    return None


def _as_setting(it: _Evidence) -> _Decision | None:
    return None if it.sinks else (Role.CONSTANT, "sets bounds, shapes, scales or conditions")


def _by_content(it: _Evidence) -> _Decision | None:
    if not it.shape:
        return Role.CONSTANT, "a scalar"
    if _is_mask(it.tensor):
        return Role.CONSTANT, "a mask"
    if it.arrives_only_at(_STATES) and not np.any(it.array):
        return Role.CONSTANT, "an initial state of zeros"
    return None


def _as_single_number(it: _Evidence) -> _Decision | None:
    if int(np.prod(it.shape)) != 1:
        return None
    has_own_name = it.named and not _EXPORTERS_NAME.fullmatch(it.value.name or "")
    if it.weighted or (has_own_name and it.is_in_arithmetic):
        return Role.PARAMETER, it.place
    return Role.CONSTANT, "a single number"


def _as_filling(it: _Evidence) -> _Decision | None:
    """Finds masks that hide nothing, and tables of biases that a model does not have."""
    if it.weighted or sum(n > 1 for n in it.shape) < 2 or np.any(it.array):
        return None
    if it.named:
        graph = it.value.graph
        others = graph.initializers.values() if graph is not None else ()
        if not any(SPEC + "kind" in other.metadata_props for other in others):
            return None
    return Role.CONSTANT, "zeros that an exporter computed"


def _as_missing_affine(it: _Evidence) -> _Decision | None:
    """Finds the ones and zeros that stand for a normalization without scale and bias."""
    if it.named or any(op != "InstanceNormalization" for op, _ in it.sinks):
        return None
    node = it.value.producer()
    is_constant = node is not None and node.op_type == "Constant"
    if is_constant and (np.all(it.array == 0) or np.all(it.array == 1)):
        return Role.CONSTANT, "no scale and no bias"
    return None


def _by_place(it: _Evidence) -> _Decision | None:
    if it.named or it.weighted or it.is_in_arithmetic:
        return Role.PARAMETER, it.place
    return None


_RULES = (
    _by_type,
    _as_statistics,
    _by_exporter,
    _as_setting,
    _by_content,
    _as_single_number,
    _as_filling,
    _as_missing_affine,
    _by_place,
)
