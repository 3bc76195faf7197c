"""Compares and makes layouts of tensors in memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["in_layout", "same_layout"]


def same_layout(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Whether strides are those of a tensor in axes of more than one element: no others matter."""
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return tensor.numel() == 0 or all(size == 1 or a == b for size, a, b in pairs)


def in_layout(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Returns a tensor with these strides: itself if it has them, else a copy."""
    if same_layout(tensor, strides):
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)
