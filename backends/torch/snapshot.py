"""The submodules of a module and their settings as they are at one time, and whether they still are."""

# torch's modules have no other door to what they hold.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import enum
import functools
import operator
import types
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ...ir import RECORDERS_MARK

__all__ = ["ABSENT", "Attributes", "Kind", "Snapshot", "State", "attribute", "has", "is_equal", "is_plain"]

Attributes = tuple[tuple[str, object], ...]
"""Names with values; of what cannot be compared, the `Kind` stands for the value."""


State = tuple[tuple[type, Attributes], ...]
"""The type and the settings of each submodule, its mode among them, the root first."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Stands for a value of which only the type is looked at, by its name: pickles hold no class for it."""

    name: str


@functools.lru_cache(maxsize=1024)
def _kind(kind: type) -> Kind:
    return Kind(f"{kind.__module__}.{kind.__qualname__}")


class _Absent(enum.Enum):
    ABSENT = "absent"


ABSENT = _Absent.ABSENT
"""Stands for an attribute that an object has not got."""

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    slice,
    range,
    type,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    types.FunctionType,
    types.BuiltinFunctionType,
)
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""What sharding of the whole module leaves in its parts."""
_NO_SETTINGS = (frozenset(vars(nn.Module())) - {"training"}).union(_MARKS, [RECORDERS_MARK])
"""What every module holds and what is no setting: parameters, buffers, submodules, hooks."""


def attribute(held: Mapping[str, object], name: str) -> object:
    """What stands for an attribute in comparisons; for a method, its function: a copy has another method."""
    value = held.get(name, ABSENT)
    if isinstance(value, types.MethodType):
        value = value.__func__
    return value if value is ABSENT or is_plain(value) else _kind(type(value))


def is_plain(value: object) -> bool:
    """Whether a value is compared as it is: numbers, texts, functions, and tuples of such."""
    if isinstance(value, tuple):
        return all(is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


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
    return now is wanted or (now == wanted if isinstance(wanted, Kind) else is_equal(now, wanted))


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

    def __init__(self, module: nn.Module) -> None:
        self.module, self.kind, self.held = module, type(module), vars(module)
        self.count = len(self.held)
        # FullyShardedDataParallel sets whole parameters beside their shards, while the module runs
        whole = module._parameters if _MARKS[0] in self.held else ()
        names = (name for name in self.held if name not in _NO_SETTINGS and name not in whole)
        self.all = tuple((name, attribute(self.held, name)) for name in names)
        plain = [(name, value) for name, value in self.all if type(value) is not Kind]
        self.names = [name for name, _ in plain]
        self.values = [value for _, value in plain]
        self.others = tuple(pair for pair in self.all if type(pair[1]) is Kind)


class Snapshot:
    """A tree of modules at one time; of its root nothing is held but what the root holds.

    Args:
        root: Its root. The root's settings are left aside but for its mode: see `Original.reads` for those
            that matter.

    Attributes:
        names: Of the modules, the root ("") first.
        state: For each of them its type and its settings.
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
        self._settings = [_Settings(module) for module in self.submodules]
        self._training = root.training
        of_root: tuple[type, Attributes] = (nn.Module, (("training", root.training),))
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
        """Whether the modules' modes and settings are still the same."""
        if root.training is not self._training:
            return False
        for each in self._settings:
            if len(each.held) != each.count or type(each.module) is not each.kind:
                return False
            if not all(map(operator.is_, map(each.held.get, each.names), each.values)) and not has(
                each.held, each.all
            ):
                return False
            if each.others and not has(each.held, each.others):
                return False
        return True
