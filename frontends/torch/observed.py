"""Stands in for hooks of submodules while a forward is traced, and notes what they will be given.

A planned step calls them after its forward, each with what it would be given. That is what eager does if
the forward depends on nothing that they do. Where it may, they are refused: here if a hook leads to what the
forward leads to, or may return something, in each step if it changes the module or what it is given.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Generator, Set
from typing import Any

from torch import Tensor, nn

from ...ir import UnsupportedError
from ...torch_support.observers import Observer, observers_of
from ...torch_support.pytree import flatten
from .annotation_scopes import Scopes
from .code import code_reach, function_reach
from .object_graph import HeldObject, is_plain, own_reach

__all__ = ["Observed"]


class Observed:
    """The hooks of a module's submodules that look at what passes.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        named = dict(module.named_modules())
        self.module = module
        self.observers = tuple(observers_of(list(named)[1:], list(named.values())[1:]))
        self.calls: list[tuple[int, tuple[Any, ...]]] = []
        """The hooks that the last run called, by their index, with what they were given after the module."""
        self._versions: list[tuple[int, Tensor, int]] = []
        self._is_running = False

    @contextlib.contextmanager
    def recording(self) -> Generator[None]:
        """Meanwhile, the hooks are not called.

        Raises:
            UnsupportedError: IRC505 for a hook that leads to what the forward leads to, or may return one.
        """
        tables: list[dict[int, Any]] = [
            vars(self.module.get_submodule(each.module))[each.table] for each in self.observers
        ]
        for index, (table, each) in enumerate(zip(tables, self.observers, strict=True)):
            table[each.key] = self._recorder(index)
        try:
            if self.observers:
                self._refuse_shared()
            yield
        finally:
            for table, each in zip(tables, self.observers, strict=True):
                table[each.key] = each.hook

    @contextlib.contextmanager
    def one_run(self) -> Generator[None]:
        """Around one run of the forward.

        Raises:
            UnsupportedError: IRC505 if the forward changes in place what a hook was given.
        """
        self.calls, self._versions, self._is_running = [], [], True
        try:
            yield
        finally:
            self._is_running = False
        for index, tensor, version in self._versions:
            if tensor._version != version:
                raise _refusal(self.observers[index], "is given a tensor that the forward changes afterwards")

    def _recorder(self, index: int) -> Callable[..., None]:
        def record(_: nn.Module, *given: Any) -> None:
            scopes = Scopes.current()
            if not self._is_running or (scopes is not None and scopes.is_checkpointing):
                raise _refusal(self.observers[index], "runs in a part that is checkpointed")
            self.calls.append((index, given))
            tensors = (leaf for leaf in flatten(given)[0] if isinstance(leaf, Tensor))
            self._versions += [(index, tensor, tensor._version) for tensor in tensors]

        return record

    def _refuse_shared(self) -> None:
        modules = list(self.module.modules())
        own = own_reach(self.module, lambda _: frozenset())
        forward = _places([*own, *code_reach(self.module, own)])
        for each in self.observers:
            if not _returns_nothing(_function_of(each.hook)):
                raise _refusal(each, "may return another value than None (a lambda does: write a def)")
            reach = function_reach(each.hook, modules)
            if _places(reach, _written_globals(each.hook)) & forward:
                raise _refusal(each, "shares an object with the forward, which may read what it leaves there")


def _places(holders: list[HeldObject], written: Set[str] | None = None) -> set[tuple[int, str]]:
    """Returns the objects that can hold something else, and the globals.

    Args:
        holders: The objects.
        written: The globals that are assigned to: of numbers and texts these alone count. None for all.
    """
    found: set[tuple[int, str]] = set()
    for holder in holders:
        if holder.names is None:
            found.add((id(holder.value), ""))
            continue
        for name, value in holder.items.items():
            if written is None or name in written or not is_plain(value):
                found.add((id(holder.value), name))
    return found


def _written_globals(hook: Any) -> set[str]:
    """Returns the globals that a hook assigns to, itself and in functions within."""
    waiting: list[Any] = [getattr(_function_of(hook), "__code__", None)]
    found: set[str] = set()
    while waiting:
        code = waiting.pop()
        if isinstance(code, types.CodeType):
            stores = (each for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL")
            found.update(str(each.argval) for each in stores)
            waiting += code.co_consts
    return found


def _function_of(hook: Any) -> Any:
    """Returns the function of Python that a hook calls, without its decorators."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function: Any = getattr(hook, "__func__", hook)
    return inspect.unwrap(function if isinstance(function, types.FunctionType) else type(hook).__call__)


_NO_RESULT = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _returns_nothing(function: Any) -> bool:
    """Whether all ways out of a function return None, as its code is written."""
    if not isinstance(function, types.FunctionType) or function.__code__.co_flags & _NO_RESULT:
        return False
    steps = list(dis.get_instructions(function))
    for before, step in itertools.pairwise(steps):
        is_none = before.opname == "LOAD_CONST" and before.argval is None and not step.is_jump_target
        if (step.opname == "RETURN_VALUE" and not is_none) or (
            step.opname == "RETURN_CONST" and step.argval is not None
        ):
            return False
    return True


def _refusal(observer: Observer, reason: str) -> UnsupportedError:
    return UnsupportedError(
        "IRC505",
        f"{observer}, which {reason}: a planned step calls it after its forward",
        help="remove it, or register it on the root module or on a parameter; or let the forward do its "
        "work, and leave checkpoints to irc",
    )
