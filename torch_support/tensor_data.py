"""The memory of a tensor as `tensor.data` shows it: the tensor's version does not count what is written."""

from __future__ import annotations

from torch import Tensor

__all__ = ["TENSOR_DATA", "tensor_data"]

TENSOR_DATA = "irc.tensor_data.default"
"""The operation (tensor) that views a tensor so."""


def tensor_data(tensor: Tensor) -> Tensor:
    """Returns a view of a tensor whose writes autograd does not notice."""
    return tensor.data
