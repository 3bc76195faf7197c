"""Pooling over regions of interest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Call, Result, lowering


@lowering("RoiAlign", since=10)
def roi_align_10(c: Call) -> Result:
    """Regions count from the corner of the first pixel."""
    return _roi_align(c, 0.0)


@lowering("RoiAlign", since=16)
def roi_align(c: Call) -> Result:
    """Regions count from the centre of the first pixel, unless the node says otherwise."""
    transform = c.str_("coordinate_transformation_mode", "half_pixel")
    if transform not in ("half_pixel", "output_half_pixel"):
        c.refuse(f"with coordinate_transformation_mode={transform}")
    return _roi_align(c, 0.5 if transform == "half_pixel" else 0.0)


def _roi_align(c: Call, shift: float) -> Tensor:
    """Points of a grid in each cell of each region, interpolated, and their mean or greatest.

    In mode `max` the four elements around a point are compared after they are weighed, one by one: the
    standard's reference does so.
    """
    x, batch, mode = c[0], c[2].long(), c.str_("mode", "avg").lower()
    if mode not in ("avg", "max"):
        c.refuse(f"with mode={mode}")
    rows, columns = c.int_("output_height", 1), c.int_("output_width", 1)
    wide = x if x.element_size() > 2 else x.float()
    corners = c[1].to(wide.dtype) * c.float_("spatial_scale", 1.0) - shift
    starts, extents = corners[:, :2], corners[:, 2:] - corners[:, :2]
    if shift == 0.0:
        extents = extents.clamp(min=1.0)  # a region has at least one pixel
    ratio = c.int_("sampling_ratio", 0)
    if ratio > 0:
        y = _cells(c, wide, starts, extents, batch, (rows, columns), (ratio, ratio), mode)
        return y.to(x.dtype)
    grids = _grids(c, shift, rows, columns)
    parts: list[Tensor] = []
    order: list[int] = []
    # Regions with the same number of points run together.
    for grid in sorted({(int(a), int(b)) for a, b in grids}):
        members = [i for i, other in enumerate(grids) if (int(other[0]), int(other[1])) == grid]
        these = c.literal(lambda members=members: torch.tensor(members))
        order.extend(members)
        parts.append(
            _cells(c, wide, starts[these], extents[these], batch[these], (rows, columns), grid, mode)
        )
    if not parts:
        return x.new_zeros(0, x.shape[1], rows, columns)
    back = c.literal(lambda: torch.tensor(order).argsort())
    return torch.cat(parts)[back].to(x.dtype)


def _grids(c: Call, shift: float, rows: int, columns: int) -> npt.NDArray[Any]:
    """The points of each region's cells along both axes, as many as a cell has pixels."""
    array = c.constant(1, "list of regions").array
    array = array.astype(np.float64 if array.dtype == np.float64 else np.float32)
    corners = array * array.dtype.type(c.float_("spatial_scale", 1.0)) - array.dtype.type(shift)
    extents = corners[:, 2:] - corners[:, :2]
    if shift == 0.0:
        extents = np.maximum(extents, 1.0)
    points = np.ceil(extents[:, ::-1] / np.array([rows, columns], array.dtype))
    return np.maximum(points, 0).astype(np.int64)


def _cells(
    c: Call,
    x: Tensor,
    starts: Tensor,
    extents: Tensor,
    batch: Tensor,
    cells: tuple[int, int],
    grid: tuple[int, int],
    mode: str,
) -> Tensor:
    """Regions, channels, rows, columns, for regions with grids of the same size."""
    images, channels, height, width = x.shape
    if 0 in grid:
        return x.new_zeros(batch.shape[0], channels, *cells)
    down = _axis(c, starts[:, 1], extents[:, 1], cells[0], grid[0], height)
    across = _axis(c, starts[:, 0], extents[:, 0], cells[1], grid[1], width)
    planes = x.transpose(0, 1).reshape(channels, images * height * width)
    first = (batch * (height * width)).reshape(-1, 1, 1)
    y: Tensor | None = None
    for row, row_share in down:
        for column, column_share in across:
            places = first + (row * width).unsqueeze(2) + column.unsqueeze(1)
            share = row_share.unsqueeze(2) * column_share.unsqueeze(1)
            weighed = planes.index_select(1, places.reshape(-1)) * share.reshape(-1)
            join = torch.add if mode == "avg" else torch.maximum
            y = weighed if y is None else join(y, weighed)
    assert y is not None
    y = y.reshape(channels, batch.shape[0], cells[0], grid[0], cells[1], grid[1])
    y = y.mean((3, 5)) if mode == "avg" else y.amax((3, 5))
    return y.transpose(0, 1)


def _axis(
    c: Call, start: Tensor, extent: Tensor, cells: int, points: int, size: int
) -> list[tuple[Tensor, Tensor]]:
    """Along one axis, the two elements around each point and their weights; regions by points."""
    steps = c.literal(lambda: torch.arange(cells * points).to(start.dtype))
    at = start.unsqueeze(1) + (steps + 0.5) * (extent / (cells * points)).unsqueeze(1)
    inside = (at >= -1.0) & (at <= size)
    at = at.clamp(0.0, size - 1.0)
    low = at.detach().floor().clamp(max=max(size - 2, 0))
    high_share = at - low
    low_place = low.long()
    high_place = (low_place + 1).clamp(max=size - 1)
    zero = torch.zeros((), dtype=at.dtype, device=at.device)
    return [
        (low_place, torch.where(inside, 1.0 - high_share, zero)),
        (high_place, torch.where(inside, high_share, zero)),
    ]


@lowering("MaxRoiPool")
def max_roi_pool(c: Call) -> Result:
    """The greatest of each cell of each region; regions are rounded to pixels, so they get no gradient."""
    x, shape, scale = c[0], c.ints_("pooled_shape") or [], c.float_("spatial_scale", 1.0)
    pooled: list[Tensor] = []
    for region in c.constant(1, "list of regions").array.astype(np.float32):
        left, top, right, bottom = (_rounded(np.float32(v * np.float32(scale))) for v in region[1:])
        pooled.append(_greatest(x[int(region[0])], top, left, bottom, right, shape))
    return torch.stack(pooled) if pooled else x.new_zeros(0, x.shape[1], *shape)


def _rounded(value: np.float32) -> int:
    return int(math.copysign(math.floor(abs(float(value)) + 0.5), float(value)))


def _greatest(plane: Tensor, top: int, left: int, bottom: int, right: int, shape: list[int]) -> Tensor:
    bottom, right = max(bottom, top), max(right, left)  # at least one pixel
    _, height, width = plane.shape
    inside = plane[:, max(top, 0) : max(bottom + 1, 0), max(left, 0) : max(right + 1, 0)]
    if inside.numel() == 0:
        return plane.new_zeros(plane.shape[0], *shape)
    before, above = max(-left, 0), max(-top, 0)
    after, below = max(right + 1 - width, 0), max(bottom + 1 - height, 0)
    region = F.pad(inside, (before, after, above, below), value=-math.inf)
    y = F.adaptive_max_pool2d(region, shape)
    return y.masked_fill(y == -math.inf, 0.0)  # a cell with no pixel of the image
