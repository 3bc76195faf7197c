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


def _windows(c: Call, rank: int) -> tuple[list[int], list[int]]:
    return c.ints_("strides") or [1] * rank, c.ints_("dilations") or [1] * rank


@lowering("Conv")
def conv(c: Call) -> Result:
    """Padding that differs before and after is done ahead of the convolution."""
    x, weight, bias = c[0], c[1], c.optional(2)
    rank = x.ndim - 2
    if rank not in _CONV:
        c.refuse(f"over {rank} spatial axes")
    stride, dilation = _windows(c, rank)
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
    stride, dilation = _windows(c, rank)
    extra = c.ints_("output_padding") or [0] * rank
    full = [
        s * (n - 1) + d * (k - 1) + 1
        for n, s, d, k in zip(x.shape[2:], stride, dilation, weight.shape[2:], strict=True)
    ]
    before, after = _transposed_padding(c, x.shape[2:], full, extra, stride)
    options: dict[str, Any] = {"stride": stride, "groups": c.int_("group", 1), "dilation": dilation}
    fits = all(e < max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True))
    if before == after and min(before) >= 0 and fits:
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
        return pads[:rank], pads[rank:]
    if shape is None:
        shape = [n * s for n, s in zip(size, stride, strict=True)]
    totals = [f + e - want for f, e, want in zip(full, extra, shape[-rank:], strict=True)]
    small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
    return (small, large) if mode == "SAME_UPPER" else (large, small)
