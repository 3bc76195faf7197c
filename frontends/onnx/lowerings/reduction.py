"""Reductions over axes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .table import Call, Result, lowering

_Axes = list[int]


def _prod(x: Tensor, axes: _Axes, keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keep, dtype=x.dtype)
    return x


def _sum(x: Tensor, axes: _Axes, keep: bool) -> Tensor:
    return x.sum(axes, keepdim=keep, dtype=x.dtype)


_REDUCE: dict[str, Callable[[Tensor, _Axes, bool], Tensor]] = {
    "ReduceL1": lambda x, axes, keep: _sum(x.abs(), axes, keep),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keepdim=keep),
    "ReduceLogSum": lambda x, axes, keep: _sum(x, axes, keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "ReduceProd": _prod,
    "ReduceSum": _sum,
    "ReduceSumSquare": lambda x, axes, keep: _sum(x * x, axes, keep),
}

_FRACTIONS = ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean")


def _lowest(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return -math.inf
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return math.inf
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


# The results of operators for no elements, if torch refuses them.
_LEAST: dict[str, Callable[[torch.dtype], float | int]] = {"ReduceMax": _lowest, "ReduceMin": _highest}

# What is left of an operator that reduces over no axis at all.
_NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "ReduceL1": torch.abs,
    "ReduceL2": torch.abs,
    "ReduceLogSum": torch.log,
    "ReduceSumSquare": torch.square,
}


@lowering(*_REDUCE)
def reduce(c: Call) -> Result:
    """Over the axes given; over all when none is, unless `noop_with_empty_axes`."""
    x, op, keep, stay = c[0], c.node.op, c.flag("keepdims", default=True), c.flag("noop_with_empty_axes")
    axes = [axis % max(x.ndim, 1) for axis in c.axes() or []]
    if not axes and (stay or x.ndim == 0):
        return _NOTHING.get(op, lambda x: x)(x)
    axes = axes or list(range(x.ndim))
    if op in _LEAST and any(x.shape[axis] == 0 for axis in axes):
        return torch.full_like(x.sum(axes, keepdim=keep), _LEAST[op](x.dtype), dtype=x.dtype)
    if not x.is_floating_point() and op in _FRACTIONS:
        if x.numel() == 0:
            c.refuse(f"of no elements of {x.dtype}")
        # Results of integers are cut off.
        return _REDUCE[op](x.double(), axes, keep).to(x.dtype)
    return _REDUCE[op](x, axes, keep)


@lowering("ArgMax", "ArgMin")
def arg(c: Call) -> Result:
    """The position of the greatest or least, the first or the last among equals."""
    x, axis, keep = c[0], c.int_("axis", 0) % c[0].ndim, c.flag("keepdims", default=True)
    find = torch.argmax if c.node.op == "ArgMax" else torch.argmin
    if not c.flag("select_last_index"):
        return find(x, axis, keep)
    return x.shape[axis] - 1 - find(x.flip(axis), axis, keep)
