"""Tensors that have a type and no data: those on the device `meta`, and torch's fake ones."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["lacks_data"]


def lacks_data(tensor: Tensor) -> bool:
    """Whether a tensor, such as a parameter of a model that is only planned, has no data."""
    return tensor.is_meta or isinstance(tensor, FakeTensor) or isinstance(tensor.data, FakeTensor)
