"""Sampling at points of a grid."""

from __future__ import annotations

import torch.nn.functional as F

from .table import Call, Result, lowering

_MODES = {
    "bilinear": "bilinear",
    "linear": "bilinear",
    "nearest": "nearest",
    "bicubic": "bicubic",
    "cubic": "bicubic",
}


@lowering("GridSample", since=16)
def grid_sample(c: Call) -> Result:
    """Interpolate at each point; cubic in two dimensions only."""
    mode = c.str_("mode", "linear")
    if mode not in _MODES or (_MODES[mode] == "bicubic" and c[0].ndim != 4):
        c.refuse(f"with mode={mode} on {c[0].ndim - 2} spatial axes")
    padding, corners = c.str_("padding_mode", "zeros"), bool(c.int_("align_corners", 0))
    return F.grid_sample(c[0], c[1], mode=_MODES[mode], padding_mode=padding, align_corners=corners)


@lowering("AffineGrid", since=20)
def affine_grid(c: Call) -> Result:
    """The points that an affine map sends a regular grid to."""
    return F.affine_grid(c[0], c.integers(1, "size"), bool(c.int_("align_corners", 0)))
