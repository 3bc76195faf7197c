"""Finds the attributes and hooks through which a module holds generators, and tensors not of its state."""

# torch has no public way to the tables of a module.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...torch_support.containers import base_of
from ...torch_support.inspectable import is_inspectable
from ...torch_support.module_hooks import HOOKS, held_by_function, original_of
from ...torch_support.object_graph import attributes_of

__all__ = ["AttributePath", "find_all_paths", "find_attribute_paths", "held_at"]

AttributePath = tuple[str, tuple[object, ...]]
"""The name of a submodule, and the names and keys that lead from an attribute or a hook to what it holds."""

_DEPTH = 4
"""The number of steps from an attribute up to which something is found."""
_DEPTH_OF_HOOKS = 10
"""The same from a table of hooks: beyond what the guards compare (`guards/hook_state.py`)."""
_KINDS = (Tensor, torch.Generator)
_STATE = ("_buffers", "_parameters")
"""Tensors there are constants if code reads them in backward: they may be replaced as others are."""
_OWN = frozenset(vars(nn.Module())).difference(HOOKS, _STATE)


def find_attribute_paths(
    module: nn.Module, wanted_ones: Iterable[Tensor | torch.Generator]
) -> dict[int, AttributePath]:
    """Finds the paths of tensors and generators by identity, through attributes, containers and objects.

    One without a path is one that the module's code made, or found outside of the module.
    """
    return {key: paths[0] for key, paths in find_all_paths(module, wanted_ones).items()}


def find_all_paths(
    module: nn.Module, wanted_ones: Iterable[Tensor | torch.Generator]
) -> dict[int, tuple[AttributePath, ...]]:
    """Finds all paths of tensors and generators by identity; a container that is held twice has one."""
    wanted = {id(each) for each in wanted_ones}
    found: dict[int, tuple[AttributePath, ...]] = {}
    if not wanted:
        return found
    seen: set[int] = set()
    pending: deque[tuple[str, tuple[object, ...], object]] = deque(
        (name, (key,), value)
        for name, child in module.named_modules()
        for key, value in vars(child).items()
        if key not in _OWN
    )
    while pending:
        name, steps, value = pending.popleft()
        if issubclass(type(value), _KINDS):  # not isinstance(), which asks the object for its class
            if id(value) in wanted:
                found[id(value)] = (*found.get(id(value), ()), (name, steps))
        elif len(steps) <= (_DEPTH_OF_HOOKS if steps[0] in HOOKS else _DEPTH) and id(value) not in seen:
            seen.add(id(value))
            pending += [(name, (*steps, key), part) for key, part in _parts(value).items()]
    return found


def held_at(module: nn.Module, path: AttributePath) -> Tensor | torch.Generator | None:
    """Returns the tensor or generator at a path; None if there is none."""
    name, (first, *steps) = path
    value = vars(module.get_submodule(name)).get(cast(str, first))
    for step in steps:
        value = _parts(value).get(step)
    return value if isinstance(value, _KINDS) else None


def _parts(value: Any) -> Mapping[object, object]:
    """Returns the parts of a container, an object or a hook, by key, position or name."""
    kind = cast("type[Any]", type(value := original_of(value)))
    if (held := held_by_function(value)) is not None:
        return held
    if issubclass(kind, dict):
        return dict.copy(cast("dict[object, object]", value))
    if issubclass(kind, (list, tuple, deque)):
        return dict(enumerate(base_of(kind).__iter__(value)))
    if issubclass(kind, nn.Module) or not is_inspectable(kind):
        return {}
    return cast("Mapping[object, object]", attributes_of(value))
