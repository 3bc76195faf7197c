"""Revolve: the binomial schedules of a chain whose blocks are taken for alike."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ..remat.problem import CheckpointProblem, Solution
from ..strategy_registry import Strategy
from .chain_schedules import Pass, Run, chain_of, schedule_of

__all__ = ["REVOLVE", "revolve", "runs_of"]

REVOLVE = Strategy("revolve", "Griewank and Walther 2000", lambda problem, _: revolve(problem))


def revolve(problem: CheckpointProblem) -> Iterator[Solution]:
    """Yields the schedule of each number of checkpoints, of the blocks between articulation points.

    With `c` checkpoints beside the chain's input, the schedule runs the fewest blocks forward, if all blocks
    take as long and all sources are as large. Nothing but sources of blocks is kept: each block runs forward
    right before its backward.

    Args:
        problem: The recomputation problem.

    Raises:
        UsageError: IRC403 for a graph that is no chain.

    Source:
        Griewank and Walther, Algorithm 799: revolve (ACM TOMS, 2000); the chain of a graph by its
        articulation points.
    """
    problem, blocks = chain_of(problem, "revolve")
    for checkpoints in range(len(blocks)):
        yield schedule_of(problem, blocks, runs_of(len(blocks), checkpoints))


def runs_of(blocks: int, checkpoints: int) -> Iterator[Run]:
    """The passes of a chain of so many blocks, with so many checkpoints beside the chain's input."""
    yield from _between(0, blocks, checkpoints)


def _between(first: int, end: int, checkpoints: int) -> Iterator[Run]:
    """The passes from block `first`, whose source is there, to the block before `end`, and back."""
    if end - first == 1:
        yield Run(first, Pass.SAVE)
        yield Run(first, Pass.BACKWARD)
        return
    split = first + _split(end - first, checkpoints)
    yield Run(first, Pass.CHECKPOINT)
    yield from (Run(block, Pass.ADVANCE) for block in range(first + 1, split))
    yield from _between(split, end, max(checkpoints - 1, 0))
    yield from _between(first, split, checkpoints)


@cache
def _again(blocks: int, checkpoints: int) -> int:
    """The fewest forward passes of blocks that do not save: each saves once, right before its backward.

    Source:
        Griewank and Walther (2000), the recursion of section 2. Its closed form is r * l - C(s + r, r - 1)
        with l blocks, s checkpoints, the input's among them, and r the least number for which
        C(s + r, s) >= l.
    """
    if blocks == 1:
        return 0
    if checkpoints == 0:
        return blocks * (blocks - 1) // 2
    return min(_cost(blocks, checkpoints, split) for split in range(1, blocks))


def _cost(blocks: int, checkpoints: int, split: int) -> int:
    return split + _again(blocks - split, checkpoints - 1) + _again(split, checkpoints)


def _split(blocks: int, checkpoints: int) -> int:
    """The number of blocks before the next checkpoint; without any, the last block is reached alone."""
    if checkpoints == 0:
        return blocks - 1
    return min(range(1, blocks), key=lambda split: _cost(blocks, checkpoints, split))
