"""Plans with loss heads in tiles of rows, where sums may be taken in another order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from ..ir import BudgetError, Graph, IrcError, TimeLimitError
from ..passes import Program, loss_heads

__all__ = ["tiles_of", "whole_or_tiled"]

_FEWEST = 4
_TIMES_MORE = 2
"""The fewest tiles, and how many times more each attempt has than the one before."""

_MOST_IN_16_BITS = 16
"""The most tiles whose sum is rounded to 16 bits at each of them.

The gradient of a head in bfloat16 is off from that in float64 by .3% whole, .5% of 16 tiles, 15% of 512.
"""

_SMALLER = 0.999
"""If nothing fits, the last attempt is one whose smallest budget is not below this part of the others."""

_LEAST_BYTES = 1 << 20
"""Logits of a tile are not made smaller than this: the calls of operations would take the time."""


def tiles_of(graph: Graph) -> Iterator[int]:
    """Yields the numbers of tiles that are worth an attempt, fewest first; none if no head can be tiled."""
    heads = loss_heads(graph)
    rows = max((head.rows for head in heads), default=0)
    logits_bytes = max((head.logits_bytes for head in heads), default=0)
    most = min(rows, _MOST_IN_16_BITS) if any(head.sums_in_16_bits for head in heads) else rows
    tiles = _FEWEST
    while tiles <= most and tiles * _LEAST_BYTES <= logits_bytes:
        yield tiles
        tiles *= _TIMES_MORE


def whole_or_tiled(graph: Graph, whole: Callable[[], Program], tiled: Callable[[int], Program]) -> Program:
    """The fastest plan of those with loss heads whole and in tiles, with as many tiles as help.

    Args:
        graph: The graph with whole heads.
        whole: Plans it.
        tiled: Plans it with heads in so many tiles.

    Raises:
        BudgetError: If none fits, that of the one with the smallest budget.
        TimeLimitError: If the time limit ended before any schedule was found.
    """
    best: Program | None = None
    refused: list[IrcError] = []
    for plan in (whole, *(partial(tiled, tiles) for tiles in tiles_of(graph))):
        try:
            program = plan()
        except (BudgetError, TimeLimitError) as error:
            least = min(map(_minimum_bytes, refused), default=math.inf)
            refused.append(error)
            if best is None and math.inf > _minimum_bytes(error) > _SMALLER * least:
                break  # the head is not what needs most
            continue
        if best is None or _step_seconds(program) < _step_seconds(best):
            best = program
        elif plan is not whole and best.kernels is not None:
            break  # fewer tiles are faster
        if not _overhead(best):
            break
    if best is None:
        raise min(refused, key=_minimum_bytes)
    return best


def _minimum_bytes(error: IrcError) -> float:
    return error.minimum_bytes if isinstance(error, BudgetError) else math.inf


def _overhead(program: Program) -> float:
    assert program.plan is not None
    return program.plan.overhead


def _step_seconds(program: Program) -> float:
    assert program.plan is not None
    return (1 + program.plan.overhead) * (program.plan.step_seconds or 0.0)
