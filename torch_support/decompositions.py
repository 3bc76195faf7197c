"""Compositions of simpler operations, which fuse with what comes before and behind."""

# Decompositions and overloads have no public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
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
    """Returns Inductor's table, without scattered writes."""
    from torch._inductor.decomposition import select_decomp_table

    aten = torch.ops.aten
    own = {aten.nll_loss_backward.default: _nll_loss_backward}
    return {**select_decomp_table(), **own, aten.nll_loss2d_backward.default: _nll_loss_backward}


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
    shape = [1] * data.dim()
    shape[dim] = data.shape[dim]
    if reduction == 1:
        gradient = gradient / total_weight
    own = target.unsqueeze(dim)
    given = gradient.unsqueeze(dim) if reduction == 0 and data.dim() > 1 else gradient
    counted = torch.where(own != ignored, -given, 0)
    if weight is not None:
        counted = counted * weight.reshape(shape)
    classes = torch.arange(data.shape[dim], device=data.device).reshape(shape)
    return torch.where(own == classes, counted, torch.zeros((), dtype=data.dtype, device=data.device)).to(
        data.dtype
    )
