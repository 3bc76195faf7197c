"""Compositions of simpler operations, which fuse with what comes before and behind."""

# Decompositions and overloads have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["COMPOSED", "decompositions", "traced"]

_NORMS = ("native_layer_norm", "native_group_norm", "_native_batch_norm_legit_functional")

COMPOSED = frozenset(f"aten.{name}.default" for name in ("_softmax", "_log_softmax", *_NORMS))
"""The operations of forward that are taken apart: what a kernel makes again of them is the part that goes
element by element, and what it reads are their sums."""


def traced(body: Callable[..., Any], operands: list[Tensor]) -> fx.GraphModule:
    """Traces a function of fake tensors, with compositions taken apart."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(body, decomposition_table=decompositions())(*operands)


@lru_cache(maxsize=1)
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Returns Inductor's table, without reads by an index: a kernel ends the process at a wrong one."""
    from torch._inductor.decomposition import select_decomp_table

    aten = torch.ops.aten
    own: dict[Any, Callable[..., Any]] = {
        aten.nll_loss_forward.default: _nll_loss_forward,
        aten.nll_loss2d_forward.default: _nll_loss_forward,
        aten.nll_loss_backward.default: _nll_loss_backward,
        aten.nll_loss2d_backward.default: _nll_loss_backward,
    }
    table = select_decomp_table()
    for name in (*_NORMS, *(f"{name}_backward" for name in _NORMS[:2]), "native_batch_norm_backward"):
        norm = getattr(aten, name).default
        own[norm] = partial(_in_32_bits, table[norm])
    return {**table, **own}


def _in_32_bits(norm: Callable[..., Any], data: Tensor, *args: Any) -> Any:
    """A norm, or its backward, in the type of its parameters if these have 32 bits, as torch's kernels.

    The first result has the type of the data; statistics and gradients of parameters have that of parameters.
    """
    types = {each.dtype for each in args if isinstance(each, Tensor)}
    if data.dtype not in (torch.bfloat16, torch.float16) or torch.float32 not in types:
        return norm(data, *args)
    wide = [each.float() if isinstance(each, Tensor) and each.is_floating_point() else each for each in args]
    first, *others = norm(data.float(), *wide)
    return None if first is None else first.to(data.dtype), *others


def _nll_loss_forward(
    data: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    """A loss of classes in range (see `check_classes`), and the weight of all rows that count."""
    dim = 0 if data.dim() < 2 else 1
    is_own = target.unsqueeze(dim) == _classes(data, dim)
    counted = target != ignored
    nothing = torch.zeros((), dtype=data.dtype, device=data.device)
    weights = torch.ones_like(target, dtype=data.dtype)
    if weight is not None:
        weights = torch.where(is_own, weight.reshape(_classes(data, dim).shape), nothing).sum(dim)
    each = torch.where(counted, -torch.where(is_own, data, nothing).sum(dim) * weights, nothing)
    if reduction == 0:
        return each, nothing
    total = torch.where(counted, weights, nothing).sum()
    return (each.sum() / total if reduction == 1 else each.sum()), total


def _classes(data: Tensor, dim: int) -> Tensor:
    """The number of each class, along its dimension."""
    shape = [1] * data.dim()
    shape[dim] = data.shape[dim]
    return torch.arange(data.shape[dim], device=data.device).reshape(shape)


def _nll_loss_backward(
    gradient: Tensor,
    data: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total_weight: Tensor,
) -> Tensor:
    """The gradient of a loss of classes, element by element: at the row's own class, and zero elsewhere."""
    dim = 0 if data.dim() < 2 else 1
    classes = _classes(data, dim)
    if reduction == 1:
        gradient = gradient / total_weight
    own = target.unsqueeze(dim)
    given = gradient.unsqueeze(dim) if reduction == 0 and data.dim() > 1 else gradient
    counted = torch.where(own != ignored, -given, 0)
    if weight is not None:
        counted = counted * weight.reshape(classes.shape)
    return torch.where(own == classes, counted, torch.zeros((), dtype=data.dtype, device=data.device)).to(
        data.dtype
    )
