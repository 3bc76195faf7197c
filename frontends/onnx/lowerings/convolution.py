"""Convolution and its transpose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .table import Call, Result, lowering

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


def padding_of(
    c: Call, size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Padding before and after each spatial axis of a window operator, whatever way the node gives it."""
    rank = len(size)
    mode = c.str_("auto_pad", "NOTSET")
    if mode == "NOTSET":
        pads = c.ints_("pads") or [0] * 2 * rank
        fits = len(pads) == 2 * rank and all(n >= 0 for n in pads)
        c.require(fits, f"has pads={pads} for {rank} spatial axes; each has two, of at least 0")
        return pads[:rank], pads[rank:]
    if mode == "VALID":
        return [0] * rank, [0] * rank
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        c.refuse(f"with auto_pad={mode}")
    before: list[int] = []
    after: list[int] = []
    for n, k, s, d in zip(size, kernel, stride, dilation, strict=True):
        total = max((math.ceil(n / s) - 1) * s + d * (k - 1) + 1 - n, 0)
        small, large = total // 2, total - total // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return before, after


def pad_spatial(x: Tensor, before: Sequence[int], after: Sequence[int], value: float = 0.0) -> Tensor:
    """Pad (or with negative counts, crop) the trailing axes."""
    pads = [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]
    return F.pad(x, pads, value=value) if any(pads) else x


def steps_of(c: Call, kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """The stride and dilation of a window operator along each spatial axis."""
    rank = len(kernel)
    stride, dilation = c.ints_("strides") or [1] * rank, c.ints_("dilations") or [1] * rank
    for name, values in (("kernel_shape", kernel), ("strides", stride), ("dilations", dilation)):
        fits = len(values) == rank and all(n > 0 for n in values)
        c.require(fits, f"has {name}={list(values)} for {rank} spatial axes; each is at least 1")
    return stride, dilation


def _windows(c: Call, weight: Tensor, rank: int) -> tuple[list[int], list[int]]:
    """Stride and dilation of a convolution, whose kernel is its weight's."""
    size = list(weight.shape[2:])
    kernel = c.ints_("kernel_shape") or size
    c.require(kernel == size, f"has kernel_shape={kernel} and a weight of shape {list(weight.shape)}")
    c.require(weight.ndim == rank + 2, f"has a weight of shape {list(weight.shape)} over {rank} spatial axes")
    return steps_of(c, size)


@lowering("Conv")
def conv(c: Call) -> Result:
    """Padding that differs before and after is done ahead of the convolution."""
    x, weight, bias = c[0], c[1], c.optional(2)
    rank = x.ndim - 2
    if rank not in _CONV:
        c.refuse(f"over {rank} spatial axes")
    stride, dilation = _windows(c, weight, rank)
    before, after = padding_of(c, x.shape[2:], weight.shape[2:], stride, dilation)
    if before != after:
        x, before = pad_spatial(x, before, after), [0] * rank
    return _CONV[rank](x, weight, bias, stride, before, dilation, c.int_("group", 1))


@lowering("ConvTranspose")
def conv_transpose(c: Call) -> Result:
    """Computes the full result and crops it if torch's own padding cannot express the padding."""
    x, weight, bias = c[0], c[1], c.optional(2)
    rank = x.ndim - 2
    if rank not in _CONV_TRANSPOSE:
        c.refuse(f"over {rank} spatial axes")
    stride, dilation = _windows(c, weight, rank)
    extra = c.ints_("output_padding") or [0] * rank
    fits = len(extra) == rank and all(
        0 <= e < max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)
    )
    c.require(
        fits,
        f"has output_padding={extra} with strides={stride} and dilations={dilation}; it is less than one of"
        " them",
    )
    full = [
        s * (n - 1) + d * (k - 1) + 1
        for n, s, d, k in zip(x.shape[2:], stride, dilation, weight.shape[2:], strict=True)
    ]
    before, after = _transposed_padding(c, x.shape[2:], full, extra, stride)
    sizes = [f + e - b - a for f, e, b, a in zip(full, extra, before, after, strict=True)]
    c.require(min(sizes) > 0, f"makes spatial axes of {sizes} elements")
    options: dict[str, Any] = {"stride": stride, "groups": c.int_("group", 1), "dilation": dilation}
    if before == after and min(before) >= 0:
        return _CONV_TRANSPOSE[rank](x, weight, bias, padding=before, output_padding=extra, **options)
    y = _CONV_TRANSPOSE[rank](x, weight, None, **options)
    y = pad_spatial(y, [-b for b in before], [e - a for e, a in zip(extra, after, strict=True)])
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


def _transposed_padding(
    c: Call, size: Sequence[int], full: Sequence[int], extra: Sequence[int], stride: Sequence[int]
) -> tuple[list[int], list[int]]:
    rank = len(size)
    mode = c.str_("auto_pad", "NOTSET")
    shape = c.ints_("output_shape")
    if shape is None and mode in ("NOTSET", "VALID"):
        pads = c.ints_("pads") if mode == "NOTSET" else None
        pads = pads or [0] * 2 * rank
        fits = len(pads) == 2 * rank and all(n >= 0 for n in pads)
        c.require(fits, f"has pads={pads} for {rank} spatial axes; each has two, of at least 0")
        return pads[:rank], pads[rank:]
    if shape is None:
        shape = [n * s for n, s in zip(size, stride, strict=True)]
    c.require(len(shape) in (rank, rank + 2), f"has output_shape={shape} for {rank} spatial axes")
    fits = all(want < f + s for want, f, s in zip(shape[-rank:], full, stride, strict=True))
    c.require(fits, f"has output_shape={shape}; with strides={stride} at most {full} is reached")
    totals = [f + e - want for f, e, want in zip(full, extra, shape[-rank:], strict=True)]
    small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
    return (small, large) if mode == "SAME_UPPER" else (large, small)
