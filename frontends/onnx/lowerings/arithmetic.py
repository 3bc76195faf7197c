"""Element-wise arithmetic, comparison, logic, and matrix products."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Call, Result, lowering

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Round": torch.round,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
}

# Python's operators take a number on either side, which torch's functions do not.
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "And": torch.logical_and,
    "Equal": operator.eq,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Mul": operator.mul,
    "Or": torch.logical_or,
    "Sub": operator.sub,
    "Xor": torch.logical_xor,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
}


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
# In two's complement these give the same bits for signed and unsigned numbers.
_SIGNLESS = ("Add", "Sub", "Mul", "Equal", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot")
_ORDERED = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Min", "Max")


def _of_unsigned(c: Call) -> bool:
    """Whether an operand is of an unsigned type that torch stores and does not compute with."""
    return any(isinstance(value, Tensor) and value.dtype in _UNSIGNED for value in c.tensors)


def _unsigned(c: Call, function: Callable[..., Tensor]) -> Tensor:
    """Computes `function` for unsigned numbers in int64."""
    operands, op = c.all(), c.node.op
    dtype = operands[0].dtype
    if dtype is not torch.uint64:
        result = function(*(x.to(torch.int64) for x in operands))
        return result if result.dtype is torch.bool else result.to(dtype)
    if op in _SIGNLESS:
        result = function(*(x.view(torch.int64) for x in operands))
        return result if result.dtype is torch.bool else result.view(dtype)
    if op not in _ORDERED:
        c.refuse("of uint64")
    # With the highest bit turned over, the order of signed numbers is that of unsigned ones.
    turn = torch.iinfo(torch.int64).min
    result = function(*(x.view(torch.int64) ^ turn for x in operands))
    return result if result.dtype is torch.bool else (result ^ turn).view(dtype)


@lowering(*_UNARY)
def unary(c: Call) -> Result:
    """One operand, one result of the same shape."""
    if _of_unsigned(c):
        return _unsigned(c, _UNARY[c.node.op])
    return _UNARY[c.node.op](c[0])


def pair(c: Call) -> tuple[Any, Any]:
    """Both operands, broadcast as the version says; a constant of one element as a number."""
    older = c.node.version < 7 and c.flag("broadcast")
    if c.static(0) is not None and c.static(1) is None and not older:
        b = c[1]
        return c.scalar_or_tensor(0, b), b
    a = c[0]
    if older:
        b = c[1]
        axis = c.int_("axis", a.ndim - b.ndim) % max(a.ndim, 1)
        return a, b.reshape(*b.shape, *[1] * (a.ndim - axis - b.ndim))
    return a, c.scalar_or_tensor(1, a)


@lowering(*_BINARY)
def binary(c: Call) -> Result:
    """Two operands that broadcast."""
    if _of_unsigned(c):
        return _unsigned(c, _BINARY[c.node.op])
    if c.node.op in ("And", "Or", "Xor") or c.node.op.startswith("Bitwise"):
        older = c.node.version < 7 and c.flag("broadcast")
        return _BINARY[c.node.op](*(pair(c) if older else (c[0], c[1])))
    return _BINARY[c.node.op](*pair(c))


@lowering("Div")
def div(c: Call) -> Result:
    """Integers divide towards zero."""
    if _of_unsigned(c):
        return _unsigned(c, lambda a, b: torch.div(a, b, rounding_mode="trunc"))
    a, b = pair(c)
    sample: Tensor = a if isinstance(a, Tensor) else b
    if sample.is_floating_point():
        return a / b
    return torch.div(torch.as_tensor(a, dtype=sample.dtype), b, rounding_mode="trunc")


@lowering("Mod", since=10)
def mod(c: Call) -> Result:
    """The sign follows the divisor, or with `fmod` the dividend."""
    remainder = torch.fmod if c.flag("fmod") else torch.remainder
    return _unsigned(c, remainder) if _of_unsigned(c) else remainder(c[0], c[1])


@lowering("BitShift", since=11)
def bit_shift(c: Call) -> Result:
    """Shift each element by as many bits as the other operand says."""
    left = c.str_("direction", "") == "LEFT"
    shift = torch.bitwise_left_shift if left else torch.bitwise_right_shift
    if c[0].dtype is torch.uint64 and not left:
        # The sign must not be shifted in: its bit, and what it would leave behind, are cleared.
        bits, by = c[0].view(torch.int64), c[1].view(torch.int64)
        rest = torch.bitwise_right_shift((bits >> 1) & torch.iinfo(torch.int64).max, (by - 1).clamp(min=0))
        return torch.where(by == 0, bits, rest).view(torch.uint64)
    if c[0].dtype is torch.uint64:
        return shift(c[0].view(torch.int64), c[1].view(torch.int64)).view(torch.uint64)
    return _unsigned(c, shift) if _of_unsigned(c) else shift(c[0], c[1])


@lowering("Pow")
def power(c: Call) -> Result:
    """The result has the type of the base."""
    a, b = pair(c)
    b = b.to(torch.int64) if isinstance(b, Tensor) and b.dtype in _UNSIGNED else b
    if not isinstance(a, Tensor):
        return torch.pow(a, b)
    if isinstance(b, Tensor) and b.dtype is not a.dtype:
        static = c.static(1)
        if static is not None and static.array.size == 1 and static.array.ndim <= a.ndim:
            b = static.array.reshape(()).item()
            if isinstance(b, float) and b.is_integer() and not a.is_floating_point():
                b = int(b)
    if not a.is_floating_point() and isinstance(b, int) and b < 0:
        c.refuse("of integers with a negative exponent")
    return torch.pow(a, b).to(a.dtype)


def _fold(c: Call, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return _unsigned(c, lambda *xs: _folded(xs, function)) if _of_unsigned(c) else _folded(c.all(), function)


def _folded(values: Sequence[Tensor], function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = function(total, value)
    return total


@lowering("Sum")
def sum_(c: Call) -> Result:
    """The sum of all operands."""
    return _fold(c, torch.add)


@lowering("Mean")
def mean(c: Call) -> Result:
    """The mean of all operands."""
    return _fold(c, torch.add) / len(c.all())


@lowering("Min")
def minimum(c: Call) -> Result:
    """The least of all operands."""
    return _fold(c, torch.minimum)


@lowering("Max")
def maximum(c: Call) -> Result:
    """The greatest of all operands."""
    return _fold(c, torch.maximum)


@lowering("Clip")
def clip_by_attribute(c: Call) -> Result:
    """Bounds are attributes."""
    low = c.float_("min", 0) if c.given("min") else None
    high = c.float_("max", 0) if c.given("max") else None
    return c[0] if low is None and high is None else torch.clamp(c[0], low, high)


@lowering("Clip", since=11)
def clip(c: Call) -> Result:
    """Bounds are operands; each may be absent."""
    x = c[0]
    low = c.scalar_or_tensor(1, x) if c.has(1) else None
    high = c.scalar_or_tensor(2, x) if c.has(2) else None
    if low is None and high is None:
        return x
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        y = x if low is None else torch.maximum(x, torch.as_tensor(low, dtype=x.dtype, device=x.device))
        return y if high is None else torch.minimum(y, torch.as_tensor(high, dtype=x.dtype, device=x.device))
    return torch.clamp(x, low, high)


@lowering("Where", since=9)
def where(c: Call) -> Result:
    """Select by a condition."""
    if c.static(1) is None and c.static(2) is not None:
        x = c[1]
        return torch.where(c[0], x, c.scalar_or_tensor(2, x))
    if c.static(2) is None and c.static(1) is not None:
        y = c[2]
        return torch.where(c[0], c.scalar_or_tensor(1, y), y)
    return torch.where(c[0], c[1], c[2])


@lowering("IsInf", since=10)
def is_inf(c: Call) -> Result:
    """Infinities of the signs asked for."""
    x = c[0]
    positive, negative = c.int_("detect_positive", 1), c.int_("detect_negative", 1)
    if positive and negative:
        return torch.isinf(x)
    if positive:
        return torch.isposinf(x)
    return torch.isneginf(x) if negative else torch.zeros_like(x, dtype=torch.bool)


@lowering("MatMul")
def matmul(c: Call) -> Result:
    """The product as numpy defines it."""
    return torch.matmul(c[0], c[1])


@lowering("Gemm")
def gemm(c: Call) -> Result:
    """`alpha * A @ B + beta * C`, with A and B transposed as asked."""
    a, b = c[0], c[1]
    c.int_("broadcast", 1)  # of older versions; the result's shape says as much
    alpha, beta = c.float_("alpha", 1.0), c.float_("beta", 1.0)
    a = a.t() if c.flag("transA") else a
    bias = c.optional(2)
    if (
        alpha == 1.0
        and beta == 1.0
        and bias is not None
        and bias.ndim == 1
        and bias.shape[0] == b.shape[0 if c.flag("transB") else 1]
    ):
        return F.linear(a, b if c.flag("transB") else b.t(), bias)
    b = b.t() if c.flag("transB") else b
    if bias is None:
        return a @ b if alpha == 1.0 else alpha * (a @ b)
    if a.is_floating_point():
        return torch.addmm(bias, a, b, beta=beta, alpha=alpha)
    if not (alpha.is_integer() and beta.is_integer()):
        c.refuse("of integers with a fractional factor")
    return int(alpha) * (a @ b) + int(beta) * bias


@lowering("Det", since=11)
def determinant(c: Call) -> Result:
    """Computes the determinant of each matrix of the last two axes."""
    x = c[0]
    return torch.linalg.det(x if x.dtype in (torch.float32, torch.float64) else x.float()).to(x.dtype)


@lowering("Einsum", since=12)
def einsum(c: Call) -> Result:
    """A sum of products, by its equation."""
    return torch.einsum(c.str_("equation", "").replace(" ", ""), *c.all())
