"""Looks into functions: their code, what they close over, and the objects that wrap them."""

from __future__ import annotations

import functools
import hashlib
import types
from typing import Any

__all__ = ["WRAPPERS", "FunctionCode", "cells_of", "closed_over"]

WRAPPERS: dict[type, tuple[str, ...]] = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    types.MethodType: ("__func__",),
    functools.partial: ("func",),
    functools.cached_property: ("func",),
    type(functools.lru_cache(lambda: None)): ("__wrapped__",),
}
"""The classes of objects that wrap a function, with the attributes that hold it."""


class FunctionCode:
    """The code of a function, wherever it stands: equal in another process, and after pickling.

    Args:
        code: The code.
    """

    def __init__(self, code: types.CodeType) -> None:
        self.digest, self.where = (
            _digest(code),
            f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})",
        )

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, FunctionCode) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return self.where


@functools.lru_cache(maxsize=16384)
def _digest(code: types.CodeType) -> str:
    constants = [_text(each) for each in code.co_consts]
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return hashlib.sha256(repr((code.co_code, constants, counts, names)).encode()).hexdigest()


def _text(constant: Any) -> str:
    if isinstance(constant, types.CodeType):
        return _digest(constant)
    if isinstance(constant, tuple | frozenset):
        texts = [_text(each) for each in constant]
        return f"{type(constant)}{texts if isinstance(constant, tuple) else sorted(texts)}"
    return repr(constant)


def cells_of(function: types.FunctionType) -> dict[str, types.CellType]:
    """The cells of a function's free variables, those that have a value, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in cells if _is_filled(cell)}


def closed_over(function: types.FunctionType) -> list[Any]:
    """The values of a function's free variables, those that have one."""
    return [cell.cell_contents for cell in cells_of(function).values()]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return bool(cell.cell_contents is not cell)
    except ValueError:  # not assigned yet
        return False
