"""Tells whether the hooks on submodules are still those that a plan was made with, and hold the same.

What they hold is compared as settings are, by stand-ins and a `Watch`. Tensors are looked up in each call
(`attribute_paths.py`). Modules outside of the tree are compared by their attributes and tensors.
"""

# torch has no public way to the tables of a module.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ....ir import UnsupportedError
from ....torch_support.module_hooks import WITH_KEYWORDS, has_hooks, hooks_of, name_of_hook
from ....torch_support.recorders import RECORDERS_MARK
from .settings import Watch, stand_in, unopened

__all__ = ["HookState", "Hooks"]

Hooks = tuple[tuple[object, ...], ...]
"""The hooks of one module: for each its name, how it is called, and the stand-in of it and what it holds."""

_DEPTH = 6
"""The steps from a hook to the last objects that are opened; `attribute_paths.py` finds tensors beyond."""
_UNCOMPARED = (Tensor, torch.Generator, RemovableHandle, types.ModuleType)
"""Kinds of objects in hooks that are not compared: they are looked up in each call, or compute nothing."""

_Entry = tuple[nn.Module, str, int, Any, bool]


class HookState:
    """The hooks of the submodules of a tree at one time, with what they hold.

    Args:
        root: The root of the tree.
        names: The names of its submodules.
        submodules: The submodules.
        ignored: The attributes of the root that do not count.
    """

    def __init__(
        self,
        root: nn.Module,
        names: Sequence[str],
        submodules: Sequence[nn.Module],
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        self._submodules = submodules
        self._entries = list(_entries(submodules))
        self.of: dict[int, Hooks] = {}
        """The hooks of submodules that have some, by the identity of the submodule."""
        self._uncompared: tuple[_Entry, object] | None = None
        self._watches: list[Watch] = []
        if not self._entries:
            return
        self._names = {id(module): name for name, module in zip(names, submodules, strict=True)}
        hooks = [hook for _, _, _, hook, _ in self._entries]
        led_to = list(unopened(hooks, _DEPTH))
        self._note_uncompared(led_to)
        known: dict[Any, object] = {}
        for module, table, _, hook, has_keywords in self._entries:
            name = name_of_hook(table, getattr(hook, "__qualname__", type(hook).__qualname__))
            contents = stand_in(hook, known, _DEPTH, of_code=None)
            self.of[id(module)] = (*self.of.get(id(module), ()), (name, has_keywords, contents))
        outside = list(_outside(led_to, {id(root), *self._names}))
        tables = [table for module in outside for table in _tables_of(module, root, ignored)]
        first = self._entries[0][0]
        held_outside = tuple(
            (kind, *((name, stand_in(table.get(name), known, of_code=True)) for name in counted))
            for kind, table, counted in tables
        )
        self.of[id(first)] = (*self.of[id(first)], held_outside)
        watch = Watch((), of_code=True)
        for _, table, counted in tables:
            watch.add_table(table, counted)
        self._watches = [Watch(hooks, of_code=None, depth=_DEPTH), watch]

    def is_same(self) -> bool:
        """Whether there are the very same hooks now, which hold the very same."""
        now = list(_entries(self._submodules))
        return (
            len(now) == len(self._entries)
            and all(
                all(a is b for a, b in zip(*each, strict=True))
                for each in zip(now, self._entries, strict=True)
            )
            and all(watch.holds() for watch in self._watches)
        )

    def refuse_uncompared(self) -> None:
        """Refuses hooks that hold what no call could compare with the plan.

        Raises:
            UnsupportedError: IRC505.
        """
        if self._uncompared is None:
            return
        (module, table, _, hook, _), leaf = self._uncompared
        kind = type(leaf)
        raise UnsupportedError(
            "IRC505",
            f"submodule {self._names[id(module)]!r} has a hook ({name_of_hook(table, hook)}) that holds an "
            f"object of {kind.__module__}.{kind.__qualname__}, which is of a library, too large or too deep "
            "to be compared in each step: the plan would not see it change",
            help="let the hook hold only numbers, texts, tensors, modules, and lists, dicts and objects "
            f"of them, of at most 1000 items and {_DEPTH} levels; or register it on the root module",
        )

    def _note_uncompared(self, led_to: list[object]) -> None:
        leaf = next((each for each in led_to if not isinstance(each, (nn.Module, *_UNCOMPARED))), None)
        if leaf is not None:
            one = (
                entry for entry in self._entries if any(each is leaf for each in unopened([entry[3]], _DEPTH))
            )
            self._uncompared = next(one, self._entries[0]), leaf


def _entries(modules: Sequence[nn.Module]) -> Iterator[_Entry]:
    for module in modules:
        if has_hooks(module):
            tables = vars(module)
            for table, key, hook in hooks_of(module):
                has_keywords = table in WITH_KEYWORDS and key in tables[WITH_KEYWORDS[table]]
                yield module, table, key, hook, has_keywords


def _outside(led_to: list[object], inside: set[int]) -> Iterator[nn.Module]:
    """Yields the modules that hooks lead to and that are not in the tree, with their submodules."""
    seen = set(inside)
    for value in led_to:
        for module in value.modules() if isinstance(value, nn.Module) else ():
            if id(module) not in seen:
                seen.add(id(module))
                yield module


def _tables_of(
    module: nn.Module, root: nn.Module, ignored: frozenset[str]
) -> Iterator[tuple[type, dict[str, Any], list[str]]]:
    """Yields the attributes and the tensors of a module that is not in the tree.

    The module that was fitted shares its tensors with the fitted one, and they are looked up.
    """
    attributes = vars(module)
    is_root = attributes["_parameters"] is vars(root)["_parameters"]
    without = _OWN | ignored if is_root else _OWN
    yield type(module), attributes, [name for name in attributes if name not in without]
    if not is_root:
        for tensors in (attributes["_parameters"], attributes["_buffers"]):
            yield type(module), tensors, list(tensors)


_OWN = (frozenset(vars(nn.Module())) - {"training"}) | {"_compiled_call_impl", RECORDERS_MARK}
"""The attributes of every module that are not settings: irc sets one while a plan is there."""
