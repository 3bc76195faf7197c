"""Selections whose size depends on data, and reversals."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .table import Call, Result, lowering


@lowering("Compress", since=9)
def compress(c: Call) -> Result:
    """The slices of an axis, or the elements in order, for which a condition holds."""
    x = c[0]
    axis = c.int_("axis", 0) if c.given("axis") else None
    if axis is None:
        x, axis = x.reshape(-1), 0
    static = c.static(1)
    if static is None:
        return x.index_select(axis, torch.nonzero(c[1]).reshape(-1))
    return x.index_select(axis, c.literal(lambda: torch.from_numpy(np.flatnonzero(static.array))))


@lowering("Unique", since=11)
def unique(c: Call) -> Result:
    """The different elements, or slices of an axis: in order, or in the order of their first positions.

    Of an element that is there more than once, the first one gets the gradient.
    """
    x = c[0]
    axis = c.int_("axis", 0) if c.given("axis") else None
    flat = x.reshape(-1) if axis is None else x
    axis = 0 if axis is None else axis % x.ndim
    small = flat.dtype in (torch.float16, torch.bfloat16)
    keys = flat.detach().float() if small else flat.detach()
    _, inverse, counts = torch.unique(keys, return_inverse=True, return_counts=True, dim=axis)
    places = torch.arange(flat.shape[axis], device=x.device)
    first = torch.full_like(counts, flat.shape[axis]).scatter_reduce(0, inverse, places, "amin")
    if not c.int_("sorted", 1):
        order = torch.argsort(first)
        first, counts, inverse = first[order], counts[order], torch.argsort(order)[inverse]
    return flat.index_select(axis, first), first, inverse, counts


@lowering("ReverseSequence", since=10)
def reverse_sequence(c: Call) -> Result:
    """Each sequence of a batch, its first elements turned round as far as its length says."""
    batch, time = c.int_("batch_axis", 1), c.int_("time_axis", 0)
    c.require({batch, time} == {0, 1}, f"has batch_axis={batch} and time_axis={time}; they are 0 and 1")
    x = c[0].movedim((batch, time), (0, 1))
    static = c.static(1)
    if static is not None:
        fits = static.array.size == x.shape[0] and all(0 <= n <= x.shape[1] for n in static.array.tolist())
        c.require(fits, f"has lengths {static.array.tolist()} for {x.shape[0]} samples of {x.shape[1]} steps")
    lengths = c[1].long().unsqueeze(1)
    steps = c.literal(lambda: torch.arange(x.shape[1]).unsqueeze(0))
    rows = c.literal(lambda: torch.arange(x.shape[0]).unsqueeze(1))
    source = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return x[rows, source].movedim((0, 1), (batch, time))


@lowering("NonMaxSuppression", since=10)
def non_max_suppression(c: Call) -> Result:
    """Batch, class and box of those that no box of a higher score overlaps too much, class by class."""
    most = c.integer(2, "count") if c.has(2) else 0
    overlap = float(c.number(3, "threshold of overlap")) if c.has(3) else 0.0
    least = float(c.number(4, "threshold of score")) if c.has(4) else None
    boxes, scores = _corners(c[0].detach(), c.flag("center_point_box")), c[1].detach()
    picked: list[Tensor] = [torch.empty(0, 3, dtype=torch.int64, device=scores.device)]
    for batch in range(scores.shape[0] if most > 0 else 0):
        for kind in range(scores.shape[1]):
            kept = _kept(boxes[batch], scores[batch, kind], most, overlap, least)
            where = kept.new_tensor([[batch, kind]]).expand(kept.shape[0], 2)
            picked.append(torch.cat([where, kept.unsqueeze(1)], 1))
    return torch.cat(picked)


def _corners(boxes: Tensor, centred: bool) -> Tensor:
    """Boxes as their least and greatest corner, from two corners or from a centre and a size."""
    a, b = boxes[..., :2], boxes[..., 2:]
    if centred:
        return torch.cat([a - b / 2, a + b / 2], -1)
    return torch.cat([torch.minimum(a, b), torch.maximum(a, b)], -1)


def _kept(boxes: Tensor, scores: Tensor, most: int, overlap: float, least: float | None) -> Tensor:
    """The boxes that stay, the highest score first; among equals, the first comes first."""
    order = torch.sort(scores, descending=True, stable=True).indices
    rest = order if least is None else order[scores[order] > least]
    kept: list[Tensor] = []
    while rest.numel() and len(kept) < most:
        best, rest = rest[:1], rest[1:]
        kept.append(best)
        rest = rest[_overlaps(boxes[best], boxes[rest]) <= overlap]
    return torch.cat(kept) if kept else order[:0]


def _overlaps(one: Tensor, others: Tensor) -> Tensor:
    """Intersection over union; zero if the boxes do not meet."""
    low, high = torch.maximum(one[:, :2], others[:, :2]), torch.minimum(one[:, 2:], others[:, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    union = (one[:, 2:] - one[:, :2]).prod(-1) + (others[:, 2:] - others[:, :2]).prod(-1) - shared
    return torch.where(shared > 0, shared / union, torch.zeros_like(shared))
