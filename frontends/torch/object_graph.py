"""Lists the objects that a module's attributes and code lead to, compares and restores them."""

from __future__ import annotations

import datetime
import functools
import numbers
import operator
import pickle
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch import nn

from ...torch_support.containers import (
    CONTAINERS,
    base_of,
    copied,
    drop_item,
    put_item,
    refill,
    size_of,
)
from ...torch_support.inspectable import is_inspectable, is_of_library, slots_of, store_of
from ...torch_support.object_graph import (
    ABSENT,
    PLAIN,
    Limits,
    array_content,
    attributes_of,
    partial_items,
)
from .fixups.function_caches import is_traced

__all__ = [
    "HeldObject",
    "changed",
    "class_items",
    "digest",
    "holds_traced",
    "is_closed",
    "is_generator",
    "is_plain",
    "own_reach",
    "reach_of",
    "walk_from",
]

_LIMITS = Limits(depth=6, items=10_000, array_bytes=1 << 16)
_MOST_OBJECTS = 10_000
"""The most objects that one walk lists."""
_MOST_ITEMS = 50_000
"""The most items of objects and containers that one walk looks at."""
_MOST_LARGE = 4_000_000
"""The most items, in a module's own containers above the limit, that are compared by identity."""

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_OF_ALL = (vars(random)["_inst"], vars(np.random)["mtrand"]._rand)
"""The generators behind the functions of these modules."""


Path = str | tuple["Path", Any, bool]
"""The way to an object: in words, or a path, a key there, and whether it is a key of a container."""


@dataclass(eq=False, frozen=True, slots=True)
class HeldObject:
    """Something that can change, and what it held when it was looked at.

    Args:
        where: The path that leads to it.
        value: The container, object, generator, class, table of globals, or cell of a closure.
        held: Its items: attributes by name, elements by key or in order, or a generator's state.
        is_own: Whether an attribute of the module leads there; otherwise the code of its classes does.
        without: The attributes of a module that are none of its state.
        names: The names that are looked at in a table of globals.
    """

    where: Path
    value: Any
    held: dict[Any, Any] | list[Any]
    is_own: bool
    without: frozenset[str] = frozenset()
    names: tuple[str, ...] | None = None

    @staticmethod
    def of_container(value: Any) -> HeldObject:
        """A container of the module."""
        return HeldObject("", value, copied(value), is_own=True)

    @staticmethod
    def of_module(path: str, module: nn.Module, without: frozenset[str]) -> HeldObject:
        """A module with its attributes."""
        return HeldObject(path, module, _without(module, without), is_own=True, without=without)

    @staticmethod
    def of_globals(table: dict[str, Any], names: tuple[str, ...]) -> HeldObject:
        """Some globals of a file."""
        path = str(table.get("__name__"))
        return HeldObject(path, table, _named(table, names), is_own=False, names=names)

    @property
    def path(self) -> str:
        """The path to it, such as `block.schedule` or `Model.cache`."""
        return _shown(self.where)

    @property
    def items(self) -> dict[Any, Any]:
        """The content that it had, by name, key or position."""
        return self.held if isinstance(self.held, dict) else dict(enumerate(self.held))

    @property
    def is_container(self) -> bool:
        """Whether it is a container or an array, all of whose items count."""
        return issubclass(type(self.value), (*CONTAINERS, np.ndarray)) and self.names is None

    @property
    def is_object(self) -> bool:
        """Whether it is an object with attributes, and no module."""
        kind = cast("type[Any]", type(self.value))
        return not issubclass(kind, (nn.Module, *CONTAINERS)) and is_inspectable(kind)

    @property
    def store(self) -> Any:
        """The dict or list in which its items are; None if they are elsewhere, or cannot be replaced."""
        kind = cast("type[Any]", type(self.value))
        if issubclass(kind, (dict, list)):
            return self.value
        if issubclass(kind, (type, types.CellType, *CONTAINERS, np.ndarray)) or is_generator(self.value):
            return None
        return store_of(self.value)

    def now(self) -> dict[Any, Any] | list[Any]:
        """Returns the content that it has now."""
        if self.names is not None:
            return _named(self.value, self.names)
        if issubclass(type(self.value), nn.Module):
            return _without(self.value, self.without)
        if issubclass(type(self.value), CONTAINERS):
            return copied(self.value)
        return _items(self.value) or {}

    def step_to(self, key: Any) -> Path:
        """Returns the path to one of its items."""
        if issubclass(type(self.value), (types.CellType, np.ndarray)) or is_generator(self.value):
            return self.where
        return self.where, key, self.is_container

    def path_of(self, key: Any) -> str:
        """The path of one of its items."""
        return _shown(self.step_to(key))

    def put_back(self) -> None:
        """Lets it hold what it held; of what only code leads to, see `put_back_item`."""
        now = self.now()
        if _are_same(self.held, now):
            return
        if issubclass(type(self.value), CONTAINERS):
            refill(self.value, self.held)
        else:
            for key in _by_key(now).keys() | self.items.keys():
                self.put_back_item(key)

    def put_back_item(self, key: Any) -> None:
        """Lets it hold one item as it did.

        Of a list, deque or set, the others with it. Where only code leads there, others than the forward may
        have added to it meanwhile, such as threads: those items stay.
        """
        old, value = self.items.get(key, ABSENT), self.value
        kind = cast("type[Any]", type(value))
        if is_generator(value):
            _set_state(value, old)
        elif issubclass(kind, np.ndarray):
            value[...] = np.frombuffer(old, value.dtype).reshape(value.shape)
        elif issubclass(kind, types.CellType):
            value.cell_contents = old
        elif issubclass(kind, dict):
            if old is ABSENT:
                drop_item(value, key)
            else:
                put_item(value, key, old)
        elif issubclass(kind, (list, set, deque)):
            if self.is_own:
                self.put_back()
            elif issubclass(kind, set):
                self._put_back_elements()
            else:
                self._put_back_positions()
        elif old is ABSENT:
            store_of(value).pop(key, None) if _is_in_dict(value, key) else _forget(value, key)
        elif _is_in_dict(value, key):
            store_of(value)[key] = old
        else:
            _remember(value, key, old)

    def _put_back_elements(self) -> None:
        """Takes traced elements out of a set, and adds those that are missing."""
        now = self.now()
        for item in now:
            if item not in self.items and holds_traced(item):
                set.discard(self.value, item)
        for item in self.items:
            set.add(self.value, item)

    def _put_back_positions(self) -> None:
        """Takes traced elements out of a list or deque, and restores numbers if none came or went."""
        base, old, now = (
            base_of(type(self.value)),
            list(self.items.values()),
            list(_by_key(self.now()).values()),
        )
        known = set(map(id, old))
        added = [i for i, item in enumerate(now) if id(item) not in known and holds_traced(item)]
        if len(now) > len(old):
            for i in reversed(added):
                base.__delitem__(self.value, i)
                del now[i]
            added = []
        if len(now) == len(old):
            for i, (was, item) in enumerate(zip(old, now, strict=True)):
                if not _is_same(was, item) and (i in added or (is_plain(was) and is_plain(item))):
                    base.__setitem__(self.value, i, was)
        elif len(now) < len(old) and _are_same(old[: len(now)], now):  # taken from the end
            base.extend(self.value, old[len(now) :])
        elif len(now) < len(old) and _are_same(old[len(old) - len(now) :], now):
            for i, item in enumerate(old[: len(old) - len(now)]):
                base.insert(self.value, i, item)


def own_reach(module: nn.Module, excused: Callable[[nn.Module], frozenset[str] | None]) -> list[HeldObject]:
    """A module, its submodules, and what their attributes lead to; not what is in tensors.

    Args:
        module: The module.
        excused: The attributes of a module that are none of its state; None for all of them.
    """
    modules = [
        HeldObject.of_module(name, child, without)
        for name, child in module.named_modules()
        if (without := excused(child)) is not None
    ]
    return modules + walk_from(modules)


def reach_of(values: Iterable[Any]) -> list[HeldObject]:
    """Lists what some values are and lead to, except what is in tensors."""
    return _walk([("", value) for value in values], is_own=True)


def changed(holder: HeldObject) -> Iterator[tuple[Any, Any, Any]]:
    """The items of a holder that are others than they were: key, before and now."""
    found = holder.now()
    if _are_identical(holder.held, found):
        return
    items, now = holder.items, _by_key(found)
    for key in dict.fromkeys((*items, *now)):
        old, new = items.get(key, ABSENT), now.get(key, ABSENT)
        if not _is_same(old, new):
            yield key, old, new


def holds_traced(value: Any) -> bool:
    """Whether something is or leads to a tensor that exists only while a module is traced."""
    if type(value) in PLAIN:
        return False
    if is_traced(value):
        return True
    return any(
        is_traced(item)
        for holder in _walk([("", value)], is_own=True)
        for item in _by_key(holder.held).values()
        if type(item) not in PLAIN and type(item) not in CONTAINERS
    )


def digest(value: Any, depth: int = 4) -> Any:
    """Returns the content of an object as nested tuples; the class, if it is neither plain nor opened."""
    if is_plain(value):
        return value
    if isinstance(value, (np.generic, numbers.Number, datetime.timedelta)):
        return type(value), repr(value)
    parts = _parts(value) if depth else None
    if parts is None or is_generator(value):
        return type(value)
    return type(value), tuple((digest(k, 1), digest(v, depth - 1)) for k, v in _by_key(parts[0]).items())


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None, or a tuple of such."""
    kind = cast("type[Any]", type(value))  # not isinstance(), which asks the object for its class
    if issubclass(kind, (tuple, frozenset)):
        return all(map(is_plain, value))
    return issubclass(kind, PLAIN)


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of random numbers, of Python or numpy."""
    return issubclass(type(value), _GENERATORS)


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (
        type(old) is type(new) and is_plain(old) and is_plain(new) and (old == new or repr(old) == repr(new))
    )


def _are_same(some: dict[Any, Any] | list[Any], others: dict[Any, Any] | list[Any]) -> bool:
    if _are_identical(some, others):
        return True
    some, others = _by_key(some), _by_key(others)
    return list(some) == list(others) and all(map(_is_same, some.values(), others.values()))


def _are_identical(some: dict[Any, Any] | list[Any], others: dict[Any, Any] | list[Any]) -> bool:
    """Whether two hold the very same in the same order: a quick look."""
    if len(some) != len(others) or not all(map(operator.is_, some, others)):
        return False
    if isinstance(some, list) or isinstance(others, list):
        return True
    return all(map(operator.is_, some.values(), others.values()))


def _by_key(held: dict[Any, Any] | list[Any]) -> dict[Any, Any]:
    return held if isinstance(held, dict) else dict(enumerate(held))


def walk_from(holders: list[HeldObject]) -> list[HeldObject]:
    """Lists what some objects lead to, nearest first; all of them are the module's own, or none is."""
    roots = [
        (each.step_to(key), value)
        for each in holders
        for key, value in each.items.items()
        if type(value) not in PLAIN
    ]
    return _walk(roots, is_own=all(each.is_own for each in holders))


def _walk(roots: list[tuple[Path, Any]], *, is_own: bool) -> list[HeldObject]:
    """Lists what these values are and lead to, nearest first."""
    waiting = deque((path, value, 0) for path, value in roots)
    seen: set[int] = set()
    found: list[HeldObject] = []
    items_left, large_left = _MOST_ITEMS, _MOST_LARGE if is_own else 0
    while waiting and len(found) < _MOST_OBJECTS and items_left > 0:
        path, value, depth = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = cast("type[Any]", type(value))
        if issubclass(kind, CONTAINERS) and (size := size_of(value)) > _LIMITS.items:
            if size <= large_left:
                large_left -= size
                found.append(HeldObject(path, value, copied(value), is_own))
            continue
        parts = _parts(value)
        if parts is None:
            continue
        held, is_holder = parts
        items_left -= len(held)
        if is_holder:
            found.append(HeldObject(path, value, held, is_own))
        if depth < _LIMITS.depth and not is_generator(value):
            inside = issubclass(kind, (*CONTAINERS, tuple))
            pairs = held.items() if isinstance(held, dict) else enumerate(held)
            waiting += [((path, k, inside), v, depth + 1) for k, v in pairs if type(v) not in PLAIN]
    return found


def _parts(value: Any) -> tuple[dict[Any, Any] | list[Any], bool] | None:
    """Returns what an object leads to, and whether it can change itself; None if it is not opened."""
    kind = type(value)
    if kind is functools.partial:
        return partial_items(value), False
    if kind is types.MethodType:
        return {"": value.__self__}, False
    if kind is types.FunctionType:
        cells = value.__closure__ or ()
        return dict(zip(value.__code__.co_freevars, cells, strict=True)), False
    if issubclass(kind, tuple):
        return list(tuple.__iter__(value)), False
    items = None if issubclass(kind, type) else _items(value)
    return None if items is None else (items, True)


def _items(value: Any) -> dict[Any, Any] | list[Any] | None:
    """Returns the content of an object that can change; None if it is not opened."""
    kind = type(value)
    if issubclass(kind, CONTAINERS):
        return copied(value)
    if issubclass(kind, _GENERATORS):
        return None if any(value is each for each in _OF_ALL) else {"state": _state_of(value)}
    if kind is np.ndarray:
        content = array_content(value, _LIMITS)
        return None if content is None else {"values": content}
    if kind is types.CellType:
        try:
            return {"": value.cell_contents}
        except ValueError:  # not assigned yet
            return None
    if issubclass(kind, type):
        return None if is_closed(value) else class_items(value)
    return _attributes(value) if is_inspectable(kind) else None


def _without(module: nn.Module, names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in names}


def _named(table: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Some globals without modules, functions and classes."""
    found = {name: table.get(name, ABSENT) for name in names}
    return {
        name: value
        for name, value in found.items()
        if value is not ABSENT and type(value) not in (types.ModuleType, types.FunctionType, type)
    }


def class_items(kind: type) -> dict[str, Any]:
    """Returns the attributes of a class except its methods."""
    return {
        name: value
        for name, value in dict(vars(kind)).items()
        if not name.startswith(("__", "_abc_"))
        and not hasattr(type(value), "__get__")
        and not issubclass(type(value), type)
    }


def _attributes(value: Any) -> dict[str, Any] | None:
    """Returns the attributes of an object; None if its class has room for none."""
    held = attributes_of(value)
    return held if held or slots_of(type(value)) or _has_dict(value) else None


def _has_dict(value: Any) -> bool:
    return any("__dict__" in vars(kind) for kind in type(value).__mro__)


def is_closed(kind: type) -> bool:
    """Whether a class is one of Python, torch, numpy or irc, whose attributes are not looked at."""
    return is_of_library(kind.__module__)


def _shown(path: Path) -> str:
    if isinstance(path, str):
        return path
    parent, key, is_container = path
    return _joined(_shown(parent), key, is_container=is_container)


def _joined(path: str, key: Any, *, is_container: bool = False) -> str:
    if is_container:
        return f"{path}[{key!r}]"
    return f"{path}.{key}".strip(".")


def _is_in_dict(value: Any, key: Any) -> bool:
    return not issubclass(type(value), type) and key not in slots_of(type(value))


def _remember(value: Any, key: str, old: Any) -> None:
    if issubclass(type(value), type):
        setattr(value, key, old)
    else:
        object.__setattr__(value, key, old)


def _forget(value: Any, key: str) -> None:
    if issubclass(type(value), type):
        delattr(value, key)
    else:
        object.__delattr__(value, key)


def _state_of(generator: Any) -> bytes:
    """The state of a generator, to be compared."""
    if issubclass(type(generator), random.Random):
        return pickle.dumps(generator.getstate())
    if issubclass(type(generator), np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(generator.bit_generator.state)


def _set_state(generator: Any, state: bytes) -> None:
    known = pickle.loads(state)
    if issubclass(type(generator), random.Random):
        generator.setstate(known)
    elif issubclass(type(generator), np.random.RandomState):
        generator.set_state(known)
    else:
        generator.bit_generator.state = known
