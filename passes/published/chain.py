"""A training graph as a chain of blocks: the cuts that only one storage crosses, and costs of blocks."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ...ir import Compute, Node, Storage, liveness
from ..remat.problem import CheckpointProblem

__all__ = ["SMALL_PART", "Block", "articulations", "blocks_of"]

SMALL_PART = 2e-5
"""Storages up to this fraction of the peak that keeps all may cross a cut beside the one."""

_MOST_BLOCKS = 64
"""The most blocks of a chain; in a longer one the shortest blocks are joined."""


@dataclass(frozen=True)
class Block:
    """A block of the chain, with what its forward and backward take.

    Args:
        first: Its first forward operation.
        end: The forward operation behind its last one.
        backward_first: Its first operation of backward.
        backward_end: The operation of backward behind its last one.
        source: The storage that it hangs on; None for the first block.
        saved: The storages that it makes and backward reads, without the source of the next block.
        forced_bytes: The bytes of `saved` that only operations make that run once.
        is_source_read: Whether backward reads the source.
        forward_seconds: Time of its forward.
        again_seconds: Time to make again what backward reads and the source of the next block.
        again_last_seconds: The same without the source of the next block.
        backward_seconds: Time of its part of backward.
        base_bytes: Bytes that are alive before its forward if nothing is kept: the source, and what is
            static.
        forward_bytes: The most that is alive in its forward then.
        keeping_bytes: The same if what backward reads is kept.
        backward_bytes: The most that is alive in its part of backward, without what forward made.
        entry_bytes: The same before that part begins.
    """

    first: int
    end: int
    backward_first: int
    backward_end: int
    source: Storage | None
    saved: tuple[Storage, ...]
    forced_bytes: int
    is_source_read: bool
    forward_seconds: float
    again_seconds: float
    again_last_seconds: float
    backward_seconds: float
    base_bytes: int
    forward_bytes: int
    keeping_bytes: int
    backward_bytes: int
    entry_bytes: int

    @property
    def source_bytes(self) -> int:
        """Bytes of the source."""
        return 0 if self.source is None else self.source.nbytes

    @property
    def saved_bytes(self) -> int:
        """Bytes of what is saved, and of the source if backward reads it."""
        return sum(s.nbytes for s in self.saved) + (self.source_bytes if self.is_source_read else 0)


def articulations(problem: CheckpointProblem) -> dict[int, Storage]:
    """The positions in forward from which the rest of forward reads one storage made before.

    Storages that are tiny beside the peak, such as masks and positions that all blocks share, do not count.
    """
    small_bytes = problem.keep_all.peak_bytes * SMALL_PART
    crossing: dict[Storage, int] = {}
    found: dict[int, Storage] = {}
    for index, node in enumerate(problem.forward):
        crossing = {s: last for s, last in crossing.items() if last >= index}
        large = [s for s in crossing if s.nbytes > small_bytes]
        if len(large) == 1:
            found[index] = large[0]
        for storage in problem.graph.allocates(node):
            users = problem.users.get(storage, ())
            if storage in problem.producer and users:
                crossing[storage] = problem.index[users[-1]]
    return found


def blocks_of(
    problem: CheckpointProblem, most: int = _MOST_BLOCKS, *, only_saved: bool = False
) -> list[Block]:
    """The blocks between articulations; one for the whole graph if it has none.

    Backward of a block begins with the first operation that reads something of it or of an earlier block;
    gradients that are made last, whatever they belong to, count for the first block.

    Args:
        problem: The recomputation problem.
        most: The most blocks; beyond that, those with the shortest forward are joined to their neighbours.
        only_saved: Whether to cut once for each storage, and only where backward reads it too, if it reads
            any: then a chain that keeps all its sources takes no more than a step that keeps all.
    """
    if not problem.forward:
        return []
    sources = articulations(problem)
    if only_saved:
        last = {storage: index for index, storage in sources.items()}
        read = [storage for storage in last if storage in problem.read_positions]
        sources = {last[storage]: storage for storage in read or last}
    marks = [0, *_thinned(problem, sorted(sources), most), len(problem.forward)]
    starts = _backward_starts(problem, marks)
    alone, kept = _alive(problem, is_kept=False), _alive(problem, is_kept=True)
    return [
        _block(problem, (first, end), sources.get(first), sources.get(end), part, alone, kept)
        for (first, end), part in zip(pairwise(marks), starts, strict=True)
    ]


def _thinned(problem: CheckpointProblem, cuts: list[int], most: int) -> list[int]:
    """Drops the cuts between which the least is computed, until `most` blocks are left."""
    seconds = [problem.costs.seconds[node] for node in problem.forward]
    cuts = [cut for cut in cuts if cut]
    while len(cuts) >= most:
        marks = [0, *cuts, len(problem.forward)]
        joined = [math.fsum(seconds[marks[i - 1] : marks[i + 1]]) for i in range(1, len(marks) - 1)]
        del cuts[min(range(len(cuts)), key=joined.__getitem__)]
    return cuts


def _backward_starts(problem: CheckpointProblem, marks: Sequence[int]) -> list[tuple[int, int]]:
    """For each block the positions of its part of backward: first, and behind the last."""
    end = len(problem.backward)
    small_bytes = problem.keep_all.peak_bytes * SMALL_PART
    read: dict[int, int] = {}
    for position, node in enumerate(problem.backward):
        for storage in (s for s in problem.forward_reads[node] if s.nbytes > small_bytes):
            block = bisect_right(marks, problem.index[problem.producer[storage]]) - 1
            read.setdefault(block, position)
    begins = list(accumulate((read.get(block, end) for block in range(len(marks) - 1)), min))
    begins[-1] = 0
    ends = [end, *begins[:-1]]
    return list(zip(begins, ends, strict=True))


@dataclass(frozen=True)
class _Alive:
    """Bytes at the forward operations."""

    during: Sequence[int]
    after: Sequence[int]

    def before(self, index: int, static_bytes: int) -> int:
        return self.after[index - 1] if index else static_bytes


def _alive(problem: CheckpointProblem, *, is_kept: bool) -> _Alive:
    solution = problem.simulate_order(problem.forward, problem.backward if is_kept else ())
    timeline = liveness(solution.schedule, problem.costs.workspace_bytes)
    during: list[int] = []
    after: list[int] = []
    for index, instruction in enumerate(solution.schedule.instructions):
        if isinstance(instruction, Compute):
            if len(during) == len(problem.forward):
                break
            during.append(timeline.during_bytes[index])
            after.append(timeline.after_bytes[index])
        elif during and len(during) <= len(problem.forward):
            after[-1] = timeline.after_bytes[index]
    return _Alive(during, after)


def _block(
    problem: CheckpointProblem,
    span: tuple[int, int],
    source: Storage | None,
    following: Storage | None,
    part: tuple[int, int],
    alone: _Alive,
    kept: _Alive,
) -> Block:
    first, end = span
    seconds = problem.costs.seconds
    nodes = problem.forward[first:end]
    made = [s for node in nodes for s in problem.graph.allocates(node) if s in problem.producer]
    saved = tuple(s for s in made if s in problem.read_positions and s is not following)
    static_bytes = problem.graph.static_bytes
    base = alone.before(first, static_bytes)
    more = max(kept.during[first:end]) - kept.before(first, static_bytes)
    held = problem.held_before[len(problem.forward) + part[0]]
    also = (following,) if following is not None else ()
    return Block(
        first=first,
        end=end,
        backward_first=part[0],
        backward_end=part[1],
        source=source,
        saved=saved,
        forced_bytes=sum(s.nbytes for s in saved if not problem.producer[s].is_recomputable),
        is_source_read=source in problem.read_positions,
        forward_seconds=math.fsum(seconds[node] for node in nodes),
        again_seconds=_again_seconds(problem, nodes, (*saved, *also)),
        again_last_seconds=_again_seconds(problem, nodes, saved),
        backward_seconds=math.fsum(seconds[node] for node in problem.backward[part[0] : part[1]]),
        base_bytes=base,
        forward_bytes=max(alone.during[first:end]),
        keeping_bytes=base + more,
        backward_bytes=max(problem.held_during[part[0] : part[1]], default=held),
        entry_bytes=held,
    )


def _again_seconds(problem: CheckpointProblem, nodes: Sequence[Node], wanted: Sequence[Storage]) -> float:
    """Time of the operations of a block that make some of its storages again."""
    inside = set(nodes)
    needed = {problem.producer[s] for s in wanted if problem.producer[s] in inside}
    for node in reversed(nodes):
        if node in needed:
            needed.update(m for s in problem.forward_reads[node] if (m := problem.producer[s]) in inside)
    return math.fsum(problem.costs.seconds[node] for node in needed if node.is_recomputable)
