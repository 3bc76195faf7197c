"""Stands in for a number in an attribute of a module that each forward changes, as a counter of steps."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from ...ir.scalars import Operand, Scalar

__all__ = ["Counter", "CounterReadError"]


_STORING = (nn.modules.module.__file__, nn.parameter.__file__)
"""Code that asks for the class of what becomes an attribute, to know where to hold it."""


class CounterReadError(Exception):
    """The forward does more with a number in an attribute than to compute the next one."""


class Counter:
    """A number that is not known; arithmetic with it makes an expression, all else is a decision.

    Args:
        operand: The expression.
        reads: Takes what is done with it besides arithmetic: code may catch the error.
    """

    __slots__ = ("operand", "reads")

    def __init__(self, operand: Operand, reads: list[str]) -> None:
        self.operand, self.reads = operand, reads

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] isinstance() asks
        if sys._getframe(1).f_code.co_filename in _STORING:
            return Counter
        return _refused(self, "__class__")

    def __getattr__(self, name: str) -> Any:
        return _refused(self, name)


def _refused(counter: Counter, name: str) -> Any:
    counter.reads.append(name)
    raise CounterReadError(name)


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: Counter, *args: Any) -> Any:
        return _refused(self, name)

    return method


def _computing(function: str, *, is_reflected: bool = False) -> Callable[..., Any]:
    def method(self: Counter, *others: Any) -> Any:
        operands: list[Operand] = []
        for other in (self, *others):
            if type(other) not in (Counter, int, float):
                return _refused(self, function)
            operands.append(other.operand if type(other) is Counter else cast("Operand", other))
        if is_reflected:
            operands.reverse()
        return Counter(Scalar(function, tuple(operands)), self.reads)

    return method


_READING = (
    *("bool", "int", "index", "float", "complex", "round", "trunc", "floor", "ceil", "len", "iter", "call"),
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "str", "repr", "format", "bytes", "getitem", "contains"),
    *("reduce", "reduce_ex", "copy", "deepcopy", "array", "and", "or", "xor", "rand", "ror", "rxor"),
    *("lshift", "rshift", "invert", "divmod", "pow", "rpow", "matmul", "rmatmul"),
)
for _name in _READING:
    setattr(Counter, f"__{_name}__", _refusing(f"__{_name}__"))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    setattr(Counter, f"__{_name}__", _computing(_name))
    setattr(Counter, f"__r{_name}__", _computing(_name, is_reflected=True))
for _name in ("neg", "pos", "abs"):
    setattr(Counter, f"__{_name}__", _computing(_name))
