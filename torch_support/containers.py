"""Reads and fills containers by the methods of Python's own classes, whatever a subclass overrides."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from typing import Any, cast

__all__ = ["CONTAINERS", "base_of", "copied", "drop_item", "put_item", "refill", "size_of"]

CONTAINERS = (dict, list, set, deque)
"""The containers that can change."""
_BASES = (OrderedDict, dict, list, deque, set, tuple, frozenset)


@functools.lru_cache(maxsize=4096)
def base_of(kind: type) -> Any:
    """Returns the container class of Python that a class is or inherits from; None for other classes."""
    return next((base for base in _BASES if issubclass(kind, base)), None)


def size_of(value: Any) -> int:
    """Returns the number of items of a container."""
    return base_of(type(value)).__len__(value)


def copied(value: Any) -> dict[Any, Any] | list[Any]:
    """Copies the items of a container: by key, in order (list, deque), or by themselves (set)."""
    kind: Any = type(value)
    base = base_of(kind)
    if kind.__iter__ is dict.__iter__:
        return cast("dict[Any, Any]", dict.copy(value))  # in one step, even while another thread adds to it
    if issubclass(base, dict):  # one that orders by itself: dict.copy would look items up by its own methods
        return dict(base.items(value))
    items: list[Any] = list(base.__iter__(value))
    return dict(zip(items, items, strict=True)) if base is set else items


def put_item(value: Any, key: Any, item: Any) -> None:
    """Sets one item of a dict, list or deque."""
    base_of(type(value)).__setitem__(value, key, item)


def drop_item(value: Any, key: Any) -> None:
    """Takes one item out of a dict, if it is there."""
    base = base_of(type(value))
    if base.__contains__(value, key):
        base.__delitem__(value, key)


def refill(value: Any, items: dict[Any, Any] | list[Any]) -> None:
    """Replaces the items of a container."""
    base = base_of(type(value))
    if base is list:
        list.__setitem__(value, slice(None), cast("list[Any]", items))
        return
    base.clear(value)
    if isinstance(items, list):
        deque.extend(value, items)
    elif base is set:
        set.update(value, items)
    else:
        for key, item in items.items():
            base.__setitem__(value, key, item)
