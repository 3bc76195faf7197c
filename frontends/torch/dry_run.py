"""Runs what a user wrote, as a loss, on tensors without data, and leaves no trace of it in their objects."""

# The tables in which torch keeps its modes have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ...torch_support.functions import closed_over
from .state import State

__all__ = ["dry_run"]


@contextlib.contextmanager
def dry_run(function: Callable[..., Any]) -> Generator[None]:
    """Afterwards, what a function holds is as before: its object, its closure, modules, Python's generators.

    A loss may keep state, as a running mean of what it has seen: run on tensors without data it would keep
    one of these, and train on it.

    Args:
        function: A function, a method, a partial function, or an object that can be called.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(State(nn.Module()).kept())  # Python's generators
        for held in _held_by(function):
            stack.enter_context(_numbers_kept(held))
            if isinstance(held, nn.Module):
                stack.enter_context(State(held).kept())
            else:
                stack.enter_context(_kept(held))
        yield


def _held_by(function: Any) -> Iterator[Any]:
    """Yields the objects to which a function can write without naming a global."""
    seen: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, type):
            continue
        seen.add(id(found))
        if isinstance(found, functools.partial):
            waiting += [found.func, *found.args, *found.keywords.values()]
        elif inspect.ismethod(found):
            waiting += [found.__self__, found.__func__]
        elif inspect.isfunction(found):
            waiting += closed_over(found)
        elif isinstance(found, (nn.Module, list, dict, set)) or hasattr(found, "__dict__"):
            yield found


@contextlib.contextmanager
def _numbers_kept(held: Any) -> Generator[None]:
    """Afterwards, tensors of one element are as before: they alone have data where others have none."""
    tensors = (
        list(held.buffers())
        if isinstance(held, nn.Module)
        else [held, *getattr(held, "__dict__", {}).values()]
    )
    numbers = [t for t in tensors if type(t) is Tensor and t.numel() == 1 and not t.is_inference()]
    with _disable_current_modes():
        before = [(number, number._version, number.detach().clone()) for number in numbers]
    try:
        yield
    finally:
        with _disable_current_modes():
            for number, version, value in before:
                if number._version != version:
                    number.data.copy_(value)  # keeps the version, which the backward of the loss checks


@contextlib.contextmanager
def _kept(held: Any) -> Generator[None]:
    """Afterwards, a container or the attributes of an object, with the containers in them, are as before."""
    within = held if isinstance(held, (list, dict, set)) else vars(held)
    parts = [within]
    if isinstance(within, dict):
        values = cast("dict[Any, Any]", within).values()
        parts += [value for value in values if isinstance(value, (list, dict, set))]
    before = [(part, part.copy()) for part in parts]
    try:
        yield
    finally:
        for part, contents in before:
            part.clear()
            if isinstance(part, list):
                part.extend(contents)
            else:
                part.update(contents)
