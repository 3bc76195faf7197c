"""Tells whether the hooks on submodules are still those that a plan was made with, and hold the same."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import nn

from ....torch_support.containers import base_of
from ....torch_support.inspectable import is_inspectable
from ....torch_support.module_hooks import WITH_KEYWORDS, has_hooks, held_by_function, hooks_of, name_of_hook
from ....torch_support.object_graph import attributes_of
from .settings import stand_in

__all__ = ["HookState", "Hooks", "held_by_hooks"]

Hooks = tuple[tuple[object, ...], ...]
"""The hooks of one module: for each its name, how it is called, and what it holds, or the class of it."""

_MOST_DEPTH = 3
"""The steps from a hook to what it holds; tensors there are looked up in each call (`attribute_paths.py`)."""
_MOST_ITEMS = 1000


class HookState:
    """The hooks of some modules at one time, with what they hold.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._held = held_by_hooks(modules)
        found = ((module, _hooks(module)) for module in modules if has_hooks(module))
        self.of = {id(module): hooks for module, hooks in found if hooks}

    def is_same(self, held: list[object]) -> bool:
        """Whether these are the very same hooks, which hold the very same."""
        return len(held) == len(self._held) and all(a is b for a, b in zip(held, self._held, strict=True))


def held_by_hooks(modules: Sequence[nn.Module]) -> list[object]:
    """Lists the hooks of some modules, and what they lead to."""
    found: list[object] = []
    for module in modules:
        if has_hooks(module):
            for _, key, hook in hooks_of(module):
                found += [module, key, *_leaves(hook)]
    return found


def _hooks(module: nn.Module) -> Hooks:
    held = vars(module)
    return tuple(
        (
            name_of_hook(table, getattr(hook, "__qualname__", type(hook).__qualname__)),
            table in WITH_KEYWORDS and key in held[WITH_KEYWORDS[table]],
            *(stand_in(leaf, depth=0) for leaf in _leaves(hook)),
        )
        for table, key, hook in hooks_of(module)
    )


def _leaves(hook: Any) -> Iterator[object]:
    """Yields a hook's functions and what they lead to: numbers, tensors; modules are not opened."""
    waiting, seen, left = [(hook, 0)], set[int](), _MOST_ITEMS
    while waiting and left:
        value, depth = waiting.pop()
        if issubclass(type(value), nn.Module):
            value = type(value)
        parts = _parts(value) if depth < _MOST_DEPTH and id(value) not in seen else None
        if parts is None or type(value) is types.FunctionType:
            left -= 1
            yield value
        if parts is not None:
            seen.add(id(value))
            waiting += [(part, depth + 1) for part in parts]


def _parts(value: Any) -> list[object] | None:
    held = held_by_function(value)
    if held is not None:
        return list(held.values())
    kind = cast("type[Any]", type(value))
    base = base_of(kind)
    if base is not None:
        items = list(base.__iter__(value))
        return [*items, *base.values(value)] if issubclass(base, dict) else items
    return list(attributes_of(value).values()) if is_inspectable(kind) else None
