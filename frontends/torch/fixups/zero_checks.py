"""Traces the gradients of products, whose formula eager chooses by the data: whether a factor is zero."""

# Torch's dispatchers have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from .python_kernels import with_kernels

__all__ = ["gradients_by_zeros"]

_aten = torch.ops.aten
_Formula = Callable[..., Tensor]


def _of_product(gradient: Tensor, data: Tensor, result: Tensor, *_: Any) -> Tensor:
    return gradient * (result / data).conj()


def _of_products(
    gradient: Tensor, data: Tensor, result: Tensor, axis: int, is_kept: bool = False, *_: Any
) -> Tensor:
    if not is_kept:
        gradient, result = gradient.unsqueeze(axis), result.unsqueeze(axis)
    return gradient * (result / data).conj()


def _of_running_product(gradient: Tensor, data: Tensor, result: Tensor, axis: int, *_: Any) -> Tensor:
    weighted = result.conj() * gradient
    return weighted.flip(axis).cumsum(axis).flip(axis).div(data.conj())


_WITHOUT_ZEROS: dict[Any, _Formula] = {
    _aten.prod.default: _of_product,
    _aten.prod.dim_int: _of_products,
    _aten.cumprod.default: _of_running_product,
}
"""Operations, with the gradient of eager if no factor is zero; without data torch takes the other."""


class _BothWays(torch.autograd.Function):
    """Computes both gradients, and takes the one that eager would have computed alone."""

    @staticmethod
    def forward(ctx: Any, operation: Any, data: Tensor, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        result = _below(operation, data, *args, **kwargs)
        ctx.save_for_backward(data, result)
        ctx.call = operation, args, kwargs
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        operation, args, kwargs = ctx.call
        data, result = ctx.saved_tensors
        with torch.enable_grad(), torch._C._DisablePythonDispatcher():
            again = data.detach().requires_grad_()
            (with_zeros,) = torch.autograd.grad(operation(again, *args, **kwargs), again, gradient)
        has_none = (data != 0).all()
        wide = data.to(gradient.dtype)
        factors = torch.where(has_none, wide, torch.ones_like(wide))
        without_zeros = _WITHOUT_ZEROS[operation](gradient, factors, result, *args)
        return None, torch.where(has_none, without_zeros.to(data.dtype), with_zeros), None, None


def _below(operation: Any, *args: Any, **kwargs: Any) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return operation(*args, **kwargs)


def _kernel(operation: Any) -> Callable[..., Tensor]:
    def kernel(data: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (torch.is_grad_enabled() and data.requires_grad) or data.dim() == 0 or data.numel() == 0:
            with torch._C._DisablePythonDispatcher():
                return operation(data, *args, **kwargs)
        return _BothWays.apply(operation, data, args, kwargs)  # pyright: ignore[reportReturnType]

    return kernel


def gradients_by_zeros() -> contextlib.AbstractContextManager[None]:
    """Lets the gradients of products be traced both with zeros and without."""
    return with_kernels({each: {DispatchKey.Autograd: _kernel(each)} for each in _WITHOUT_ZEROS})
