"""Traces some operations by the kernels that eager runs; torch's tracer would take others."""

# The list of operations that torch takes apart has no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import _disable_current_modes

from .python_kernels import with_kernels

__all__ = ["composite_operations"]

_LEVELS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_FAMILIES = ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d", "nearest1d", "nearest2d", "nearest3d")
_EXACT = ("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")
_ANTIALIASED = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
_OTHERS = ("hardshrink", "softshrink", "multi_margin_loss", "multilabel_margin_loss_forward")
_FOLDING = ("matmul",)
"""Operations that eager composes by the strides and gradients of their operands, with other conditions."""
_NAMES = (*(f"upsample_{family}" for family in _FAMILIES), *_EXACT, *_ANTIALIASED, *_OTHERS, *_FOLDING)


_DROPOUT = torch.ops.aten.dropout.default


def _dropout(data: Tensor, rate: float, train: bool) -> Tensor:
    """Returns the numbers of eager's dropout, of which a mask of a byte an element is kept.

    Eager on a CPU draws ones and zeros and divides them by `1 - rate`. The kernel that keeps a mask
    multiplies by `1 / (1 - rate)`, which may round to another number, and its gradient rounds otherwise in
    half precision. Then its mask alone is taken, and the same operations follow with eager's factor: a step
    needs the same memory at every rate.
    """
    if not train or rate == 0 or data.numel() == 0:
        return data
    if rate == 1:
        return data * torch.zeros((), dtype=data.dtype, device=data.device)
    output, mask = torch.native_dropout(data, rate, True)
    if data.device.type != "cpu":
        return output
    scale, is_of_kernel = _scale(rate, data.dtype)
    return output if is_of_kernel else _Product.apply(data, mask, scale)


class _Product(torch.autograd.Function):
    """The product with a mask and a factor, by the operation that is its gradient too."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return torch.ops.aten.native_dropout_backward(data, mask, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        return torch.ops.aten.native_dropout_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None


@functools.cache
def _scale(rate: float, dtype: torch.dtype) -> tuple[float, bool]:
    """Returns the factor of eager's dropout, and whether the kernel that keeps a mask has the same one."""
    with _disable_current_modes():
        one = torch.ones((), dtype=dtype, device="cpu")
        scale = one.div(1 - rate)
        is_full = dtype in (torch.float32, torch.float64)
        return scale.item(), is_full and torch.equal(scale, one.mul(1 / (1 - rate)))


def _svdvals(data: Tensor, *, driver: str | None = None) -> Tensor:
    return torch.ops.aten._linalg_svd(data, False, _needs_vectors(data), driver=driver)[1]


def _eigvalsh(data: Tensor, UPLO: str = "L") -> Tensor:
    return torch.ops.aten._linalg_eigh(data, UPLO, _needs_vectors(data))[0]


def _needs_vectors(data: Tensor) -> bool:
    """Whether eager computes the vectors too: a gradient needs them, and values alone round otherwise.

    Torch takes each tensor that is traced for one that may need a gradient.
    """
    return torch.is_grad_enabled() and data.requires_grad


def _rrelu(
    data: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    """Eager's result is contiguous; of the operation that a trace takes for it, it is laid out as `data`.

    The operand stays as it is: without noise, the gradient is laid out as the operand.
    """
    noise = torch.empty_like(data, memory_format=torch.contiguous_format)
    return torch.ops.aten.rrelu_with_noise(data, noise, lower, upper, training, generator).contiguous()


def _overloads() -> list[Any]:
    packets = [getattr(torch.ops.aten, name) for name in _NAMES]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def composite_operations() -> contextlib.AbstractContextManager[None]:
    """Lets interpolation and a few others be traced as one operation, and others with eager's rounding.

    Taken apart into indexing and sums, interpolation would take several times the memory, and round in
    another order.
    """
    own = dict.fromkeys(_overloads()) | {
        _DROPOUT: _dropout,
        torch.ops.aten.rrelu.default: _rrelu,
        torch.ops.aten.linalg_svdvals.default: _svdvals,
        torch.ops.aten.linalg_eigvalsh.default: _eigvalsh,
    }
    return with_kernels({operation: dict.fromkeys(_LEVELS, kernel) for operation, kernel in own.items()})
