"""Names the parts of a fitted module that train beside its plan: a planned step calls none of them."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import nn
from torch.jit._recursive import ignored_attributes

from ...ir import format_bytes
from ...torch_support.allocated import allocated_bytes
from ...torch_support.pytree import tensors_of
from .alive import storage_key
from .guards.module_state import CALL
from .planning_locks import is_tracing

__all__ = ["BesidePlan", "as_they_are"]

_log = logging.getLogger("irc")
_thread = threading.local()


class BesidePlan:
    """The parts of one fitted module that were called in training, each named once."""

    def __init__(self) -> None:
        self._told = {""}  # whoever calls the original itself goes around no plan

    def watch(self, names: Sequence[str], submodules: Sequence[nn.Module]) -> None:
        """Watches the original, by the name "", and submodules, except those that are compiled."""
        if CALL not in ignored_attributes:
            ignored_attributes.append(CALL)  # torch.jit.script would ask for its type
        for name, child in zip(names, submodules, strict=True):
            if isinstance(vars(child).get(CALL), _Watched | None):
                vars(child)[CALL] = _Watched(child, name, self)

    def is_new(self, name: str) -> bool:
        """Whether a part was not named before."""
        return name not in self._told

    def tell(self, name: str, result: Any) -> None:
        """Names a part, with the bytes of its result.

        What the result holds for backward is not looked at: a checkpoint of the user's would run for it.
        """
        self._told.add(name)
        tensors = tensors_of(result)
        if not any(tensor.requires_grad for tensor in tensors):
            return
        storages = {storage_key(tensor): allocated_bytes(tensor) for tensor in tensors}
        _log.warning(
            "IRC568: submodule %r is called in training beside the plan of the module around it, which does "
            "not count what it takes: %s of results, and what backward needs for them. Call the fitted "
            "module, or give it a forward that calls the submodule: that is planned",
            name,
            format_bytes(sum(storages.values())),
        )


@contextlib.contextmanager
def as_they_are() -> Generator[None]:
    """Meanwhile, this thread calls submodules without a plan, and that was said."""
    before = getattr(_thread, "is_said", False)
    _thread.is_said = True
    try:
        yield
    finally:
        _thread.is_said = before


class _Watched:
    """Calls a submodule as it is; it holds nothing, and a copy of it is None."""

    def __init__(self, module: nn.Module, name: str, beside: BesidePlan) -> None:
        self._module, self._name, self._beside = weakref.ref(module), name, weakref.ref(beside)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, beside = self._module(), self._beside()
        assert module is not None
        if beside is None:  # the fitted module is gone
            vars(module).pop(CALL, None)
        elif (
            module.training
            and torch.is_grad_enabled()
            and not is_tracing()
            and not getattr(_thread, "is_said", False)
            and torch._C._current_graph_task_id() == -1  # in backward, a checkpoint runs what ran before
        ):
            with as_they_are():  # its own parts are parts of this call
                result = module._call_impl(*args, **kwargs)
            if beside.is_new(self._name):
                beside.tell(self._name, result)
            return result
        return module._call_impl(*args, **kwargs)
