"""Reads what the allocator of a device takes for a tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..ir import allocation_bytes

__all__ = ["allocated_bytes", "cuda_devices", "dense_parts"]


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors that hold the elements of a tensor: indices and values of a sparse gradient."""
    if tensor.layout is not torch.sparse_coo:
        return (tensor,)
    return tensor._indices(), tensor._values()  # those of the public names are for coalesced ones alone


def allocated_bytes(tensor: Tensor) -> int:
    """Returns the bytes that the allocator takes for the storages of a tensor, its rounding included."""
    device = str(tensor.device)
    return sum(allocation_bytes(int(p.untyped_storage().nbytes()), device) for p in dense_parts(tensor))


def cuda_devices(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Returns the GPUs that tensors are on, in order."""
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
