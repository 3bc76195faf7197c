"""Pooling over windows and over whole planes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .convolution import pad_spatial, padding_of, steps_of
from .table import Call, Result, lowering

_MAX: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_MAX_INDICES: dict[int, Callable[..., Any]] = {
    1: F.max_pool1d_with_indices,
    2: F.max_pool2d_with_indices,
    3: F.max_pool3d_with_indices,
}
_AVERAGE: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _average(x: Tensor, *how: Any) -> Tensor:
    if x.ndim == 5 and x.element_size() == 2 and x.device.type == "cpu":  # which torch has not
        return F.avg_pool3d(x.float(), *how).to(x.dtype)
    return _AVERAGE[x.ndim - 2](x, *how)


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows of one pooling: `out` of them along each axis, the last ending `after` past the data."""

    kernel: list[int]
    stride: list[int]
    dilation: list[int]
    before: list[int]
    after: list[int]
    declared: list[int]
    ceil: bool

    @property
    def native(self) -> bool:
        """Whether torch's own padding says the same."""
        half = all(2 * b <= k for b, k in zip(self.before, self.kernel, strict=True))
        return half and self.before == self.declared


def _windows(c: Call, x: Tensor) -> _Windows:
    rank = x.ndim - 2
    if rank not in _MAX:
        c.refuse(f"over {rank} spatial axes")
    kernel = c.ints_("kernel_shape") or []
    c.require(len(kernel) == rank, f"has kernel_shape={kernel} for {rank} spatial axes")
    stride, dilation = steps_of(c, kernel)
    ceil = c.flag("ceil_mode")
    before, declared = padding_of(c, x.shape[2:], kernel, stride, dilation)
    same = c.str_("auto_pad", "NOTSET").startswith("SAME")
    fits = same or all(0 <= p < k for p, k in zip(before + declared, kernel * 2, strict=True))
    c.require(fits, f"has pads={before + declared} and kernel_shape={kernel}; pads are less than the kernel")
    after: list[int] = []
    for n, k, s, d, b, e in zip(x.shape[2:], kernel, stride, dilation, before, declared, strict=True):
        reach = d * (k - 1) + 1
        room = n + b + e - reach
        if same and (math.ceil(n / s) - 1) * s + reach < n:
            c.refuse("with auto_pad and windows that leave gaps")  # where they begin is not agreed on
        out = (math.ceil(room / s) if ceil else room // s) + 1
        if ceil and (out - 1) * s >= n + b:
            out -= 1  # a window that would start past the data and its leading padding
        after.append((out - 1) * s + reach - n - b)
    return _Windows(kernel, stride, dilation, before, after, declared, ceil)


@lowering("MaxPool")
def max_pool(c: Call) -> Result:
    """Padding counts as minus infinity."""
    x = c[0]
    w = _windows(c, x)
    rank, by_columns = x.ndim - 2, c.flag("storage_order")
    if c.wants(1):
        return _max_pool_with_indices(x, w, c, by_columns=by_columns)
    dtype = x.dtype
    x = x if x.is_floating_point() else x.float()
    if w.native:
        return _MAX[rank](x, w.kernel, w.stride, w.before, w.dilation, ceil_mode=w.ceil).to(dtype)
    x = pad_spatial(x, w.before, w.after, value=-math.inf)
    return _MAX[rank](x, w.kernel, w.stride, 0, w.dilation).to(dtype)


def _max_pool_with_indices(x: Tensor, w: _Windows, c: Call, *, by_columns: bool) -> Result:
    """The second output counts through the whole tensor; within a plane by rows, or by columns if asked."""
    dtype, size = x.dtype, x.shape[2:]
    x = x if x.is_floating_point() else x.float()
    if w.native:
        y, found = _MAX_INDICES[x.ndim - 2](x, w.kernel, w.stride, w.before, w.dilation, ceil_mode=w.ceil)
        searched, before = size, [0] * len(size)
    else:
        x = pad_spatial(x, w.before, w.after, value=-math.inf)
        y, found = _MAX_INDICES[x.ndim - 2](x, w.kernel, w.stride, 0, w.dilation)
        searched, before = x.shape[2:], w.before
    indices = torch.zeros_like(found)
    step, axes = 1, list(range(len(size)))
    for axis in axes if by_columns else reversed(axes):
        place = found // math.prod(searched[axis + 1 :]) % searched[axis] - before[axis]
        indices = indices + place * step
        step *= size[axis]
    shape = (*x.shape[:2], *[1] * len(size))
    first = c.literal(lambda: torch.arange(math.prod(x.shape[:2])).reshape(shape) * step)
    return y.to(dtype), indices + first


@lowering("MaxUnpool", since=9)
def max_unpool(c: Call) -> Result:
    """Zeros but for the elements given, at the places that a MaxPool found.

    The places count through the shape that kernel, strides and padding imply; another shape that is asked for
    is this one cut off or filled with zeros at its end.
    """
    x, rank = c[0], c[0].ndim - 2
    kernel, stride = c.ints_("kernel_shape") or [], c.ints_("strides") or [1] * rank
    pads = c.ints_("pads") or [0] * 2 * rank
    implied = [
        (n - 1) * s - pads[i] - pads[i + rank] + k
        for i, (n, s, k) in enumerate(zip(x.shape[2:], stride, kernel, strict=True))
    ]
    y = x.new_zeros(math.prod(x.shape[:2]) * math.prod(implied))
    y = y.scatter(0, c[1].reshape(-1), x.reshape(-1)).reshape(*x.shape[:2], *implied)
    if not c.has(2):
        return y
    shape = c.integers(2, "output shape")
    return pad_spatial(y, [0] * rank, [n - m for n, m in zip(shape[2:], implied, strict=True)])


def _window_sum(x: Tensor, w: _Windows) -> Tensor:
    rank = x.ndim - 2
    x = pad_spatial(x, w.before, w.after)
    if all(d == 1 for d in w.dilation):
        return _average(x, w.kernel, w.stride) * math.prod(w.kernel)
    ones = torch.ones(1, 1, *w.kernel, dtype=x.dtype, device=x.device)
    flat = x.reshape(-1, 1, *x.shape[2:])
    y = _CONV[rank](flat, ones, None, w.stride, 0, w.dilation)
    return y.reshape(*x.shape[:2], *y.shape[2:])


@lowering("AveragePool")
def average_pool(c: Call) -> Result:
    """Padding counts in the divisor only when asked."""
    x = c[0]
    w = _windows(c, x)
    include = c.flag("count_include_pad")
    if w.native and all(d == 1 for d in w.dilation):
        return _average(x, w.kernel, w.stride, w.before, w.ceil, include)
    return _window_sum(x, w) / c.literal(lambda: _window_counts(x.shape[2:], w, include, x.dtype))


def _window_counts(size: Sequence[int], w: _Windows, include: bool, dtype: torch.dtype) -> Tensor:
    """Returns the number of elements over which each window averages."""
    ones = torch.ones(1, 1, *size)
    if include:
        ones = pad_spatial(ones, w.before, w.declared, value=1.0)
        over = [a - e for a, e in zip(w.after, w.declared, strict=True)]
        w = _Windows(w.kernel, w.stride, w.dilation, [0] * len(over), over, w.declared, w.ceil)
    return _window_sum(ones, w).to(dtype)


@lowering("LpPool")
def lp_pool(c: Call) -> Result:
    """The p-norm of each window."""
    x, p = c[0], c.float_("p", 2.0)
    total = _window_sum(x.abs() ** p, _windows(c, x))
    # The root of zeros alone has no slope.
    zero = total == 0.0
    return (total.masked_fill(zero, 1.0) ** (1.0 / p)).masked_fill(zero, 0.0)


@lowering("GlobalAveragePool")
def global_average_pool(c: Call) -> Result:
    """The mean of each plane."""
    return c[0].mean(tuple(range(2, c[0].ndim)), keepdim=True)


@lowering("GlobalMaxPool")
def global_max_pool(c: Call) -> Result:
    """The greatest of each plane."""
    return c[0].amax(tuple(range(2, c[0].ndim)), keepdim=True)


@lowering("GlobalLpPool")
def global_lp_pool(c: Call) -> Result:
    """The p-norm of each plane."""
    return torch.linalg.vector_norm(c[0], c.float_("p", 2.0), tuple(range(2, c[0].ndim)), keepdim=True)
