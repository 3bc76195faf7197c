"""Refuses compressed sparse tensors before they are traced: torch's tracer ends the process."""

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

__all__ = ["DENSE_ALONE", "refuse_compressed_layouts"]

DENSE_ALONE = (
    f"a plan holds dense tensors alone: give embeddings sparse=False, or call to_dense(); or {THROUGH_DYNAMO}"
)

_aten = torch.ops.aten
_LAYOUTS = {
    _aten._to_sparse.default: None,
    _aten._to_sparse_csr.default: torch.sparse_csr,
    _aten._to_sparse_csc.default: torch.sparse_csc,
    _aten._to_sparse_bsr.default: torch.sparse_bsr,
    _aten._to_sparse_bsc.default: torch.sparse_bsc,
}


def _kernel(operation: Any) -> Callable[..., Tensor]:
    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        layout = _LAYOUTS[operation] or kwargs.get("layout")
        if layout in _LAYOUTS.values() and layout is not None:
            raise UnsupportedError(
                "IRC334",
                f"{operation} makes a {layout} tensor",
                at=Location(source=user_line(inspect.currentframe())),
                help=DENSE_ALONE,
            )
        with torch._C._DisablePythonDispatcher():
            return operation(*args, **kwargs)

    return kernel


def refuse_compressed_layouts() -> contextlib.AbstractContextManager[None]:
    """Refuses what makes a compressed tensor of a dense one; torch ends the process while it traces that.

    Raises:
        UnsupportedError: IRC334, from the forward that calls it.
    """
    return with_kernels({key: {DispatchKey.Autograd: _kernel(key)} for key in _LAYOUTS})
