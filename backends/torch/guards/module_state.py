"""The submodules of a module and their settings as they are at one time, and whether they still are."""

# torch's modules have no other door to what they hold.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
import types
from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import nn

from ....torch_support.inspectable import is_of_library
from ....torch_support.recorders import RECORDERS_MARK
from .settings import ABSENT, Content, Kind, Watch, is_plain, stand_in

__all__ = [
    "ABSENT",
    "Attributes",
    "Kind",
    "Reads",
    "Snapshot",
    "State",
    "attribute",
    "has",
    "is_equal",
    "is_plain",
]

Attributes = tuple[tuple[str, object], ...]
"""Names with values; a `Content` or a `Kind` stands for what is not compared as it is."""

Known = dict[tuple[int, int], object]
"""What stands for objects, by identity and depth."""


State = tuple[tuple[type, Attributes], ...]
"""The type and the settings of each submodule, its mode among them, the root first."""


_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""What sharding of the whole module leaves in its parts."""
_NO_SETTINGS = (frozenset(vars(nn.Module())) - {"training"}).union(_MARKS, [RECORDERS_MARK])
"""What every module holds and what is no setting: parameters, buffers, submodules, hooks."""


def attribute(held: Mapping[str, object], name: str, known: Known | None = None) -> object:
    """What stands for an attribute in comparisons; for a method, its function: a copy has another method."""
    value = held.get(name, ABSENT)
    if type(value) is types.MethodType and issubclass(type(value.__self__), nn.Module):
        value = value.__func__
    return value if value is ABSENT else stand_in(value, known)


def is_equal(a: object, b: object) -> bool:
    """Whether two values are equal; those that cannot tell, such as arrays, are not."""
    return is_plain(a) and is_plain(b) and bool(a == b)


def has(held: Mapping[str, object], attributes: Attributes) -> bool:
    """Whether these attributes are as they were."""
    return all(
        held.get(name, ABSENT) is wanted or _is_same(attribute(held, name), wanted)
        for name, wanted in attributes
    )


def _is_same(now: object, wanted: object) -> bool:
    return now is wanted or (now == wanted if isinstance(wanted, (Content, Kind)) else is_equal(now, wanted))


class Reads:
    """A quick look whether the attributes of a root that its forward reads are the very same.

    Args:
        held: What the root holds while they are as planned; nothing where that is not known yet.
        attributes: Their names, with what stands for them.
    """

    def __init__(self, held: Mapping[str, object], attributes: Attributes) -> None:
        self._slow = tuple(
            (name, wanted)
            for name, wanted in attributes
            if isinstance(wanted, Kind) or type(held.get(name)) is types.MethodType
        )
        slow = {name for name, _ in self._slow}
        self._names = [name for name, _ in attributes if name not in slow]
        self._values = [held.get(name, ABSENT) for name in self._names]
        self._watch = Watch(self._values)

    def holds(self, held: Mapping[str, object]) -> bool:
        """Whether they are."""
        return (
            all(
                held.get(name, ABSENT) is value for name, value in zip(self._names, self._values, strict=True)
            )
            and has(held, self._slow)
            and self._watch.holds()
        )


class _Row:
    """One module of a tree: its submodules, and how many parameters and buffers it has."""

    def __init__(self, module: nn.Module) -> None:
        self.modules, self.parameters, self.buffers = module._modules, module._parameters, module._buffers
        self.children = tuple(self.modules.values())
        self.count, self.parameter_count, self.buffer_count = map(
            len, (self.modules, self.parameters, self.buffers)
        )
        tensors: tuple[Mapping[str, object], ...] = self.parameters, self.buffers
        self.absent = [(held, name) for held in tensors for name, value in held.items() if value is None]


class _Settings:
    """The settings of a submodule; those that are compared by identity first apart from the others."""

    def __init__(self, module: nn.Module, known: Known) -> None:
        self.module, self.kind, self.held = module, type(module), vars(module)
        self.count = len(self.held)
        # FullyShardedDataParallel sets whole parameters beside their shards, while the module runs
        whole = module._parameters if _MARKS[0] in self.held else ()
        names = (name for name in self.held if name not in _NO_SETTINGS and name not in whole)
        self.all = tuple((name, attribute(self.held, name, known)) for name in names)
        self.others = tuple(
            pair for pair in self.all if type(pair[1]) is Kind or type(self.held[pair[0]]) is types.MethodType
        )
        others = {name for name, _ in self.others}
        self.names = [name for name, _ in self.all if name not in others]
        self.values = [self.held[name] for name in self.names]

    def is_equal(self) -> bool:
        """Whether all are equal to what they were; what is looked into is the very same."""
        wanted = dict(self.all)
        pairs = zip(self.names, self.values, strict=True)
        others = (name for name, value in pairs if self.held.get(name, ABSENT) is not value)
        return has(self.held, self.all) and not any(isinstance(wanted[name], Content) for name in others)


def _own_classes(modules: Iterable[nn.Module]) -> list[type]:
    """The classes that the code of some modules is written in, but those of torch, Python and irc."""
    kinds = dict.fromkeys(kind for one in dict.fromkeys(map(type, modules)) for kind in one.__mro__)
    return [kind for kind in kinds if not is_of_library(kind.__module__)]


def _class_attributes(kind: type) -> list[str]:
    """What is written down in a class besides methods and other classes."""
    return [
        name
        for name, value in vars(kind).items()
        if not name.startswith(("__", "_abc_", "_irc_"))
        and not issubclass(type(value), type)
        and not hasattr(type(value), "__get__")
    ]


class Snapshot:
    """A tree of modules at one time; of its root nothing is held but what the root holds.

    Args:
        root: Its root. The root's settings are left aside but for its mode: see `Original.reads` for those
            that matter.

    Attributes:
        names: Of the modules, the root ("") first.
        state: For each of them its type and its settings. With the root's mode are torch's default type and
            what is written down in the classes of the modules.
        submodules: All but the root.
    """

    def __init__(self, root: nn.Module) -> None:
        named = dict(root.named_modules())
        self.names = tuple(named)
        self.submodules = tuple(named.values())[1:]
        self._rows = [_Row(module) for module in named.values()]
        self._absent = [
            (name, *pair) for name, row in zip(self.names, self._rows, strict=True) for pair in row.absent
        ]
        known: Known = {}
        self._settings = [_Settings(module, known) for module in self.submodules]
        self._training, self._dtype = root.training, torch.get_default_dtype()
        self._watch = Watch(value for each in self._settings for value in each.values)
        of_classes: list[tuple[str, object]] = []
        for kind in _own_classes(named.values()):
            held, names = cast("Mapping[str, object]", vars(kind)), _class_attributes(kind)
            if names:
                self._watch.add_table(held, names)
                offloaded = f"{kind.__module__}.{kind.__qualname__}"
                of_classes += [(f"{offloaded}.{name}", attribute(held, name, known)) for name in names]
        plain = (("training", root.training), ("torch.get_default_dtype()", self._dtype))
        of_root: tuple[type, Attributes] = (nn.Module, (*plain, *of_classes))
        self.state: State = (of_root, *((each.kind, each.all) for each in self._settings))

    def other_part(self) -> str | None:
        """The name of a module that holds other modules than it did, or parameters or buffers came or went.

        None where there is none.
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
        """Whether the modules' modes and settings are still the same.

        It may say no where something was replaced by its equal: then another snapshot has an equal state.
        """
        if root.training is not self._training or torch.get_default_dtype() is not self._dtype:
            return False
        for each in self._settings:
            if len(each.held) != each.count or type(each.module) is not each.kind:
                return False
            if (
                not all(map(operator.is_, map(each.held.get, each.names), each.values))
                and not each.is_equal()
            ):
                return False
            if each.others and not has(each.held, each.others):
                return False
        return self._watch.holds()
