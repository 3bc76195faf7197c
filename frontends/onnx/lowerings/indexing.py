"""Reading and writing by index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Call, Result, lowering


@lowering("Gather")
def gather(c: Call) -> Result:
    """Whole slices along one axis; a table of rows is an embedding."""
    x, axis = c[0], c.int_("axis", 0) % max(c[0].ndim, 1)
    static = c.static(1)
    if static is not None and static.array.ndim <= 1:
        picked = [int(i) + (x.shape[axis] if i < 0 else 0) for i in static.array.reshape(-1).tolist()]
        if any(not 0 <= i < x.shape[axis] for i in picked):
            raise IndexError(f"indices {picked} are out of bounds for axis {axis} of shape {list(x.shape)}")
        if static.array.ndim == 0:
            return x.select(axis, picked[0])
        if picked and picked == list(range(picked[0], picked[0] + len(picked))):
            return x.narrow(axis, picked[0], len(picked))
        return x.index_select(axis, c.literal(lambda: torch.tensor(picked, dtype=torch.int64)))
    indices = c[1].long()
    if x.ndim == 2 and axis == 0 and c.is_weight(0):
        return F.embedding(indices, x)  # a negative index is an error here, not a wrong row
    return x[(*[slice(None)] * axis, indices)]


def _wrapped(c: Call, index: int, n: int) -> Tensor:
    """An index operand with negative indices counted from the end."""
    static = c.static(index)
    if static is not None:
        given = static.array.astype(np.int64)
        values = np.where(given < 0, given + n, given)
        return c.literal(lambda: torch.from_numpy(values))
    raw = c[index].long()
    return torch.where(raw < 0, raw + n, raw)


@lowering("GatherElements", since=11)
def gather_elements(c: Call) -> Result:
    """One element for each index."""
    axis = c.int_("axis", 0) % c[0].ndim
    return torch.gather(c[0], axis, _wrapped(c, 1, c[0].shape[axis]))


@lowering("GatherND", since=11)
def gather_nd(c: Call) -> Result:
    """Slices by tuples of indices, apart in each batch."""
    x, indices, batch = c[0], c[1], c.int_("batch_dims", 0)
    parts: list[Tensor] = []
    for i in range(batch):
        size = [1] * (indices.ndim - 1)
        size[i] = x.shape[i]
        parts.append(c.literal(lambda i=i, size=size: torch.arange(x.shape[i]).reshape(size)))
    return x[(*parts, *indices.long().unbind(-1))]


_REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _reduction(c: Call) -> str:
    name = c.str_("reduction", "none")
    if name != "none" and name not in _REDUCE:
        c.refuse(f"with reduction={name}")
    return name


@lowering("ScatterElements", since=11)
@lowering("Scatter", since=9)
def scatter_elements(c: Call) -> Result:
    """Write, add, multiply or compare one element for each index."""
    axis, how = c.int_("axis", 0) % c[0].ndim, _reduction(c)
    return _scatter(c[0], axis, _wrapped(c, 1, c[0].shape[axis]), c[2], how)


def _scatter(x: Tensor, axis: int, indices: Tensor, updates: Tensor, how: str) -> Tensor:
    if how == "none":
        return x.scatter(axis, indices, updates)
    if how == "add":
        return x.scatter_add(axis, indices, updates)
    return x.scatter_reduce(axis, indices, updates, _REDUCE[how])


@lowering("ScatterND", since=11)
def scatter_nd(c: Call) -> Result:
    """Write, add, multiply or compare slices by tuples of indices."""
    x, indices, updates, how = c[0], c[1].long(), c[2], _reduction(c)
    where = tuple(indices.unbind(-1))
    if how in ("none", "add"):
        return x.index_put(where, updates, accumulate=how == "add")
    depth = len(where)
    inner = math.prod(x.shape[depth:])
    row = torch.zeros_like(where[0])
    for n, part in zip(x.shape[:depth], where, strict=True):
        row = row * n + torch.where(part < 0, part + n, part)
    rows = row.reshape(-1, 1).expand(-1, inner)
    flat = x.reshape(-1, inner)
    return _scatter(flat, 0, rows, updates.reshape(-1, inner), how).reshape(x.shape)


@lowering("Slice")
def slice_by_attribute(c: Call) -> Result:
    """Bounds are attributes."""
    starts, ends = c.ints_("starts") or [], c.ints_("ends") or []
    axes = c.ints_("axes") or list(range(len(starts)))
    return _slice(c, starts, ends, axes, [1] * len(starts))


@lowering("Slice", since=10)
def slice_(c: Call) -> Result:
    """Bounds, axes and steps are operands."""
    starts, ends = c.integers(1, "start"), c.integers(2, "end")
    axes = c.integers(3, "list of axes") if c.has(3) else list(range(len(starts)))
    steps = c.integers(4, "step") if c.has(4) else [1] * len(starts)
    return _slice(c, starts, ends, axes, steps)


def _slice(
    c: Call, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]
) -> Tensor:
    x = c[0]
    c.require(len({axis % x.ndim for axis in axes}) == len(axes), f"names an axis twice: {list(axes)}")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= x.ndim
        picked = range(*slice(start, end, step).indices(x.shape[axis]))
        if not picked:
            x = x.narrow(axis, 0, 0)
        elif picked != range(x.shape[axis]):
            # torch has no negative steps: take the elements forwards, then turn them round.
            ahead = picked if step > 0 else picked[::-1]
            cut: Any = (*[slice(None)] * axis, slice(ahead.start, ahead[-1] + 1, ahead.step))
            x = x[cut] if step > 0 else x[cut].flip(axis)
    return x


@lowering("OneHot", since=9)
def one_hot(c: Call) -> Result:
    """`on` where the new axis counts to the index, else `off`; what is out of range is all `off`."""
    indices, depth, values = c[0], c.integer(1, "depth"), c[2]
    c.require(depth > 0, f"has a depth of {depth}")
    axis = c.int_("axis", -1) % (indices.ndim + 1)
    indices = indices.long().unsqueeze(axis)
    indices = torch.where(indices < 0, indices + depth, indices)
    size = [1] * indices.ndim
    size[axis] = depth
    steps = c.literal(lambda: torch.arange(depth).reshape(size))
    return torch.where(indices == steps, values[1], values[0])


@lowering("TopK", since=10)
@lowering("TopK")
def top_k(c: Call) -> Result:
    """The greatest or least along an axis; among equals, the first comes first."""
    x, axis, largest = c[0], c.int_("axis", -1), c.flag("largest", default=True)
    k = c.integer(1, "count") if c.node.version >= 10 else c.int_("k", 1)
    values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, k), indices.narrow(axis, 0, k)


@lowering("CumProd", since=26)
@lowering("CumSum", since=11)
def cumulate(c: Call) -> Result:
    """Running sums or products along an axis, from either end, with or without the element itself."""
    x, axis, reverse = c[0], c.integer(1, "axis") % c[0].ndim, c.flag("reverse")
    x = x.flip(axis) if reverse else x
    sums = c.node.op == "CumSum"
    total = (torch.cumsum if sums else torch.cumprod)(x, axis, dtype=x.dtype)
    if c.flag("exclusive"):
        first = x.narrow(axis, 0, 1)
        first = torch.zeros_like(first) if sums else torch.ones_like(first)
        total = torch.cat([first, total.narrow(axis, 0, x.shape[axis] - 1)], axis)
    return total.flip(axis) if reverse else total


@lowering("NonZero", since=9)
def non_zero(c: Call) -> Result:
    """Returns the indices of the elements that are not zero; their number is part of the result's shape."""
    static = c.static(0)
    if static is None:
        return torch.nonzero(c[0]).t()
    return c.literal(lambda: torch.from_numpy(np.stack(np.nonzero(static.array)).astype(np.int64)))
