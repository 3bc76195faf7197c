"""Tensor types with exact sizes, and the storages (alias classes) that are really allocated."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum

__all__ = ["DType", "Storage", "TensorType", "Value", "allocation_bytes"]

CUDA_BLOCK_BYTES = 512


class DType(Enum):
    """An element type, named as torch names it."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz"
    FLOAT8_E8M0FNU = "float8_e8m0fnu"
    FLOAT4_E2M1FN_X2 = "float4_e2m1fn_x2"
    COMPLEX128 = "complex128"
    COMPLEX64 = "complex64"
    COMPLEX32 = "complex32"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT64 = "uint64"
    UINT32 = "uint32"
    UINT16 = "uint16"
    UINT8 = "uint8"
    INT7 = "int7"
    INT6 = "int6"
    INT5 = "int5"
    INT4 = "int4"
    INT3 = "int3"
    INT2 = "int2"
    INT1 = "int1"
    UINT7 = "uint7"
    UINT6 = "uint6"
    UINT5 = "uint5"
    UINT4 = "uint4"
    UINT3 = "uint3"
    UINT2 = "uint2"
    UINT1 = "uint1"
    BITS16 = "bits16"
    BITS8 = "bits8"
    BITS4X2 = "bits4x2"
    BITS2X4 = "bits2x4"
    BITS1X8 = "bits1x8"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return _ITEMSIZE[self]

    @property
    def is_float(self) -> bool:
        """Whether gradients can flow through values of this type."""
        return self.value.startswith(("float", "bfloat", "complex"))


_BITS = re.compile(r"\d+")
_ITEMSIZE = {dtype: max(int((_BITS.findall(dtype.value) or [8])[0]) // 8, 1) for dtype in DType}
"""Of an element of less than eight bits one lies in each byte, or as many as torch counts as one element."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape, element type, strides (in elements) and device of a tensor."""

    shape: tuple[int, ...]
    dtype: DType
    strides: tuple[int, ...]
    device: str = "cpu"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Payload in bytes, before allocator rounding; a view may own less of its storage, or more."""
        return self.numel * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the elements lie in one block, each in a place of its own, in any order."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.numel == 0 or (span == self.numel and min(self.strides, default=1) >= 0)

    @property
    def is_contiguous(self) -> bool:
        """Whether it is row-major."""
        return self == TensorType.contiguous(self.shape, self.dtype, self.device)

    @staticmethod
    def contiguous(shape: tuple[int, ...], dtype: DType, device: str = "cpu") -> TensorType:
        """The type of a row-major tensor."""
        strides: list[int] = []
        step = 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        return TensorType(shape, dtype, tuple(reversed(strides)), device)


def allocation_bytes(payload_bytes: int, device: str) -> int:
    """Returns the bytes that the allocator of `device` takes for a storage of `payload_bytes`.

    The CPU allocator reports what was asked for; the CUDA caching allocator rounds up to 512 bytes.
    """
    if device.startswith("cuda"):
        return -(-payload_bytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES
    return payload_bytes


@dataclass(eq=False, frozen=True, slots=True)
class Storage:
    """One allocation. All values that alias each other share one storage; it is counted once.

    Args:
        name: Unique in the graph.
        nbytes: Bytes that the allocator takes for it, rounding included.
        device: The device that it lives on.
    """

    name: str
    nbytes: int
    device: str = "cpu"

    def __repr__(self) -> str:
        return f"Storage({self.name}, {self.nbytes} B, {self.device})"


@dataclass(eq=False, frozen=True, slots=True)
class Value:
    """One tensor of the graph, written once.

    Args:
        name: Unique in the graph.
        type: Its shape, element type and layout.
        storage: The allocation that it lies in.
    """

    name: str
    type: TensorType
    storage: Storage

    def __repr__(self) -> str:
        return f"%{self.name}"
