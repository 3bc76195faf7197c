"""Operators on whole numbers of onnxruntime (domain com.microsoft).

Their gradients are those of the default domain's quantisation: see `quantization`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from .pooling import average_pool
from .quantization import dequantize_linear, extremes, quantize_linear, requantized, shifted, summed, through
from .table import Call, Result, lowering

_DOMAIN = "com.microsoft"

lowering("QuantizeLinear", domain=_DOMAIN)(quantize_linear)
lowering("DequantizeLinear", domain=_DOMAIN)(dequantize_linear)


def _real(c: Call, index: int) -> Tensor:
    """The operand at `index` with its scale and zero point behind it, as floats."""
    zero = c.optional(index + 2)
    x = c[index].float()
    return (x if zero is None else x - zero.float()) * c[index + 1]


def _stored(c: Call, y: Tensor, scale: int, dtype: torch.dtype) -> Tensor:
    """Floats quantised by the scale and zero point at an index."""
    y = y if c.int_("_held", 0) else y.double()
    return requantized(c, y, 1.0 / c[scale].double(), c.optional(scale + 1), dtype)


@lowering("QLinearAdd", "QLinearMul", domain=_DOMAIN)
def qlinear_binary(c: Call) -> Result:
    """The sum or the product of what two operands stand for, quantised."""
    a, b = _real(c, 0), _real(c, 3)
    return _stored(c, a + b if c.node.op == "QLinearAdd" else a * b, 6, c[0].dtype)


@lowering("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", domain=_DOMAIN)
def qlinear_unary(c: Call) -> Result:
    """A function of what the operand stands for, quantised."""
    return _stored(c, _FUNCTIONS[c.node.op](c, _real(c, 0)), 3, c[0].dtype)


def _softmax(c: Call, x: Tensor) -> Tensor:
    axis = c.int_("axis", -1) % x.ndim
    if c.int_("opset", 13) >= 13:
        return torch.softmax(x, axis)
    return torch.softmax(x.flatten(axis), -1).reshape(x.shape)


_FUNCTIONS: dict[str, Callable[[Call, Tensor], Tensor]] = {
    "QLinearLeakyRelu": lambda c, x: F.leaky_relu(x, c.float_("alpha", 0.01)),
    "QLinearSigmoid": lambda c, x: torch.sigmoid(x),
    "QLinearSoftmax": _softmax,
}


@lowering("QLinearAveragePool", "QLinearGlobalAveragePool", domain=_DOMAIN)
def qlinear_average_pool(c: Call) -> Result:
    """The average of what the windows or the planes stand for, quantised."""
    x, last = _real(c, 0), c.flag("channels_last")
    x = x.movedim(-1, 1) if last else x
    if c.node.op == "QLinearGlobalAveragePool":
        y = x.mean(tuple(range(2, x.ndim)), keepdim=True)
    else:
        pooled = average_pool(replace(c, tensors=[x], statics=[None]))
        assert isinstance(pooled, Tensor)
        y = pooled
    return _stored(c, y.movedim(1, -1) if last else y, 3, c[0].dtype)


@lowering("QLinearConcat", domain=_DOMAIN)
def qlinear_concat(c: Call) -> Result:
    """Concatenates the numbers that the operands stand for, and quantises the result."""
    parts = [_real(c, i) for i in range(2, len(c), 3)]
    return _stored(c, torch.cat(parts, c.int_("axis", 0)), 0, c[2].dtype)


@lowering("DynamicQuantizeMatMul", domain=_DOMAIN)
def dynamic_quantize_matmul(c: Call) -> Result:
    """The product of floats, quantised by their extremes, with whole numbers that stand for floats.

    The rounding counts as the identity in the gradient.
    """
    x = c[0]
    scale, zero = extremes(x)
    q = torch.clamp(through(x / scale, ir.DataType.UINT8), -zero, 255 - zero)
    weight = c[1].float()
    weight = weight - c[3].float() if c.has(3) else weight
    y = torch.matmul(q, weight) * (scale * c[2])
    return y + c[4] if c.has(4) else y


@lowering("MatMulIntegerToFloat", domain=_DOMAIN)
def matmul_integer_to_float(c: Call) -> Result:
    """The product of what two operands stand for; the scales pass gradients."""
    dtype = summed(c[0])
    total = torch.matmul(shifted(c[0], c.optional(4), dtype), shifted(c[1], c.optional(5), dtype))
    y = total.to(c[2].dtype) * (c[2] * c[3])
    return y + c[6] if c.has(6) else y


@lowering("QGemm", domain=_DOMAIN)
def qgemm(c: Call) -> Result:
    """A Gemm of whole numbers; with a scale of its own the result is quantised, else float."""
    a = c[0].t() if c.flag("transA") else c[0]
    b = c[3].t() if c.flag("transB") else c[3]
    dtype = summed(a, b)
    total = shifted(a, c.optional(2), dtype) @ shifted(b, c.optional(5), dtype)
    total = total + c[6].to(dtype) if c.has(6) else total
    factor = c.float_("alpha", 1.0) * c[1] * c[4]
    if not c.has(7):
        return total.to(factor.dtype) * factor
    return requantized(c, total, factor / c[7], c.optional(8), c[0].dtype)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Whole numbers of few bits out of bytes along the last axis, the lowest bits first."""
    each = 8 // bits
    parts = [(packed >> (bits * i)) & (2**bits - 1) for i in range(each)]
    return torch.stack(parts, -1).flatten(-2)


@lowering("MatMulNBits", domain=_DOMAIN)
def matmul_n_bits(c: Call) -> Result:
    """The product with a matrix that is stored in few bits, with a scale for each block of a row."""
    x, rows, columns = c[0], c.int_("N", 0), c.int_("K", 0)
    bits, block = c.int_("bits", 4), c.int_("block_size", 32)
    if bits not in (2, 4, 8) or c.int_("weight_prepacked", 0) or c.has(4):
        c.refuse(f"of {bits} bits, prepacked or with g_idx")
    c.int_("accuracy_level", 0)  # how the product may be computed, not what it is
    blocks = -(-columns // block)
    stored = _unpacked(c[1].reshape(rows, blocks, -1), bits).to(x.dtype)
    zero: Tensor | float = 2.0 ** (bits - 1)
    if c.has(3) and c[3].dtype is torch.uint8:
        zero = _unpacked(c[3].reshape(rows, -1), bits)[:, :blocks].unsqueeze(-1).to(x.dtype)
    elif c.has(3):
        zero = c[3].reshape(rows, blocks, 1)
    weight = ((stored - zero) * c[2].reshape(rows, blocks, 1)).reshape(rows, -1)[:, :columns]
    return F.linear(x, weight, c.optional(5))
