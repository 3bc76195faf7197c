"""Rules that every search begins with, each family in a file of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ....ir import UsageError
from ...strategy_registry import Strategy
from ..problem import CheckpointProblem, Solution
from .blocks import block_borders, per_block
from .min_cut import min_cut, min_cut_candidates, priced_cuts
from .segments import every_k, keeping, segments, sqrt_n

__all__ = [
    "block_borders",
    "every_k",
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
    yield "keep-all", problem.keep_all
    yield "sqrt-n", sqrt_n(problem)
    for exponent in range(1, max(len(problem.forward) - 1, 0).bit_length()):
        yield f"every-{2**exponent}", every_k(problem, 2**exponent)
    yield from (("per-block", solution) for solution in per_block(problem))
    yield from (("min-cut", solution) for solution in min_cut_candidates(problem))
    yield from (("priced-cut", solution) for solution in priced_cuts(problem))
    for borders in islice(block_borders(problem), 1):
        inside = priced_cuts(problem, kept=borders, limit=_CUTS_IN_BLOCKS)
        yield from (("cut-in-blocks", solution) for solution in inside)


# ---------------------------------------------------------------------- the same by name


def _per_block(problem: CheckpointProblem) -> list[Solution]:
    solutions = list(per_block(problem))
    if not solutions:
        raise UsageError(
            "IRC403",
            "strategy per-block finds no blocks in the names of this model's modules",
            help="use strategy auto, or put the blocks into a Sequential or ModuleList",
        )
    return solutions


# These published methods stand in the core, and not in `passes/published`, since `known_strategies` yields
# them to every search; keep-none and keep-all are the ends of every-<k>.
MIN_CUT = Strategy("min-cut", "PyTorch 2022", lambda problem, _: min_cut_candidates(problem))
PER_BLOCK = Strategy("per-block", "torch.utils.checkpoint", lambda problem, _: _per_block(problem))
SQRT_N = Strategy("sqrt-n", "Chen et al. 2016", lambda problem, _: [sqrt_n(problem)])
EVERY_K = Strategy(
    "every-<k>", "Chen et al. 2016", lambda problem, asked: [every_k(problem, asked.number)], numbers=(8,)
)
KEEP_NONE = Strategy("keep-none", "torch.utils.checkpoint", lambda problem, _: [segments(problem, ())])
KEEP_ALL = Strategy("keep-all", "eager", lambda problem, _: [problem.keep_all])
