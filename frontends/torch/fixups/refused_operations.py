"""Refuses operations when a forward calls them: those that no trace sees as they are, or dies of."""

# Torch's dispatchers have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from ....ir import THROUGH_DYNAMO, Location, UnsupportedError
from ..source_lines import user_line
from .python_kernels import with_kernels

__all__ = ["DENSE_ALONE", "check_casts", "refused_operations"]

DENSE_ALONE = (
    f"a plan holds dense tensors alone: give embeddings sparse=False, or call to_dense(); or {THROUGH_DYNAMO}"
)

_aten = torch.ops.aten
_CASTING = {
    _aten._trilinear.default: "bilinear",
    _aten.linalg_pinv.atol_rtol_tensor: "pinv",
}
"""Of all operations in torch's samples, those whose kernels call a product that autocast has a rule for."""

_COMPRESSING = {
    _aten._to_sparse.default: None,
    _aten._to_sparse_csr.default: torch.sparse_csr,
    _aten._to_sparse_csc.default: torch.sparse_csc,
    _aten._to_sparse_bsr.default: torch.sparse_bsr,
    _aten._to_sparse_bsc.default: torch.sparse_bsc,
}
"""Operations that make compressed tensors, with their layouts; None where an argument says it."""


def check_casts(name: str, operand: Tensor) -> None:
    """Refuses an operation under autocast, which casts within the kernel: a step calls it without.

    Raises:
        UnsupportedError: IRC352.
    """
    if torch.is_autocast_enabled(operand.device.type):
        raise UnsupportedError(
            "IRC352",
            f"autocast casts within the kernel of {name}, and a planned step would not",
            at=_line(),
            help="call it in `with torch.autocast(device_type, enabled=False):` on float32",
        )


def _check_casts(operation: Any, args: Any, kwargs: Any) -> None:
    check_casts(_CASTING[operation], args[0])


def _check_layout(operation: Any, args: Any, kwargs: Any) -> None:
    """Refuses a compressed tensor: of one that needs a gradient, torch's tracer ends the process."""
    layout = _COMPRESSING[operation] or kwargs.get("layout")
    if layout is not None and layout in _COMPRESSING.values():
        raise UnsupportedError("IRC334", f"{operation} makes a {layout} tensor", at=_line(), help=DENSE_ALONE)


def _line() -> Location:
    return Location(source=user_line(inspect.currentframe()))


def _kernel(operation: Any, check: Callable[[Any, Any, Any], None]) -> Callable[..., Tensor]:
    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        check(operation, args, kwargs)
        with with_kernels({operation: {DispatchKey.Autograd: None}}):
            return operation(*args, **kwargs)

    return kernel


def refused_operations() -> contextlib.AbstractContextManager[None]:
    """Refuses these operations, in the forward that calls them.

    Raises:
        UnsupportedError: IRC352 for those whose kernels cast under autocast, IRC334 for compressed tensors.
    """
    checks = dict.fromkeys(_CASTING, _check_casts) | dict.fromkeys(_COMPRESSING, _check_layout)
    return with_kernels({key: {DispatchKey.Autograd: _kernel(key, check)} for key, check in checks.items()})
