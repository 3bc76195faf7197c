"""Compares the values of settings: by stand-ins with equality, and by a quick check of identity.

Settings are numbers and texts, and the lists, dicts, functions, configurations and other objects that hold
them. Objects of torch, numpy and Python are not inspected. Neither are tensors: a plan looks up those of a
module. A tensor that only code leads to is a constant of the plan, and has to stay the same one.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ....torch_support.bits import bits
from ....torch_support.containers import base_of
from ....torch_support.functions import WRAPPERS, FunctionCode, cells_of
from ....torch_support.inspectable import is_inspectable, is_installed, slots_of, store_of
from ....torch_support.object_graph import (
    ABSENT,
    PLAIN,
    Limits,
    array_content,
    attributes_of,
    partial_items,
)

__all__ = [
    "ABSENT",
    "Content",
    "Kind",
    "Watch",
    "differing",
    "is_plain",
    "is_same",
    "kind_of",
    "stand_in",
    "unopened",
]

_LIMITS = Limits(depth=4, items=1000, array_bytes=1 << 12)
"""The limits of comparisons: settings are looked at in each step, and each difference costs a plan.

Larger containers are compared by their number of items, larger arrays by their class.
"""
_FUNCTION = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_CONTENT = operator.attrgetter("cell_contents")
_MOST_EXACT = 4096
"""The most items of lists and dicts that are compared by identity in each step; see `Watch`."""
_PLAIN = (*PLAIN, np.generic, type, types.BuiltinFunctionType, FunctionCode)
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


class SameTensor:
    """Stands for a tensor, or a hook's module, that is to stay the same one.

    After it was pickled, it stands for any tensor of the same bits, and for any module.

    Args:
        tensor: The tensor or module, which is not held.
        contents: The type and the digest of the bits of a tensor that was pickled.
    """

    def __init__(self, tensor: Tensor | nn.Module | None, contents: object = None) -> None:
        self._reference = None if tensor is None else weakref.ref(tensor)
        self._contents = contents

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameTensor):
            return NotImplemented
        if self._reference is None or other._reference is None:
            return self._bits() == other._bits()
        return self._reference() is other._reference() is not None

    def _bits(self) -> object:
        tensor = self._reference() if self._reference is not None else None
        if not isinstance(tensor, Tensor):
            return self._contents
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return object()  # equal to no other
        digest = hashlib.sha256(bits(tensor).cpu().numpy().tobytes()).digest()
        return tuple(tensor.shape), tensor.dtype, digest

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __deepcopy__(self, memo: dict[int, Any]) -> SameTensor:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SameTensor, (None, self._bits())

    def __repr__(self) -> str:
        return f"an object at {id(self._reference and self._reference()):#x}"


def is_plain(value: object) -> bool:
    """Whether a value is compared directly: a number, a text, a class, or a tuple of such."""
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
    value: object,
    known: dict[tuple[int, int, bool | None], object] | None = None,
    depth: int = _LIMITS.depth,
    *,
    of_code: bool | None = False,
) -> object:
    """Returns the stand-in of a value for comparisons.

    Args:
        value: A setting.
        known: The stand-ins so far, by identity, depth and `of_code`; each object is inspected once.
        depth: The number of steps that are left.
        of_code: Whether code leads to it, not a module: its tensors have to stay the same ones. None stands
            for a hook, whose tensors are looked up, also those that its functions lead to.
    """
    if is_plain(value):
        return math.nan if type(value) is float and value != value else value
    if _has_to_stay(value, of_code):
        return SameTensor(cast("Tensor | nn.Module", value))
    if type(value) is types.FunctionType and not depth:
        return FunctionCode(value.__code__)
    parts = _parts(value, of_code) if depth else None
    if parts is None:
        return kind_of(type(value))
    found = {} if known is None else known
    if of_code is False:
        of_code = type(value) is types.FunctionType
    key = id(value), depth, of_code
    if key not in found:
        items = ((name, stand_in(part, found, depth - 1, of_code=of_code)) for name, part in parts)
        found[key] = Content(kind_of(type(value)).name, tuple(items))
    return found[key]


def unopened(values: Iterable[object], depth: int) -> Iterator[object]:
    """Yields what values lead to and a stand-in does not open: modules, tensors, and what is not compared.

    Args:
        values: The values.
        depth: As of `stand_in`.
    """
    waiting, seen = [(value, depth) for value in values], dict[int, int]()
    while waiting:
        value, left = waiting.pop()
        if is_plain(value) or seen.get(id(value), -1) >= left:
            continue
        seen[id(value)] = left
        parts = _all_parts(value) if left else None
        if parts is None or not _is_compared_whole(value):
            yield value
            continue
        owner = value.__self__ if isinstance(value, types.MethodType) else None
        waiting += [(part, left - 1) for part in (owner, *(part for _, part in parts))]


def _is_compared_whole(value: Any) -> bool:
    """Whether a stand-in holds all parts of a value that it opens."""
    kind = cast("type[Any]", type(value))
    base = base_of(kind)
    if base in (set, frozenset) and not all(map(is_plain, base.__iter__(value))):
        return False
    if base is not None and issubclass(base, dict) and not all(map(is_plain, dict.keys(value))):
        return False
    if kind in WRAPPERS and kind not in (types.MethodType, functools.partial):
        return False
    return base is None or base.__len__(value) <= _LIMITS.items


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


def _has_to_stay(value: object, of_code: bool | None) -> bool:
    """Whether a value has to stay the same object: a tensor of code, or a module that a hook holds."""
    return issubclass(type(value), nn.Module if of_code is None else Tensor) and of_code is not False


def _parts(value: Any, of_code: bool | None = False) -> list[tuple[object, object]] | None:
    """Returns the parts of a value by name, key or position, without modules except those of hooks.

    None if it is not inspected.
    """
    parts = _all_parts(value)
    if parts is None or of_code is None:
        return parts
    return [part for part in parts if not issubclass(type(part[1]), nn.Module)]


def _all_parts(value: Any) -> list[tuple[object, object]] | None:
    kind = cast("type[Any]", type(value))
    if kind is types.MethodType:
        owner = None if issubclass(type(value.__self__), nn.Module) else value.__self__
        return [("function", value.__func__), ("owner", owner)]
    if kind is types.FunctionType:
        return _function_parts(value)
    if kind is functools.partial:
        return cast("list[tuple[object, object]]", list(partial_items(value).items()))
    if kind is torch.jit.ScriptFunction:
        return [("code", str(value.inlined_graph))]
    if kind in WRAPPERS:
        return [(name, getattr(value, name)) for name in WRAPPERS[kind]]
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


def _function_parts(function: types.FunctionType) -> list[tuple[object, object]]:
    """Returns the code of a function, its defaults, and what it closes over; not the class that holds it."""
    defaults = enumerate(function.__defaults__ or ())
    file = str(function.__globals__.get("__name__"))
    return [
        ("file", "__main__" if file == "__mp_main__" else file),  # the same in a process that was spawned
        ("code", FunctionCode(function.__code__)),
        *((f"default {place}", value) for place, value in defaults),
        *list((function.__kwdefaults__ or {}).items()),
        *((name, cell.cell_contents) for name, cell in _own_cells(function)),
        *((f"attribute {name}", value) for name, value in _attributes_of_function(function).items()),
    ]


def _attributes_of_function(function: types.FunctionType) -> dict[str, Any]:
    """The attributes that a function's own file gives it; libraries mark functions of theirs."""
    return {} if is_installed(str(function.__globals__.get("__name__"))) else vars(function)


def _own_cells(function: types.FunctionType) -> list[tuple[str, types.CellType]]:
    """The cells of a function except that of the class which holds it."""
    return [(name, cell) for name, cell in cells_of(function).items() if name != "__class__"]


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
        of_code: As of `stand_in`.
        depth: As of `stand_in`.
    """

    def __init__(
        self, values: Iterable[object], *, of_code: bool | None = False, depth: int = _LIMITS.depth
    ) -> None:
        self._of_code, self._depth = of_code, depth
        self._tables: list[tuple[Mapping[Any, Any], int | None, list[Any], list[Any]]] = []
        """Tables that are not dicts, such as those of classes, with their numbers of items if these count."""
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
        self._tensors: list[tuple[Any, Any, weakref.ref[Tensor | nn.Module]]] = []
        """The container, the key and the tensor of each item that has to stay the same tensor."""
        self._functions: tuple[list[types.FunctionType], list[Any]] = [], []
        """Functions, and the code, the defaults and the defaults by keyword of one after the other."""
        self._cells: tuple[list[types.CellType], list[Any]] = [], []
        """The cells of functions, and what they hold."""
        self._others: list[tuple[Any, object]] = []
        """The values without a quick check, with their stand-ins."""
        self._checks: list[Callable[[], bool]] | None = None
        """The checks of the above that have something to check."""
        self._seen: dict[int, int] = {}
        """How far each object was looked into, by its identity."""
        for value in values:
            self._add(value, depth)

    def add_table(self, table: Mapping[Any, Any], names: Iterable[str]) -> None:
        """Watches some items of a table, and how many items it has."""
        self._watch(table, [(name, table[name]) for name in names], _LIMITS.depth + 1)

    def add_items(self, table: Mapping[Any, Any], keys: Iterable[Any], *, is_deep: bool) -> None:
        """Watches some items of a table, with what they lead to if it `is_deep`, whatever else it holds."""
        depth = _LIMITS.depth + 1 if is_deep else 1
        self._watch(table, [(key, _item(table, key)) for key in keys], depth, is_whole=False)

    def holds(self) -> bool:
        """Whether all values hold the same objects; nothing is added after the first call."""
        if self._checks is None:
            checks = {
                self._tables_hold: self._tables,
                self._containers_hold: (*self._dicts, *self._lists),
                self._entries_hold: self._entries[0],
                lambda: self._many[0] == self._many[1]: self._many[0],
                lambda: all(held == items for held, items in self._sets): self._sets,
                self._others_hold: (*self._classes, *self._kinds, *self._tensors, *self._others),
                self._functions_hold: (*self._functions[0], *self._cells[0]),
            }
            self._checks = [check for check, watched in checks.items() if watched]
        return all([check() for check in self._checks])

    def _tables_hold(self) -> bool:
        return all(
            (count is None or len(table) == count) and all(map(operator.is_, map(table.get, names), values))
            for table, count, names, values in self._tables
        )

    def _containers_hold(self) -> bool:
        dict_counts, list_counts = self._counts
        if [*map(dict.__len__, self._dicts)] != dict_counts:
            return False
        if [*map(list.__len__, self._lists)] != list_counts:
            return False
        items = itertools.chain.from_iterable(map(list.__iter__, self._lists))
        return all(map(operator.is_, items, self._items))

    def _entries_hold(self) -> bool:
        dicts, keys, values = self._entries
        return all(map(operator.is_, map(dict.get, dicts, keys), values))

    def _others_hold(self) -> bool:
        return (
            all([*map(type, list.__iter__(held))] == kinds for held, kinds in self._classes)
            and all(type(_item(held, key)) is kind for held, key, kind in self._kinds)
            and all(_item(held, key) is tensor() for held, key, tensor in self._tensors)
            and all(self._stand_in(value) == wanted for value, wanted in self._others)
        )

    def _functions_hold(self) -> bool:
        functions, wanted = self._functions
        if not all(map(operator.is_, itertools.chain.from_iterable(map(_FUNCTION, functions)), wanted)):
            return False
        cells, contents = self._cells
        try:
            return all(map(operator.is_, map(_CONTENT, cells), contents))
        except ValueError:  # one holds nothing any more
            return False

    def _stand_in(self, value: object) -> object:
        return stand_in(value, depth=self._depth, of_code=self._of_code)

    def _add(self, value: Any, depth: int) -> None:
        if not depth or is_plain(value) or self._seen.get(id(value), 0) >= depth:
            return
        parts = _parts(value, self._of_code)
        kind = cast("type[Any]", type(value))
        if parts is None or kind is torch.jit.ScriptFunction:  # which never changes
            return
        self._seen[id(value)] = depth
        base = base_of(kind)
        if base is not None and base.__len__(value) > _LIMITS.items:
            self._others.append((value, self._stand_in(value)))
        elif kind in (list, dict) and self._is_by_value(value):
            for held, each in zip(self._many, (value, value.copy()), strict=True):
                held.append(each)
        elif issubclass(kind, dict):
            self._watch(value, list(dict.items(value)), depth)
        elif base in (set, frozenset) and all(map(is_plain, base.__iter__(value))):
            self._sets.append((value, frozenset(base.__iter__(value))))
        elif issubclass(kind, list):
            self._watch_list(value, depth)
        elif kind is types.FunctionType:
            self._watch_function(value, depth)
        elif kind in WRAPPERS or issubclass(kind, tuple):
            for _, part in parts:
                self._add(part, depth - 1)
        elif is_inspectable(kind) and not slots_of(kind):
            self._watch(store_of(value), cast("list[tuple[Any, Any]]", parts), depth)
        else:
            self._others.append((value, self._stand_in(value)))

    def _is_by_value(self, value: dict[Any, Any] | list[Any]) -> bool:
        if len(self._items) + len(self._entries[1]) + len(value) <= _MOST_EXACT:
            return False
        items = value.values() if isinstance(value, dict) else value
        return _COMPARED.issuperset(map(type, items))

    def _watch_function(self, function: types.FunctionType, depth: int) -> None:
        if not is_installed(str(function.__globals__.get("__name__"))):
            self._functions[0].append(function)
            self._functions[1].extend(_FUNCTION(function))
        for _, cell in _own_cells(function):
            if _is_held(cell.cell_contents):
                self._cells[0].append(cell)
                self._cells[1].append(cell.cell_contents)
            else:
                self._watch_other(cell, "", cell.cell_contents, of_code=self._of_code is not None)
            self._add(cell.cell_contents, depth - 1)
        for value in function.__defaults__ or ():
            self._add(value, depth - 1)
        if function.__kwdefaults__:
            self._watch(function.__kwdefaults__, list(function.__kwdefaults__.items()), depth)
        if attributes := _attributes_of_function(function):
            self._watch(attributes, list(attributes.items()), depth)

    def _watch_other(self, held: Any, key: Any, value: object, *, of_code: bool | None) -> None:
        """Watches an item that is not held: the class counts, of code's tensors also which one it is."""
        if _has_to_stay(value, of_code):
            self._tensors.append((held, key, weakref.ref(cast("Tensor | nn.Module", value))))
        else:
            self._kinds.append((held, key, type(value)))

    def _watch(
        self, table: Mapping[Any, Any], items: list[tuple[Any, Any]], depth: int, *, is_whole: bool = True
    ) -> None:
        held = [(key, part) for key, part in items if _is_held(part)]
        names, values = [key for key, _ in held], [part for _, part in held]
        if isinstance(table, dict):
            if is_whole:
                self._dicts.append(table)
                self._counts[0].append(dict.__len__(table))
            for known, more in zip(self._entries, ([table] * len(held), names, values), strict=True):
                known += more
        else:
            self._tables.append((table, len(table) if is_whole else None, names, values))
        for key, part in items:
            if not _is_held(part):
                self._watch_other(table, key, part, of_code=self._of_code)
        for part in values:
            self._add(part, depth - 1)

    def _watch_list(self, value: list[Any], depth: int) -> None:
        items = list(list.__iter__(value))
        if all(map(_is_held, items)):
            self._lists.append(value)
            self._counts[1].append(len(items))
            self._items += items
        elif not any(map(_is_held, items)) and self._of_code is False:
            self._classes.append((value, [*map(type, items)]))
        else:
            self._others.append((value, self._stand_in(value)))
        for part in items:
            self._add(part, depth - 1)


def _is_held(value: object) -> bool:
    """Whether a value may be held: it is compared, and is not a tensor."""
    return is_plain(value) or _parts(value) is not None


def _item(held: Any, key: Any) -> object:
    if type(held) is types.CellType:
        return held.cell_contents
    return dict.get(held, key, ABSENT) if isinstance(held, dict) else held.get(key, ABSENT)
