"""The bytes of a tensor in memory, and their checksum."""

from __future__ import annotations

import ctypes
import os
import zlib
from typing import Any

import torch
from torch import Tensor

__all__ = ["bytes_at", "bytes_of", "checksum", "is_checking"]

CHECK = "IRC_SWAP_CHECK"


def is_checking() -> bool:
    """Whether the user asks for checksums of all copies."""
    return os.environ.get(CHECK, "") not in ("", "0")


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Returns a view of this process's memory, which somebody else must hold."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns a dense tensor's bytes in the order of memory, as an alias of one dimension."""
    first = tensor.storage_offset() * tensor.itemsize
    empty: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), first, (tensor.nbytes,))


def checksum(tensor: Tensor) -> int:
    """Computes the CRC-32 of a dense tensor's bytes."""
    there = bytes_of(tensor).cpu()
    return zlib.crc32(bytes_at(there.data_ptr(), there.nbytes))
