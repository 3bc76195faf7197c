"""Scalar expressions of a call's numbers, arguments or attributes, such as `1 - t / 1000`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FUNCTIONS", "Leaf", "Operand", "Scalar", "evaluate", "is_same", "leaves_of"]


def _lesser(a: Any, b: Any) -> Any:
    return min(_distinct(a, b))


def _greater(a: Any, b: Any) -> Any:
    return max(_distinct(a, b))


def _distinct(a: Any, b: Any) -> tuple[Any, Any]:
    """Returns two numbers, neither of which can stand for the other: of equal ones Python takes the first.

    Raises:
        ArithmeticError: They are equal and yet two, or of two types.
    """
    if type(a) is not type(b) or (a == b and not is_same(a, b)):
        raise ArithmeticError
    return a, b


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")},
    **{name: getattr(operator, name) for name in ("neg", "pos", "abs")},
    **{name: getattr(math, name) for name in ("sqrt", "cos", "sin", "tan", "cosh", "sinh", "tanh", "log2")},
    "float": float,
    "min": _lesser,
    "max": _greater,
}
"""The functions of expressions, by their names."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A number among the leaves of the arguments, or among the attributes that a forward changes.

    Args:
        place: Its index.
    """

    place: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """A function of numbers.

    Args:
        function: Its name among `FUNCTIONS`.
        operands: Its arguments.
    """

    function: str
    operands: tuple[Operand, ...]


Operand = Scalar | Leaf | int | float


def evaluate(operand: Operand, leaves: Sequence[Any]) -> Any:
    """Returns the number that an expression is in a call, as Python computes it.

    Raises:
        ArithmeticError, ValueError: What Python raises.
    """
    match operand:
        case Leaf(place):
            return leaves[place]
        case Scalar(function, operands):
            return FUNCTIONS[function](*(evaluate(each, leaves) for each in operands))
        case _:
            return operand


def leaves_of(operand: Operand) -> frozenset[int]:
    """Returns the indices of the numbers that an expression is made of."""
    match operand:
        case Leaf(place):
            return frozenset((place,))
        case Scalar(_, operands):
            return frozenset[int]().union(*map(leaves_of, operands))
        case _:
            return frozenset()


def is_same(a: object, b: object) -> bool:
    """Whether two numbers are of one class and the same; zeros of two signs are two numbers."""
    return type(a) is type(b) and repr(a) == repr(b)
