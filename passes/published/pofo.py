"""POFO: a dynamic programme that keeps, recomputes or offloads the activations of a chain."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...ir import Storage, Tier
from ..offload.offload_problem import OffloadProblem
from ..remat.problem import CheckpointProblem, Solution
from ..remat.strategies import keeping
from ..strategy_registry import Asked, Strategy
from .chain import Block, blocks_of

__all__ = ["POFO", "Segment", "pofo", "segments_within"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of blocks that are treated alike.

    Args:
        first: The first block.
        end: The block behind the last.
        is_recomputed: Whether only the source of the first block is stored, and the blocks run again before
            their backward; else what backward reads of the block, which is alone then, is stored.
        is_offloaded: Whether what is stored goes to the tier.
    """

    first: int
    end: int
    is_recomputed: bool
    is_offloaded: bool


_RESERVES = (1.0, 0.9, 0.8)
"""The parts of the budget that choices are made for: the model of a chain is not exact on other graphs."""


def pofo(problem: CheckpointProblem, asked: Asked) -> Iterator[Solution]:
    """Yields the schedules of POFO's choices, for the budget and for a little less.

    The graph is cut into a chain of blocks (see `chain`). A dynamic programme goes over the blocks and
    chooses a `Segment` for each stretch of them; see `segments_within`. Its choice is carried out on the true
    graph: what it recomputes runs again when backward reads it, and what it offloads is copied by
    `schedule_copies`, which begins copies out as storages are made and copies back in the order of their
    uses, as early as memory allows. So the schedule is within the budget, or there is none.

    As in the paper, the memory in use, the copies and the idle time they cause are in one programme; a
    channel each way carries one copy at a time, in the order of the blocks. Ours differs in three points. A
    stretch that is recomputed is computed once more as a whole; the paper recomputes within it recursively,
    by the programme of Rotor. Forward and backward are looked at block by block together; the paper has a
    bound for the idle time. Labels that hardly differ are taken for one; the paper rounds memory to whole
    parts. Only the first tier is used, and its capacity is left to `schedule_copies`.

    Source:
        Beaumont, Eyraud-Dubois, Shilova, Efficient Combination of Rematerialization and Offloading for
        Training DNNs (NeurIPS 2021).
    """
    work = OffloadProblem(problem, asked.tiers, asked.budget_bytes)
    if not work.tiers or not problem.forward or not problem.backward:
        return
    blocks = blocks_of(problem)
    tried: set[tuple[Segment, ...]] = set()
    for reserve in _RESERVES:
        if time.thread_time() >= asked.deadline:
            return
        chosen = segments_within(blocks, work.tiers[0], int(work.budget_bytes * reserve))
        if chosen is None or tuple(chosen) in tried:
            continue
        tried.add(tuple(chosen))
        kept, offloaded = _storages(problem, blocks, chosen)
        fitted = work.with_copies(keeping(problem, frozenset(kept)), offloaded)
        if fitted is not None:
            yield fitted


POFO = Strategy("pofo", "Beaumont et al. 2021", pofo, copies=True)


def _storages(
    problem: CheckpointProblem, blocks: Sequence[Block], segments: Sequence[Segment]
) -> tuple[set[Storage], set[Storage]]:
    """The storages kept from forward to backward, and those of them that go to the tier."""
    kept: set[Storage] = set()
    offloaded: set[Storage] = set()
    for segment in segments:
        block = blocks[segment.first]
        stored = set(() if segment.is_recomputed else block.saved)
        if block.source is not None and (segment.is_recomputed or block.is_source_read):
            stored.add(block.source)
        kept |= stored
        if segment.is_offloaded:
            offloaded |= stored
    return kept, offloaded


# ---------------------------------------------------------------------- the dynamic programme

_LONGEST = 16
"""The most blocks of a stretch that is recomputed."""

_PARTS = 200
"""Labels that agree in seconds and bytes within this part of the whole are taken for one."""

_LABELS = 200
"""The most labels at a block; with more, those that agree within larger parts are taken for one."""

_COARSER = 1.3
_LOOKED_AT = 5
"""The multiple of `_MOST_LABELS` up to which labels are compared with each other."""

_MOST_PARTS = 1 << 15

_SECONDS, _KEPT, _GOING, _COMING, _PARENT, _SEGMENT = range(6)
"""Columns of labels: seconds lost, bytes kept, bytes on their way out, bytes that have come back early, the
label that they continue, and the segment that they end with."""


def segments_within(
    blocks: Sequence[Block],
    tier: Tier,
    budget_bytes: int,
    *,
    parts: int | None = _PARTS,
) -> list[Segment] | None:
    """Finds the choice for a chain that loses the least time within a budget; None if none fits.

    Time is lost when blocks run again, and when the device waits for copies. Blocks are looked at from the
    first to the last, each with its forward and its backward. With `k` bytes kept so far:

    - Forward of a block needs k + p + its own bytes, where p bytes are on their way out; the device waits for
      what is over the budget. While it runs, p falls by what the channel carries; then what the block stores
      is added to k or to p.
    - Backward of a block needs k + q + the bytes stored of it + its own bytes, where q bytes of earlier
      blocks have come back already. In reversed time, copies back are copies out: the device waits for what
      is over the budget, and q falls by what the channel carries while it runs.

    At the loss the last copy out ends before the first copy back begins. A label is (seconds, k, p, q); one
    that is no better than another in anything goes.

    Args:
        blocks: The chain.
        tier: The tier to copy to.
        budget_bytes: The most that may be alive at once.
        parts: Labels that agree within this part of time and memory, or a larger one if there are many, are
            taken for one; None for an exact choice.
    """
    rates = (tier.out_bytes_per_second, tier.in_bytes_per_second)
    whole = sum(block.forward_seconds + block.backward_seconds for block in blocks)
    sizes = np.maximum([whole, budget_bytes, budget_bytes, budget_bytes], 1e-30)
    sieve = _Sieve(None if parts is None else sizes / parts, _LABELS)
    arriving: list[list[np.ndarray]] = [[] for _ in range(len(blocks) + 1)]
    arriving[0].append(np.zeros((1, 6)))
    labels: list[np.ndarray] = []
    options = list(_options(len(blocks)))
    for here in range(len(blocks) + 1):
        found = np.concatenate(arriving[here]) if arriving[here] else np.zeros((0, 6))
        labels.append(sieve.best(found))
        for number, segment in options:
            if segment.first == here and len(labels[here]):
                reached = _reach(labels[here], blocks, segment, rates, budget_bytes)
                reached[:, _SEGMENT] = number
                arriving[segment.end].append(reached[np.isfinite(reached[:, _SECONDS])])
    last = labels[-1]
    if not len(last):
        return None
    lost = last[:, _SECONDS] + last[:, _GOING] / rates[0] + last[:, _COMING] / rates[1]
    return _traced(labels, [segment for _, segment in options], int(np.argmin(lost)))


def _options(count: int) -> Iterator[tuple[int, Segment]]:
    number = 0
    for first in range(count):
        for end in range(first + 1, min(first + _LONGEST, count) + 1):
            for is_recomputed in (False, True) if end == first + 1 else (True,):
                for is_offloaded in (False, True):
                    yield number, Segment(first, end, is_recomputed, is_offloaded)
                    number += 1


def _reach(
    labels: np.ndarray,
    blocks: Sequence[Block],
    segment: Segment,
    rates: tuple[float, float],
    budget_bytes: int,
) -> np.ndarray:
    """The labels behind a segment; those that do not fit have infinite seconds."""
    reached = labels.copy()
    reached[:, _PARENT] = np.arange(len(labels))
    inside = blocks[segment.first : segment.end]
    stored = inside[0].source_bytes if segment.is_recomputed else inside[0].saved_bytes
    target = _GOING if segment.is_offloaded else _KEPT
    if segment.is_recomputed:
        reached[:, target] += stored
        reached[:, _KEPT] += sum(block.forced_bytes for block in inside)
        for index, block in enumerate(inside):
            needed = block.forward_bytes - (stored if not index else 0)
            _pass(reached, _GOING, needed, block.forward_seconds, rates[0], budget_bytes)
    else:
        block = inside[0]
        _pass(reached, _GOING, block.keeping_bytes, block.forward_seconds, rates[0], budget_bytes)
        reached[:, target] += stored
    needed, seconds = _backward(inside, segment.is_recomputed)
    extra = stored if segment.is_offloaded else 0
    _pass(reached, _COMING, needed + extra, seconds, rates[1], budget_bytes)
    if segment.is_offloaded:
        reached[:, _COMING] += stored
    if segment.is_recomputed:
        again = sum(block.again_seconds for block in inside[:-1]) + inside[-1].again_last_seconds
        reached[:, _SECONDS] += again
    return reached


def _pass(
    labels: np.ndarray, moving: int, needed_bytes: int, seconds: float, rate: float, budget_bytes: int
) -> None:
    """Runs something beside copies: waits until there is room, then lets the copies go on beside it."""
    room = budget_bytes - needed_bytes - labels[:, _KEPT]
    over = np.maximum(labels[:, moving] - room, 0.0)
    labels[:, _SECONDS] += np.where(room >= 0, over / rate, math.inf)
    labels[:, moving] = np.maximum(labels[:, moving] - over - rate * seconds, 0.0)


def _backward(inside: Sequence[Block], is_recomputed: bool) -> tuple[int, float]:
    """The bytes that backward of a segment needs beside what is stored of it, and its time."""
    seconds = math.fsum(block.backward_seconds for block in inside)
    if not is_recomputed:
        return inside[0].backward_bytes, seconds
    made = needed = 0
    entry = inside[-1].entry_bytes
    for index, block in enumerate(inside):
        source = block.source_bytes if index else 0
        running = max(block.forward_bytes, block.keeping_bytes) - block.base_bytes
        needed = max(needed, entry + made + source + running)
        made += sum(s.nbytes for s in block.saved) - block.forced_bytes
        made += source if block.is_source_read else 0
        needed = max(needed, made + block.backward_bytes)
    again = sum(block.again_seconds for block in inside[:-1]) + inside[-1].again_last_seconds
    return needed, seconds + again


@dataclass
class _Sieve:
    """Keeps the labels that no other one beats in everything, and not too many of them.

    Args:
        unit: Seconds and bytes within which labels are taken for one; it grows if there are too many. None
            for all labels.
        most: The most labels.
    """

    unit: np.ndarray | None
    most: int

    def best(self, labels: np.ndarray) -> np.ndarray:
        labels = labels[np.lexsort(labels[:, [_COMING, _GOING, _KEPT, _SECONDS]].T)]
        while self.unit is not None:
            thinned = _thinned(labels, self.unit)
            if len(thinned) <= _LOOKED_AT * self.most:
                found = _undominated(thinned)
                if len(found) <= self.most:
                    return found
            self.unit = self.unit * _COARSER
        return _undominated(labels)


def _thinned(labels: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """The first label in each part, by seconds."""
    parts = np.minimum(labels[:, :4] / unit, _MOST_PARTS - 1).astype(np.int64)
    keys = parts @ (_MOST_PARTS ** np.arange(4))
    _, first = np.unique(keys, return_index=True)
    return labels[np.sort(first)]


def _undominated(labels: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(labels)
    count = 0
    for label in labels:
        if not (kept[:count, :4] <= label[:4]).all(axis=1).any():
            kept[count] = label
            count += 1
    return kept[:count]


def _traced(labels: Sequence[np.ndarray], segments: Sequence[Segment], row: int) -> list[Segment]:
    found: list[Segment] = []
    here = len(labels) - 1
    while here:
        label = labels[here][row]
        segment = segments[int(label[_SEGMENT])]
        found.append(segment)
        here, row = segment.first, int(label[_PARENT])
    return found[::-1]
