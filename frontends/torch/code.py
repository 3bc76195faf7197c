"""The code of a module: its functions and those they name, with the classes, globals and cells they use."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from torch import nn

from ...torch_support.code_names import CodeNames, CodePath, GlobalTable, Step
from ...torch_support.containers import CONTAINERS
from ...torch_support.functions import WRAPPERS, cells_of, closed_over
from ...torch_support.inspectable import is_inspectable, is_installed, is_of_library, store_of
from ...torch_support.module_hooks import original_of
from .object_graph import HeldObject, class_items, is_closed, is_plain, reach_of, walk_from

__all__ = ["code_names", "code_reach", "hook_reach"]

_OF_OTHERS = frozenset({"__init__", "__getattribute__"})
"""Methods that do not count: the first runs before a forward, and irc itself replaces the other."""

_ENTRIES = ("forward", "backward", "setup_context")
"""The methods that torch calls."""


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
    """Returns what a module's code reads: methods and attributes of classes, and globals with what they hold.

    Attributes of the module's own classes are left out.

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
    code = _Code(kinds, {type(child).__module__ for child in children})
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
        files: The files of these modules' classes, without those of their bases.
    """

    def __init__(self, kinds: Iterable[type], files: Iterable[str] = ()) -> None:
        self._kinds, self._files = frozenset(kinds), frozenset(files)
        self._before_forward = {id(vars(kind).get("__init__")) for kind in self._kinds}
        self._classes: dict[type, int] = {}
        """The levels of the other classes."""
        self._read: dict[int, tuple[dict[str, Any], dict[CodePath, None]]] = {}
        """Tables of globals, with what code of the module reads of them."""
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
        ]
        classes = [
            HeldObject(kind.__name__, kind, class_items(kind), is_own=False) for kind in self._own_classes()
        ]
        return [*cells, *classes] + [
            HeldObject.of_globals(table, tuple(sorted(names))) for table, names in self._tables.values()
        ]

    def reads(self) -> Iterator[tuple[type | GlobalTable, tuple[CodePath, ...]]]:
        """Yields the classes and tables with the paths to what code of the module may read of them.

        What libraries keep in their own classes and files, as caches, counts for nothing here, except numbers
        and texts.
        """
        for kind in (*self._kinds, *self._own_classes()):
            names: list[str] = []
            if self._is_own_file(kind.__module__):
                names += (name for name, value in list(vars(kind).items()) if self._is_method(name, value))
            if kind not in self._kinds:
                names += (name for name in class_items(kind) if name in self._named)
            if names:
                yield kind, tuple(map(CodePath, names))
        for table, paths in self._read.values():
            file = str(table.get("__name__"))
            is_own = self._is_own_file(file)
            there = [each for each in paths if is_own or (each.name in table and is_plain(table[each.name]))]
            if there and "__name__" in table:  # code that libraries generate, as fx does, has none
                yield GlobalTable(file, table), tuple(there)

    def _is_own_file(self, name: str) -> bool:
        return name in self._files or not is_installed(name)

    def _is_method(self, name: str, value: Any) -> bool:
        """Whether an item of a class is a method that may run in a forward."""
        is_function = type(value) is types.FunctionType or type(value) in WRAPPERS
        return is_function and name not in _OF_OTHERS and (name in self._named or name.startswith("__"))

    def _own_classes(self) -> list[type]:
        """The classes that code of the module names, and that are no modules."""
        return [kind for kind, level in self._classes.items() if not level]

    def follow(self, values: Iterable[Any], level: int) -> None:
        """Notes the functions that these values are, and those that these name.

        Args:
            values: Functions, classes, objects with methods, and others.
            level: 0 for code of the module, 1 for other code: of that, only the same file is followed. What
                is not in an installed package counts as code of the module.
        """
        waiting = deque((value, level, 0) for value in values)
        while waiting:
            value, at, file = waiting.popleft()
            kind = cast("type[Any]", type(value))
            if kind is types.FunctionType:
                waiting += self._of_function(value, at + (file not in (0, id(value.__globals__))))
            elif kind in WRAPPERS:
                waiting += [(getattr(value, name), at, file) for name in WRAPPERS[kind]]
            elif issubclass(kind, type) or is_inspectable(kind):
                waiting += self._of_class(value if issubclass(kind, type) else kind, at, file)

    def _of_class(self, kind: type, level: int, file: int) -> Iterator[tuple[Any, int, int]]:
        level = level if is_installed(kind.__module__) else 0
        if self._seen.get(id(kind), 2) <= level:
            return
        self._seen[id(kind)] = level
        for each in kind.__mro__:
            if not is_closed(each) and each not in self._kinds:
                self._classes[each] = min(level, self._classes.get(each, level))
            for name, value in () if is_closed(each) else list(vars(each).items()):
                if isinstance(value, type) or is_inspectable(type(value)):
                    yield value, level, file
                elif type(value) is types.FunctionType or type(value) in WRAPPERS:
                    if name in self._named or name.startswith("__"):
                        yield value, level, file
                    else:
                        self._unnamed.setdefault(name, []).append((value, level, file))

    def _of_function(self, function: types.FunctionType, level: int) -> Iterator[tuple[Any, int, int]]:
        table = function.__globals__
        level = level if is_installed(str(table.get("__name__"))) else 0
        if self._seen.get(id(function), 2) <= level:
            return
        self._seen[id(function)] = level
        yield from ((held, level, 0) for held in closed_over(function))
        if is_of_library(str(table.get("__name__"))):  # such as what no_grad() makes of a function
            return
        for name, cell in cells_of(function).items():
            self._cells[id(cell)] = name, cell
        names, uses = _names_in(function.__code__), _globals_in(function.__code__)
        is_any = "globals" in names or any(name == "__name__" for name, _ in uses)  # sys.modules[__name__]
        for name in sorted(names - self._named):
            self._named.add(name)
            yield from self._unnamed.pop(name, ())
        imported = _modules_at([sys.modules[name] for name in sorted(names & sys.modules.keys())], names)
        if not level and id(function) not in self._before_forward:
            self._note_reads(table, uses)
            self._note_missing(table, uses)
            handed_on = _modules_at((table.get(name) for name, steps in uses if not steps), names)
            tables = list(map(vars, (*imported, *handed_on)))
            for each in (*tables, *([table] if is_any or "vars" in names else ())):
                self._note_reads(each, ((name, ()) for name in names))
            if "globals" in names:  # by keys that are computed, too
                self._note_reads(table, [(name, ()) for name in table if is_plain(table[name])])
        if is_any:
            names |= set(table)
        names = {name for name in names if not name.startswith("__")}
        self._tables.setdefault(id(table), (table, set()))[1].update(names)
        values = [table[name] for name in sorted(names) if name in table]
        yield from ((value, level, id(table)) for value in values)
        for module in (*values, *imported):
            if _is_own_module(module):
                yield from self._of_module(module, names, level)

    def _of_module(
        self, module: types.ModuleType, names: set[str], level: int
    ) -> Iterator[tuple[Any, int, int]]:
        """Notes what a function names of a module that is a global of its file, as a file of settings is."""
        table = vars(module)
        found = {name for name in names if name in table}
        self._tables.setdefault(id(table), (table, set()))[1].update(found)
        for value in (table[name] for name in sorted(found)):
            yield value, level + (not isinstance(value, type)), id(table)

    def _note_reads(self, table: dict[str, Any], uses: Iterable[_Use]) -> None:
        """Notes what own code reads of the globals of a file, and of modules among them."""
        for name, steps in uses:
            held, key, rest = _through_modules(table, name, steps)
            if key in held and type(held[key]) is not types.ModuleType:
                path = CodePath(key, _stored(held[key], rest))
                self._read.setdefault(id(held), (held, {}))[1][path] = None

    def _note_missing(self, table: dict[str, Any], uses: Iterable[_Use]) -> None:
        """Notes globals that own code names and that are not there: it may ask for them (`NameError`)."""
        for name in {name for name, _ in uses if name not in table and not hasattr(builtins, name)}:
            self._read.setdefault(id(table), (table, {}))[1][CodePath(name)] = None


_Use = tuple[str, tuple[Step, ...]]
"""A global that code reads, with the attributes and items of it that the code goes on to."""


def _through_modules(
    table: dict[str, Any], name: str, steps: tuple[Step, ...]
) -> tuple[dict[str, Any], str, tuple[Step, ...]]:
    """Follows attributes of modules that are no library's; returns a table, a name, and steps from there."""
    while steps and _is_own_module(table.get(name)):
        table, name, steps = vars(table[name]), steps[0].key, steps[1:]
    return table, name, steps


def _modules_at(values: Iterable[Any], names: Iterable[str]) -> list[types.ModuleType]:
    """Returns the modules among some values that are no library's, and those to which names lead in them."""
    modules = dict.fromkeys(filter(_is_own_module, values))
    waiting = list(modules)
    for module in waiting:
        within = [held for name in names if _is_own_module(held := vars(module).get(name))]
        waiting += [each for each in within if each not in modules]
        modules.update(dict.fromkeys(within))
    return waiting


def _is_own_module(value: Any) -> bool:
    return type(value) is types.ModuleType and not is_of_library(value.__name__)


@functools.lru_cache(maxsize=16384)
def _globals_in(code: types.CodeType) -> frozenset[_Use]:
    """The globals that a function and those inside of it read."""
    inside = [_globals_in(each) for each in code.co_consts if type(each) is types.CodeType]
    instructions = list(dis.get_instructions(code))
    return frozenset(
        (str(each.argval), tuple(_steps(instructions[place + 1 :])))
        for place, each in enumerate(instructions)
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and str(each.argval).isidentifier()
    ).union(*inside)


def _steps(instructions: Sequence[dis.Instruction]) -> Iterator[Step]:
    """Yields the attributes and constant items that instructions take, one of the other."""
    place = 0
    while place < len(instructions):
        this = instructions[place]
        if this.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield Step(this.argval, is_item=False)
            place += 1
        elif _is_constant_item(instructions[place : place + 2]):
            yield Step(this.argval, is_item=True)
            place += 2
        else:
            return


def _is_constant_item(instructions: Sequence[dis.Instruction]) -> bool:
    if len(instructions) < 2 or instructions[0].opname not in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return False
    takes = instructions[1]
    return takes.opname == "BINARY_SUBSCR" or (takes.opname == "BINARY_OP" and takes.argrepr == "[]")


def _stored(value: Any, steps: Iterable[Step]) -> tuple[Step, ...]:
    """Returns the first steps, as long as they take what an object itself holds.

    What its class computes, such as a property, may rest on all that it holds.
    """
    taken: list[Step] = []
    for step in steps:
        kind = cast("type[Any]", type(value))
        held: dict[Any, Any] = {}
        if step.is_item and issubclass(kind, dict) and kind.__getitem__ is dict.__getitem__:
            held = cast("dict[Any, Any]", value)
        elif not (step.is_item or issubclass(kind, type) or _computes(kind, step.key)):
            held = store_of(value)
        if not dict.__contains__(held, step.key):
            break
        value = dict.__getitem__(held, step.key)
        taken.append(step)
    return tuple(taken)


def _computes(kind: type, name: str) -> bool:
    """Whether a class computes an attribute that its objects hold, or may."""
    reads_by_itself = type(kind.__getattribute__) is types.FunctionType
    return reads_by_itself or hasattr(inspect.getattr_static(kind, name, None), "__set__")


def _names_in(code: types.CodeType) -> set[str]:
    """The globals and attributes that a function and those inside of it name, in texts also.

    Names that nobody can write are those of a tool that has compiled it anew, as pytest does for `assert`.
    """
    names = set(filter(str.isidentifier, code.co_names))
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
            if kind is types.FunctionType or kind in WRAPPERS or issubclass(kind, type):
                yield value
