"""Traces some operations as the one kernel that eager runs; torch's tracer would take them apart."""

# The list of operations that torch takes apart has no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch._C import DispatchKey

__all__ = ["composite_operations"]

_LEVELS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_FAMILIES = ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d", "nearest1d", "nearest2d", "nearest3d")
_EXACT = ("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")
_ANTIALIASED = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
_OTHERS = ("hardshrink", "softshrink", "multi_margin_loss", "multilabel_margin_loss_forward")
_NAMES = (*(f"upsample_{family}" for family in _FAMILIES), *_EXACT, *_ANTIALIASED, *_OTHERS)


def _overloads() -> list[Any]:
    packets = [getattr(torch.ops.aten, name) for name in _NAMES]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


@contextlib.contextmanager
def composite_operations() -> Generator[None]:
    """Lets interpolation and a few others be traced as eager runs them, as one operation.

    Taken apart into indexing and sums they would take several times the memory, and round in another order.
    """
    before = [(operation, dict(operation.py_kernels)) for operation in _overloads()]
    for operation, _ in before:
        for level in _LEVELS:
            operation.py_kernels.pop(level, None)
        operation._dispatch_cache.clear()
    try:
        yield
    finally:
        for operation, kernels in before:
            operation.py_kernels.clear()
            operation.py_kernels.update(kernels)
            operation._dispatch_cache.clear()
