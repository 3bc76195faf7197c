"""Hooks of submodules: those whose work is part of a traced graph, and those that look at what passes."""

# torch keeps these hooks in private tables.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from .recorders import is_recorder, is_recording

__all__ = ["Observer", "are_same", "is_part_of_graph", "modules_of", "observers_of"]

_TABLES = ("_forward_pre_hooks", "_forward_hooks")


@dataclass(frozen=True, eq=False, slots=True)
class Observer:
    """A hook that is called before or after the forward of a submodule.

    Args:
        module: The dotted path of the submodule.
        table: The attribute of the submodule that holds it.
        key: Its key there.
        hook: The hook.
        takes_keywords: Whether it is given the keyword arguments.
    """

    module: str
    table: str
    key: int
    hook: Any
    takes_keywords: bool

    def __str__(self) -> str:
        return (
            f"submodule {self.module!r} has a hook ({self.table.strip('_').replace('_', ' ')}: {self.hook!r})"
        )


def observers_of(names: Iterable[str], modules: Iterable[nn.Module]) -> Iterator[Observer]:
    """Yields the hooks around the forwards of submodules whose work is no part of a traced graph.

    Args:
        names: The dotted paths of the submodules.
        modules: The submodules.
    """
    for name, child in zip(names, modules, strict=True):
        held = child.__dict__
        if held["_forward_hooks"] or held["_forward_pre_hooks"]:
            for table in _TABLES:
                for key, hook in held[table].items():
                    if not is_part_of_graph(hook) and not is_recorder(hook):
                        yield Observer(name, table, key, hook, key in held[f"{table}_with_kwargs"])


def are_same(some: Sequence[Observer], others: Sequence[Observer]) -> bool:
    """Whether two modules have the same hooks, in the same order."""
    return len(some) == len(others) and all(
        (a.module, a.table, a.takes_keywords) == (b.module, b.table, b.takes_keywords)
        and (a.hook is b.hook or (type(a.hook) is type(b.hook) is MethodType and a.hook == b.hook))
        for a, b in zip(some, others, strict=True)
    )


def is_part_of_graph(hook: Any) -> bool:
    """Whether the work of a submodule's hook is part of the traced graph.

    It is if the hook is torch's own and computes tensors, if it records within the forward, and if it lets
    the submodule's output require a gradient and does nothing else.
    """
    if is_recorder(hook):
        return not is_recording()
    if _is_same_code(hook, _require_gradient):
        return True
    return any(h.startswith("torch.") and not h.startswith("torch.distributed.") for h in modules_of(hook))


def modules_of(hook: Any) -> list[str]:
    """Returns the names of the Python modules of a hook and of its base classes.

    A user's pruning method inherits from torch's.
    """
    own = str(getattr(hook, "__module__", None) or type(hook).__module__)
    return [own, *(kind.__module__ for kind in type(hook).__mro__)]


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
