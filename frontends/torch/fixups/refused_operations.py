"""Refuses operations when a forward calls them: those that no plan holds, or torch's tracer dies of."""

# Torch's dispatchers have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import DispatchKey

from ....ir import THROUGH_DYNAMO, Location, UnsupportedError
from ..source_lines import user_line
from .python_kernels import with_kernels

__all__ = ["DENSE_ALONE", "refused_operations"]

DENSE_ALONE = (
    "a plan holds dense tensors, and sparse gradients of embeddings that are looked up once, without "
    f"padding_idx: give others sparse=False, or call to_dense(); or {THROUGH_DYNAMO}"
)

_aten = torch.ops.aten
_COMPRESSING = {
    _aten._to_sparse.default: None,
    _aten._to_sparse_csr.default: torch.sparse_csr,
    _aten._to_sparse_csc.default: torch.sparse_csc,
    _aten._to_sparse_bsr.default: torch.sparse_bsr,
    _aten._to_sparse_bsc.default: torch.sparse_bsc,
}
"""Operations that make compressed tensors, with their layouts; None where an argument says it."""


_LOOKING_UP = (_aten.embedding.default, _aten._embedding_bag.default)


def _check_layout(operation: Any, kwargs: Any) -> None:
    """Refuses a compressed tensor: of one that needs a gradient, torch's tracer ends the process."""
    layout = _COMPRESSING[operation] or kwargs.get("layout")
    if layout is not None and layout in _COMPRESSING.values():
        raise UnsupportedError("IRC334", f"{operation} makes a {layout} tensor", at=_line(), help=DENSE_ALONE)


def _refuse_padding(result: Tensor, *, padding_idx: int = -1, sparse: bool = False, **_: Any) -> None:
    """Refuses a sparse gradient from which the rows of `padding_idx` are taken, once backward makes it."""
    if not sparse or padding_idx < 0 or result.grad_fn is None:
        return
    message = "an embedding with padding_idx makes a sparse gradient as long as data says"
    error = UnsupportedError("IRC334", message, at=_line(), help=DENSE_ALONE)

    def refuse(_: Any) -> NoReturn:
        raise error

    result.grad_fn.register_prehook(refuse)


def _line() -> Location:
    return Location(source=user_line(inspect.currentframe()))


def _kernel(operation: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operation._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if operation in _COMPRESSING:
            _check_layout(operation, kwargs)
        with with_kernels({operation: {DispatchKey.Autograd: None}}):
            results = operation(*args, **kwargs)
        if operation in _LOOKING_UP:
            result = results if isinstance(results, Tensor) else results[0]
            _refuse_padding(result, **dict(zip(names, args, strict=False)), **kwargs)
        return results

    return kernel


def refused_operations() -> contextlib.AbstractContextManager[None]:
    """Refuses these operations, with the line of the forward that calls them.

    Raises:
        UnsupportedError: IRC334.
    """
    checked = (*_COMPRESSING, *_LOOKING_UP)
    return with_kernels({operation: {DispatchKey.Autograd: _kernel(operation)} for operation in checked})
