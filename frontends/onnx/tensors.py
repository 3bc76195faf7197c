"""Element types and constant tensors: ONNX on one side, torch on the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

__all__ = ["FLOATS", "Static", "onnx_dtype", "torch_dtype", "torch_tensor"]

_DTYPES: dict[ir.DataType, torch.dtype] = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT8: torch.int8,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.UINT16: torch.uint16,
    ir.DataType.UINT32: torch.uint32,
    ir.DataType.UINT64: torch.uint64,
    ir.DataType.BOOL: torch.bool,
    ir.DataType.COMPLEX64: torch.complex64,
    ir.DataType.COMPLEX128: torch.complex128,
    ir.DataType.FLOAT8E4M3FN: torch.float8_e4m3fn,
    ir.DataType.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    ir.DataType.FLOAT8E5M2: torch.float8_e5m2,
    ir.DataType.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    ir.DataType.FLOAT8E8M0: torch.float8_e8m0fnu,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# numpy has no such types of its own: tensors pass as integers of the same size.
_BITS: dict[torch.dtype, type[np.generic]] = {
    torch.bfloat16: np.int16,
    torch.float8_e4m3fn: np.uint8,
    torch.float8_e4m3fnuz: np.uint8,
    torch.float8_e5m2: np.uint8,
    torch.float8_e5m2fnuz: np.uint8,
    torch.float8_e8m0fnu: np.uint8,
}

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Element types that a weight can have."""


def torch_dtype(dtype: ir.DataType | int | None) -> torch.dtype | None:
    """The torch element type of an ONNX one; `None` if torch has no ordinary equal, as for strings."""
    return None if dtype is None else _DTYPES.get(ir.DataType(dtype))


def onnx_dtype(dtype: torch.dtype) -> ir.DataType:
    """The ONNX element type of a torch one that has an equal."""
    return _CODES[dtype]


def onnx_tensor(tensor: torch.Tensor, name: str | None = None) -> ir.Tensor[Any]:
    """A tensor of torch as one of ONNX; on the CPU it shares the elements."""
    array = tensor.detach().cpu().contiguous()
    if array.dtype in _BITS:
        wide = array.element_size() == 2
        bits = array.view(torch.int16).numpy().view(np.uint16) if wide else array.view(torch.uint8).numpy()
        return ir.Tensor(bits, dtype=onnx_dtype(array.dtype), name=name)
    return ir.Tensor(array.numpy(), dtype=onnx_dtype(array.dtype), name=name)


def torch_tensor(tensor: ir.TensorProtocol) -> torch.Tensor | None:
    """A copy of an ONNX tensor in torch's own memory; `None` if torch lacks the element type."""
    dtype = torch_dtype(tensor.dtype)
    if dtype is None:
        return None
    array = np.array(tensor.numpy(), order="C")
    if dtype in _BITS:
        return torch.from_numpy(array.view(_BITS[dtype])).view(dtype)
    return torch.from_numpy(array)


@dataclass(frozen=True, slots=True)
class Static:
    """A constant operand as plain data, readable while torch is tracing.

    Args:
        array: The values; bfloat16 and floats of eight bits widened to float32, which is exact.
        dtype: The element type that the operand has in the graph.
    """

    array: npt.NDArray[np.generic]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Static:
        """The plain data of a concrete tensor."""
        wide = tensor.float() if tensor.dtype in _BITS else tensor
        return cls(wide.detach().cpu().numpy(), tensor.dtype)

    def tensor(self) -> torch.Tensor:
        """A copy as a tensor."""
        return torch.tensor(self.array).to(self.dtype)
