"""Compares the values of settings: by stand-ins with equality, and by a quick check of identity.

Settings are numbers, texts and functions, and the lists, dicts, configurations and other objects that hold
them. Objects of torch, numpy and Python are not inspected. Neither are tensors: a plan looks those up.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch import nn

from ....torch_support.containers import base_of
from ....torch_support.inspectable import is_inspectable, slots_of, store_of
from ....torch_support.object_graph import (
    ABSENT,
    PLAIN,
    Limits,
    array_content,
    attributes_of,
    partial_items,
)

__all__ = ["ABSENT", "Content", "Kind", "Watch", "differing", "is_plain", "is_same", "kind_of", "stand_in"]

_LIMITS = Limits(depth=4, items=1000, array_bytes=1 << 12)
"""The limits of comparisons: settings are looked at in each step, and each difference costs a plan.

Larger containers are compared by their number of items, larger arrays by their class.
"""
_MOST_EXACT = 4096
"""The most items of lists and dicts that are compared by identity in each step; see `Watch`."""
_PLAIN = (*PLAIN, np.generic, type, types.FunctionType, types.BuiltinFunctionType)
_COMPARED = frozenset({bool, int, float, complex, str, bytes, type(None)})
_ON_SAVING: dict[str, frozenset[str]] = {
    "transformers": frozenset(
        {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
    ),
    "diffusers": frozenset({"_class_name", "_diffusers_version"}),
    "peft": frozenset({"base_model_name_or_path"}),
}
"""The attributes and items that a library writes into its configurations when it saves a model."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Stands for a value of which only the class is compared, by its name: pickles hold no class for it."""

    name: str


@dataclass(frozen=True, slots=True)
class Content:
    """Stands for a value that is compared by its parts.

    Args:
        name: The name of its class.
        items: Its attributes with their names, or its elements with their keys or positions.
    """

    name: str
    items: tuple[tuple[object, object], ...]


def is_plain(value: object) -> bool:
    """Whether a value is compared directly: a number, a text, a function, or a tuple of such."""
    kind = cast("type[Any]", type(value))  # not isinstance(), which asks the object for its class
    if issubclass(kind, tuple):
        return all(map(is_plain, tuple.__iter__(cast("tuple[object, ...]", value))))
    return issubclass(kind, _PLAIN)


def is_same(a: object, b: object) -> bool:
    """Whether two values, or stand-ins, are equal and their numbers of one class and sign.

    What computes with `1` and `1.0`, or `0.0` and `-0.0`, may give other results. One NaN is as any other.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    match a, b:
        case tuple(), tuple():
            return len(a) == len(b) and all(map(is_same, a, b))
        case dict(), dict():
            return a.keys() == b.keys() and all(is_same(value, b[key]) for key, value in a.items())
        case Content(), Content():
            return a.name == b.name and is_same(a.items, b.items)
        case ((float() | complex()), _):
            return repr(a) == repr(b)
        case (np.generic(), np.generic()):
            return a.dtype == b.dtype and a.tobytes() == b.tobytes()
        case (slice(), slice()):
            return is_same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
        case _:
            return bool(a == b)


@functools.lru_cache(maxsize=1024)
def kind_of(kind: type) -> Kind:
    """Returns the stand-in for any value of a class."""
    return Kind(f"{kind.__module__}.{kind.__qualname__}")


def stand_in(
    value: object, known: dict[tuple[int, int], object] | None = None, depth: int = _LIMITS.depth
) -> object:
    """Returns the stand-in of a value for comparisons.

    Args:
        value: A setting.
        known: The stand-ins so far, by identity and depth; each object is inspected once.
        depth: The number of steps that are left.
    """
    if is_plain(value):
        return math.nan if type(value) is float and value != value else value
    parts = _parts(value) if depth else None
    if parts is None:
        return kind_of(type(value))
    found = {} if known is None else known
    key = id(value), depth
    if key not in found:
        items = ((name, stand_in(part, found, depth - 1)) for name, part in parts)
        found[key] = Content(kind_of(type(value)).name, tuple(items))
    return found[key]


def differing(value: object, other: object) -> str:
    """Prints a value; of its parts only those that differ from another value."""
    if isinstance(value, Kind):
        return f"a {value.name}"
    if not isinstance(value, Content):
        return "absent" if value is ABSENT else repr(value)
    name = value.name.rpartition(".")[2]
    theirs = dict(other.items) if isinstance(other, Content) else {}
    mine = dict(value.items)
    shown = [
        f"{key}={differing(mine.get(key, ABSENT), theirs.get(key, ABSENT))}"
        for key in dict.fromkeys((*mine, *theirs))
        if mine.get(key, ABSENT) != theirs.get(key, ABSENT)
    ]
    return f"{name}({', '.join(shown)})"


def _parts(value: Any) -> list[tuple[object, object]] | None:
    """Returns the parts of a value by name, key or position, without modules; None if it is not inspected."""
    parts = _all_parts(value)
    if parts is None:
        return None
    return [part for part in parts if not issubclass(type(part[1]), nn.Module)]


def _all_parts(value: Any) -> list[tuple[object, object]] | None:
    kind = cast("type[Any]", type(value))
    if kind is types.MethodType:
        owner = None if issubclass(type(value.__self__), nn.Module) else value.__self__
        return [("function", value.__func__), ("owner", owner)]
    if kind is functools.partial:
        return cast("list[tuple[object, object]]", list(partial_items(value).items()))
    base = base_of(kind)
    if base is not None:
        count = base.__len__(value)
        if count > _LIMITS.items:
            return [("number of items", count)]
        if issubclass(base, dict):
            unread = _on_saving(kind)
            return [(_name(key), part) for key, part in dict.items(value) if key not in unread]
        if base in (set, frozenset):
            return [(each, None) for each in sorted(map(_name, base.__iter__(value)), key=repr)]
        return cast("list[tuple[object, object]]", list(enumerate(base.__iter__(value))))
    if kind is np.ndarray:
        content = array_content(value, _LIMITS)
        if content is None:
            return None
        return [("type", str(value.dtype)), ("shape", value.shape), ("values", content)]
    return _attributes(value) if is_inspectable(kind) else None


def _name(key: object) -> object:
    """Returns a key of a dict or an element of a set, or its stand-in if it is not compared directly."""
    return key if is_plain(key) else kind_of(type(key))


def _attributes(value: Any) -> list[tuple[object, object]]:
    unread = _on_saving(type(value))
    return [(name, part) for name, part in attributes_of(value).items() if name not in unread]


def _on_saving(kind: type) -> frozenset[str]:
    """Returns the names that do not count in an object of a class, as saving writes them."""
    return _ON_SAVING.get(kind.__module__.partition(".")[0], frozenset())


class Watch:
    """Tells in each step whether some values still hold the same objects.

    An object that was replaced by an equal one counts as a change here, but not in `stand_in`. Tensors and
    other values that are not inspected are not held: only their class counts.

    Beyond `_MOST_EXACT` items, lists and dicts of numbers and texts are compared by value, which takes a
    tenth of the time: there, the replacement of 1 by 1.0 is not seen.

    Args:
        values: The values to watch.
    """

    def __init__(self, values: Iterable[object]) -> None:
        self._tables: list[tuple[Mapping[Any, Any], int, list[Any], list[Any]]] = []
        """Tables that are not dicts, such as those of classes."""
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        self._counts: tuple[list[int], list[int]] = [], []
        """The number of items of each of the dicts, and of each of the lists."""
        self._entries: tuple[list[dict[Any, Any]], list[Any], list[Any]] = [], [], []
        """The dict, the key and the value of each entry of a dict."""
        self._items: list[Any] = []
        """The items of all lists, one list after the other."""
        self._many: tuple[list[Any], list[Any]] = [], []
        """Lists and dicts that are compared by value, and copies of them."""
        self._sets: list[tuple[Any, frozenset[Any]]] = []
        self._classes: list[tuple[list[Any], list[type]]] = []
        """Lists of values that are not inspected, such as tensors, with their classes."""
        self._kinds: list[tuple[Any, Any, type]] = []
        """The container, the key and the class of each value that is not inspected."""
        self._others: list[tuple[Any, object]] = []
        """The values without a quick check, with their stand-ins."""
        seen: set[int] = set()
        for value in values:
            self._add(value, _LIMITS.depth, seen)

    def add_table(self, table: Mapping[Any, Any], names: Iterable[str]) -> None:
        """Watches some items of a table, and how many items it has."""
        self._watch(table, [(name, table[name]) for name in names], _LIMITS.depth, set())

    def holds(self) -> bool:
        """Whether all values hold the same objects."""
        for table, count, names, values in self._tables:
            if len(table) != count or not all(map(operator.is_, map(table.get, names), values)):
                return False
        dict_counts, list_counts = self._counts
        if [*map(dict.__len__, self._dicts)] != dict_counts or [
            *map(list.__len__, self._lists)
        ] != list_counts:
            return False
        dicts, keys, values = self._entries
        if not all(map(operator.is_, map(dict.get, dicts, keys), values)):
            return False
        many, copies = self._many
        if many != copies:
            return False
        items = itertools.chain.from_iterable(map(list.__iter__, self._lists))
        if not all(map(operator.is_, items, self._items)):
            return False
        for held, items in self._sets:
            if held != items:
                return False
        for held, kinds in self._classes:
            if [*map(type, list.__iter__(held))] != kinds:
                return False
        for held, key, kind in self._kinds:
            if type(_item(held, key)) is not kind:
                return False
        return all(stand_in(value) == wanted for value, wanted in self._others)

    def _add(self, value: Any, depth: int, seen: set[int]) -> None:
        if not depth or is_plain(value) or id(value) in seen:
            return
        parts = _parts(value)
        if parts is None:
            return
        seen.add(id(value))
        kind = cast("type[Any]", type(value))
        base = base_of(kind)
        if base is not None and base.__len__(value) > _LIMITS.items:
            self._others.append((value, stand_in(value)))
        elif kind in (list, dict) and self._is_by_value(value):
            for held, each in zip(self._many, (value, value.copy()), strict=True):
                held.append(each)
        elif issubclass(kind, dict):
            self._watch(value, list(dict.items(value)), depth, seen)
        elif base in (set, frozenset) and all(map(is_plain, base.__iter__(value))):
            self._sets.append((value, frozenset(base.__iter__(value))))
        elif issubclass(kind, list):
            self._watch_list(value, depth, seen)
        elif kind in (types.MethodType, functools.partial) or issubclass(kind, tuple):
            for _, part in parts:
                self._add(part, depth - 1, seen)
        elif is_inspectable(kind) and not slots_of(kind):
            self._watch(store_of(value), cast("list[tuple[Any, Any]]", parts), depth, seen)
        else:
            self._others.append((value, stand_in(value)))

    def _is_by_value(self, value: dict[Any, Any] | list[Any]) -> bool:
        if len(self._items) + len(self._entries[1]) + len(value) <= _MOST_EXACT:
            return False
        items = value.values() if isinstance(value, dict) else value
        return _COMPARED.issuperset(map(type, items))

    def _watch(
        self, table: Mapping[Any, Any], items: list[tuple[Any, Any]], depth: int, seen: set[int]
    ) -> None:
        held = [(key, part) for key, part in items if _is_held(part)]
        names, values = [key for key, _ in held], [part for _, part in held]
        if isinstance(table, dict):
            self._dicts.append(table)
            self._counts[0].append(dict.__len__(table))
            for known, more in zip(self._entries, ([table] * len(held), names, values), strict=True):
                known += more
        else:
            self._tables.append((table, len(table), names, values))
        self._kinds += [(table, key, type(part)) for key, part in items if not _is_held(part)]
        for part in values:
            self._add(part, depth - 1, seen)

    def _watch_list(self, value: list[Any], depth: int, seen: set[int]) -> None:
        items = list(list.__iter__(value))
        if all(map(_is_held, items)):
            self._lists.append(value)
            self._counts[1].append(len(items))
            self._items += items
        elif not any(map(_is_held, items)):
            self._classes.append((value, [*map(type, items)]))
        else:
            self._others.append((value, stand_in(value)))
        for part in items:
            self._add(part, depth - 1, seen)


def _is_held(value: object) -> bool:
    """Whether a value may be held: it is compared, and is not a tensor."""
    return is_plain(value) or _parts(value) is not None


def _item(held: Any, key: Any) -> object:
    return dict.get(held, key, ABSENT) if isinstance(held, dict) else held.get(key, ABSENT)
