"""Gives operations other kernels of Python, by which torch's tracer runs them, for a while."""

# The kernels that Python adds to an operation have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

from torch._C import DispatchKey

__all__ = ["with_kernels"]


@contextlib.contextmanager
def with_kernels(kernels: Mapping[Any, Mapping[DispatchKey, Callable[..., Any] | None]]) -> Generator[None]:
    """Meanwhile, operations have these kernels.

    Args:
        kernels: By operation, its kernels by dispatch key; None takes away the one that it has.
    """
    before = {operation: dict(operation.py_kernels) for operation in kernels}
    for operation, changes in kernels.items():
        _set(operation, {key: kernel for key, kernel in {**before[operation], **changes}.items() if kernel})
    try:
        yield
    finally:
        for operation, theirs in before.items():
            _set(operation, theirs)


def _set(operation: Any, kernels: Mapping[DispatchKey, Callable[..., Any]]) -> None:
    operation.py_kernels.clear()
    operation.py_kernels.update(kernels)
    operation._dispatch_cache.clear()
