"""Decides which objects of a model are opened: those of its own code and of the libraries that it uses."""

from __future__ import annotations

import argparse
import enum
import functools
import sys
import types
from pathlib import Path
from typing import Any

__all__ = ["is_inspectable", "is_installed", "is_of_library", "slots_of", "store_of"]

_LIBRARIES = frozenset(sys.stdlib_module_names | {"torch", "numpy", __name__.partition(".")[0]})
_OF_PYTHON = (types.SimpleNamespace, argparse.Namespace)
_CLOSED = (enum.Enum, type, BaseException, types.ModuleType)
_NEUTRAL = frozenset({"abc", "builtins", "collections.abc", "typing"})
"""Bases in these modules say nothing about the origin of a class."""


def is_of_library(module: str) -> bool:
    """Whether a module is one of Python, torch, numpy or irc, by its dotted name, or a named tuple's."""
    return module.partition(".")[0] in _LIBRARIES or module.startswith("namedtuple_")


def is_installed(module: str) -> bool:
    """Whether the file of a module lies among installed packages, by its dotted name."""
    return _is_among_packages(getattr(sys.modules.get(module), "__file__", None) or "")


@functools.lru_cache(maxsize=4096)
def _is_among_packages(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


@functools.lru_cache(maxsize=4096)
def is_inspectable(kind: type) -> bool:
    """Whether objects of a class are looked into: not those of Python, torch and numpy, nor their heirs."""
    if issubclass(kind, _OF_PYTHON):
        return True
    if issubclass(kind, _CLOSED):
        return False
    modules = {each.__module__ for each in kind.__mro__} - _NEUTRAL
    return bool(modules) and not any(map(is_of_library, modules))


@functools.lru_cache(maxsize=4096)
def slots_of(kind: type) -> tuple[str, ...]:
    """The attributes that objects of a class have outside of their `__dict__`."""
    member = types.MemberDescriptorType
    return tuple(
        name for each in kind.__mro__ for name, held in vars(each).items() if isinstance(held, member)
    )


def store_of(value: Any) -> dict[str, Any]:
    """The `__dict__` of an object; an empty one if it has none."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
