"""Schedules of a chain of blocks: which block runs forward again when, carried out on the true graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from ...ir import Node, Storage, UsageError
from ..remat.problem import CheckpointProblem, Solution
from .chain import Block, blocks_of

__all__ = ["Pass", "Run", "chain_of", "schedule_of"]


class Pass(Enum):
    """The passes of a block."""

    ADVANCE = "advance"
    """Its forward runs; the source of the next block is there then, its own is not."""
    CHECKPOINT = "checkpoint"
    """Its forward runs; both sources are there then."""
    SAVE = "save"
    """Its forward runs; both sources are there then, and what its backward reads."""
    BACKWARD = "backward"
    """Its backward runs; what was saved of it is not there then, nor its source, unless that was saved as a
    result of the block before."""


@dataclass(frozen=True, slots=True)
class Run:
    """One pass of one block.

    Args:
        block: Its number.
        what: The pass.
    """

    block: int
    what: Pass


def chain_of(problem: CheckpointProblem, strategy: str) -> tuple[CheckpointProblem, list[Block]]:
    """The problem in its graph's own order of backward, and the blocks of its chain, two at least.

    In another order gradients may be made last: of all blocks, behind the backward of the first.

    Args:
        problem: The recomputation problem.
        strategy: The name of the strategy that asks, for the refusal.

    Raises:
        UsageError: IRC403 when no position of forward is crossed by one storage alone.
    """
    problem = replace(problem, sequence=())
    blocks = blocks_of(problem, only_saved=True)
    if len(blocks) < 2:
        raise UsageError(
            "IRC403",
            f"strategy {strategy} plans chains, and this graph is none: nowhere in forward is one tensor "
            "alone read by all that follows",
            help="use strategy auto, which takes any graph",
        )
    return problem, blocks


def schedule_of(problem: CheckpointProblem, blocks: Sequence[Block], runs: Iterable[Run]) -> Solution:
    """The schedule that makes these passes, on the true graph.

    The first forward pass of a block is its first run. A later one runs what is needed for what it is to
    leave; the source of the next block is not, if its backward is over. What backward reads beside that
    (tensors that cross the chain beside its sources) is made again before it is read, and stays until the
    block's backward ends.

    Args:
        problem: The recomputation problem.
        blocks: Its chain.
        runs: The passes: forward of all blocks in order, then any, with one backward of each, last block
            first.
    """
    carried = _Carried(problem, blocks)
    for run, following in pairwise((*runs, None)):
        assert run is not None
        carried.take(run, is_last=following == Run(run.block, Pass.BACKWARD))
    return problem.simulate_order(problem.forward, carried.order)


class _Carried:
    """A schedule that is being carried out.

    Attributes:
        order: The operations behind the loss.
    """

    def __init__(self, problem: CheckpointProblem, blocks: Sequence[Block]) -> None:
        self.problem, self.blocks = problem, blocks
        self.order: list[Node] = []
        once = {s for s, node in problem.producer.items() if not node.is_recomputable}
        first = problem.forward_reads[problem.backward[0]] if problem.backward else ()
        self._lasting = once.union(first) - problem.transient
        self._there = set(self._lasting)
        self._have_run = 0
        self._saved: set[int] = set()

    def take(self, run: Run, *, is_last: bool) -> None:
        """Carries out one pass; `is_last` if its backward follows."""
        block = self.blocks[run.block]
        if run.what is Pass.BACKWARD:
            self._go_back(run.block)
            return
        left = self._left(run)
        if run.what is Pass.SAVE:
            self._saved.add(run.block)
        if run.block < self._have_run:
            left = left.intersection(block.saved) if is_last else left
            self.order += self.problem.closure(left, self._there)
            self._there |= left
        else:
            assert run.block == self._have_run, "blocks run forward in order first"
            self._have_run += 1
            self._there |= left - self.problem.transient
        if run.what is Pass.ADVANCE:
            self._drop(() if block.source is None else (block.source,))

    def _left(self, run: Run) -> set[Storage]:
        """The storages that a pass leaves, beside the block's own source."""
        following = self.blocks[run.block + 1 : run.block + 2]
        sources = {block.source for block in following if block.source is not None}
        return sources.union(self.blocks[run.block].saved) if run.what is Pass.SAVE else sources

    def _go_back(self, number: int) -> None:
        block, made = self.blocks[number], set[Storage]()
        for node in self.problem.backward[block.backward_first : block.backward_end]:
            reads = self.problem.forward_reads[node]
            missing = [storage for storage in reads if storage not in self._there]
            self.order += (*self.problem.closure(missing, self._there), node)
            made.update(missing)
            self._there.update(missing)
        self._saved.discard(number)
        sources = enumerate(self.blocks[number : number + 2], number - 1)
        over = (other.source for before, other in sources if before not in self._saved)
        self._drop((*made, *block.saved, *(source for source in over if source is not None)))

    def _drop(self, storages: Iterable[Storage]) -> None:
        self._there.difference_update(set(storages) - self._lasting)
