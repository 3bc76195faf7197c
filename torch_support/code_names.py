"""The classes and globals whose attributes a model's code names: a call is compared by what they hold."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CodeNames", "GlobalTable", "items_of"]


@dataclass(frozen=True, eq=False, slots=True)
class GlobalTable:
    """The globals of a file. Copies share them, and pickles name the file.

    Args:
        name: The dotted name of the file as a module.
        table: Its `__dict__`.
    """

    name: str
    table: dict[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalTable:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _table_of, (self.name,)


def _table_of(name: str) -> GlobalTable:
    return GlobalTable(name, vars(importlib.import_module(name)))


CodeNames = tuple[tuple[type | GlobalTable, tuple[str, ...]], ...]
"""Classes and tables of globals, each with names of what it holds."""


def items_of(owner: type | GlobalTable) -> Mapping[str, Any]:
    """Returns what a class or a file holds, by name."""
    return owner.table if isinstance(owner, GlobalTable) else vars(owner)
