"""Quantisation: to and from whole numbers, and products of them.

QuantizeLinear gives whole numbers, which have no gradient. If its result is only turned back into floats,
directly or through operators that move data, the importer keeps it in a float tensor (the attribute `_held`),
and then it has the **straight-through** gradient: rounding counts as the identity. So with `q = x / scale`,
whose nearest whole number the range of the type cuts to `[low - zero, high - zero]`, a pair of QuantizeLinear
and DequantizeLinear gives

- to `x` the gradient of its result if that number is within the range, else zero;
- to `scale`, if that is a computed or trained float, the sum of `round(q) - q` within the range and of the
  bound itself outside, times the gradient of the result. This follows from the same rule and is the
  gradient of learned step sizes (LSQ: Esser et al., 2020) without that paper's factor;
- to a zero point none, for it is whole.

DynamicQuantizeLinear and the QLinear operators have it too; the scale and zero point of the first count as
given. A MatMulInteger or ConvInteger hands it on if its result is cast to floats. Whole numbers that are
outputs of the graph, or that anything else reads, have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from ..tensors import FLOATS, onnx_dtype, torch_dtype
from .casting import FLOAT8, cast_to, to_float8
from .convolution import pad_spatial, padding_of
from .table import Call, Result, lowering

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_RANGES: dict[ir.DataType, tuple[int, int]] = {
    ir.DataType.INT2: (-2, 1),
    ir.DataType.UINT2: (0, 3),
    ir.DataType.INT4: (-8, 7),
    ir.DataType.UINT4: (0, 15),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT16: (-32768, 32767),
    ir.DataType.UINT16: (0, 65535),
}


class _Through(torch.autograd.Function):
    """The nearest value of a type, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, code: int) -> Tensor:
        """`x` to the nearest whole number or float of few bits; among two, to the even one."""
        return _nearest(x, ir.DataType(code))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Passes the gradient on as if nothing had been rounded."""
        return grads[0], None


def _nearest(x: Tensor, code: ir.DataType) -> Tensor:
    if code is ir.DataType.FLOAT4E2M1:
        size = x.abs()
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        return torch.round(x / step) * step
    dtype = torch_dtype(code)
    return to_float8(x, dtype).to(x.dtype) if dtype in FLOAT8 else torch.round(x)


def _spread(c: Call, index: int, x: Tensor) -> Tensor:
    """A scale or zero point of one element, of one per slice of an axis, or of one per block, for `x`."""
    values, block = c[index], c.int_("block_size", 0)
    axis = c.int_("axis", 1)
    if values.numel() == 1:
        return values.reshape(())
    if not -x.ndim <= axis < x.ndim:
        raise IndexError(f"there is no axis {axis} in shape {list(x.shape)}")
    if not block:
        size = [1] * x.ndim
        size[axis] = values.numel()
        return values.reshape(size)
    spread = values.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    if spread.shape != x.shape:
        raise ValueError(f"{list(values.shape)} does not give {list(x.shape)} in blocks of {block}")
    return spread


@lowering("QuantizeLinear", since=10)
def quantize_linear(c: Call) -> Result:
    """`round(x / scale) + zero point`, within the range of the type; see the module for its gradient."""
    x, scale, held = c[0], _spread(c, 1, c[0]), bool(c.int_("_held", 0))
    code = ir.DataType(
        c.int_("output_dtype", 0) or (onnx_dtype(c[2].dtype) if c.has(2) else ir.DataType.UINT8)
    )
    precision = torch_dtype(c.int_("precision", 0) or None) or scale.dtype
    if precision not in FLOATS:
        precision = x.dtype if x.dtype in FLOATS else torch.float32
    q = (x.to(precision) / scale.to(precision)).float()
    if code in _RANGES:
        return _to_whole(c, q, code, held)
    dtype = torch_dtype(code)
    if dtype in FLOAT8 and not held:
        return cast_to(c, q, dtype, saturate=c.flag("saturate", default=True))
    peak = 6.0 if code is ir.DataType.FLOAT4E2M1 else torch.finfo(dtype).max if dtype in FLOAT8 else 0.0
    if not held or not peak:
        c.refuse(f"to {code.name}")
    if c.flag("saturate", default=True) or code is ir.DataType.FLOAT4E2M1:
        q = q.clamp(-peak, peak)
    return through(q, code)


def through(q: Tensor, code: ir.DataType) -> Tensor:
    """The nearest value of a type, be it out of its range, with the gradient of the identity."""
    apply: Any = _Through.apply
    return apply(q, int(code))


def _to_whole(c: Call, q: Tensor, code: ir.DataType, held: bool) -> Tensor:
    (low, high), dtype, static = _RANGES[code], torch_dtype(code), c.static(2)
    q = through(q, code) if held else torch.round(q)
    if not c.has(2) or (static is not None and static.array.size == 1):
        zero = int(c.number(2, "zero point")) if c.has(2) else 0
        q = torch.clamp(q, low - zero, high - zero) + zero
    else:
        zero = _spread(c, 2, q).float()
        q = torch.clamp(q, low - zero, high - zero) + zero
    if held:
        return q
    if dtype is None:
        c.refuse(f"to {code.name}")
    return q.to(torch.int32).to(dtype)


@lowering("DequantizeLinear", since=10)
def dequantize_linear(c: Call) -> Result:
    """`(x - zero point) * scale`, computed in float32 or wider."""
    x, scale = c[0].float(), _spread(c, 1, c[0])
    code = c.int_("output_dtype", 0)
    dtype = torch_dtype(code) if code else scale.dtype
    if dtype not in FLOATS:
        c.refuse(f"to {ir.DataType(code).name if code else dtype}")
    if c.has(2):
        static = c.static(2)
        if static is None or bool(static.array.any()):
            x = x - _spread(c, 2, c[0]).float()
    wide = torch.promote_types(torch.float32, dtype)
    return (x * scale.to(wide)).to(dtype)


@lowering("DynamicQuantizeLinear", since=11)
def dynamic_quantize_linear(c: Call) -> Result:
    """Quantises to uint8, by the scale and zero point of the extremes; see the module for its gradient."""
    x, held = c[0], bool(c.int_("_held", 0))
    scale, zero = extremes(x)
    q = through(x / scale, ir.DataType.UINT8) if held else torch.round(x / scale)
    y = torch.clamp(q, -zero, 255 - zero) + zero
    return y if held else y.to(torch.uint8), scale, zero.to(torch.uint8)


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point of uint8 that bring zero and all of `x` into the range; without a gradient."""
    x = x.detach()
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = torch.where(high == low, torch.ones_like(high), high - low) / 255
    return scale, torch.round(torch.clamp(-low / scale, 0, 255))


# Products of whole numbers are summed in float64, which is exact to 2**53; those of held ones, whose sums
# become float32 anyway, in float32.


def shifted(x: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Whole numbers less their zero point, in a float type."""
    wide = x.to(dtype)
    return wide if zero is None else wide - zero.to(dtype)


def summed(*operands: Tensor) -> torch.dtype:
    """The type to multiply and sum whole numbers in."""
    return torch.float32 if any(x.is_floating_point() for x in operands) else torch.float64


def requantized(c: Call, total: Tensor, factor: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`total * factor` as whole numbers about a zero point, within the range of the type."""
    dtype = dtype if zero is None else zero.dtype
    if dtype not in (torch.int8, torch.uint8, torch.int16, torch.uint16):
        c.refuse(f"on {dtype}")
    y = total * factor.to(total.dtype)
    y = y if zero is None else y + zero.to(total.dtype)
    limits = torch.iinfo(dtype)
    if c.int_("_held", 0):
        return torch.clamp(through(y, onnx_dtype(dtype)), limits.min, limits.max)
    return torch.clamp(torch.round(y), limits.min, limits.max).to(torch.int32).to(dtype)


def _whole(c: Call, *operands: Tensor) -> None:
    for x in operands:
        # A held operand is a float; no operator here lets the file give one.
        if x.dtype not in (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.float32):
            c.refuse(f"on {x.dtype}")


def _by_row(values: Tensor | None) -> Tensor | None:
    return values.unsqueeze(-1) if values is not None and values.ndim == 1 and values.numel() > 1 else values


@lowering("QLinearMatMul", since=10)
def qlinear_matmul(c: Call) -> Result:
    """The product of quantised operands, quantised; left operand and result by rows, the right by columns."""
    _whole(c, c[0], c[3])
    dtype = summed(c[0], c[3])
    total = torch.matmul(shifted(c[0], _by_row(c[2]), dtype), shifted(c[3], c[5], dtype))
    scale = _by_row(c[1]), c[4], _by_row(c[6])
    assert scale[0] is not None and scale[2] is not None
    factor = scale[0] * scale[1] / scale[2]
    return requantized(c, total, factor, _by_row(c[7]), c[7].dtype)


@lowering("MatMulInteger", since=10)
def matmul_integer(c: Call) -> Result:
    """The product in int32; left operand by rows, the right by columns."""
    a, b, dtype = c[0], c[1], summed(c[0])
    _whole(c, a, b)
    y = torch.matmul(shifted(a, _by_row(c.optional(2)), dtype), shifted(b, c.optional(3), dtype))
    return y if a.is_floating_point() else y.to(torch.int32)


def _convolved(c: Call, x: Tensor, w: Tensor) -> Tensor:
    """Padding counts as the zero point: it is done after that has been taken away."""
    rank = x.ndim - 2
    if rank not in _CONV:
        c.refuse(f"over {rank} spatial axes")
    stride, dilation = c.ints_("strides") or [1] * rank, c.ints_("dilations") or [1] * rank
    before, after = padding_of(c, x.shape[2:], w.shape[2:], stride, dilation)
    x = pad_spatial(x, before, after)
    return _CONV[rank](x, w, None, stride, 0, dilation, c.int_("group", 1))


def _by_channel(values: Tensor, rank: int) -> Tensor:
    """One element for each output channel of a convolution's result."""
    return values.reshape(-1, *[1] * rank) if values.numel() > 1 else values.reshape(())


@lowering("ConvInteger", since=10)
def conv_integer(c: Call) -> Result:
    """The convolution in int32."""
    x, w, dtype = c[0], c[1], summed(c[0])
    _whole(c, x, w)
    zero = c.optional(3)
    zero = None if zero is None else _by_channel(zero, w.ndim - 1)
    y = _convolved(c, shifted(x, c.optional(2), dtype), shifted(w, zero, dtype))
    return y if x.is_floating_point() else y.to(torch.int32)


@lowering("QLinearConv", since=10)
def qlinear_conv(c: Call) -> Result:
    """The convolution of quantised operands, quantised; the bias is in units of both scales' product."""
    x, w, rank = c[0], c[3], c[0].ndim - 2
    _whole(c, x, w)
    dtype = summed(x)
    total = _convolved(c, shifted(x, c[2], dtype), shifted(w, _by_channel(c[5], rank + 1), dtype))
    if c.has(8):
        total = total + c[8].to(dtype).reshape(-1, *[1] * rank)
    factor = c[1].reshape(()) * _by_channel(c[4], rank) / c[6].reshape(())
    return requantized(c, total, factor, c[7].reshape(()), c[7].dtype)
