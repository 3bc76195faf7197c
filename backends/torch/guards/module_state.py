"""Records the submodules of a module and their settings, and tells whether they are still the same."""

# torch has no public way to the tables of a module.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import nn

from ....torch_support.attribute_reads import Names
from ....torch_support.code_names import CodeNames, CodePath, GlobalTable, places
from ....torch_support.inspectable import is_of_library
from ....torch_support.recorders import RECORDERS_MARK
from ....torch_support.scripted import is_scripted, script_settings
from .hook_state import HookState
from .settings import ABSENT, Content, Kind, SameTensor, Watch, is_plain, is_same, stand_in

__all__ = [
    "ABSENT",
    "CALL",
    "HOOKS_MARK",
    "SCRIPT_MARK",
    "Attributes",
    "CodeReads",
    "CodeWatch",
    "Kind",
    "ModuleState",
    "Reads",
    "State",
    "attribute",
    "code_reads",
    "differing_modules",
    "has",
    "is_equal",
    "is_plain",
    "relevant_settings",
]

Attributes = tuple[tuple[str, object], ...]
"""Names with values; a `Content` or a `Kind` stands for a value that is not compared directly."""

StandIns = dict[tuple[int, int, bool | None], object]
"""The stand-ins of objects, by identity, depth, and whether only code leads there."""


State = tuple[tuple[type, Attributes], ...]
"""The type and the settings of each module of a tree, the root first; the mode is one of the settings."""


_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""The marks that sharding of the whole module leaves in its submodules."""
_OWN_MARKS = "_irc"
"""The prefix of irc's own marks, which are read from the `__dict__`."""
SCRIPT_MARK = f"{_OWN_MARKS}_script"
"""Stands for what a submodule made by torch.jit holds outside of Python."""
HOOKS_MARK = f"{_OWN_MARKS}_hooks"
"""Stands for the hooks of a submodule among its settings."""
CALL = "_compiled_call_impl"
"""The attribute by which torch lets a module be called in another way; copies and pickles leave it out."""
_NO_SETTINGS = (frozenset(vars(nn.Module())) - {"training"}).union(_MARKS, [RECORDERS_MARK, CALL])
"""The attributes of every module that are not settings: parameters, buffers, submodules, hooks."""


def attribute(
    held: Mapping[str, object], name: str, known: StandIns | None = None, *, of_code: bool = False
) -> object:
    """Returns the stand-in of an attribute; for a method its function's, as a copy has another method."""
    value = held.get(name, ABSENT)
    if type(value) is types.MethodType and issubclass(type(value.__self__), nn.Module):
        value = value.__func__
    return value if value is ABSENT else stand_in(value, known, of_code=of_code)


def is_equal(a: object, b: object) -> bool:
    """Whether two values are equal; values that cannot tell, such as arrays, count as different."""
    return is_plain(a) and is_plain(b) and is_same(a, b)


def has(held: Mapping[str, object], attributes: Attributes) -> bool:
    """Whether these attributes still have these values."""
    return all(
        held.get(name, ABSENT) is wanted or _is_same(attribute(held, name), wanted)
        for name, wanted in attributes
    )


def _is_same(now: object, wanted: object) -> bool:
    return now is wanted or (is_same if isinstance(wanted, (Content, Kind, SameTensor)) else is_equal)(
        now, wanted
    )


class _Compared:
    """Attributes of one object: most are compared by identity first, the others always by their values.

    Args:
        held: The object's `__dict__` while the attributes are as planned; empty if that is not known yet.
        attributes: The names of the attributes, with their stand-ins.
    """

    def __init__(self, held: Mapping[str, object], attributes: Attributes) -> None:
        self.others = tuple(
            (name, wanted)
            for name, wanted in attributes
            if isinstance(wanted, Kind) or type(held.get(name)) is types.MethodType
        )
        others = {name for name, _ in self.others}
        self.names = [name for name, _ in attributes if name not in others]
        self.values = [held.get(name, ABSENT) for name in self.names]

    def are_same(self, held: Mapping[str, object]) -> bool:
        """Whether those that are compared by identity are the same objects in `held`."""
        return all(map(operator.is_, map(held.get, self.names, itertools.repeat(ABSENT)), self.values))


class Reads:
    """A quick check that the attributes of a root that its forward reads are still the same objects.

    Args:
        held: The root's `__dict__` while the attributes are as planned; empty if that is not known yet.
        attributes: The names of the attributes, with their stand-ins.
    """

    def __init__(self, held: Mapping[str, object], attributes: Attributes) -> None:
        self._compared = _Compared(held, attributes)
        self._watch = Watch(self._compared.values)

    def holds(self, held: Mapping[str, object]) -> bool:
        """Whether the attributes in `held` are the same objects."""
        compared = self._compared
        return compared.are_same(held) and has(held, compared.others) and self._watch.holds()


CodeReads = tuple[tuple[type | GlobalTable, tuple[tuple[CodePath, object], ...]], ...]
"""Classes and tables of globals that code reads, with stand-ins of what they held when a call was planned."""


def code_reads(names: CodeNames) -> CodeReads:
    """Returns what classes and tables of globals hold."""
    known: StandIns = {}
    return tuple(
        (owner, tuple((path, _read(owner, path, known)) for path in paths)) for owner, paths in names
    )


def _read(owner: type | GlobalTable, path: CodePath, known: StandIns) -> object:
    *_, (table, key) = places(owner, path)
    return attribute(table, key, known, of_code=True)


class CodeWatch:
    """A check that classes and globals hold what they held, by identity first.

    Args:
        reads: What they are to hold.
    """

    def __init__(self, reads: CodeReads) -> None:
        self._reads = reads
        self._watch: Watch | None = None
        """Watches them once they were found to be the same."""

    def differing(self) -> tuple[str, object, object] | None:
        """Returns the first one that differs: its path, what it is, and what it was; None if none does."""
        if self._watch is not None and self._watch.holds():
            return None
        known: StandIns = {}
        for owner, paths in self._reads:
            for path, wanted in paths:
                now = _read(owner, path, known)
                if not _is_same(now, wanted):
                    prefix = owner.name if isinstance(owner, GlobalTable) else owner.__qualname__
                    return f"{prefix}.{path}", now, wanted
        self._watch = Watch((), of_code=True)
        for owner, paths in self._reads:
            table, _ = next(places(owner, paths[0][0]))
            self._watch.add_items(table, [path.name for path, _ in paths if not path.steps], is_deep=True)
            for path in (path for path, _ in paths if path.steps):
                *on_the_way, (table, key) = places(owner, path)
                for each, item in on_the_way:
                    self._watch.add_items(each, [item], is_deep=False)
                self._watch.add_items(table, [key], is_deep=True)
        return None


class _Row:
    """The submodules of one module, and the numbers of its parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self.modules, self.parameters, self.buffers = module._modules, module._parameters, module._buffers
        self.children = tuple(self.modules.values())
        self.count, self.parameter_count, self.buffer_count = map(
            len, (self.modules, self.parameters, self.buffers)
        )
        tensors: tuple[Mapping[str, object], ...] = self.parameters, self.buffers
        self.absent = [(held, name) for held in tensors for name, value in held.items() if value is None]


class _Settings:
    """The settings of a submodule."""

    def __init__(self, module: nn.Module, known: StandIns, ignored: frozenset[str]) -> None:
        self.module, self.kind, self.held = module, type(module), vars(module)
        self.count = len(self.held)
        # FullyShardedDataParallel sets whole parameters beside their shards while the module runs
        whole = module._parameters if _MARKS[0] in self.held else ()
        without = _NO_SETTINGS | ignored if ignored else _NO_SETTINGS
        names = (name for name in self.held if name not in without and name not in whole)
        self.script = script_settings(module) if is_scripted(module) else None
        self.all = tuple((name, attribute(self.held, name, known)) for name in names)
        self.compared = _Compared(self.held, self.all)

    def is_equal(self) -> bool:
        """Whether all settings equal the recorded ones, and those with a `Content` are the same objects."""
        wanted = dict(self.all)
        pairs = zip(self.compared.names, self.compared.values, strict=True)
        others = (name for name, value in pairs if self.held.get(name, ABSENT) is not value)
        return has(self.held, self.all) and not any(isinstance(wanted[name], Content) for name in others)


def _own_classes(modules: Iterable[nn.Module]) -> list[type]:
    """Returns the classes of some modules and their bases, except those of torch, Python and irc."""
    kinds = dict.fromkeys(kind for one in dict.fromkeys(map(type, modules)) for kind in one.__mro__)
    return [kind for kind in kinds if not is_of_library(kind.__module__)]


def _of_torch() -> Attributes:
    """Returns the global settings of torch that code reads, torch's own functions included."""
    return (
        ("torch.get_default_dtype()", torch.get_default_dtype()),
        ("torch.are_deterministic_algorithms_enabled()", torch.are_deterministic_algorithms_enabled()),
    )


def _class_attributes(kind: type) -> list[str]:
    """Returns the names in a class body that are not methods, descriptors or classes."""
    return [
        name
        for name, value in vars(kind).items()
        if not name.startswith(("__", "_abc_", "_irc_"))
        and not issubclass(type(value), type)
        and not hasattr(type(value), "__get__")
    ]


class ModuleState:
    """The state of a tree of modules at one time. It holds the root's tables, not the root itself.

    Args:
        root: The root of the tree. Its only setting here is its mode: `Original.reads` has the others that
            count.
        ignored: The attributes that do not count, by the paths of their submodules.

    Attributes:
        names: The names of the modules, the root ("") first.
        state: The type and the settings of each module. The root's entry has its mode, settings of
            torch and the attributes of the modules' classes.
        submodules: All modules but the root.
        ignored: The attributes that do not count.
        hooks: The hooks on the submodules.
    """

    def __init__(self, root: nn.Module, ignored: Mapping[str, frozenset[str]] | None = None) -> None:
        named = dict(root.named_modules())
        self.names = tuple(named)
        self.submodules = tuple(named.values())[1:]
        self._rows = [_Row(module) for module in named.values()]
        self._absent = [
            (name, *pair) for name, row in zip(self.names, self._rows, strict=True) for pair in row.absent
        ]
        known: StandIns = {}
        self.ignored = ignored or {}
        self._settings = [
            _Settings(module, known, self.ignored.get(name, frozenset()))
            for name, module in zip(self.names[1:], self.submodules, strict=True)
        ]
        self._training, self._of_torch = root.training, _of_torch()
        self._watch = Watch(value for each in self._settings for value in each.compared.values)
        of_classes: list[tuple[str, object]] = []
        for kind in _own_classes(named.values()):
            held, names = cast("Mapping[str, object]", vars(kind)), _class_attributes(kind)
            if names:
                self._watch.add_table(held, names)
                class_name = f"{kind.__module__}.{kind.__qualname__}"
                of_classes += [(f"{class_name}.{name}", attribute(held, name, known)) for name in names]
        plain = (("training", root.training), *self._of_torch)
        of_root: tuple[type, Attributes] = (nn.Module, (*plain, *of_classes))
        self.hooks = HookState(root, self.names[1:], self.submodules, self.ignored.get("", frozenset()))
        self.state: State = (of_root, *((each.kind, self._marked(each)) for each in self._settings))

    def _marked(self, settings: _Settings) -> Attributes:
        """Returns the settings of a submodule with its hooks, and with what it holds outside of Python."""
        more = (HOOKS_MARK, self.hooks.of.get(id(settings.module))), (SCRIPT_MARK, settings.script)
        return (*settings.all, *(each for each in more if each[1] is not None))

    def changed_part(self) -> str | None:
        """Returns the name of a module that has other submodules now, or more or fewer parameters or buffers.

        None means that all modules hold what they held.
        """
        for name, row in zip(self.names, self._rows, strict=True):  # in each call, for each module
            if len(row.parameters) != row.parameter_count or len(row.buffers) != row.buffer_count:
                return name
            if row.count or row.modules:
                if len(row.modules) != row.count:
                    return name
                if not all(map(operator.is_, row.modules.values(), row.children)):
                    return name
        return next((name for name, held, key in self._absent if held.get(key) is not None), None)

    def has_same_state(self, root: nn.Module) -> bool:
        """Whether the modules' modes and settings are still the same objects.

        The answer may be no if a value was replaced by an equal one: a new `ModuleState` then has an equal
        `state`.
        """
        if root.training is not self._training or _of_torch() != self._of_torch:
            return False
        for each in self._settings:
            if len(each.held) != each.count or type(each.module) is not each.kind:
                return False
            if each.script is not None and script_settings(each.module) != each.script:
                return False
            if not each.compared.are_same(each.held) and not each.is_equal():
                return False
            if each.compared.others and not has(each.held, each.compared.others):
                return False
        return self._watch.holds() and self.hooks.is_same()


def differing_modules(now: State, planned: State, names: Names) -> Iterator[int]:
    """Yields the indices of the modules in a tree whose class differs, or a setting that was read."""
    for index, (mine, its) in enumerate(zip(now, planned, strict=True)):
        if not is_same(mine, its):
            read = names[index] if names else None
            known, found = (relevant_settings(each[1], read) for each in (its, mine))
            if mine[0] is not its[0] or not is_same(known, found):
                yield index


def relevant_settings(settings: Attributes, read: frozenset[str] | None) -> dict[str, object]:
    """Returns the settings that count if these names are known to be read; None stands for all names."""
    return {
        name: value for name, value in settings if read is None or name in read or name.startswith(_OWN_MARKS)
    }
