"""The call of a fitted module, as plans are compared with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ....ir import Autocast
from .module_state import ModuleState

__all__ = ["CallKey"]


@dataclass(eq=False, slots=True)
class CallKey:
    """A call with all that decides which plan is for it.

    Args:
        root: The fitted module.
        args: The positional arguments.
        kwargs: The keyword arguments.
        leaves: The leaves of both.
        tree: The nesting of both.
        tensors: The tensors among the leaves.
        module_state: The submodules and their settings at the time of the call.
        autocast: The device types for which automatic casting is on.
    """

    root: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    tree: Any
    tensors: list[Tensor]
    module_state: ModuleState
    autocast: Autocast

    def trains(self) -> bool:
        """Whether an argument or a parameter requires a gradient."""
        return any(tensor.requires_grad for tensor in (*self.tensors, *self.root.parameters()))
