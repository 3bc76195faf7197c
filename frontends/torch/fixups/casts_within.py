"""Refuses operations whose kernels compute products that autocast casts, which no trace sees."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ....ir import Location, UnsupportedError
from ..source_lines import user_line

__all__ = ["RefusesCastsWithin"]

_FUNCTIONS = {
    functional.affine_grid,
    torch.affine_grid_generator,
    torch.bilinear,
    torch.linalg.pinv,
    torch.pinverse,
}
"""Of all operations in torch's samples, those whose kernels call a product that autocast has a rule for."""


class RefusesCastsWithin(TorchFunctionMode):
    """Refuses them under autocast, which casts within the kernel; a step calls the kernel without it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function.

        Raises:
            UnsupportedError: IRC352 for one of these under autocast.
        """
        if func in _FUNCTIONS and _is_cast(args):
            raise UnsupportedError(
                "IRC352",
                f"autocast casts within the kernel of {func.__name__}, and a planned step would not",
                at=Location(source=user_line(inspect.currentframe())),
                help="call it in `with torch.autocast(device_type, enabled=False):` on float32",
            )
        return func(*args, **(kwargs or {}))


def _is_cast(args: tuple[Any, ...]) -> bool:
    devices = {arg.device.type for arg in args if isinstance(arg, Tensor)} & {"cpu", "cuda"}
    return any(map(torch.is_autocast_enabled, devices))
