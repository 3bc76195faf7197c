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

COMPOSED = frozenset(
    f"aten.{name}.default"
    for name in (
        *("_softmax", "_log_softmax", "native_layer_norm", "native_group_norm"),
        "_native_batch_norm_legit_functional",
    )
)
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
    for norm in (aten.native_layer_norm.default, aten.native_group_norm.default):
        own[norm] = partial(_mixed_norm, table[norm])
    return {**table, **own}


def _mixed_norm(norm: Callable[..., Any], data: Tensor, *args: Any) -> Any:
    """A norm, whose statistics have the type of its parameters, as in torch's kernels."""
    types = {each.dtype for each in args if isinstance(each, Tensor)}
    if data.dtype in (torch.bfloat16, torch.float16) and types == {torch.float32}:
        made, mean, deviation = norm(data.float(), *args)
        return made.to(data.dtype), mean, deviation
    return norm(data, *args)


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
