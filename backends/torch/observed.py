"""Calls hooks of submodules after a planned forward, with what eager gives them."""

# torch's dispatch modes are given operations, whose schemas have no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...ir import UnsupportedError
from ...torch_support.observers import Observer
from ...torch_support.pytree import flatten
from .compiled_plan import CompiledPlan
from .guards.module_state import ModuleState

__all__ = ["call_observers"]


def call_observers(root: nn.Module, compiled: CompiledPlan, given: Sequence[tuple[Any, ...]]) -> None:
    """Calls the observers of a plan.

    Args:
        root: The fitted module.
        compiled: The plan.
        given: The arguments of each call after the submodule.

    Raises:
        UnsupportedError: IRC505 for a hook that eager's forward would depend on: it returns something,
            changes what it is given, a parameter, a buffer, or a setting that the forward reads, or draws
            random numbers.
    """
    held = [*root.parameters(), *root.buffers()]
    kept = _addresses(held)
    for index, arguments in zip(compiled.signature.observed, given, strict=True):
        observer = compiled.observers[index]
        tensors = [leaf for leaf in flatten(arguments)[0] if isinstance(leaf, Tensor)]
        asking = [tensor.requires_grad for tensor in tensors]
        with _Watch(observer, _addresses(tensors), kept):
            made = observer.hook(root.get_submodule(observer.module), *arguments)
        if made is not None:
            raise _refusal(observer, "returns something")
        if [tensor.requires_grad for tensor in tensors] != asking:
            raise _refusal(observer, "changes what it is given")
        if _addresses(held) != kept:
            raise _refusal(observer, "changes a parameter or a buffer")
    if not compiled.is_for(ModuleState(root).state):
        called = compiled.observers[compiled.signature.observed[0]]
        raise _refusal(called, "or another changes a setting of a module, which the forward reads")


class _Watch(TorchDispatchMode):
    """Refuses operations of a hook that eager's forward would depend on.

    Args:
        observer: The hook.
        given: The addresses of the tensors that it is given.
        held: Those of parameters and buffers.
    """

    def __init__(self, observer: Observer, given: frozenset[int], held: frozenset[int]) -> None:
        super().__init__()
        self.observer, self.given, self.held = observer, given, held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _refusal(self.observer, "draws random numbers")
        if func._schema.is_mutable:
            named = dict(zip((each.name for each in func._schema.arguments), args, strict=False))
            named |= kwargs or {}
            for each in func._schema.arguments:
                if each.alias_info is not None and each.alias_info.is_write:
                    found = named.get(each.name)
                    tensors: list[Any] = found if isinstance(found, list) else [found]
                    self._refuse_written(_addresses(t for t in tensors if isinstance(t, Tensor)))
        return func(*args, **(kwargs or {}))

    def _refuse_written(self, written: frozenset[int]) -> None:
        if written & self.held:
            raise _refusal(self.observer, "changes a parameter or a buffer")
        if written & self.given:
            raise _refusal(self.observer, "changes what it is given")


def _addresses(tensors: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel())


def _refusal(observer: Observer, reason: str) -> UnsupportedError:
    return UnsupportedError(
        "IRC505",
        f"{observer}, which {reason}: a planned step calls it after its forward",
        help="remove it, or let the forward do its work; if it is there for gradient checkpointing, "
        "gradient_checkpointing_disable(): irc chooses what runs again",
    )
