"""Operations that are known to take no workspace: none of them has to run for that."""

from __future__ import annotations

import torch

from ...ir import DType, Node, TensorType

__all__ = ["takes_none"]

_PRODUCTS = ("aten.mm.default", "aten.addmm.default")


def takes_none(node: Node) -> bool:
    """Whether an operation takes nothing from the allocator beyond its result, whatever its sizes.

    On a processor these are products of matrices of full precision that lie row by row or column by column:
    torch hands such matrices, and the result, to MKL as they are. It copies others first. What MKL takes
    for itself does not come from torch's allocator.
    """
    return (
        node.op in _PRODUCTS
        and all(map(_is_plain, (value.type for value in node.operands[-2:])))
        and all(value.type.dtype is DType.FLOAT32 for value in node.operands)
        and torch.backends.mkl.is_available()
        and torch.get_float32_matmul_precision() == "highest"
    )


def _is_plain(type: TensorType) -> bool:
    """Whether a matrix of a processor's lies row by row or column by column, without gaps."""
    rows, columns = type.shape
    return type.device == "cpu" and type.numel > 0 and type.strides in ((columns, 1), (1, rows))
