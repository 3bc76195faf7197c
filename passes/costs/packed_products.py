"""Products of a matrix and a packed one, which unpack it into the allocator's memory."""

from __future__ import annotations

import math
from typing import cast

from ...ir import DType, Node, Value

__all__ = ["is_packed_product", "is_unpacking", "packed_product_flops", "unpacked_bytes"]

_UNPACKING = ("bitsandbytes.dequantize_4bit.default", "bitsandbytes.dequantize_blockwise.default")


def is_packed_product(node: Node) -> bool:
    """Whether an operation is the product of rows with a matrix of 4 bits, `gemm_4bit` of bitsandbytes."""
    return node.op == "bitsandbytes.gemm_4bit.default"


def is_unpacking(node: Node) -> bool:
    """Whether an operation writes packed numbers as floats and takes nothing besides."""
    return node.op in _UNPACKING


def packed_product_flops(node: Node) -> float:
    """The multiplications and additions of a product with a matrix of 4 bits."""
    left, rows = _left(node), cast(tuple[int, int], node.arguments[2])[0]
    return 2.0 * left.type.numel * rows


def unpacked_bytes(node: Node) -> int:
    """The bytes of the matrix in the type of the left operand, and of scales that were packed too."""
    scales = dict(node.keywords).get("absmax_8bit")
    scale_bytes = scales.type.numel * DType.FLOAT32.itemsize if isinstance(scales, Value) else 0
    shape = cast(tuple[int, int], node.arguments[2])
    return math.prod(shape) * _left(node).type.dtype.itemsize + 2 * scale_bytes


def _left(node: Node) -> Value:
    return cast(Value, node.arguments[0])
