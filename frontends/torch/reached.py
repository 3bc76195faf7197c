"""What a module's attributes and its code reach in Python: looked at before and after a forward, put back."""

from __future__ import annotations

import enum
import functools
import pickle
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ...ir import is_inspectable, is_of_library, slots_of, store_of
from .caches import is_traced
from .closures import closed_over

__all__ = [
    "ABSENT",
    "Holder",
    "changed",
    "code_reach",
    "digest",
    "holds_traced",
    "is_generator",
    "is_plain",
    "own_reach",
    "reach_of",
]

ABSENT: Any = object()
"""Stands for what is not there."""

_DEPTH = 6
"""So many steps away from an attribute something is still looked at."""
_MOST = 20_000
"""So many objects are looked at, and containers with more items than this are not."""
_ARRAY_BYTES = 1 << 16
"""Arrays of numpy up to this size are looked at."""

_CONTAINERS = (dict, list, set, deque)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_OF_ALL = (vars(random)["_inst"], vars(np.random)["mtrand"]._rand)
"""The generators behind the functions of these modules."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), enum.Enum)


@dataclass(eq=False, frozen=True, slots=True)
class Holder:
    """Something that can change, and what it held when it was looked at.

    Args:
        path: How it is reached, such as `block.schedule` or `Model.cache`.
        value: The container, object, generator, class, table of globals, or cell of a closure.
        items: What it held: attributes by name, elements by key or position, or a generator's state.
        is_own: Whether an attribute of the module leads there; otherwise the code of its classes does.
        without: The attributes of a module that are none of its state.
    """

    path: str
    value: Any
    items: dict[Any, Any]
    is_own: bool
    without: frozenset[str] = frozenset()

    @staticmethod
    def of_container(value: Any) -> Holder:
        """A container of the module."""
        return Holder("", value, _items(value) or {}, is_own=True)

    @staticmethod
    def of_module(path: str, module: nn.Module, without: frozenset[str]) -> Holder:
        """A module with its attributes."""
        return Holder(path, module, _without(module, without), is_own=True, without=without)

    @property
    def is_container(self) -> bool:
        """Whether it is a container or an array, all of whose items count."""
        return isinstance(self.value, (*_CONTAINERS, np.ndarray)) and not self._is_globals

    @property
    def is_object(self) -> bool:
        """Whether it is an object with attributes, and no module."""
        kind = cast("type[Any]", type(self.value))
        return not issubclass(kind, (nn.Module, *_CONTAINERS)) and is_inspectable(kind)

    @property
    def store(self) -> Any:
        """The dict or list in which its items are; None where they are elsewhere, or cannot be replaced."""
        if isinstance(self.value, (dict, list)):
            return cast(Any, self.value)
        if isinstance(self.value, (type, types.CellType, *_CONTAINERS, np.ndarray)) or is_generator(
            self.value
        ):
            return None
        return store_of(self.value)

    @property
    def _is_globals(self) -> bool:
        return not self.is_own and type(self.value) is dict and "__name__" in self.value

    def now(self) -> dict[Any, Any]:
        """What it holds now."""
        if isinstance(self.value, nn.Module):
            return _without(self.value, self.without)
        if self._is_globals:
            return _named(self.value)
        return _items(self.value) or {}

    def path_of(self, key: Any) -> str:
        """The path of one of its items."""
        if isinstance(self.value, (types.CellType, np.ndarray)) or is_generator(self.value):
            return self.path
        return _joined(self.path, key, is_container=self.is_container)

    def put_back(self) -> None:
        """Lets it hold what it held; of what only code leads to, see `put_back_item`."""
        now = self.now()
        if _are_same(self.items, now):
            return
        value = self.value
        if isinstance(value, list):
            value[:] = self.items.values()
        elif isinstance(value, _CONTAINERS):
            value.clear()
            if isinstance(value, dict):
                cast("dict[Any, Any]", value).update(self.items)
            else:
                getattr(value, "extend" if isinstance(value, deque) else "update")(self.items.values())
        else:
            for key in now.keys() | self.items.keys():
                self.put_back_item(key)

    def put_back_item(self, key: Any) -> None:
        """Lets it hold one item as it did."""
        old, value = self.items.get(key, ABSENT), self.value
        if is_generator(value):
            _set_state(value, old)
        elif isinstance(value, np.ndarray):
            value[...] = np.frombuffer(old, value.dtype).reshape(value.shape)
        elif isinstance(value, types.CellType):
            value.cell_contents = old
        elif isinstance(value, dict):
            if old is ABSENT:
                value.pop(key, None)
            else:
                value[key] = old
        elif isinstance(value, (list, set, deque)):
            self.put_back()
        elif old is ABSENT:
            store_of(value).pop(key, None) if _is_in_dict(value, key) else _forget(value, key)
        elif _is_in_dict(value, key):
            store_of(value)[key] = old
        else:
            _remember(value, key, old)


def own_reach(module: nn.Module, excused: Callable[[nn.Module], frozenset[str] | None]) -> list[Holder]:
    """A module, its submodules, and what their attributes lead to; not what is in tensors.

    Args:
        module: The module.
        excused: The attributes of a module that are none of its state; None for all of them.
    """
    modules = [
        Holder.of_module(name, child, without)
        for name, child in module.named_modules()
        if (without := excused(child)) is not None
    ]
    roots = [(each.path_of(key), value) for each in modules for key, value in each.items.items()]
    return modules + _walk(roots, is_own=True)


def reach_of(values: Iterable[Any]) -> list[Holder]:
    """What some values are and lead to; not what is in tensors."""
    return _walk([("", value) for value in values], is_own=True)


def code_reach(module: nn.Module) -> list[Holder]:
    """What the code of a module leads to: its classes, and globals and closures of their functions.

    Code of torch, numpy and Python counts for nothing; of what a file imports, functions count with the
    globals beside them.
    """
    kinds = {kind: None for child in module.modules() for kind in type(child).__mro__ if not _is_closed(kind)}
    found = [Holder(kind.__name__, kind, _class_items(kind), is_own=False) for kind in kinds]
    tables: dict[int, dict[str, Any]] = {}
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(value, 0) for kind in kinds for value in vars(kind).values()]
    waiting += [(value, 0) for child in module.modules() for value in vars(child).values()]
    while waiting:
        value, level = waiting.pop()
        function = _function_of(value)
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        if is_of_library(str(function.__globals__.get("__name__"))):
            continue
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if items := _items(cell):
                found.append(Holder(name, cell, items, is_own=False))
        waiting += [(held, level) for held in closed_over(function)]
        if id(function.__globals__) not in tables:
            tables[id(function.__globals__)] = function.__globals__
            if level == 0:
                waiting += [(held, 1) for held in function.__globals__.values()]
    found += [Holder(str(t.get("__name__")), t, _named(t), is_own=False) for t in tables.values()]
    roots = [(each.path_of(key), value) for each in found for key, value in each.items.items()]
    return found + _walk(roots, is_own=False)


def changed(holder: Holder) -> Iterator[tuple[Any, Any, Any]]:
    """The items of a holder that are others than they were: key, before and now."""
    now = holder.now()
    for key in dict.fromkeys((*holder.items, *now)):
        old, new = holder.items.get(key, ABSENT), now.get(key, ABSENT)
        if not _is_same(old, new):
            yield key, old, new


def holds_traced(value: Any) -> bool:
    """Whether something is or leads to a tensor that exists only while a module is traced."""
    if is_traced(value):
        return True
    return any(
        is_traced(item) for holder in _walk([("", value)], is_own=True) for item in holder.items.values()
    )


def digest(value: Any, depth: int = 4) -> Any:
    """What something holds as nested tuples; of what is neither plain nor looked into, the class."""
    if is_plain(value):
        return value
    parts = _parts(value) if depth else None
    if parts is None or is_generator(value):
        return type(value)
    return type(value), tuple((digest(k, 1), digest(v, depth - 1)) for k, v in parts[0].items())


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None, or a tuple of such."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, cast("tuple[Any, ...]", value)))
    return isinstance(value, _PLAIN) or type(value) in _NAMES


_NAMES = (torch.dtype, torch.device, torch.layout, torch.memory_format, slice, range)


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of random numbers, of Python or numpy."""
    return isinstance(value, _GENERATORS)


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (
        type(old) is type(new) and is_plain(old) and is_plain(new) and (old == new or repr(old) == repr(new))
    )


def _are_same(some: dict[Any, Any], others: dict[Any, Any]) -> bool:
    return list(some) == list(others) and all(map(_is_same, some.values(), others.values()))


def _walk(roots: list[tuple[str, Any]], *, is_own: bool) -> list[Holder]:
    """What these values are and lead to, nearest first."""
    waiting = deque((path, value, 0) for path, value in roots)
    seen: set[int] = set()
    found: list[Holder] = []
    while waiting and len(found) < _MOST:
        path, value, depth = waiting.popleft()
        if type(value) in _PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        parts = _parts(value)
        if parts is None:
            continue
        items, is_holder = parts
        if is_holder:
            found.append(Holder(path, value, items, is_own))
        if depth < _DEPTH and not is_generator(value):
            inside = isinstance(value, (*_CONTAINERS, tuple))
            waiting += [(_joined(path, k, is_container=inside), v, depth + 1) for k, v in items.items()]
    return found


def _parts(value: Any) -> tuple[dict[Any, Any], bool] | None:
    """What something leads to, and whether it can change itself; None for what is not looked into."""
    kind = type(value)
    if kind is functools.partial:
        return {"func": value.func, "args": value.args, "keywords": value.keywords}, False
    if kind is types.MethodType:
        return {"": value.__self__}, False
    if kind is types.FunctionType:
        cells = value.__closure__ or ()
        return dict(zip(value.__code__.co_freevars, cells, strict=True)), False
    if issubclass(kind, tuple):
        return dict(enumerate(value)), False
    items = None if issubclass(kind, type) else _items(value)
    return None if items is None else (items, True)


def _items(value: Any) -> dict[Any, Any] | None:
    """What something that can change holds; None for what is not looked into."""
    kind = type(value)
    if issubclass(kind, _CONTAINERS):
        if len(value) > _MOST:
            return None
        if issubclass(kind, dict):
            return dict(dict.items(value))
        return {item: item for item in value} if issubclass(kind, set) else dict(enumerate(value))
    if issubclass(kind, _GENERATORS):
        return None if value in _OF_ALL else {"state": _state_of(value)}
    if kind is np.ndarray:
        is_looked_at = value.nbytes <= _ARRAY_BYTES and not value.dtype.hasobject
        return {"values": value.tobytes()} if is_looked_at else None
    if kind is types.CellType:
        try:
            return {"": value.cell_contents}
        except ValueError:  # not assigned yet
            return None
    if issubclass(kind, type):
        return None if _is_closed(value) else _class_items(value)
    return _attributes(value) if is_inspectable(kind) else None


def _without(module: nn.Module, names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in names}


def _named(table: dict[str, Any]) -> dict[str, Any]:
    """Globals without what Python keeps among them."""
    return {
        name: value
        for name, value in table.copy().items()
        if not name.startswith("__") and type(value) not in (types.ModuleType, types.FunctionType, type)
    }


def _class_items(kind: type) -> dict[str, Any]:
    """What is written down in a class, besides its methods."""
    return {
        name: value
        for name, value in dict(vars(kind)).items()
        if not name.startswith(("__", "_abc_"))
        and not hasattr(type(value), "__get__")
        and not isinstance(value, type)
    }


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, those in slots among them; None where it has none."""
    held: dict[str, Any] = dict(store_of(value))
    slots = slots_of(type(value))
    for name in slots:
        found = getattr(value, name, ABSENT)
        if found is not ABSENT:
            held[name] = found
    return held if held or slots or hasattr(value, "__dict__") else None


def _is_closed(kind: type) -> bool:
    return is_of_library(kind.__module__)


_WRAPPERS: dict[type, str] = {
    staticmethod: "__func__",
    classmethod: "__func__",
    property: "fget",
    types.MethodType: "__func__",
    functools.partial: "func",
    functools.cached_property: "func",
    type(functools.lru_cache(lambda: None)): "__wrapped__",
}


def _function_of(value: Any) -> types.FunctionType | None:
    """The function that a method, a property or a decorator stands for."""
    while (name := _WRAPPERS.get(type(value))) is not None:
        value = getattr(value, name)
    return value if type(value) is types.FunctionType else None


def _joined(path: str, key: Any, *, is_container: bool = False) -> str:
    if is_container:
        return f"{path}[{key!r}]"
    return f"{path}.{key}".strip(".")


def _is_in_dict(value: Any, key: Any) -> bool:
    return not isinstance(value, type) and key not in slots_of(type(value))


def _remember(value: Any, key: str, old: Any) -> None:
    if isinstance(value, type):
        setattr(value, key, old)
    else:
        object.__setattr__(value, key, old)


def _forget(value: Any, key: str) -> None:
    if isinstance(value, type):
        delattr(value, key)
    else:
        object.__delattr__(value, key)


def _state_of(generator: Any) -> bytes:
    """The state of a generator, to be compared."""
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(generator.bit_generator.state)


def _set_state(generator: Any, state: bytes) -> None:
    known = pickle.loads(state)
    if isinstance(generator, random.Random):
        generator.setstate(known)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(known)
    else:
        generator.bit_generator.state = known
