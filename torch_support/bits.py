"""Compares tensors bit by bit: zeros of two signs differ, and a nan is itself."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bits", "same_bits"]


def bits(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor's elements, in order: uint8, one dimension."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors have the same shape, element type and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
