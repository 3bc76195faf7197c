"""Takes the operation apart that makes a sparse gradient of `nn.EmbeddingBag`: a plan holds its parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["BAG_BACKWARD", "bag_backward"]

_aten = torch.ops.aten
BAG_BACKWARD = _aten._embedding_bag_backward.default
_MEAN = 1


def bag_backward(
    gradient: Tensor,
    ids: Tensor,
    offsets: Tensor,
    bags: Tensor,
    sizes: Tensor,
    maxima: Tensor,
    rows: int,
    scales: bool,
    mode: int,
    is_sparse: bool,
    weights: Tensor | None,
    padding: int = -1,
    *,
    in_place: bool = False,
) -> Any:
    """Does what the operation does, by those of its kernel, if its gradient is sparse.

    Factors are multiplied in place by the kernel, but not while it is traced.
    """
    if not is_sparse:
        return NotImplemented
    if ids.numel() and not bags.numel():  # the forward of a plain sum does not say which bag an id is in
        later = offsets[1:]
        bags = offsets.new_zeros(len(ids) + 1).index_add(0, later, torch.ones_like(later)).cumsum(0)[:-1]
    factors = sizes.to(gradient.dtype).unsqueeze(1).reciprocal() if mode == _MEAN else None
    if factors is not None and not in_place:  # there are more ids than bags, and the products are the same
        gradient = gradient * factors
    of_ids = gradient.index_select(0, bags)
    if factors is not None and in_place:
        of_ids.mul_(factors.index_select(0, bags))
    if weights is not None:
        of_ids = (Tensor.mul_ if in_place else Tensor.mul)(of_ids, weights.unsqueeze(1))
    return _aten.embedding_sparse_backward(of_ids, ids, rows, padding, scales)
