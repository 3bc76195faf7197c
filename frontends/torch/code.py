"""The code of a module: its functions and those they name, with the classes, globals and cells they use."""

from __future__ import annotations

import dis
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn

from ...torch_support.code_names import CodeNames, GlobalTable
from ...torch_support.containers import CONTAINERS
from ...torch_support.inspectable import is_inspectable, is_of_library
from ...torch_support.module_hooks import original_of
from .closures import closed_over
from .object_graph import HeldObject, class_items, is_closed, is_plain, reach_of, walk_from

__all__ = ["code_names", "code_reach", "hook_reach"]

_ALL_NAMES = frozenset({"globals", "vars"})
"""A function that names one of these may use any name of its file."""

_ENTRIES = ("forward", "backward", "setup_context")
"""The methods that torch calls."""

_WRAPPERS: dict[type, tuple[str, ...]] = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    types.MethodType: ("__func__",),
    functools.partial: ("func",),
    functools.cached_property: ("func",),
    type(functools.lru_cache(lambda: None)): ("__wrapped__",),
}
"""The classes of objects that wrap a function, with the attributes that hold it."""


def code_reach(module: nn.Module, own: Iterable[HeldObject]) -> list[HeldObject]:
    """Lists what the code of a module leads to: its classes, and globals and closures of its functions.

    Of globals, those count that a function names which the forward reaches; others are other code's. Code of
    torch, numpy and Python counts for nothing. Functions of other files count if the code of the module's
    own files names them, with the functions beside them.

    Args:
        module: The module.
        own: The objects that its attributes lead to: methods of these objects are code, too.
    """
    return _reach(module, own)[1]


def code_names(module: nn.Module, own: Iterable[HeldObject]) -> CodeNames:
    """Returns the attributes of classes, and the numbers and texts among globals, that a module's code names.

    The module's own classes are left out.

    Args:
        module: The module.
        own: As of `code_reach`.
    """
    return tuple(_reach(module, own)[0].reads())


def _reach(module: nn.Module, own: Iterable[HeldObject]) -> tuple[_Code, list[HeldObject]]:
    """Returns the code of a module, and what it leads to."""
    children = list(module.modules())
    kinds = {kind: None for child in children for kind in type(child).__mro__ if not is_closed(kind)}
    found = [HeldObject(kind.__name__, kind, class_items(kind), is_own=False) for kind in kinds]
    code = _Code(kinds)
    code.follow(kinds, 0)
    for child in children:
        held = list(vars(child).values())
        code.follow(held, 0)
        hooks = [hook for one in held if type(one) in (dict, OrderedDict) for hook in list(one.values())]
        code.follow(map(original_of, hooks), 0)
    code.follow(_code_in(own), 1)
    return code, _led_to(code, found)


def hook_reach(hook: Any) -> list[HeldObject]:
    """Lists what a hook leads to: the objects that it holds, and classes, globals and cells of its code."""
    own = reach_of([hook])
    code = _Code(())
    code.follow([hook], 0)
    code.follow(_code_in(own), 1)
    return [*own, *_led_to(code, [])]


def _led_to(code: _Code, found: list[HeldObject]) -> list[HeldObject]:
    """Lists what code leads to, with the classes that were found; follows the code in it."""
    while True:
        known = code.size
        roots = [*found, *code.holders()]
        reached = walk_from(roots)
        code.follow(_code_in([*roots, *reached]), 1)
        if code.size == known:
            return roots + reached


class _Code:
    """Functions that were found, with the globals and classes that they name and the cells of their closures.

    A method of a class counts if a function names it (some method of that name, whatever the class).

    Args:
        kinds: The classes of modules.
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        self._kinds = frozenset(kinds)
        self._classes: dict[type, int] = {}
        """The levels of the other classes."""
        self._read: dict[int, tuple[dict[str, Any], set[str]]] = {}
        """Tables of globals, with the names by which code of the module reads them."""
        self._tables: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._cells: dict[int, tuple[str, types.CellType]] = {}
        self._named = set[str](_ENTRIES)
        self._unnamed: dict[str, list[tuple[Any, int, int]]] = {}
        """Methods that no function has named so far."""
        self._seen: dict[int, int] = {}
        """The levels of functions and classes."""

    @property
    def size(self) -> int:
        """The number of cells, classes and globals that were found."""
        return (
            len(self._cells)
            + len(self._classes)
            + sum(len(names & table.keys()) for table, names in self._tables.values())
        )

    def holders(self) -> list[HeldObject]:
        """The cells that hold something, the classes that own code names, and the tables of globals."""
        cells = [
            HeldObject(name, cell, {"": cell.cell_contents}, is_own=False)
            for name, cell in self._cells.values()
            if _is_filled(cell)
        ]
        classes = [
            HeldObject(kind.__name__, kind, class_items(kind), is_own=False) for kind in self._own_classes()
        ]
        return [*cells, *classes] + [
            HeldObject.of_globals(table, tuple(sorted(names))) for table, names in self._tables.values()
        ]

    def reads(self) -> Iterator[tuple[type | GlobalTable, tuple[str, ...]]]:
        """Yields the classes and tables with the names of what code of the module may read of them.

        What libraries keep in their own classes and files, as caches, counts for nothing here.
        """
        for kind in self._own_classes():
            if names := tuple(name for name in class_items(kind) if name in self._named):
                yield kind, names
        for table, names in self._read.values():
            if plain := tuple(sorted(name for name in names if name in table and is_plain(table[name]))):
                yield GlobalTable(str(table.get("__name__")), table), plain

    def _own_classes(self) -> list[type]:
        """The classes that code of the module names, and that are no modules."""
        return [kind for kind, level in self._classes.items() if not level]

    def follow(self, values: Iterable[Any], level: int) -> None:
        """Notes the functions that these values are, and those that these name.

        Args:
            values: Functions, classes, objects with methods, and others.
            level: 0 for code of the module, 1 for other code: of that, only the same file is followed.
        """
        waiting = deque((value, level, 0) for value in values)
        while waiting:
            value, at, file = waiting.popleft()
            kind = cast("type[Any]", type(value))
            if kind is types.FunctionType:
                waiting += self._of_function(value, at + (file not in (0, id(value.__globals__))))
            elif kind in _WRAPPERS:
                waiting += [(getattr(value, name), at, file) for name in _WRAPPERS[kind]]
            elif issubclass(kind, type) or is_inspectable(kind):
                waiting += self._of_class(value if issubclass(kind, type) else kind, at, file)

    def _of_class(self, kind: type, level: int, file: int) -> Iterator[tuple[Any, int, int]]:
        if self._seen.get(id(kind), 2) <= level:
            return
        self._seen[id(kind)] = level
        for each in kind.__mro__:
            if not is_closed(each) and each not in self._kinds:
                self._classes[each] = min(level, self._classes.get(each, level))
            for name, value in () if is_closed(each) else list(vars(each).items()):
                if isinstance(value, type):
                    yield value, level, file
                elif type(value) is types.FunctionType or type(value) in _WRAPPERS:
                    if name in self._named or name.startswith("__"):
                        yield value, level, file
                    else:
                        self._unnamed.setdefault(name, []).append((value, level, file))

    def _of_function(self, function: types.FunctionType, level: int) -> Iterator[tuple[Any, int, int]]:
        table = function.__globals__
        if self._seen.get(id(function), 2) <= level or is_of_library(str(table.get("__name__"))):
            return
        self._seen[id(function)] = level
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._cells[id(cell)] = name, cell
        yield from ((held, level, 0) for held in closed_over(function))
        names = _names_in(function.__code__)
        for name in sorted(names - self._named):
            self._named.add(name)
            yield from self._unnamed.pop(name, ())
        if names & _ALL_NAMES:
            names |= set(table)
        names = {name for name in names if not name.startswith("__")}
        self._tables.setdefault(id(table), (table, set()))[1].update(names)
        if not level:
            self._read.setdefault(id(table), (table, set()))[1].update(_globals_in(function.__code__))
        values = [table[name] for name in sorted(names) if name in table]
        yield from ((value, level, id(table)) for value in values)
        for module in values:
            if type(module) is types.ModuleType and not is_of_library(module.__name__):
                yield from self._of_module(module, names, level)

    def _of_module(
        self, module: types.ModuleType, names: set[str], level: int
    ) -> Iterator[tuple[Any, int, int]]:
        """Notes what a function names of a module that is a global of its file, as a file of settings is."""
        table = vars(module)
        found = {name for name in names if name in table}
        for tables in (self._tables, *(() if level else (self._read,))):
            tables.setdefault(id(table), (table, set()))[1].update(found)
        for value in (table[name] for name in sorted(found)):
            yield value, level + (not isinstance(value, type)), id(table)


@functools.lru_cache(maxsize=16384)
def _globals_in(code: types.CodeType) -> frozenset[str]:
    """The globals that a function and those inside of it read."""
    inside = [_globals_in(each) for each in code.co_consts if type(each) is types.CodeType]
    reads = (each for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return frozenset(str(each.argval) for each in reads).union(*inside)


def _names_in(code: types.CodeType) -> set[str]:
    """The globals and attributes that a function and those inside of it name, in texts also."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            names |= _names_in(constant)
        elif type(constant) is str and constant.isidentifier():
            names.add(constant)
    return names


def _code_in(holders: Iterable[HeldObject]) -> Iterator[Any]:
    """The functions, classes and objects with methods among holders and what they held."""
    for holder in holders:
        if holder.is_object:
            yield holder.value
        if holder.is_container and not issubclass(type(holder.value), CONTAINERS):
            continue
        for value in holder.items.values():
            kind = cast("type[Any]", type(value))
            if kind is types.FunctionType or kind in _WRAPPERS or issubclass(kind, type):
                yield value


def _is_filled(cell: types.CellType) -> bool:
    try:
        return bool(cell.cell_contents is not cell)
    except ValueError:  # not assigned yet
        return False
