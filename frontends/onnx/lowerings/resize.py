"""Resampling.

Every size is known at import, so where each result comes from is worked out in numbers first. torch's own
`interpolate` runs when its formula gives these numbers; else rows are picked and blended one axis at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import Call, Result, lowering


class _Axis(NamedTuple):
    """One axis to resample: its sizes, and the scale the node means, which rounding may part from them."""

    axis: int
    size: int
    out: int
    scale: float


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


def _by_version_10(c: Call, scales: Sequence[float]) -> Result:
    x, mode = c[0], c.str_("mode", "nearest")
    axes = [_Axis(i, x.shape[i], math.floor(x.shape[i] * s), s) for i, s in enumerate(scales) if s != 1.0]
    if mode == "nearest":
        if any(a.scale < 1.0 and not (1 / a.scale).is_integer() for a in axes):
            c.refuse("that shrinks by a fraction")  # versions of the standard disagree on the rounding
        return _nearest(c, x, axes, "asymmetric", "floor")
    if mode in ("linear", "bilinear"):
        return _linear(c, x, axes, "asymmetric")
    c.refuse(f"with mode={mode}")


@lowering("Resize", since=11)
def resize(c: Call) -> Result:
    """By scales or by sizes, under the coordinate transformations that are exact here."""
    x, mode = c[0], c.str_("mode", "nearest")
    transform = c.str_("coordinate_transformation_mode", "half_pixel")
    if transform not in _SOURCE:
        c.refuse(f"with coordinate_transformation_mode={transform}")
    for name in ("antialias", "exclude_outside"):
        if c.int_(name, 0):
            c.refuse(f"with {name}=1")
    if c.str_("keep_aspect_ratio_policy", "stretch") != "stretch":
        c.refuse(f"with keep_aspect_ratio_policy={c.str_('keep_aspect_ratio_policy', '')}")
    axes = _axes_of(c, x)
    if transform == "align_corners" and any(not float(a.scale * a.size).is_integer() for a in axes):
        c.refuse(
            "with align_corners by scales that leave a fraction"
        )  # runtimes disagree on where the corner is
    if mode == "nearest":
        return _nearest(c, x, axes, transform, c.str_("nearest_mode", "round_prefer_floor"))
    if mode == "linear":
        return _linear(c, x, axes, transform)
    c.refuse(f"with mode={mode}")


def _axes_of(c: Call, x: Tensor) -> list[_Axis]:
    where = [axis % x.ndim for axis in c.ints_("axes") or range(x.ndim)]
    found: list[_Axis] = []
    static = c.static(2)
    if c.has(2) and (static is None or static.array.size):
        scales = c.constant(2, "list of scales").array.reshape(-1).tolist()
        for axis, scale in zip(where, scales, strict=True):
            found.append(_Axis(axis, x.shape[axis], math.floor(x.shape[axis] * scale), float(scale)))
    else:
        for axis, out in zip(where, c.integers(3, "list of sizes"), strict=True):
            found.append(_Axis(axis, x.shape[axis], out, out / x.shape[axis]))
    for a in found:
        c.positions(a.out)
    return [a for a in found if a.scale != 1.0]


def _half_pixel(i: int, a: _Axis) -> float:
    return (i + 0.5) / a.scale - 0.5


def _pytorch_half_pixel(i: int, a: _Axis) -> float:
    return (i + 0.5) / a.scale - 0.5 if a.out > 1 else 0.0


def _half_pixel_symmetric(i: int, a: _Axis) -> float:
    # Rounding the length moves the centre; this keeps it.
    adjustment = a.out / (a.scale * a.size)
    return a.size / 2 * (1 - adjustment) + (i + 0.5) / a.scale - 0.5


def _align_corners(i: int, a: _Axis) -> float:
    return i * (a.size - 1) / (a.out - 1) if a.out > 1 else 0.0


def _asymmetric(i: int, a: _Axis) -> float:
    return i / a.scale


_SOURCE = {
    "half_pixel": _half_pixel,
    "pytorch_half_pixel": _pytorch_half_pixel,
    "half_pixel_symmetric": _half_pixel_symmetric,
    "align_corners": _align_corners,
    "asymmetric": _asymmetric,
}

_ROUND = {
    "round_prefer_floor": lambda v: math.ceil(v - 0.5),
    "round_prefer_ceil": lambda v: math.floor(v + 0.5),
    "floor": math.floor,
    "ceil": math.ceil,
}


def _spatial(x: Tensor, axes: Sequence[_Axis]) -> bool:
    """Whether torch's `interpolate` takes such a tensor."""
    return 3 <= x.ndim <= 5 and all(a.axis >= 2 for a in axes) and x.is_floating_point()


def _sizes(x: Tensor, axes: Sequence[_Axis]) -> list[int]:
    sizes = list(x.shape[2:])
    for a in axes:
        sizes[a.axis - 2] = a.out
    return sizes


def _nearest(c: Call, x: Tensor, axes: Sequence[_Axis], transform: str, rounding: str) -> Tensor:
    if rounding not in _ROUND:
        c.refuse(f"with nearest_mode={rounding}")
    picked = {
        a: [min(max(_ROUND[rounding](_SOURCE[transform](i, a)), 0), a.size - 1) for i in range(a.out)]
        for a in axes
    }
    if (
        axes
        and _spatial(x, axes)
        and all(p == [i * a.size // a.out for i in range(a.out)] for a, p in picked.items())
    ):
        return F.interpolate(x, size=_sizes(x, axes), mode="nearest")
    for a, indices in picked.items():
        x = x.index_select(a.axis, c.literal(lambda indices=indices: torch.tensor(indices)))
    return x


_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}


def _linear(c: Call, x: Tensor, axes: Sequence[_Axis], transform: str) -> Tensor:
    if not x.is_floating_point():
        c.refuse(f"with mode=linear on {x.dtype}")
    exact = all(
        a.scale * a.size == a.out or math.isclose(a.scale, a.out / a.size, rel_tol=1e-7) for a in axes
    )
    native = transform in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel") and exact
    native = native and (transform != "pytorch_half_pixel" or all(a.out > 1 for a in axes))
    if axes and _spatial(x, axes) and (native or transform == "align_corners"):
        corners = transform == "align_corners"
        return F.interpolate(x, size=_sizes(x, axes), mode=_LINEAR[x.ndim], align_corners=corners)
    for a in axes:
        x = _blend(c, x, a, [_SOURCE[transform](i, a) for i in range(a.out)])
    return x


def _blend(c: Call, x: Tensor, a: _Axis, source: Sequence[float]) -> Tensor:
    """Each result as a mean of the two elements around its source, with the outermost repeated."""
    source = [min(max(s, 0.0), a.size - 1.0) for s in source]
    low = [min(math.floor(s), a.size - 1) for s in source]
    high = [min(n + 1, a.size - 1) for n in low]
    shape = [-1, *[1] * (x.ndim - a.axis - 1)]
    share = c.literal(
        lambda: torch.tensor([s - n for s, n in zip(source, low, strict=True)]).reshape(shape).to(x.dtype)
    )
    below = x.index_select(a.axis, c.literal(lambda: torch.tensor(low)))
    above = x.index_select(a.axis, c.literal(lambda: torch.tensor(high)))
    return below * (1 - share) + above * share
