"""Reads what the allocator of a device takes for a tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..ir import allocation_bytes

__all__ = ["allocated_bytes", "cuda_devices"]


def allocated_bytes(tensor: Tensor) -> int:
    """Returns the bytes that the allocator takes for the storage of a tensor, its rounding included."""
    return allocation_bytes(int(tensor.untyped_storage().nbytes()), str(tensor.device))


def cuda_devices(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Returns the GPUs that tensors are on, in order."""
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
