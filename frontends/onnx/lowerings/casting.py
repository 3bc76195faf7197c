"""Casts from one element type to another, by value or by bits."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from ..tensors import torch_dtype
from .table import Call, Result, lowering

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz})
"""Element types of eight bits that have a sign."""

_NARROW = FLOAT8 | {torch.float8_e8m0fnu}


def element_type(c: Call, code: int) -> torch.dtype:
    """The torch element type of a code; refused if torch has none."""
    dtype = torch_dtype(code)
    if dtype is None:
        c.refuse(f"to {ir.DataType(code).name}")
    return dtype


def cast_to(c: Call, x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """Casts to an element type; to eight bits through float32, and with `saturate` within its range."""
    if x.dtype is dtype:
        return x
    if x.dtype in _NARROW:
        x = x.float()
    if dtype not in _NARROW:
        return x.to(dtype)
    x = x.float()
    if dtype is torch.float8_e8m0fnu:
        return _to_power_of_two(c, x, saturate, c.str_("round_mode", "up"))
    if saturate:
        peak = torch.finfo(dtype).max
        x = torch.clamp(x, -peak, peak)
    return to_float8(x, dtype)


def to_float8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to the nearest float of eight bits; a result above the greatest is infinite or NaN."""
    if dtype is torch.float8_e4m3fn:
        # torch gives the greatest, 448, instead. 464 is half-way to the next, and rounds to the even 448.
        x = torch.where(x.abs() > 464, torch.nan, x)
    return x.to(dtype)


def _to_power_of_two(c: Call, x: Tensor, saturate: bool, mode: str) -> Tensor:
    """Casts to float8_e8m0fnu, which holds only an exponent: 0 to 254 for 2**-127 to 2**127, 255 for NaN."""
    if mode not in ("up", "down", "nearest"):
        c.refuse(f"with round_mode={mode}")
    fraction, exponent = torch.frexp(x)  # x = fraction * 2**exponent, with a fraction from 1/2 to below 1
    least = {"up": 0.5, "down": 1.0, "nearest": 0.75}[mode]
    above = fraction > least if mode == "up" else fraction >= least
    code = exponent + 126 + above.int()
    outside = (x == 0) | (code < 0) | (code > 254) | torch.isinf(x)
    code = torch.where(x == 0, torch.zeros_like(code), code)
    code = torch.where(torch.isinf(x), torch.full_like(code, 254), code).clamp(0, 254)
    invalid = torch.isnan(x) if saturate else torch.isnan(x) | outside
    code = torch.where(invalid, torch.full_like(code, 255), code)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu)


@lowering("Cast", since=6)
def cast(c: Call) -> Result:
    """Casts to another element type."""
    return cast_to(c, c[0], element_type(c, c.int_("to", 0)), c.flag("saturate", default=True))


@lowering("CastLike", since=15)
def cast_like(c: Call) -> Result:
    """Casts to the element type of the other operand."""
    return cast_to(c, c[0], c[1].dtype, c.flag("saturate", default=True))


@lowering("BitCast", since=26)
def bit_cast(c: Call) -> Result:
    """The same bits as another element type of the same size."""
    dtype = element_type(c, c.int_("to", 0))
    if dtype.itemsize != c[0].dtype.itemsize:
        c.refuse(f"from {c[0].dtype} to {dtype}")
    return c[0].contiguous().view(dtype)
