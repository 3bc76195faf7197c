"""Reads the values over which a function closes."""

from __future__ import annotations

from types import FunctionType
from typing import Any

__all__ = ["closed_over"]


def closed_over(function: FunctionType) -> list[Any]:
    """The values of a function's free variables, those that have one."""
    found: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return found
