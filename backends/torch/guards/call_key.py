"""The call of a fitted module, as plans are compared with it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.utils import _pytree as pytree

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
        forward: What `forward_key` says of the forward that is called.
    """

    root: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    tree: Any
    tensors: list[Tensor]
    module_state: ModuleState
    autocast: Autocast
    forward: object

    def trains(self) -> bool:
        """Whether an argument or a parameter requires a gradient."""
        return any(tensor.requires_grad for tensor in (*self.tensors, *self.root.parameters()))

    def name_of(self, leaf: int) -> str:
        """The name of a leaf by the parameters of the forward, such as `argument sizes[0]`."""
        places = pytree.tree_unflatten([*range(len(self.leaves))], self.tree)
        for (kind, first, *rest), value in pytree.tree_flatten_with_path(places)[0]:
            if type(value) is int and value == leaf:
                is_positional = cast("Any", kind).idx == 0
                key = cast("Any", first)
                name = _positional_name(self.root, key.idx) if is_positional else key.key
                return f"argument {name}{pytree.keystr(tuple(rest))}"
        return "an argument"  # within a dataclass


def _positional_name(module: nn.Module, index: int) -> str:
    """The name of a positional argument; its number if it has none."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    return names[index] if index < len(names) else str(index)
