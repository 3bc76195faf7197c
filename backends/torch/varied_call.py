"""Varies the numbers of a call that decide nothing, so that they show in its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from ...ir.scalars import Operand, evaluate, is_same, leaves_of
from .compiled_plan import VariedCall, VariedNumbers
from .guards.call_key import CallKey
from .guards.dynamo_call import TraceAnswers
from .guards.free_numbers import FreeNumbers

__all__ = ["numbers_of", "varied_call", "varied_numbers"]

_OTHERS: tuple[Callable[[Any, int], Any], ...] = (
    lambda number, k: number + 3 + 7 * k if isinstance(number, int) else number * 1.0137 + 0.01731 * (k + 1),
    lambda number, k: number - 2 - 5 * k if isinstance(number, int) else number * 0.97311 - 0.01317 * (k + 1),
    lambda number, k: number // 2 + k if isinstance(number, int) else number * 0.4973 + 0.0013 * k,
    lambda number, k: number // 10 + k if isinstance(number, int) else number * 0.1093 + 0.0017 * k,
    lambda number, k: number * 3 + k if isinstance(number, int) else number * 3.0717 + 0.0119 * k,
    lambda number, k: number * 50 + 23 + k if isinstance(number, int) else number * 31.73 + 12.37 + k * 1.019,
    lambda number, k: 37 + 11 * k if isinstance(number, int) else 0.61803 + 0.01113 * k,
)
"""Other numbers than a given one, with its place in order: near ones, then some within limits."""


def varied_call(call: CallKey, free: FreeNumbers, answers: TraceAnswers) -> VariedCall | None:
    """Returns the call with other numbers, in which each expression has a value of its own that differs.

    Args:
        call: The call.
        free: Its numbers that decide nothing.
        answers: The answers of capture for which they do so.

    Returns:
        None if no such numbers are found.
    """
    numbers = varied_numbers(call.leaves, free)
    if numbers is None:
        return None
    args, kwargs = pytree.tree_unflatten(numbers.leaves, call.tree)
    return VariedCall(args, kwargs, answers, numbers)


def varied_numbers(leaves: Sequence[Any], free: FreeNumbers) -> VariedNumbers | None:
    """Varies the numbers among the leaves of a call, so that each expression has a value of its own.

    Args:
        leaves: The leaves.
        free: The numbers among them that decide nothing.

    Returns:
        None if no such numbers are found.
    """
    places = sorted(frozenset[int]().union(*map(leaves_of, free.expressions)))
    values = numbers_of(free.expressions, leaves)
    for other in _OTHERS if values else ():
        varied = list(leaves)
        for k, place in enumerate(places):
            varied[place] = other(varied[place], k)
        others = numbers_of(free.expressions, varied)
        if values is None or others is None:
            continue
        pairs = list(zip(values, others, strict=True))
        if all(type(a) is type(b) and a != b for a, b in pairs) and not _any_twice(pairs):
            return VariedNumbers(tuple(varied), free.expressions, free.uses, values, others)
    return None


def numbers_of(expressions: Sequence[Operand], leaves: Sequence[Any]) -> tuple[Any, ...] | None:
    """Returns what expressions are in a call; None if one is no number."""
    try:
        numbers = tuple(evaluate(each, leaves) for each in expressions)
    except (ArithmeticError, ValueError):
        return None
    return numbers if all(type(each) is int or type(each) is float for each in numbers) else None


def _any_twice(pairs: Sequence[tuple[Any, Any]]) -> bool:
    return any(is_same(a, c) and is_same(b, d) for k, (a, b) in enumerate(pairs) for c, d in pairs[k + 1 :])
