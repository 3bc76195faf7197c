"""Which constants of a graph are trained.

The ONNX format does not say which of its numbers are weights; torch's exporter does, in metadata, and is
believed: its parameters are **parameters** of any rank, and its float buffers **buffers**. Where nothing is
said, this is the rule for each float initializer, `Constant` and `ConstantOfShape`, by where its values
arrive (through operators that only move them):

1. Running statistics of a BatchNormalization are **buffers**, whatever else reads them.
2. **Constants** are: what only sets bounds, shapes, scales, ratios or conditions; rank 0; masks, that is
   values with an infinity or of a magnitude from 1e30, or only zeros and one fill of -1e4 or less; initial
   states of recurrent layers, and caches, that are all zero.
3. One element of rank 1 or more is a **parameter** where only a weight can stand (Conv, Gemm, MatMul,
   PRelu, a normalisation, a recurrent layer), or as an initializer with a name of the user's own in an
   arithmetic operator; exporters' names (`val_7`, `onnx::Mul_12`, ...) make it a constant.
4. More elements are a **parameter** when they come from an initializer. From a `Constant`, or a
   `ConstantOfShape` whose shape is written in the file, they are when they arrive at a weight's place or an
   arithmetic operator. Ones and zeros in a `Constant` for an InstanceNormalization are how an exporter writes
   that there is no scale and no bias. Zeros along two or more axes that are no weight's operand are a mask
   that hides nothing: in a `Constant`, and in an initializer that torch's exporter does not tell of while it
   tells of others.
5. The result of a `DequantizeLinear` of constants is judged as an initializer of its name. It trains as a
   float; its codes, scale and zero point are constants.

Everything else is a constant. Tables that torch keeps as buffers (positions, input means) cannot be told from
weights and count as parameters, unless the user gives them another role.
"""

from __future__ import annotations

import enum
import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from ...ir.errors import UsageError
from .tensors import FLOATS, torch_dtype

__all__ = ["Leaf", "Leaves", "Role"]


class Role(enum.Enum):
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
        role: What it becomes.
        why: By which rule.
        persistent: Whether a buffer is part of the state.
    """

    value: ir.Value
    tensor: ir.TensorProtocol
    shape: tuple[int, ...]
    role: Role
    why: str
    persistent: bool = True

    @property
    def name(self) -> str:
        """Its ONNX name; empty when it has none."""
        return self.value.name or ""


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
    low, high = float(array.min()), float(array.max())
    peak = max(abs(low), abs(high))
    if np.isinf(peak) or peak >= 1e30:
        return True
    if peak < 1e4:
        return False
    return bool(low <= -1e4 and np.all((array == 0) | (array == low)))


def _is_plain(value: ir.Value, tensor: ir.TensorProtocol) -> bool:
    node = value.producer()
    array = np.asarray(tensor.numpy())
    return node is not None and node.op_type == "Constant" and bool(np.all(array == 0) or np.all(array == 1))


def _is_filling(value: ir.Value, tensor: ir.TensorProtocol, shape: tuple[int, ...], named: bool) -> bool:
    """Whether a tensor is a mask that hides nothing, or a table of biases that a model has not: rule 4."""
    if sum(n > 1 for n in shape) < 2 or np.any(np.asarray(tensor.numpy())):
        return False
    graph = value.graph
    others = graph.initializers.values() if named and graph is not None else ()
    return not named or any(_SPEC + "kind" in other.metadata_props for other in others)


def _classify(
    value: ir.Value, tensor: ir.TensorProtocol, shape: tuple[int, ...], named: bool
) -> tuple[Role, str]:
    """The role of a leaf that the user has given none, and why."""
    if torch_dtype(tensor.dtype) not in FLOATS:
        return Role.CONSTANT, f"of type {tensor.dtype.name.lower()}"
    sinks = list(_sinks(value))
    if any(i in _STATISTICS.get(op, ()) for op, i in sinks):
        return Role.BUFFER, "running statistics"
    told = value.metadata_props.get(_SPEC + "kind")
    if told == "PARAMETER":
        return Role.PARAMETER, "the exporter says so"
    sinks = [(op, i) for op, i in sinks if not _is_setting(op, i)]
    if told == "BUFFER" and sinks:
        return Role.BUFFER, "the exporter says so"
    if not sinks:
        return Role.CONSTANT, "sets bounds, shapes, scales or conditions"
    if not shape:
        return Role.CONSTANT, "a scalar"
    if _fills(tensor):
        return Role.CONSTANT, "a mask"
    if all(i in _STATES.get(op, ()) for op, i in sinks) and not np.any(np.asarray(tensor.numpy())):
        return Role.CONSTANT, "an initial state of zeros"
    weighted = sorted({op for op, i in sinks if i in _WEIGHTS.get(op, ())})
    arithmetic = sorted({op for op, _ in sinks if op in _ARITHMETIC})
    if weighted:
        place = f"a weight's place in {', '.join(weighted)}"
    else:
        place = f"in {', '.join(sorted({op or 'an output' for op, _ in sinks}))}"
    if int(np.prod(shape)) == 1:
        own = named and not _EXPORTERS_NAME.fullmatch(value.name or "")
        trained = bool(weighted or (own and arithmetic))
        return (Role.PARAMETER, place) if trained else (Role.CONSTANT, "a single number")
    if not weighted and _is_filling(value, tensor, shape, named):
        return Role.CONSTANT, "zeros that an exporter computed"
    if not named and all(op == "InstanceNormalization" for op, _ in sinks) and _is_plain(value, tensor):
        return Role.CONSTANT, "no scale and no bias"
    if named or weighted or arithmetic:
        return Role.PARAMETER, place
    return Role.CONSTANT, f"a Constant node {place}"


@dataclass
class Leaves:
    """The leaves of a model, and what the user says of them.

    Args:
        given: Roles by ONNX name, or by a pattern of names as the shell has them; the first that fits counts.
    """

    given: Mapping[str, str | Role] = field(default_factory=dict[str, "str | Role"])
    _fitting: set[str] = field(default_factory=set[str])
    _known: dict[ir.Value, Leaf] = field(default_factory=dict["ir.Value", "Leaf"])

    def __post_init__(self) -> None:
        for pattern, role in self.given.items():
            if role not in [r.value for r in Role] and not isinstance(role, Role):
                raise UsageError(
                    "IRC319",
                    f"{role!r} is no role for {pattern!r}",
                    help=f"the roles are {', '.join(r.value for r in Role)}",
                )

    def of(self, value: ir.Value) -> Leaf | None:
        """The leaf that a value is, or `None` when it is computed."""
        node = value.producer()
        if node is None:
            if not value.is_initializer() or value.const_value is None:
                return None
            return self._leaf(value, value.const_value, tuple(value.const_value.shape.numpy()), named=True)
        if node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "Constant":
            tensor = _constant(node)
            return (
                None
                if tensor is None
                else self._leaf(value, tensor, tuple(tensor.shape.numpy()), named=False)
            )
        if node.op_type == "ConstantOfShape" and node.inputs[0] is not None:
            return self._repeated(value, node, node.inputs[0])
        return None

    def unpacked(self, value: ir.Value, tensor: ir.TensorProtocol) -> Leaf | None:
        """The leaf that a dequantised constant is: a float weight of its own, or `None`."""
        leaf = self._leaf(value, tensor, tuple(tensor.shape.numpy()), named=True)
        return None if leaf.role is Role.CONSTANT else leaf

    def _leaf(self, value: ir.Value, tensor: ir.TensorProtocol, shape: tuple[int, ...], named: bool) -> Leaf:
        if value not in self._known:
            role, why = self._given(value, tensor) or _classify(value, tensor, shape, named)
            persistent = value.metadata_props.get(_SPEC + "persistent") != "False"
            self._known[value] = Leaf(value, tensor, shape, role, why, persistent)
        return self._known[value]

    def let_go(self, leaf: Leaf) -> None:
        """Keep no elements of a weight that is a tensor of torch by now: they would be in memory twice."""
        self._put(
            leaf, ir.LazyTensor(_gone, leaf.tensor.dtype, ir.Shape(leaf.tensor.shape.numpy()), name=leaf.name)
        )

    def hold(self, leaf: Leaf, tensor: ir.TensorProtocol) -> None:
        """Read a constant from here from now on, and no more from its file."""
        if isinstance(leaf.tensor, ir.ExternalTensor):
            self._put(leaf, tensor)

    def _put(self, leaf: Leaf, tensor: ir.TensorProtocol) -> None:
        if isinstance(leaf.tensor, ir.ExternalTensor):
            leaf.tensor.release()
        node = leaf.value.producer()
        if node is None:
            leaf.value.const_value = tensor
        elif node.op_type == "Constant":
            node.attributes["value"] = ir.AttrTensor("value", tensor)
        self._known[leaf.value] = replace(leaf, tensor=tensor)

    def _given(self, value: ir.Value, tensor: ir.TensorProtocol) -> tuple[Role, str] | None:
        name = value.name or ""
        for pattern, text in self.given.items():
            if fnmatch.fnmatchcase(name, pattern):
                role = Role(text)
                if role is Role.PARAMETER and torch_dtype(tensor.dtype) not in FLOATS:
                    raise UsageError(
                        "IRC319",
                        f"{name!r} is of type {tensor.dtype.name.lower()}, which cannot be trained",
                        help="give it the role buffer or constant, or leave it out",
                    )
                self._fitting.add(pattern)
                return role, f"given as {pattern}={role.value}"
        return None

    def check_given(self) -> None:
        """Refuse patterns that fit no leaf.

        Raises:
            UsageError: IRC319.
        """
        idle = [pattern for pattern in self.given if pattern not in self._fitting]
        if idle:
            raise UsageError(
                "IRC319",
                f"no weight or constant that the model reads is named {idle[0]!r}",
                help="`irc inspect` lists their names",
            )

    def _repeated(self, value: ir.Value, node: ir.Node, sizes: ir.Value) -> Leaf | None:
        """A `ConstantOfShape` whose shape is in the file, if it is a weight; else it folds like any node."""
        source = self.of(sizes)
        if source is None:
            return None
        shape = tuple(int(n) for n in np.asarray(source.tensor.numpy()).reshape(-1))
        if any(n < 0 for n in shape):
            return None
        attribute = node.attributes.get("value")
        tensor = ir.tensor(np.zeros(1, np.float32)) if attribute is None else attribute.as_tensor()
        leaf = self._leaf(value, tensor, shape, named=False)
        return None if leaf.role is Role.CONSTANT else leaf


def _gone() -> ir.TensorProtocol:
    raise AssertionError("the elements of a weight are read after the import")


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
