"""Random numbers: drawn anew in each run from torch's generator.

A `seed` in the file is not honoured, for no two runtimes draw the same numbers from it: `torch.manual_seed`
sets all of them. What is drawn has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .casting import element_type
from .table import Call, Result, lowering

RANDOM = (
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
)
"""Operators that draw in each run; `Dropout` draws in training only."""


def _drawn(c: Call, normal: bool, size: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if not dtype.is_floating_point:
        c.refuse(f"of {dtype}")
    if normal:
        drawn = torch.randn(size, dtype=dtype, device=device)
        return drawn * c.float_("scale", 1.0) + c.float_("mean", 0.0)
    low, high = c.float_("low", 0.0), c.float_("high", 1.0)
    return torch.rand(size, dtype=dtype, device=device) * (high - low) + low


@lowering("RandomNormal", "RandomUniform")
def random(c: Call) -> Result:
    """Draws a tensor of a given shape and type."""
    anchor = c.literal(lambda: torch.empty(0))  # on the device of the module
    dtype = element_type(c, c.int_("dtype", 1))
    return _drawn(c, c.node.op == "RandomNormal", c.ints_("shape") or [], dtype, anchor.device)


@lowering("RandomNormalLike", "RandomUniformLike")
def random_like(c: Call) -> Result:
    """Draws a tensor of the operand's shape, and of its type if none is given."""
    x = c[0]
    dtype = element_type(c, c.int_("dtype", 0)) if c.given("dtype") else x.dtype
    return _drawn(c, c.node.op == "RandomNormalLike", list(x.shape), dtype, x.device)


@lowering("Bernoulli", since=15)
def bernoulli(c: Call) -> Result:
    """One with each element's probability, else zero."""
    x = c[0].detach()
    dtype = element_type(c, c.int_("dtype", 0)) if c.given("dtype") else x.dtype
    return torch.bernoulli(x.float()).to(dtype)


@lowering("Multinomial", since=7)
def multinomial(c: Call) -> Result:
    """Classes drawn with replacement by the logarithms of their weights."""
    dtype = element_type(c, c.int_("dtype", 6))
    weights = torch.softmax(c[0].detach().float(), 1)
    return torch.multinomial(weights, c.int_("sample_size", 1), replacement=True).to(dtype)
