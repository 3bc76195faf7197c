"""The memory of losses that torch computes by one kernel: the terms that they sum up, one an element."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["kept_bytes", "terms_workspace_bytes"]

_KEEP_THEIR_TERMS = (
    "aten.mse_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.soft_margin_loss.default",
    "aten.binary_cross_entropy.default",
)
_WORKSPACES = {
    "aten.mse_loss.default": 1,
    "aten.smooth_l1_loss.default": 1,
    "aten.huber_loss.default": 1,
    "aten.binary_cross_entropy_with_logits.default": 2,
    "aten.soft_margin_loss_backward.default": 2,
}
"""Workspaces in copies of the terms."""


def kept_bytes(op: str, operands: Sequence[Tensor], result: Tensor) -> int:
    """Bytes of the terms that a loss sums up: these kernels return the sum in the terms' allocation."""
    return _terms_bytes(operands, result) if op in _KEEP_THEIR_TERMS else 0


def terms_workspace_bytes(op: str, operands: Sequence[Tensor], result: Tensor) -> int:
    """Bytes that the kernel takes while it runs; terms in half precision are summed in single precision."""
    is_half = result.dtype in (torch.bfloat16, torch.float16)
    return (
        _WORKSPACES[op] * (3 if is_half else 1) * _terms_bytes(operands, result) if op in _WORKSPACES else 0
    )


def _terms_bytes(operands: Sequence[Tensor], result: Tensor) -> int:
    shape = torch.broadcast_shapes(*(tuple(operand.shape) for operand in operands))
    return math.prod(shape) * result.element_size()
