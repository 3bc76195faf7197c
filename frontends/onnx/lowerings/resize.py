"""Resampling.

Every size is known at import, so where each result comes from is worked out in numbers first. torch's own
`interpolate` runs when its formula gives these numbers; else rows are picked and blended one axis at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Call, Result, lowering

_Numbers: TypeAlias = "npt.NDArray[Any]"


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis to resample: its sizes, and the scale the node means, which rounding may part from them.

    Args:
        axis: Its index.
        size: Its size in the operand.
        out: Its size in the result.
        scale: The number of results for each element.
        start: The start of the part to resample, as a share of the axis.
        end: Its end.
    """

    axis: int
    size: int
    out: int
    scale: float
    start: float = 0.0
    end: float = 1.0

    @property
    def whole(self) -> bool:
        """Whether scale and sizes say the same."""
        return self.scale * self.size == self.out or math.isclose(
            self.scale, self.out / self.size, rel_tol=1e-7
        )


@dataclass(frozen=True, slots=True)
class _Filter:
    """Weighs the elements around a position.

    Args:
        name: The ONNX mode.
        reach: Its radius, in elements.
        weight: The weight of an element by its distance.
        antialias: Whether it is stretched if elements get fewer.
        exclude: Whether what lies outside has no weight, and is not the outermost element instead.
    """

    name: str
    reach: int
    weight: Callable[[_Numbers], _Numbers]
    antialias: bool
    exclude: bool


@lowering("Upsample")
def upsample_1(c: Call) -> Result:
    """Scales of the last two axes are attributes."""
    scales = [c.float_("height_scale", 1.0), c.float_("width_scale", 1.0)]
    return _by_version_10(c, [1.0] * (c[0].ndim - 2) + scales)


@lowering("Upsample", since=7)
def upsample(c: Call) -> Result:
    """Scales are an attribute, and from version 9 an operand."""
    return _by_version_10(c, _scales(c, 1))


@lowering("Resize", since=10)
def resize_10(c: Call) -> Result:
    """Scales only, and output coordinates divided by them."""
    return _by_version_10(c, _scales(c, 1))


def _scales(c: Call, index: int) -> list[float]:
    value = c.attribute("scales")
    if isinstance(value, tuple):
        return [float(v) for v in value]
    return [float(v) for v in c.constant(index, "list of scales").array.reshape(-1).tolist()]


def _scaled(size: int, scale: float) -> int:
    # In the precision of the operand, in which 0.7 of 10 is 7.
    return math.floor(np.float32(size) * np.float32(scale))


def _by_version_10(c: Call, scales: Sequence[float]) -> Result:
    x, mode = c[0], c.str_("mode", "nearest")
    axes = [_Axis(i, x.shape[i], _scaled(x.shape[i], s), s) for i, s in enumerate(scales) if s != 1.0]
    if mode == "nearest":
        if any(a.scale < 1.0 and not (1 / a.scale).is_integer() for a in axes):
            c.refuse("that shrinks by a fraction")  # versions of the standard disagree on the rounding
        return _nearest(c, x, axes, "asymmetric", "floor")
    if mode in ("linear", "bilinear"):
        return _filtered(c, x, axes, "asymmetric", _Filter("linear", 1, _triangle, False, False))
    c.refuse(f"with mode={mode}")


@lowering("Resize", since=11)
def resize(c: Call) -> Result:
    """By scales or by sizes, in every mode and under every coordinate transformation."""
    x, mode = c[0], c.str_("mode", "nearest")
    transform = c.str_("coordinate_transformation_mode", "half_pixel")
    if transform not in _SOURCE:
        c.refuse(f"with coordinate_transformation_mode={transform}")
    antialias, exclude = c.flag("antialias"), c.flag("exclude_outside")
    axes = _axes_of(c, x, transform)
    if mode == "nearest":
        if antialias or exclude:
            c.refuse("with mode=nearest and " + ("antialias=1" if antialias else "exclude_outside=1"))
        y = _nearest(c, x, axes, transform, c.str_("nearest_mode", "round_prefer_floor"))
    elif mode == "linear":
        y = _filtered(c, x, axes, transform, _Filter(mode, 1, _triangle, antialias, exclude))
    elif mode == "cubic":
        weight = _Cubic(c.float_("cubic_coeff_a", -0.75))
        y = _filtered(c, x, axes, transform, _Filter(mode, 2, weight, antialias, exclude))
    else:
        c.refuse(f"with mode={mode}")
    return _extrapolated(c, y, axes) if transform == "tf_crop_and_resize" else y


def _axes_of(c: Call, x: Tensor, transform: str) -> list[_Axis]:
    where = [axis % x.ndim for axis in c.ints_("axes") or range(x.ndim)]
    policy = c.str_("keep_aspect_ratio_policy", "stretch")
    c.require(len(set(where)) == len(where), f"names an axis twice: {where}")
    found: list[_Axis] = []
    static = c.static(2)
    if c.has(2) and (static is None or static.array.size):
        scales = c.constant(2, "list of scales").array.reshape(-1).tolist()
        for axis, scale in zip(where, scales, strict=True):
            found.append(_Axis(axis, x.shape[axis], _scaled(x.shape[axis], scale), float(scale)))
    else:
        sizes = c.integers(3, "list of sizes")
        c.require(all(n > 0 for n in sizes), f"has sizes {sizes}; each is at least 1")
        for axis, out in zip(where, sizes, strict=True):
            found.append(_Axis(axis, x.shape[axis], out, out / x.shape[axis]))
    for a in found:
        c.positions(a.out)
        if policy not in ("stretch", "not_larger", "not_smaller"):
            c.refuse(f"with keep_aspect_ratio_policy={policy}")
        if policy != "stretch":
            scale = (min if policy == "not_larger" else max)(a.scale for a in found)
            found = [_Axis(a.axis, a.size, math.floor(scale * a.size + 0.5), scale) for a in found]
    if transform == "tf_crop_and_resize":
        return _cropped(c, found)
    return [a for a in found if a.scale != 1.0]


def _cropped(c: Call, axes: Sequence[_Axis]) -> list[_Axis]:
    if not c.has(1):
        c.refuse("with coordinate_transformation_mode=tf_crop_and_resize and no roi")
    roi = c.constant(1, "region of interest").array.astype(np.float64).reshape(2, -1).T.tolist()
    found: list[_Axis] = []
    for a, (start, end) in zip(axes, roi, strict=True):
        # By scales, the standard's text and its reference disagree on the size of the result.
        if not a.whole or (c.has(2) and math.floor(a.size * (end - start) * a.scale) != a.out):
            c.refuse("with coordinate_transformation_mode=tf_crop_and_resize by scales that leave a fraction")
        if (a.scale, start, end) != (1.0, 0.0, 1.0):
            found.append(_Axis(a.axis, a.size, a.out, a.scale, start, end))
    return found


# Where results come from, for the positions `i`.


def _half_pixel(i: _Numbers, a: _Axis) -> _Numbers:
    return (i + 0.5) / a.scale - 0.5


def _pytorch_half_pixel(i: _Numbers, a: _Axis) -> _Numbers:
    return (i + 0.5) / a.scale - 0.5 if a.out > 1 else 0.0 * i


def _half_pixel_symmetric(i: _Numbers, a: _Axis) -> _Numbers:
    # Rounding the length moves the centre; this keeps it.
    adjustment = a.out / (a.scale * a.size)
    return a.size / 2 * (1 - adjustment) + (i + 0.5) / a.scale - 0.5


def _align_corners(i: _Numbers, a: _Axis) -> _Numbers:
    length = a.out if a.whole else a.scale * a.size  # of a fraction, before it is rounded
    return i * (a.size - 1) / (length - 1) if length != 1 else 0.0 * i


def _asymmetric(i: _Numbers, a: _Axis) -> _Numbers:
    return i / a.scale


def _tf_crop_and_resize(i: _Numbers, a: _Axis) -> _Numbers:
    last = a.size - 1
    if a.out == 1:
        return 0.0 * i + (a.start + a.end) / 2 * last
    return a.start * last + i * (a.end - a.start) * last / (a.out - 1)


_SOURCE: dict[str, Callable[[_Numbers, _Axis], _Numbers]] = {
    "half_pixel": _half_pixel,
    "pytorch_half_pixel": _pytorch_half_pixel,
    "half_pixel_symmetric": _half_pixel_symmetric,
    "align_corners": _align_corners,
    "asymmetric": _asymmetric,
    "tf_crop_and_resize": _tf_crop_and_resize,
}


def _sources(a: _Axis, transform: str) -> _Numbers:
    return _SOURCE[transform](np.arange(a.out, dtype=np.float64), a)


def _extrapolated(c: Call, y: Tensor, axes: Sequence[_Axis]) -> Tensor:
    """A value of its own for results that come from outside."""
    value = c.float_("extrapolation_value", 0.0)
    for a in axes:
        source = _sources(a, "tf_crop_and_resize")
        outside = (source < 0) | (source > a.size - 1)
        if outside.any():
            shape = [-1, *[1] * (y.ndim - a.axis - 1)]
            y = y.masked_fill(c.literal(lambda m=outside, s=shape: torch.from_numpy(m).reshape(s)), value)
    return y


# The nearest element

_ROUND: dict[str, Callable[[_Numbers], _Numbers]] = {
    "round_prefer_floor": lambda v: np.ceil(v - 0.5),
    "round_prefer_ceil": lambda v: np.floor(v + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _spatial(x: Tensor, axes: Sequence[_Axis]) -> bool:
    """Whether torch's `interpolate` takes such a tensor."""
    return (
        bool(axes) and 3 <= x.ndim <= 5 and all(a.axis >= 2 and a.out for a in axes) and x.is_floating_point()
    )


def _sizes(x: Tensor, axes: Sequence[_Axis]) -> list[int]:
    sizes = list(x.shape[2:])
    for a in axes:
        sizes[a.axis - 2] = a.out
    return sizes


def _nearest(c: Call, x: Tensor, axes: Sequence[_Axis], transform: str, rounding: str) -> Tensor:
    if rounding not in _ROUND:
        c.refuse(f"with nearest_mode={rounding}")
    picked = {
        a: np.clip(_ROUND[rounding](_sources(a, transform)), 0, a.size - 1).astype(np.int64) for a in axes
    }
    if _spatial(x, axes) and all((p == np.arange(a.out) * a.size // a.out).all() for a, p in picked.items()):
        return F.interpolate(x, size=_sizes(x, axes), mode="nearest")
    for a, indices in picked.items():
        x = x.index_select(a.axis, c.literal(lambda indices=indices: torch.from_numpy(indices)))
    return x


# Weighted means

_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}


def _triangle(distance: _Numbers) -> _Numbers:
    return np.maximum(1.0 - distance, 0.0)


@dataclass(frozen=True, slots=True)
class _Cubic:
    a: float

    def __call__(self, distance: _Numbers) -> _Numbers:
        a, d = self.a, distance
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _native(x: Tensor, axes: Sequence[_Axis], transform: str, how: _Filter) -> dict[str, Any] | None:
    """Returns the arguments with which torch's `interpolate` computes the same, or None."""
    pixels = transform in ("half_pixel", "half_pixel_symmetric") or (
        transform == "pytorch_half_pixel" and all(a.out > 1 for a in axes)
    )
    if not _spatial(x, axes) or not all(a.whole for a in axes):
        return None
    if not (pixels or (transform == "align_corners" and not how.antialias)):
        return None
    if how.name == "cubic":
        own = _Cubic(-0.5 if how.antialias else -0.75)
        if x.ndim != 4 or how.weight != own:
            return None
    # Its own filters weigh the outermost element for what lies outside, its antialiasing ones do not.
    inside = how.antialias or how.name == "cubic"
    if (how.antialias and x.ndim != 4) or (inside and how.exclude != how.antialias):
        return None
    mode = "bicubic" if how.name == "cubic" else _LINEAR[x.ndim]
    return {"mode": mode, "align_corners": not pixels, "antialias": how.antialias}


def _filtered(c: Call, x: Tensor, axes: Sequence[_Axis], transform: str, how: _Filter) -> Tensor:
    native = _native(x, axes, transform, how)
    if native is not None:
        # Its cubic filter rounds the weights to the type of the data.
        wide = x.float() if how.name == "cubic" and x.element_size() == 2 else x
        return F.interpolate(wide, size=_sizes(x, axes), **native).to(x.dtype)
    if x.is_complex() or x.dtype is torch.bool:
        c.refuse(f"with mode={how.name} on {x.dtype}")
    dtype = x.dtype
    if not x.is_floating_point():
        x = x.double()
    elif x.element_size() == 2:
        x = x.float()
    for a in axes:
        x = _blend(c, x, a, _sources(a, transform), how)
    if dtype.is_floating_point:
        return x.to(dtype)
    limits = torch.iinfo(dtype)
    return x.round().clamp(limits.min, limits.max).to(dtype)


def _blend(c: Call, x: Tensor, a: _Axis, source: _Numbers, how: _Filter) -> Tensor:
    """Each result as a weighted mean of the elements around its source."""
    taps, weights = _taps(c, a, source, how)
    shape = [*weights.shape, *[1] * (x.ndim - a.axis - 1)]
    near = x.index_select(a.axis, c.literal(lambda: torch.from_numpy(taps.reshape(-1))))
    shares = c.literal(lambda: torch.from_numpy(weights).reshape(shape).to(x.dtype))
    return (near.unflatten(a.axis, weights.shape) * shares).sum(a.axis + 1)


def _taps(c: Call, a: _Axis, source: _Numbers, how: _Filter) -> tuple[_Numbers, _Numbers]:
    """Returns the elements that each result reads, and their weights."""
    narrowing = min(a.scale, 1.0) if how.antialias else 1.0
    first = math.floor(-how.reach / narrowing) + 1
    c.check_listed(len(source), 2 - 2 * first)
    base = np.ceil(source) - 1  # the element before the source
    taps = base[:, None] + np.arange(first, 2 - first)
    weights = how.weight(np.abs(taps - source[:, None]) * narrowing)
    if how.exclude:
        inside = (taps >= 0) & (taps < a.size)
        # If nothing is inside, the outermost element is left.
        weights = np.where(inside | ~inside.any(1, keepdims=True), weights, 0.0)
    if how.exclude or how.antialias:
        weights = weights / weights.sum(1, keepdims=True)
    used = weights.any(0)
    return np.clip(taps, 0, a.size - 1).astype(np.int64)[:, used], weights[:, used]
