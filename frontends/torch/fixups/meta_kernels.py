"""Lets models on the device `meta` be traced with gradients through composite operations."""

# The kernels that Python adds to an operation have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

__all__ = ["composites_on_meta"]


@contextlib.contextmanager
def composites_on_meta(tensors: Iterable[Tensor]) -> Generator[None]:
    """Takes away the kernels for `meta` of composite operations, if any of these tensors lives there.

    An operation such as `nll_loss` has its gradient from the operations that it consists of. Torch adds a
    kernel of its own for the device `meta` to a hundred of them, which has none: the loss of a model there
    would not depend on its parameters.

    Args:
        tensors: The parameters, buffers and inputs of what is traced.
    """
    if not any(tensor.is_meta for tensor in tensors):
        yield
        return
    taken: list[tuple[Any, Any]] = []  # none if someone around this, or another thread, has taken them
    try:
        for operation in _composites():
            kernel = operation.py_kernels.pop(DispatchKey.Meta, None)
            if kernel is not None:
                taken.append((operation, kernel))
                operation._dispatch_cache.clear()
        yield
    finally:
        for operation, kernel in taken:
            operation.py_kernels[DispatchKey.Meta] = kernel
            operation._dispatch_cache.clear()


@functools.cache
def _composites() -> tuple[Any, ...]:
    """The operations of torch that consist of others, and have a kernel for `meta` besides."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    implicit = DispatchKey.CompositeImplicitAutograd.name
    found: list[Any] = []
    for name in names:
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, implicit):
            base, _, overload = name.removeprefix("aten::").partition(".")
            operation = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
            if DispatchKey.Meta in getattr(operation, "py_kernels", {}):
                found.append(operation)
    return tuple(found)
