"""The memory that kernels of losses take beside their results: terms, one an element, and casts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["KERNEL_NUMBERS_BYTES", "cast_bytes", "kept_bytes", "number_bytes", "workspace_bytes"]

KERNEL_NUMBERS_BYTES = 16
"""Numbers that an operation makes tensors of while it runs, such as that of the terms of a mean."""

_KEEP_THEIR_TERMS = (
    "aten.mse_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.soft_margin_loss.default",
    "aten.binary_cross_entropy.default",
)
_WORKSPACES = {
    "aten.mse_loss.default": (1, 3),
    "aten.smooth_l1_loss.default": (1, 3),
    "aten.huber_loss.default": (1, 3),
    "aten.soft_margin_loss.default": (0, 2),
    "aten.binary_cross_entropy.default": (0, 2),
    "aten.binary_cross_entropy_with_logits.default": (2, 4),
    "aten.soft_margin_loss_backward.default": (2, 2),
}
"""Workspaces in copies of the terms, and in half precision, whose mean is taken in single precision."""

_LOGITS = "aten.binary_cross_entropy_with_logits.default"
"""A loss that copies a first operand that is not contiguous."""

_TILE = 3600
"""Elements of the buffer through which a tensor is copied into another order of axes."""

_SCALAR_BYTES = 12
"""The number of terms that a mean divides by, as a tensor of eight bytes and as one of four."""

_PROMOTING = (
    *("add", "sub", "rsub", "mul", "div", "pow", "fmod", "remainder", "maximum", "minimum", "fmax", "fmin"),
    *("eq", "ne", "lt", "le", "gt", "ge", "atan2", "hypot", "xlogy"),
)
"""Functions of two tensors, element by element, that compute in one type for both."""

_LARGEST = "aten.isnan.default"
"""The operation by which the backward of `max`, `min` and `median` over all elements begins."""

_SCATTERING = "aten.scatter"
"""The backward of functions that pick elements, which adds in single precision."""

_SUMS = ("aten.sum.default", "aten.sum.dim_IntList")
_MEANS = ("aten.mean.default", "aten.mean.dim")


_COPIES = ("aten.clone.default", "aten.copy_.default")
_PRODUCTS = tuple(f"aten.{name}.default" for name in ("mm", "bmm", "addmm", "baddbmm"))

_PACKED = 64
"""Rows and columns of matrices in bfloat16 are filled up to a multiple of it, where kernels pack them."""

_PACKING_BYTES = 17 << 10
"""Beside the packed matrices, found by measuring 300 products."""


def kept_bytes(op: str, operands: Sequence[Tensor], result: Tensor) -> int:
    """Bytes of the terms that a loss sums up: these kernels return the sum in the terms' allocation."""
    return _terms_bytes(operands, result) if op in _KEEP_THEIR_TERMS else 0


def workspace_bytes(op: str, operands: Sequence[Tensor], result: Tensor) -> int:
    """Bytes that the kernel of a loss, a sum or a mean takes while it runs."""
    is_half = result.dtype in (torch.bfloat16, torch.float16)
    if op in _WORKSPACES:
        terms_bytes = _terms_bytes(operands, result)
        nbytes = _WORKSPACES[op][is_half] * terms_bytes
        if op == _LOGITS and not operands[0].is_contiguous():
            relaid_bytes = 3 * terms_bytes + _TILE * result.element_size()
            nbytes = max(nbytes, relaid_bytes)
        return nbytes + (_SCALAR_BYTES if op == _LOGITS or is_half else 0)
    if op == _LARGEST and operands[0].dim() and operands[0].device.type == "cpu" and _is_in_backward():
        # where no mode is active it makes the gradient before it counts a mask in whole numbers
        counts_bytes = operands[0].numel() * torch.int64.itemsize
        return operands[0].numel() * operands[0].element_size() + counts_bytes + _SCALAR_BYTES
    if op in _PRODUCTS:
        return _product_bytes(operands, result)
    if op in _COPIES and _is_transposed(operands[-1]) and result.is_contiguous():
        return _TILE * result.element_size()
    single_bytes = result.numel() * torch.float32.itemsize if is_half else 0
    if op in _MEANS and is_half:
        return operands[0].numel() * torch.float32.itemsize + single_bytes + _SCALAR_BYTES
    is_reduction = bool(operands) and result.numel() < operands[0].numel()
    rounded_bytes = single_bytes if is_reduction or op.startswith(_SCATTERING) else 0
    is_cast = op in (*_SUMS, *_MEANS) and operands[0].dtype != result.dtype
    return rounded_bytes + (operands[0].numel() * result.element_size() if is_cast else 0)


def _is_transposed(matrix: Tensor) -> bool:
    """Whether a matrix is copied into rows through the buffer (`copy_transpose_valid` of ATen's Copy.cpp)."""
    is_large = matrix.dim() == 2 and matrix.numel() >= _TILE
    return is_large and matrix.stride() == (1, matrix.shape[0]) and matrix.device.type == "cpu"


def _product_bytes(operands: Sequence[Tensor], result: Tensor) -> int:
    """Bytes that a product in bfloat16 takes at most where oneDNN computes it: packed matrices and sums."""
    if result.dtype is not torch.bfloat16 or result.device.type != "cpu" or not _packs_bfloat16():
        return 0
    *batch, rows, columns = result.shape
    depth = operands[-1].shape[-2]
    m, n, k = (-(-size // _PACKED) * _PACKED for size in (rows, columns, depth))
    packed = result.element_size() * (m * k + k * n) + torch.float32.itemsize * m * n
    return _PACKING_BYTES + math.prod(batch) * packed


@functools.cache
def _packs_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def number_bytes(func: Any, args: Sequence[Any]) -> int:
    """Bytes of the numbers of Python that stand for tensors among the operands, which torch makes of them."""
    schema = getattr(func, "_schema", None)
    given = zip(schema.arguments, args, strict=False) if schema is not None else ()
    count = sum(isinstance(arg, (int, float)) and str(wanted.type) == "Tensor" for wanted, arg in given)
    return count * torch.float64.itemsize


def cast_bytes(func: Any, operands: Sequence[Tensor], result: Tensor) -> int:
    """Bytes of what a function on the CPU copies into the type in which it computes.

    These are its operands; for kernels of losses and their backward, also the result.
    """
    floats = [operand for operand in operands if operand.dtype.is_floating_point]
    is_mixed = len({operand.dtype for operand in floats}) > 1
    is_promoting = _computes_in_one_type(func)
    if not (is_mixed or is_promoting) or result.device.type != "cpu" or not operands:
        return 0
    if is_mixed:
        computed = functools.reduce(torch.promote_types, (operand.dtype for operand in floats))
    else:
        is_comparison = result.dtype is torch.bool
        computed = torch.result_type(operands[0], operands[-1]) if is_comparison else result.dtype
    result_bytes = 0 if is_promoting else result.numel() * computed.itemsize
    cast = operands if is_promoting else floats
    return result_bytes + sum(o.numel() * computed.itemsize for o in cast if o.dtype != computed)


def _computes_in_one_type(func: Any) -> bool:
    return func.overloadpacket.__name__.rstrip("_") in _PROMOTING


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def _terms_bytes(operands: Sequence[Tensor], result: Tensor) -> int:
    shape = torch.broadcast_shapes(*(tuple(operand.shape) for operand in operands))
    return math.prod(shape) * result.element_size()
