"""Hooks on modules: where torch keeps them, and which of them are part of what a forward computes."""

# torch keeps these hooks in private tables.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from .functions import cells_of
from .object_graph import partial_items
from .recorders import is_recorder, is_recording

__all__ = [
    "BACKWARD_HOOKS",
    "FORWARD_HOOKS",
    "HOOKS",
    "WITH_KEYWORDS",
    "HookStandIn",
    "has_hooks",
    "held_by_function",
    "hooks_of",
    "is_of_distributed",
    "is_part_of_graph",
    "modules_of_hook",
    "name_of_hook",
    "original_of",
]

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
HOOKS = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
"""The tables of hooks of a module."""
WITH_KEYWORDS = {name: f"{name}_with_kwargs" for name in FORWARD_HOOKS}
"""The tables that say which of these hooks get keyword arguments."""


@dataclass(frozen=True, slots=True)
class HookStandIn:
    """Takes the place of a hook while its module is traced.

    Args:
        hook: The hook.
    """

    hook: Any


def has_hooks(module: nn.Module) -> bool:
    """Whether there are hooks on a module; each step asks for each submodule."""
    tables = module.__dict__
    return bool(
        tables["_forward_hooks"]
        or tables["_forward_pre_hooks"]
        or tables["_backward_hooks"]
        or tables["_backward_pre_hooks"]
    )


def original_of(hook: Any) -> Any:
    """Returns the hook that another one stands for, or itself."""
    return hook.hook if issubclass(type(hook), HookStandIn) else hook


def hooks_of(module: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """Yields the hooks of a module that are the user's: table, key and hook."""
    tables = vars(module)
    for table in HOOKS:
        for key, hook in list(tables[table].items()):
            if not is_part_of_graph(hook := original_of(hook)):
                yield table, key, hook


def held_by_function(function: Any) -> dict[object, Any] | None:
    """Returns what a function, a method or a partial holds, by name; None for other objects."""
    kind: type = type(function)  # not isinstance(), which asks the object for its class
    if kind is FunctionType:
        contents = {name: cell.cell_contents for name, cell in cells_of(function).items()}
        defaults = {"": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
        return {**contents, **defaults, "__dict__": vars(function)}
    if kind is MethodType:
        return {"function": function.__func__, "owner": function.__self__}
    return {**partial_items(function)} if kind is functools.partial else None


def name_of_hook(table: str, hook: Any) -> str:
    """Describes a hook to users."""
    return f"{table.strip('_').replace('_', ' ')}: {hook!r}"


def modules_of_hook(hook: Any) -> list[str]:
    """The modules that a hook and its base classes come from: users' pruning methods inherit from torch's."""
    module = str(getattr(hook, "__module__", None) or type(hook).__module__)
    kinds = (kind for kind in type(hook).__mro__ if kind is not nn.Module)  # any hook may be a module
    return [module, *(kind.__module__ for kind in kinds)]


def is_of_distributed(hook: Any) -> bool:
    """Whether a hook is one of torch's that shard or gather."""
    return any(name.startswith("torch.distributed.") for name in modules_of_hook(hook))


def is_part_of_graph(hook: Any) -> bool:
    """Whether a submodule's hook is a library's, of which it is known that all it does is traced.

    It is if the hook is torch's own and computes tensors, if it records within the forward, and if it lets
    the submodule's output require a gradient and does nothing else.
    """
    if is_recorder(hook):
        return not is_recording()
    if _is_same_code(hook, _require_gradient):
        return True
    return any(name.startswith("torch.") for name in modules_of_hook(hook)) and not is_of_distributed(hook)


def _require_gradient(module: Any, args: Any, output: Any) -> None:
    output.requires_grad_(True)


def _is_same_code(function: Any, other: FunctionType) -> bool:
    """Whether two functions have the same code, apart from the names of their arguments."""
    if type(function) is not FunctionType or function.__closure__ or function.__defaults__:
        return False
    mine, its = function.__code__, other.__code__
    return (mine.co_code, mine.co_consts, mine.co_names, mine.co_argcount, mine.co_nlocals) == (
        its.co_code,
        its.co_consts,
        its.co_names,
        its.co_argcount,
        its.co_nlocals,
    )
