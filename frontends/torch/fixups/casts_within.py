"""Traces operations within whose kernels autocast casts, with eager's casts in forward and backward."""

# Kernels by dispatch key, and functions of one level of torch.func, have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ....ir import Location, UnsupportedError
from ..source_lines import user_line
from .python_kernels import with_kernels

__all__ = ["casts_within"]

_GRID = torch.ops.aten.affine_grid_generator.default
_INVERSE = torch.ops.aten.linalg_pinv.atol_rtol_tensor
_PRODUCT = torch.ops.aten._trilinear.default
_BILINEAR = ([1, 3], [0], [1, 2], [2, 3], 1)
"""The dimensions of the product that is `bilinear`."""


def _is_cast(operand: Tensor) -> bool:
    """Whether autocast is on, and not off within a kernel of its own, as that of `bilinear` on CUDA."""
    device = operand.device.type
    if not torch.is_autocast_enabled(device) or operand.dtype == torch.float64 or operand.is_complex():
        return False
    key = getattr(DispatchKey, f"Autocast{device.upper()}")
    return not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def _whole(operation: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Calls an operation by torch's own kernels, as one operation of the trace."""
    with with_kernels({operation: {DispatchKey.Autograd: None}}):
        return operation(*args, **kwargs)


def _parts(operation: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Calls the operations of which the kernel consists, with autocast as it is."""
    with torch._C.DisableTorchFunction():  # a mode would call the operation, whatever the key
        return operation._op_dk(DispatchKey.CompositeExplicitAutogradNonFunctional, *args, **kwargs)


def _applied(function: Any, operation: Any, compute: Callable[..., Tensor], *args: Any) -> Any:
    """Calls a function in place of an operation, at the level of `torch.func` that it has come down to.

    The operation goes down to the next level by itself. Below the last one, `compute` returns its result.
    """
    is_recorded = torch.is_grad_enabled()

    def below(*args: Any) -> Tensor:
        if not torch._C._are_functorch_transforms_active():
            return compute(*args)
        with (
            torch.set_grad_enabled(is_recorded),
            forward_ad._set_fwd_grad_enabled(True),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            return operation(*args)

    with enable_single_level_autograd_function():
        return function.apply(below, *args)


class _Product(_SingleLevelFunction):
    """The product of three tensors under autocast. Its gradients are such products, cast where they run."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *args: Any) -> Tensor:
        ctx.save_for_backward(*args[:3])
        ctx.save_for_forward(*args[:3])
        ctx.dims = args[3:]
        return compute(*args)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:  # pyright: ignore
        terms = [
            _PRODUCT(*_replaced(ctx.saved_tensors, i, tangent), *ctx.dims)
            for i, tangent in enumerate(tangents[:3])
            if tangent is not None
        ]
        return functools.reduce(torch.add, terms)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        *expanded, summed, _ = ctx.dims
        gradients: list[Tensor | None] = [None] * 9
        for i in range(3):
            if ctx.needs_input_grad[1 + i]:
                factors = _replaced(ctx.saved_tensors, i, gradient)
                gradients[1 + i] = _PRODUCT(*factors, *_replaced(expanded, i, summed), expanded[i])
        return tuple(gradients)


def _cast_product(*args: Any) -> Tensor:
    factors, dims = args[:3], args[3:]
    if dims != _BILINEAR or not factors[1].is_contiguous():
        return _parts(_PRODUCT, *args)
    # each result is one element of one product, so all can be cast at once, not slice by slice
    dtype = torch.get_autocast_dtype(factors[0].device.type)
    return _whole(_PRODUCT, *(factor.to(dtype) for factor in factors), *dims).to(factors[0].dtype)


def _replaced(items: Sequence[Any], index: int, item: Any) -> tuple[Any, ...]:
    return *items[:index], item, *items[index + 1 :]


def _product(
    i1: Tensor,
    i2: Tensor,
    i3: Tensor,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int = 1,
) -> Tensor:
    args = i1, i2, i3, expand1, expand2, expand3, sumdim, unroll_dim
    return _applied(_Product, _PRODUCT, _cast_product, *args) if _is_cast(i2) else _whole(_PRODUCT, *args)


class _Grid(_SingleLevelFunction):
    """The operation, or its parts under autocast; the parts of its gradient.

    The kernel's own base of length 1 comes from memory that no trace can see.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], theta: Tensor, *arguments: Any) -> Tensor:
        ctx.arguments = arguments
        return compute(theta, *arguments)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *__: None) -> Tensor:  # pyright: ignore
        return _GRID(tangent, *ctx.arguments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        base = _base_grid(gradient, *ctx.arguments).transpose(1, 2)
        places = gradient.reshape(len(gradient), -1, gradient.shape[-1])
        return None, base.bmm(places).transpose(1, 2), None, None


def _grid(theta: Tensor, size: list[int], align_corners: bool) -> Tensor:
    return _applied(_Grid, _GRID, _cast_grid, theta, size, align_corners)


def _cast_grid(theta: Tensor, size: list[int], align_corners: bool) -> Tensor:
    """Returns the grid, with its product as autocast casts it."""
    if not _is_cast(theta):
        return _whole(_GRID, theta, size, align_corners)
    base = _base_grid(theta, size, align_corners)
    return base.bmm(theta.transpose(1, 2)).view(len(theta), *size[2:], -1)


def _base_grid(like: Tensor, size: list[int], align_corners: bool) -> Tensor:
    """Returns the coordinates of each place with a 1 behind, in rows (batch, places, 1 + axes)."""
    axes = len(size) - 2
    with torch.autocast(like.device.type, enabled=False):
        unit = torch.eye(axes, axes + 1, dtype=like.dtype, device=like.device)[None]
        grid = _whole(_GRID, unit, [1, *size[1:]], align_corners).view(1, -1, axes)
        return torch.cat((grid, torch.ones_like(grid[..., :1])), -1).repeat(len(like), 1, 1)


def _inverse(data: Tensor, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Tensor:
    options = {"atol": atol, "rtol": rtol, "hermitian": hermitian}
    if not _is_cast(data):
        return _whole(_INVERSE, data, **options)
    if not (torch.is_grad_enabled() and data.requires_grad):
        return _parts(_INVERSE, data, **options)
    raise UnsupportedError(
        "IRC352",
        "eager's own backward of pinv under autocast raises: its result is in half precision",
        at=Location(source=user_line(inspect.currentframe())),
        help="call it in `with torch.autocast(device_type, enabled=False):` on float32",
    )


def casts_within() -> contextlib.AbstractContextManager[None]:
    """Lets these operations be traced as autocast casts within their kernels, and not as without it.

    These are all operations of torch's samples whose kernels call a product that autocast has a rule for.

    Raises:
        UnsupportedError: IRC352, when the model calls one that has no gradient under autocast.
    """
    kernels = {_GRID: _grid, _PRODUCT: _product, _INVERSE: _inverse}
    return with_kernels({operation: {DispatchKey.Autograd: kernel} for operation, kernel in kernels.items()})
