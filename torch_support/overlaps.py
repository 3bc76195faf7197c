"""Whether two tensors have elements in common in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["is_same_memory", "overlap"]

_MOST_WORK: Any = 10_000
"""The steps of numpy's search for a common element, after which there may be one."""


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    if a is b:
        return True
    return a.data_ptr() == b.data_ptr() and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common, or may have."""
    try:
        return bool(np.shares_memory(np.asarray(_Memory(a)), np.asarray(_Memory(b)), _MOST_WORK))
    except np.exceptions.TooHardError:
        return True


class _Memory:
    """Tells numpy where the elements of a tensor lie, wherever that is: they are not read."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": f"|V{size}",
        }
