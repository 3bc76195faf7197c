"""Operations that are known to take no workspace: none of them has to run for that."""

from __future__ import annotations

import torch

from ...ir import DType, Node, TensorType, Value

__all__ = ["is_elementwise", "is_plain_product", "takes_none"]

_PRODUCTS = ("aten.mm.default", "aten.mm.out", "aten.addmm.default")


def takes_none(node: Node) -> bool:
    """Whether an operation takes nothing from the allocator beyond its result, whatever its sizes.

    On a processor these are products of matrices of full precision that lie row by row or column by column,
    with a vector as bias if there is one: torch hands such matrices, and the result, to MKL as they are. It
    copies others first. What MKL takes for itself does not come from torch's allocator.
    """
    if not torch.backends.mkl.is_available() or not _is_exact() or not is_plain_product(node):
        return False
    operands = [value.type for value in node.arguments if isinstance(value, Value)]
    return all(type.device == "cpu" and type.dtype is DType.FLOAT32 for type in operands)


def is_elementwise(node: Node) -> bool:
    """Whether an operation makes each element from those in its place, and converts none to another type.

    Such kernels write into their result alone. Others may convert an operand as a whole first.
    """
    namespace, name, overload = node.op.split(".", 2)
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found = getattr(packet, overload, None)
    if found is None or torch.Tag.pointwise not in found.tags or len(node.values) != 1:
        return False
    (result,) = node.values
    operands = (value.type for value in node.operands)
    return all(type.dtype is result.type.dtype or not type.shape for type in operands)


def is_plain_product(node: Node) -> bool:
    """Whether it is a product of matrices that BLAS reads as they lie, with or without a vector as bias."""
    if node.op not in _PRODUCTS:
        return False
    *biases, left, right = (value.type for value in node.arguments if isinstance(value, Value))
    written = node.written_operand
    if written is not None and not (_is_plain(left) and _is_plain(right) and 1 in written.type.strides):
        return False  # rows with gaps between them are as good to BLAS as others
    return all(len(bias.shape) == 1 for bias in biases) and all(map(_is_plain, (left, right)))


def _is_exact() -> bool:
    """Whether products of float32 are known to be computed in float32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # a precision was set by torch.backends.*.fp32_precision, which this cannot tell
        return False


def _is_plain(type: TensorType) -> bool:
    """Whether a matrix lies row by row or column by column, without gaps."""
    if type.numel == 0 or len(type.shape) != 2:
        return False
    rows, columns = type.shape
    return type.strides in ((columns, 1), (1, rows))
