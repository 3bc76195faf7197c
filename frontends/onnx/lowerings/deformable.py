"""Convolution at places that the data moves, and the sum of overlapping patches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .table import Call, Result, lowering


@lowering("DeformConv", since=19)
def deform_conv(c: Call) -> Result:
    """Each element of the kernel reads at an offset of its own; outside of the data is zero."""
    x, weight, bias, factor = c[0], c[1], c.optional(3), c.optional(4)
    rank = x.ndim - 2
    kernel, size = weight.shape[2:], x.shape[2:]
    stride, dilation = c.ints_("strides") or [1] * rank, c.ints_("dilations") or [1] * rank
    pads, groups = c.ints_("pads") or [0] * 2 * rank, c.int_("group", 1)
    moved, count = c.int_("offset_group", 1), math.prod(kernel)
    out = [
        (n + pads[i] + pads[i + rank] - dilation[i] * (k - 1) - 1) // stride[i] + 1
        for i, (n, k) in enumerate(zip(size, kernel, strict=True))
    ]
    c.check_listed(rank, *kernel, *out)
    wide = x if x.element_size() > 2 else x.float()
    offset = c[2].to(wide.dtype).reshape(x.shape[0], moved, count, rank, math.prod(out))
    places = [
        c.literal(lambda i=i: _still(out, kernel, i, stride[i], dilation[i], pads[i]).to(wide.dtype))
        + offset[:, :, :, i]
        for i in range(rank)
    ]
    read = _interpolated(wide.reshape(x.shape[0], moved, -1, math.prod(size)), places, size)
    if factor is not None:
        read = read * factor.to(wide.dtype).reshape(x.shape[0], moved, 1, count, -1)
    columns = read.reshape(x.shape[0], groups, -1, math.prod(out))
    y = weight.to(wide.dtype).reshape(groups, weight.shape[0] // groups, -1) @ columns
    y = y.reshape(x.shape[0], weight.shape[0], *out)
    if bias is not None:
        y = y + bias.to(wide.dtype).reshape(-1, *[1] * rank)
    return y.to(x.dtype)


def _still(
    out: Sequence[int], kernel: Sequence[int], axis: int, stride: int, dilation: int, pad: int
) -> Tensor:
    """Returns the position along an axis that each element of the kernel reads, without offsets."""
    results = np.indices(out)[axis].reshape(1, -1) * stride
    return torch.from_numpy(results + np.indices(kernel)[axis].reshape(-1, 1) * dilation - pad)


def _interpolated(x: Tensor, places: Sequence[Tensor], size: Sequence[int]) -> Tensor:
    """Samples, groups, channels, kernel elements, results."""
    lows = [place.detach().floor() for place in places]
    total: Tensor | None = None
    for corner in itertools.product((0, 1), repeat=len(places)):
        share, index, inside = None, None, None
        for place, low, high, n in zip(places, lows, corner, size, strict=True):
            at = low + high
            part = place - low if high else 1.0 - (place - low)
            within = (at >= 0) & (at < n)
            step = at.clamp(0, n - 1).long()
            share = part if share is None else share * part
            inside = within if inside is None else inside & within
            index = step if index is None else index * n + step
        assert share is not None and index is not None and inside is not None
        share = share.masked_fill(~inside, 0.0).unsqueeze(2)
        flat = index.flatten(2).unsqueeze(2).expand(-1, -1, x.shape[2], -1)
        read = x.gather(3, flat).unflatten(3, index.shape[2:]) * share
        total = read if total is None else total + read
    assert total is not None
    return total


@lowering("Col2Im", since=18)
def col2im(c: Call) -> Result:
    """Patches, each in a column, back in their places; overlapping elements add up."""
    x = c[0]
    image, block = c.integers(1, "shape of the image"), c.integers(2, "shape of the patches")
    rank = len(image)
    stride, dilation = c.ints_("strides") or [1] * rank, c.ints_("dilations") or [1] * rank
    pads = c.ints_("pads") or [0] * 2 * rank
    padded = [n + pads[i] + pads[i + rank] for i, n in enumerate(image)]
    counts = [
        (n - d * (b - 1) - 1) // s + 1 for n, b, s, d in zip(padded, block, stride, dilation, strict=True)
    ]
    c.check_listed(rank, *block, *counts)
    index = c.literal(lambda: _places(padded, block, counts, stride, dilation))
    columns = x.reshape(x.shape[0], -1, math.prod(block) * math.prod(counts))
    y = columns.new_zeros(*columns.shape[:2], math.prod(padded)).index_add(2, index, columns)
    y = y.reshape(*columns.shape[:2], *padded)
    for i, n in enumerate(image):
        y = y.narrow(2 + i, pads[i], n)
    return y


def _places(
    padded: Sequence[int],
    block: Sequence[int],
    counts: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """The place in the padded image of every element of every patch."""
    inner, outer = np.indices(block).reshape(len(block), -1, 1), np.indices(counts).reshape(len(block), 1, -1)
    steps = [outer[i] * stride[i] + inner[i] * dilation[i] for i in range(len(block))]
    return torch.from_numpy(np.ravel_multi_index(steps, tuple(padded)).reshape(-1))


@lowering("CenterCropPad", since=18)
def center_crop_pad(c: Call) -> Result:
    """Cut or filled with zeros around the middle; of an odd number the larger half is after."""
    x = c[0]
    axes = [axis % x.ndim for axis in c.ints_("axes") or range(x.ndim)]
    pads = [0] * 2 * x.ndim
    for axis, want in zip(axes, c.integers(1, "shape"), strict=True):
        missing = want - x.shape[axis]
        before = missing // 2 if missing >= 0 else -(-missing // 2)
        last = 2 * (x.ndim - 1 - axis)
        pads[last], pads[last + 1] = before, missing - before
    return torch.nn.functional.pad(x, pads) if any(pads) else x
