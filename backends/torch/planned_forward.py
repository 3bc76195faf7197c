"""Plans a forward that somebody has given to a fitted module itself, as trainers do with their models."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from types import MethodType
from typing import Any

from torch import nn

from ...ir import UnsupportedError
from ...torch_support.attribute_reads import AttributeReads, recording_attribute_reads
from .guards.module_state import attribute
from .planning_locks import is_tracing

__all__ = ["PlannedForward", "forward_key", "rebound", "replacement"]

_PLANS = "_irc_plans"
"""The mark of a function that runs the plan of another one: itself, and the other one."""


class PlannedForward:
    """The `forward` in the class of a fitted module.

    Python finds a method of a class only behind an attribute of the instance: a library that gives the module
    a `forward` of its own would go around the plan. A data descriptor is found before both.

    Args:
        function: The planned forward, which takes the module first.
        run: Runs another forward by its plan: it takes the module, that forward, and the arguments.
        original: The function that is planned.
    """

    def __init__(self, function: Any, run: Callable[..., Any], original: Any) -> None:
        self._function, self._run, self._original = function, run, original

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        if module is None:
            return self._function
        forward = replacement(module)
        return MethodType(self._function, module) if forward is None else _planned(forward, module, self._run)

    def __set__(self, module: nn.Module, forward: Any) -> None:
        _refuse_while_traced()
        attributes = vars(module)
        attributes.pop("forward", None)
        if (own := self._unplanned(forward, module)) is not None:
            attributes["forward"] = own

    def __delete__(self, module: nn.Module) -> None:
        _refuse_while_traced()
        if vars(module).pop("forward", None) is None:
            raise AttributeError("forward")

    def _unplanned(self, forward: Any, module: nn.Module) -> Any:
        """Returns the forward that one runs by its plan, itself if it runs none; None for the class's."""
        is_method = _is_method_of(forward, module)
        function = forward.__func__ if is_method else forward
        if is_method and function in (self._function, self._original):
            return None
        marked, own = getattr(function, _PLANS, (None, None))
        return own if marked is function else forward


def _refuse_while_traced() -> None:
    if is_tracing():
        raise UnsupportedError(
            "IRC539",
            "the forward of the fitted module sets the module's forward: a planned step, which does not run "
            "its code, would not",
            help="set it before the module is called",
        )


def replacement(module: nn.Module) -> Any:
    """Returns the forward that a module has itself, beside that of its class; None if it has none."""
    return vars(module).get("forward")


@contextlib.contextmanager
def watched(module: nn.Module, forward: Any) -> Generator[AttributeReads]:
    """Meanwhile, a forward that a module has itself is traced, which may read it by another name than `self`.

    A stand-in is traced in place of the module: what the forward changes in the module itself would be
    changed by the trace, and not by planned steps.

    Raises:
        UnsupportedError: IRC539 if an attribute of the module was changed; it is as it was.
    """
    if forward is None:
        yield AttributeReads()
        return
    attributes = vars(module)
    before = dict(attributes)
    try:
        with recording_attribute_reads() as readings:
            yield readings
    finally:
        changed = [
            name
            for name in (before | attributes)
            if before.get(name, attributes) is not attributes.get(name, before)
        ]
        if changed:
            attributes.clear()
            attributes.update(before)
    if changed:
        raise UnsupportedError(
            "IRC539",
            f"the forward that the module was given sets its attribute {changed[0]!r}, and not that of the "
            "argument `self`: a planned step, which does not run its code, would not",
            help="write a method that takes the module: types.MethodType(forward, module)",
        )


def forward_key(forward: Any) -> object:
    """Returns what tells a forward that a module has itself from others: of a method, its function."""
    return None if forward is None else attribute({"forward": forward}, "forward")


def rebound(forward: Any, module: nn.Module, other: nn.Module) -> Any:
    """Returns a method of a module as one of another module, and any other function as it is."""
    return MethodType(forward.__func__, other) if _is_method_of(forward, module) else forward


def _is_method_of(forward: Any, module: nn.Module) -> bool:
    return type(forward) is MethodType and forward.__self__ is module


def _planned(forward: Any, module: nn.Module, run: Callable[..., Any]) -> Any:
    """Returns what runs a forward by its plan: a method of the module if it is one, else a function."""
    if _is_method_of(forward, module):

        @functools.wraps(forward.__func__)
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return run(self, rebound(forward, module, self), args, kwargs)

        setattr(method, _PLANS, (method, forward))
        return MethodType(method, module)

    @functools.wraps(forward)
    def function(*args: Any, **kwargs: Any) -> Any:
        return run(module, forward, args, kwargs)

    setattr(function, _PLANS, (function, forward))
    return function
