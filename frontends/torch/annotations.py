"""Annotations for single modules: their results are kept for backward, or made again there."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TypeVar, overload

from torch import nn

from ...ir import Policy, UsageError
from .annotation_scopes import MARKS, Scopes, is_inside

__all__ = ["Stretch", "keep", "mark", "recompute", "unmark"]

_M = TypeVar("_M", bound=nn.Module)


class Stretch(contextlib.ContextDecorator):
    """A part of a forward that an annotation is about: a `with` block, or a function that it decorates."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __enter__(self) -> None:
        if (scopes := Scopes.current()) is not None:
            scopes.enter_stretch(self.policy)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (scopes := Scopes.current()) is not None:
            scopes.leave()


@overload
def keep(module: _M, /) -> _M: ...
@overload
def keep() -> Stretch: ...
def keep(module: nn.Module | None = None, /) -> nn.Module | Stretch:
    """Annotations that nothing of a module's forward runs again: what backward needs of it stays.

    The mark is on the module and is read by `irc.optimize`; of nested marks the innermost counts. It is not
    part of the `state_dict`; copies and pickles of the module have it. Without a module, the result is for
    a part of a forward: `with irc.keep(): ...`, or `@irc.keep()` above a function.

    Args:
        module: A submodule of the model, or the model.

    Returns:
        The module.

    Raises:
        UsageError: IRC553 if it is not a module, or one that was planned already.
    """
    return Stretch(Policy.KEEP) if module is None else mark(module, Policy.KEEP)


@overload
def recompute(module: _M, /) -> _M: ...
@overload
def recompute() -> Stretch: ...
def recompute(module: nn.Module | None = None, /) -> nn.Module | Stretch:
    """Annotates a module: its intermediate results do not stay for backward but are made again.

    Operations whose results leave the module are free: these may stay. What draws random numbers, or might
    give other numbers when it runs again, runs once in any case, and backward keeps what it needs of that.
    Otherwise as `keep`.

    Args:
        module: A submodule of the model, or the model.

    Returns:
        The module.

    Raises:
        UsageError: IRC553 if it is not a module, or one that was planned already.
    """
    return Stretch(Policy.RECOMPUTE) if module is None else mark(module, Policy.RECOMPUTE)


def unmark(module: _M, /) -> _M:
    """Takes back what `keep` or `recompute` asked for a module; annotations for submodules stay.

    Raises:
        UsageError: IRC553 if it is not a module, or one that was planned already.
    """
    _check(module)
    module.__dict__.pop(MARKS, None)
    return module


def mark(module: _M, policy: Policy, path: str = "") -> _M:
    """Annotations something for a module, a submodule, or nodes of an ONNX model.

    Args:
        module: A module.
        policy: The annotation.
        path: Dotted path of a submodule; for an ONNX model, the name of a node, or what the names of several
            nodes begin with up to a slash or a dot.

    Raises:
        UsageError: IRC553 if nothing has this path, or the module is none or was planned already.
    """
    _check(module)
    names: tuple[str, ...] | None = getattr(module, "onnx_node_names", None)
    if not path:
        module.__dict__[MARKS] = (("", policy.value),)
    elif names is not None:
        if not any(is_inside(name, path) for name in names):
            raise UsageError(
                "IRC553",
                f"no node of the ONNX model is named {path!r}, or begins so up to a slash or a dot",
                help=f"give such a name: the model's begin with {', '.join(map(repr, names[:3]))}",
            )
        others = (pair for pair in module.__dict__.get(MARKS, ()) if pair[0] != path)
        module.__dict__[MARKS] = (*others, (path, policy.value))
    else:
        try:
            child = module.get_submodule(path)
        except AttributeError as error:
            children = ", ".join(repr(name) for name, _ in module.named_children())
            raise UsageError(
                "IRC553",
                f"the model has no submodule {path!r}",
                help=f"give a dotted path that begins with one of {children}" if children else None,
            ) from error
        mark(child, policy)
    return module


def _check(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(
            "IRC553",
            f"an annotation is for a torch.nn.Module, not for a {type(module).__name__}",
            help="give a submodule, such as irc.keep(model.layer3); or write `with irc.keep():` in a forward",
        )
    if "_irc" in module.__dict__:
        raise UsageError(
            "IRC553",
            "an annotation comes too late for a module that is planned already",
            help="mark the model, then call irc.optimize",
        )
