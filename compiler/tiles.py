"""Plans with loss heads and wide layers in tiles of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from ..ir import BudgetError, Graph, IrcError, TimeLimitError
from ..passes import row_regions
from .request import SUMS, Request

__all__ = ["tiles_advice", "tiles_of", "whole_or_tiled"]

Plan = TypeVar("Plan")

_FEWEST = 4
_TIMES_MORE = 2
"""The fewest tiles, and how many times more each attempt has than the one before."""

_SMALLER = 0.999
"""If nothing fits, the last attempt is one whose smallest budget is not below this part of the others."""

_LEAST_BYTES = 1 << 20
"""The widest tensors of a tile are not made smaller than this: calls of operations would take the time."""


def tiles_of(graph: Graph, request: Request) -> Iterator[int]:
    """Yields the numbers of tiles that are worth an attempt, fewest first; none if nothing can be tiled."""
    if not request.may_tile or (request.exact is True and not request.compares_kernels):
        return
    regions = (region for region in row_regions(graph) if request.exact == SUMS or not region.sums)
    widest = max(regions, key=lambda region: region.wide_bytes, default=None)
    tiles = _FEWEST
    while widest is not None and tiles <= widest.most_tiles and tiles * _LEAST_BYTES <= widest.wide_bytes:
        yield tiles
        tiles *= _TIMES_MORE


def tiles_advice(graph: Graph, request: Request) -> str:
    """Says what sums in another order would do for a graph of which no plan fits; "" if nothing."""
    summed = replace(request, exact=SUMS)
    if request.exact == SUMS or next(tiles_of(graph, summed), None) is None:
        return ""
    return 'run loss heads and wide layers in tiles (exact="sums")'


def whole_or_tiled(
    tiles: Iterable[int],
    whole: Callable[[], Plan],
    tiled: Callable[[int], Plan | None],
    *,
    step_seconds: Callable[[Plan], float],
    is_best: Callable[[Plan], bool],
) -> Plan:
    """The fastest plan of those with all operations whole and in tiles, with as many tiles as help.

    Args:
        tiles: The numbers of tiles to try.
        whole: Plans the graph with whole operations.
        tiled: Plans it with the widest operations in so many tiles; returns None if nothing can be.
        step_seconds: The time of a plan's step.
        is_best: Whether no plan is faster by much.

    Raises:
        BudgetError: If none fits, that of the one with the smallest budget.
        TimeLimitError: If the time limit ended before any schedule was found.
    """
    best: Plan | None = None
    refused: list[IrcError] = []
    for number in chain([None], tiles):
        try:
            plan = whole() if number is None else tiled(number)
        except (BudgetError, TimeLimitError) as error:
            least = min(map(_minimum_bytes, refused), default=math.inf)
            refused.append(error)
            if best is None and math.inf > _minimum_bytes(error) > _SMALLER * least:
                break  # others need most
            continue
        if plan is None:
            continue
        if best is not None and step_seconds(plan) >= step_seconds(best):
            break  # fewer tiles are faster
        best = plan
        if is_best(best):
            break
    if best is None:
        raise min(refused, key=_minimum_bytes)
    return best


def _minimum_bytes(error: IrcError) -> float:
    return error.minimum_bytes if isinstance(error, BudgetError) else math.inf
