"""Where a module holds the tensors that its code reads and that are no parameter, buffer or input of it."""

# torch's modules have no other door to what they hold.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from ...torch_support.inspectable import is_inspectable, store_of

__all__ = ["Place", "at", "places_of"]

Place = tuple[str, tuple[object, ...]]
"""The name of a submodule, and the names and keys that lead from its attributes to a tensor."""

_DEPTH = 4
"""So many steps away from an attribute a tensor is still found."""
_OWN = frozenset(vars(nn.Module()))


def places_of(module: nn.Module, tensors: Iterable[Tensor]) -> dict[int, Place]:
    """Where some tensors are held, by their identity: in attributes, and in their containers and objects.

    A tensor that is in no such place is one that the module's code wrote down or found elsewhere.
    """
    wanted = {id(tensor) for tensor in tensors}
    found: dict[int, Place] = {}
    if not wanted:
        return found
    seen: set[int] = set()
    waiting: deque[tuple[str, tuple[object, ...], object]] = deque(
        (name, (key,), value)
        for name, child in module.named_modules()
        for key, value in vars(child).items()
        if key not in _OWN
    )
    while waiting:
        name, steps, value = waiting.popleft()
        if issubclass(type(value), Tensor):  # not isinstance(), which asks the object for its class
            if id(value) in wanted:
                found.setdefault(id(value), (name, steps))
        elif len(steps) <= _DEPTH and id(value) not in seen:
            seen.add(id(value))
            waiting += [(name, (*steps, key), part) for key, part in _inside(value).items()]
    return found


def at(module: nn.Module, place: Place) -> Tensor | None:
    """The tensor at a place; None where there is none."""
    name, (first, *steps) = place
    value = vars(module.get_submodule(name)).get(cast(str, first))
    for step in steps:
        value = _inside(value).get(step)
    return value if isinstance(value, Tensor) else None


def _inside(value: Any) -> Mapping[object, object]:
    """What a container or an object holds, by key, position or name."""
    kind = cast("type[Any]", type(value))
    if issubclass(kind, dict):
        return dict.copy(cast("dict[object, object]", value))
    if issubclass(kind, (list, tuple)):
        base = list if issubclass(kind, list) else tuple
        return dict(enumerate(base.__iter__(value)))
    if issubclass(kind, nn.Module) or not is_inspectable(kind):
        return {}
    return cast("Mapping[object, object]", store_of(value))
