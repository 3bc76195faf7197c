"""Operators that move, repeat, join, cut or retype data, and those that make constants."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from .casting import element_type
from .table import Call, Result, lowering


@lowering("Identity")
def identity(c: Call) -> Result:
    """The operand itself, be it a list or absent."""
    value = c.tensors[0]
    return c[0] if isinstance(value, Tensor) else (value,)


@lowering("Shape")
def shape(c: Call) -> Result:
    """The sizes, which are known once the inputs are bound."""
    sizes = list(c[0].shape)
    end = c.int_("end", len(sizes))
    picked = sizes[c.int_("start", 0) : end]
    return c.literal(lambda: torch.tensor(picked, dtype=torch.int64))


@lowering("Size")
def size(c: Call) -> Result:
    """The number of elements."""
    count = c[0].numel()
    return c.literal(lambda: torch.tensor(count))


@lowering("ConstantOfShape", since=9)
def constant_of_shape(c: Call) -> Result:
    """One value, repeated."""
    given = c.attribute("value")
    value = given if isinstance(given, Tensor) else torch.zeros(1)
    sizes = c.integers(0, "shape")
    if any(n < 0 for n in sizes):
        raise ValueError(f"the shape {sizes} has a negative size")
    return c.literal(lambda: value.reshape(()).expand(sizes).clone())


@lowering("Range", since=11)
def range_(c: Call) -> Result:
    """Evenly spaced numbers, as many as the bounds say."""
    start, limit, step = (c.number(i, name) for i, name in enumerate(("start", "limit", "delta")))
    dtype = c[0].dtype
    count = max(math.ceil((limit - start) / step), 0)
    return c.literal(lambda: (torch.arange(count) * step + start).to(dtype))


@lowering("EyeLike", since=9)
def eye_like(c: Call) -> Result:
    """Ones on one diagonal."""
    x, k = c[0], c.int_("k", 0)
    dtype = element_type(c, c.int_("dtype", 0)) if c.given("dtype") else x.dtype
    rows, columns = x.shape
    return c.literal(lambda: torch.ones(rows, columns).triu(k).tril(k).to(dtype))


@lowering("Reshape", since=5)
def reshape(c: Call) -> Result:
    """Zero keeps a size (unless `allowzero`), and minus one is what remains."""
    return _reshape(c, c.integers(1, "shape"))


@lowering("Reshape")
def reshape_by_attribute(c: Call) -> Result:
    """Reshapes as later versions do; the shape is an attribute."""
    return _reshape(c, c.ints_("shape") or [])


def _reshape(c: Call, target: Sequence[int]) -> Result:
    x = c[0]
    if not c.flag("allowzero"):
        target = [x.shape[i] if n == 0 else n for i, n in enumerate(target)]
    return x.reshape(*target) if target else x.reshape(())


@lowering("Flatten")
def flatten(c: Call) -> Result:
    """Reshapes to two axes, split at `axis`."""
    x, axis = c[0], c.int_("axis", 1)
    axis += x.ndim if axis < 0 else 0
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@lowering("Squeeze")
def squeeze(c: Call) -> Result:
    """Drop axes of size one."""
    x, axes = c[0], c.axes()
    if not axes:  # as without axes, which is what onnxruntime makes of an empty list
        return x.squeeze()
    if any(x.shape[axis] != 1 for axis in axes):
        raise ValueError(f"cannot squeeze axes {axes} of shape {list(x.shape)}")
    return x.squeeze([axis % x.ndim for axis in axes])


@lowering("Unsqueeze")
def unsqueeze(c: Call) -> Result:
    """Insert axes of size one; they are counted in the result."""
    x, axes = c[0], c.axes()
    assert axes is not None
    rank = x.ndim + len(axes)
    c.require(all(-rank <= axis < rank for axis in axes), f"names axes {axes} of a result of {rank} axes")
    places = sorted(axis % rank for axis in axes)
    c.require(len(set(places)) == len(axes), f"names an axis twice: {axes} of a result of {rank} axes")
    for axis in places:
        x = x.unsqueeze(axis)
    return x


@lowering("Transpose")
def transpose(c: Call) -> Result:
    """Permute the axes, or reverse them."""
    rank = c[0].ndim
    order = c.ints_("perm") or list(range(rank))[::-1]
    c.require(sorted(order) == list(range(rank)), f"has perm={order} for an operand of {rank} axes")
    return c[0].permute(order)


@lowering("Expand", since=8)
def expand(c: Call) -> Result:
    """Broadcast both ways."""
    return c[0].expand(torch.broadcast_shapes(c[0].shape, c.integers(1, "shape")))


@lowering("Tile", since=6)
def tile(c: Call) -> Result:
    """Repeat along each axis."""
    x, repeats = c[0], c.integers(1, "list of repeats")
    c.require(len(repeats) == x.ndim, f"has {len(repeats)} repeats for an operand of {x.ndim} axes")
    return x.repeat(*repeats)


@lowering("Concat")
def concat(c: Call) -> Result:
    """Join along an axis, which the first version let be absent."""
    return torch.cat(c.all(), c.int_("axis", 1))


@lowering("Split")
def split(c: Call) -> Result:
    """By sizes, by a count of parts, or into as many equal parts as there are outputs."""
    x, axis = c[0], c.int_("axis", 0)
    sizes = c.ints_("split") or (c.integers(1, "list of sizes") if c.has(1) else None)
    if sizes is None:
        parts = c.int_("num_outputs", len(c.node.wanted))
        if parts != len(c.node.wanted):
            raise ValueError(f"num_outputs={parts}, and the node has {len(c.node.wanted)}")
        equal = c.node.version >= 18 or x.shape[axis] % parts == 0
        c.require(equal, f"splits {x.shape[axis]} elements of axis {axis} into {parts} equal parts")
        each, total = math.ceil(x.shape[axis] / parts), x.shape[axis]
        sizes = [max(min(each, total - i * each), 0) for i in range(parts)]
    c.require(len(sizes) == len(c.node.wanted), f"has {len(c.node.wanted)} results and {len(sizes)} sizes")
    return torch.split(x, sizes, axis)


@lowering("SplitToSequence", since=11)
def split_to_sequence(c: Call) -> Result:
    """The parts, of a size, of given sizes, or of one element each, which may lose the axis.

    A list that only a run tells is one result; a list of known length has a result for each of its parts.
    """
    x, axis, keep = c[0], c.int_("axis", 0), c.flag("keepdims", default=True)
    if c.has(1):
        sizes = c.integers(1, "list of sizes")
        scalar = c.constant(1, "list of sizes").array.ndim == 0
        parts = torch.split(x, sizes[0] if scalar else sizes, axis)
    else:
        parts = torch.split(x, 1, axis) if keep else x.unbind(axis)
    return list(parts) if c.runs else tuple(parts)


@lowering("ConcatFromSequence", since=11)
def concat_from_sequence(c: Call) -> Result:
    """Join along an axis, an old one or a new one."""
    return (torch.stack if c.flag("new_axis") else torch.cat)(c.all(), c.int_("axis", 0))


@lowering("DepthToSpace")
def depth_to_space(c: Call) -> Result:
    """Blocks of channels become blocks of space."""
    x, b = c[0], c.int_("blocksize", 1)
    n, channels, h, w = x.shape
    if c.str_("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, b)
    y = x.reshape(n, b, b, channels // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    return y.reshape(n, channels // (b * b), h * b, w * b)


@lowering("SpaceToDepth")
def space_to_depth(c: Call) -> Result:
    """Blocks of space become blocks of channels."""
    x, b = c[0], c.int_("blocksize", 1)
    n, channels, h, w = x.shape
    y = x.reshape(n, channels, h // b, b, w // b, b)
    y = y.permute(0, 1, 3, 5, 2, 4) if c.str_("mode", "DCR") == "CRD" else y.permute(0, 3, 5, 1, 2, 4)
    return y.reshape(n, channels * b * b, h // b, w // b)


@lowering("Trilu", since=14)
def trilu(c: Call) -> Result:
    """The upper or the lower triangle."""
    k = c.integer(1, "diagonal") if c.has(1) else 0
    return torch.triu(c[0], k) if c.flag("upper", default=True) else torch.tril(c[0], k)


@lowering("Pad")
def pad_by_attribute(c: Call) -> Result:
    """Counts and value are attributes."""
    pads = c.ints_("pads") or c.ints_("paddings") or []
    return _pad(c, pads, list(range(c[0].ndim)), c.float_("value", 0.0))


@lowering("Pad", since=11)
def pad(c: Call) -> Result:
    """Counts, value and axes are operands."""
    axes = c.integers(3, "list of axes") if c.has(3) else list(range(c[0].ndim))
    value = c.number(2, "value") if c.has(2) else 0
    return _pad(c, c.integers(1, "list of pads"), axes, value)


def _pad(c: Call, pads: Sequence[int], axes: Sequence[int], value: float) -> Result:
    x, mode = c[0], c.str_("mode", "constant")
    c.require(len(pads) == 2 * len(axes), f"has {len(pads)} pads for {len(axes)} axes")
    both = [(0, 0)] * x.ndim
    for i, axis in enumerate(axes):
        both[axis] = (pads[i], pads[len(axes) + i])
    if mode == "constant":
        last = max((i for i, counts in enumerate(both) if any(counts)), default=-1)
        first = min((i for i, counts in enumerate(both) if any(counts)), default=0)
        flat = [n for counts in reversed(both[first:]) for n in counts]
        return x if last < 0 else F.pad(x, flat, value=value)
    if mode not in ("reflect", "edge", "wrap"):
        c.refuse(f"with mode={mode}")
    return _pad_by_copy(c, x, both, mode)


def _pad_by_copy(c: Call, x: Tensor, both: Sequence[tuple[int, int]], mode: str) -> Tensor:
    moved = [i for i, counts in enumerate(both) if any(counts)]
    spatial = 1 <= x.ndim - 2 <= 3 and all(i >= 2 for i in moved) and all(min(counts) >= 0 for counts in both)
    small = all(max(both[i]) < x.shape[i] for i in moved)
    if moved and spatial and x.is_floating_point() and (mode == "edge" or (mode == "reflect" and small)):
        flat = [n for counts in reversed(both[2:]) for n in counts]
        return F.pad(x, flat, mode="replicate" if mode == "edge" else mode)
    for axis in moved:
        indices = _source_indices(c, x.shape[axis], both[axis], mode)
        x = x.index_select(axis, c.literal(lambda indices=indices: torch.from_numpy(indices)))
    return x


def _source_indices(c: Call, n: int, counts: tuple[int, int], mode: str) -> npt.NDArray[np.int64]:
    """Returns the source of each element of a padded axis; negative counts cut before the rest is copied."""
    start, end = max(-counts[0], 0), n - max(-counts[1], 0)
    n, before, after = end - start, max(counts[0], 0), max(counts[1], 0)
    if n < 1:
        raise ValueError(f"{mode} pads of {counts} leave nothing to copy from")
    i = c.positions(before + n + after) - before
    if mode == "edge":
        return start + i.clip(0, n - 1)
    if mode == "wrap":
        return start + i % n
    period = max(2 * (n - 1), 1)
    i = i % period
    return start + np.where(i < n, i, period - i)
