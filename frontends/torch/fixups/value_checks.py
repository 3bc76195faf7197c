"""Lets checks of values that torch's own functions make pass on tensors without data."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["PassedChecks"]

_CHECKING = {functional.gaussian_nll_loss.__code__}
"""Functions that read whether a value is wrong, and then raise: whatever runs on has read False."""


class PassedChecks(TorchDispatchMode):
    """Answers such checks; a step in which one fails takes no memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool and _is_check():
            return False
        return func(*args, **(kwargs or {}))


def _is_check() -> bool:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in _CHECKING:
        frame = frame.f_back
    return frame is not None
