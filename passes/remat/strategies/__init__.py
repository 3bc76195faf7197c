"""Published methods, each family in a file of its own, and those of them that every search begins with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ..problem import CheckpointProblem, Solution
from .blocks import block_borders, per_block
from .min_cut import min_cut, min_cut_candidates, priced_cuts
from .segments import every_k, keep_all, keep_none, keeping, segments, sqrt_n

__all__ = [
    "block_borders",
    "every_k",
    "keep_all",
    "keep_none",
    "keeping",
    "known_strategies",
    "min_cut",
    "min_cut_candidates",
    "per_block",
    "priced_cuts",
    "segments",
    "sqrt_n",
]

_CUTS_IN_BLOCKS = 8
"""The number of priced cuts that keep the borders of blocks; there are fewer trade-offs than without them."""


def known_strategies(problem: CheckpointProblem) -> Iterator[tuple[str, Solution]]:
    """Yields schedules that searches begin with, with their names: of rules that look at no budget."""
    yield "keep-all", keep_all(problem)
    yield "sqrt-n", sqrt_n(problem)
    for exponent in range(1, max(len(problem.forward) - 1, 0).bit_length()):
        yield f"every-{2**exponent}", every_k(problem, 2**exponent)
    yield from (("per-block", solution) for solution in per_block(problem))
    yield from (("min-cut", solution) for solution in min_cut_candidates(problem))
    yield from (("priced-cut", solution) for solution in priced_cuts(problem))
    for borders in islice(block_borders(problem), 1):
        inside = priced_cuts(problem, kept=borders, limit=_CUTS_IN_BLOCKS)
        yield from (("cut-in-blocks", solution) for solution in inside)
