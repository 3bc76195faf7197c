"""The classes and globals whose attributes a model's code names: a call is compared by what they hold."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .inspectable import store_of

__all__ = ["CodeNames", "CodePath", "GlobalTable", "Step", "places"]


@dataclass(frozen=True, eq=False, slots=True)
class GlobalTable:
    """The globals of a file. Copies share them, and pickles name the file, if it can be imported.

    Args:
        name: The dotted name of the file as a module.
        table: Its `__dict__`.
    """

    name: str
    table: dict[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalTable:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if getattr(sys.modules.get(self.name), "__dict__", None) is not self.table:
            raise pickle.PicklingError(f"no module holds the globals of {self.name}")
        return _table_of, (self.name,)


def _table_of(name: str) -> GlobalTable:
    return GlobalTable(name, vars(importlib.import_module(name)))


@dataclass(frozen=True, slots=True)
class Step:
    """A step from an object to an attribute in its `__dict__`, or from a dict to an item.

    Args:
        key: The attribute's name, or the item's key.
        is_item: Whether it is an item.
    """

    key: Any
    is_item: bool

    def __str__(self) -> str:
        return f"[{self.key!r}]" if self.is_item else f".{self.key}"


@dataclass(frozen=True, slots=True)
class CodePath:
    """What code reads of a class or a file: all of what a name holds, or what some steps lead to there."""

    name: str
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return self.name + "".join(map(str, self.steps))


CodeNames = tuple[tuple[type | GlobalTable, tuple[CodePath, ...]], ...]
"""Classes and tables of globals, each with paths to what code reads of it."""


def places(owner: type | GlobalTable, path: CodePath) -> Iterator[tuple[Mapping[Any, Any], Any]]:
    """Yields the tables along a path, each with the key that the path takes there."""
    table: Mapping[Any, Any] = owner.table if isinstance(owner, GlobalTable) else vars(owner)
    key: Any = path.name
    yield table, key
    for step in path.steps:
        value: Any = dict.get(table, key) if isinstance(table, dict) else table.get(key)
        items: dict[Any, Any] = value if issubclass(type(value), dict) else {}
        table, key = (items if step.is_item else store_of(value)), step.key
        yield table, key
