"""Refuses operations whose kernels compute products that autocast casts, which no trace sees."""

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

from ....ir import Location, UnsupportedError
from ..source_lines import user_line
from .python_kernels import with_kernels

__all__ = ["refuse_casts_within"]

_aten = torch.ops.aten
_NAMES = {
    _aten.affine_grid_generator.default: "affine_grid",
    _aten._trilinear.default: "bilinear",
    _aten.linalg_pinv.atol_rtol_tensor: "pinv",
}
"""Of all operations in torch's samples, those whose kernels call a product that autocast has a rule for."""


def _kernel(operation: Any) -> Callable[..., Tensor]:
    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled(args[0].device.type):
            raise UnsupportedError(
                "IRC352",
                f"autocast casts within the kernel of {_NAMES[operation]}, and a planned step would not",
                at=Location(source=user_line(inspect.currentframe())),
                help="call it in `with torch.autocast(device_type, enabled=False):` on float32",
            )
        with torch._C._DisablePythonDispatcher():
            return operation(*args, **kwargs)

    return kernel


def refuse_casts_within() -> contextlib.AbstractContextManager[None]:
    """Refuses them under autocast, which casts within the kernel; a step calls the kernel without it.

    Raises:
        UnsupportedError: IRC352, from the forward that calls one of these under autocast.
    """
    return with_kernels({each: {DispatchKey.Autograd: _kernel(each)} for each in _NAMES})
