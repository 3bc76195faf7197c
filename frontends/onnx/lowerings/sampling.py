"""Sampling at points of a grid."""

from __future__ import annotations

import torch
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
    """Interpolate at each point; cubic in one and two dimensions only."""
    mode, x, grid = c.str_("mode", "linear"), c[0], c[1]
    if mode not in _MODES or (_MODES[mode] == "bicubic" and x.ndim > 4) or not 3 <= x.ndim <= 5:
        c.refuse(f"with mode={mode} on {x.ndim - 2} spatial axes")
    wide = torch.promote_types(x.dtype, grid.dtype)
    if wide.itemsize == 2 and _MODES[mode] == "bicubic":
        wide = torch.float32  # the weights would be rounded to the type of the data
    line = x.ndim == 3
    if line:  # a plane of one row
        x, grid = x.unsqueeze(2), F.pad(grid, (0, 1)).unsqueeze(1)
    y = F.grid_sample(
        x.to(wide),
        grid.to(wide),
        mode=_MODES[mode],
        padding_mode=c.str_("padding_mode", "zeros"),
        align_corners=c.flag("align_corners"),
    ).to(x.dtype)
    return y.squeeze(2) if line else y


@lowering("AffineGrid", since=20)
def affine_grid(c: Call) -> Result:
    """The points that an affine map sends a regular grid to."""
    return F.affine_grid(c[0], c.integers(1, "size"), c.flag("align_corners"))
