"""Known rules for what to keep: everything, segments, blocks of the model, minimum cuts of what is saved."""

from __future__ import annotations

import heapq
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import count, islice
from typing import NamedTuple

from ...ir import Location, Node, Storage
from ..combinatorial import FlowNetwork, knapsack
from .problem import CheckpointProblem, Solution

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

Kept = frozenset[Storage]
"""Storages that stay from forward to backward."""

_CUTS_IN_BLOCKS = 8
"""The number of priced cuts that keep the borders of blocks; there are fewer trade-offs than without them."""


def known_strategies(problem: CheckpointProblem) -> Iterator[tuple[str, Solution]]:
    """Yields every rule of this file with its name, at all its settings: none of them looks at a budget."""
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


def keep_all(problem: CheckpointProblem) -> Solution:
    """Computes nothing twice."""
    return problem.keep_all


def keep_none(problem: CheckpointProblem) -> Solution:
    """Keeps forward's inputs, what may not be computed again (masks) and what backward reads first.

    `torch.utils.checkpoint` around the whole model does the same.
    """
    return keeping(problem, frozenset())


# ---------------------------------------------------------------------- segments


def every_k(problem: CheckpointProblem, k: int) -> Solution:
    """Cuts forward into segments of `k` operations and keeps what crosses from one to the next.

    Inside a segment it keeps only what may not be computed again (masks).
    """
    return segments(problem, range(k, len(problem.forward), k))


def segments(problem: CheckpointProblem, cuts: Sequence[int]) -> Solution:
    """Cuts forward before the operations at `cuts`, in order, and keeps what crosses from one to the next."""
    return keeping(problem, _crossing(problem, cuts))


def sqrt_n(problem: CheckpointProblem) -> Solution:
    """Cuts forward into about sqrt(n) segments of equal bytes and keeps what crosses from one to the next.

    Source:
        Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), section 4; ours on any graph.
    """
    forward = problem.forward
    sizes = [sum(s.nbytes for s in problem.graph.allocates(node)) for node in forward]
    segment_bytes = sum(sizes) / max(math.isqrt(len(forward)), 1)
    cuts: list[int] = []
    filled = 0.0
    for index, size in enumerate(sizes):
        filled += size
        if filled >= segment_bytes:
            cuts.append(index + 1)
            filled = 0.0
    return segments(problem, cuts)


def _crossing(problem: CheckpointProblem, cuts: Sequence[int]) -> Kept:
    """The storages that forward reads across one of the cuts, which are in order."""
    kept: set[Storage] = set()
    for storage, node in problem.producer.items():
        made = problem.index[node]
        last = max((problem.index[user] for user in problem.users.get(storage, ())), default=made)
        if bisect_right(cuts, made) < bisect_right(cuts, last):
            kept.add(storage)
    return frozenset(kept)


def keeping(problem: CheckpointProblem, kept: Kept) -> Solution:
    """Makes the schedule that keeps these storages, and what cannot be made from them."""
    return problem.keeping(_with_unrepeatable(problem, kept))


def _with_unrepeatable(problem: CheckpointProblem, kept: Kept) -> Kept:
    """Adds what backward needs from operations that may run only once, and what its first operation reads."""
    first = problem.forward_reads[problem.backward[0]] if problem.backward else ()
    found = (set(kept) | set(first)) - problem.transient
    pending = [s for s in problem.read_positions if s not in found]
    seen: set[Storage] = set()
    while pending:
        storage = pending.pop()
        if storage in found or storage in seen:
            continue
        seen.add(storage)
        node = problem.producer[storage]
        if node.is_recomputable:
            pending.extend(problem.forward_reads[node])
        else:
            found.add(storage)
    return frozenset(found)


# ---------------------------------------------------------------------- blocks


def per_block(problem: CheckpointProblem) -> Iterator[Solution]:
    """Keeps what crosses the borders of the model's blocks and computes the inside of a block again.

    `torch.utils.checkpoint` around each block does the same, but here operations run again one by one, when
    their results are read. What runs outside of all blocks is kept.

    Yields:
        One schedule for each level of blocks, outermost first; see `block_borders`.
    """
    yield from (keeping(problem, borders) for borders in block_borders(problem))


def block_borders(problem: CheckpointProblem) -> Iterator[Kept]:
    """The storages that cross the borders of the model's blocks, or are made outside of all blocks.

    A block is a member of something that repeats: in the path `encoder.layers.3.mlp.experts.0` the
    components with a digit are `3` and `0`, so that there are two levels of blocks, `encoder.layers.3`
    and `encoder.layers.3.mlp.experts.0`.

    Yields:
        One set for each level, outermost first; none if no operation has such a path.
    """
    paths = _block_paths(problem)
    seen: set[Kept] = set()
    for level in range(max(map(len, paths.values()), default=0)):
        block = {node: path[: level + 1] for node, path in paths.items()}
        borders = frozenset(
            storage
            for storage, node in problem.producer.items()
            if not block[node] or any(block[user] != block[node] for user in problem.users.get(storage, ()))
        )
        if borders not in seen:
            seen.add(borders)
            yield borders


def _block_paths(problem: CheckpointProblem) -> dict[Node, tuple[str, ...]]:
    """The blocks of each forward operation, outermost first; without a location, its predecessor's."""
    found: dict[Node, tuple[str, ...]] = {}
    path: tuple[str, ...] = ()
    for node in problem.forward:
        if node.at is not None:
            path = _blocks_at(node.at)
        found[node] = path
    return found


def _blocks_at(location: Location) -> tuple[str, ...]:
    """The prefixes of a location's path that end in a component with a digit.

    A path is the module's, or the part before the last slash in the name of an ONNX node.
    """
    path = location.module or (location.onnx_node or "").rpartition("/")[0]
    ends = (match.end() for match in re.finditer(r"[^./]+", path) if re.search(r"\d", match.group()))
    return tuple(path[:end] for end in ends)


# ---------------------------------------------------------------------- minimum cuts


def min_cut(problem: CheckpointProblem, fraction: float) -> Solution:
    """Saves between forward and backward the fewest bytes from which backward can be computed.

    At fraction 1 no operation runs again that takes more seconds a byte than forward as a whole: saving
    bytes costs hardly any time. At 0 everything may run again. Between them a knapsack chooses which of
    the slow operations do not: the most seconds whose results are within `fraction` of the bytes that
    lie between the two ends.

    Args:
        problem: The recomputation problem.
        fraction: A number from 0 to 1.

    Source:
        PyTorch's partitioner with `activation_memory_budget` (torch/_functorch/partitioners.py, 2022 to
        2024). Ours knows an operation as slow by its time, theirs by its name.
    """
    return _saving(problem, _Network(problem).at(fraction))


def min_cut_candidates(problem: CheckpointProblem) -> Iterator[Solution]:
    """The schedules of `min_cut` at fractions 1, 0.9, ... 0, without repetition."""
    network = _Network(problem)
    kept = (network.at(tenths / 10) for tenths in reversed(range(11)))
    yield from (_saving(problem, saved) for saved in dict.fromkeys(kept))


def priced_cuts(
    problem: CheckpointProblem, *, kept: Kept = frozenset(), limit: int = 16
) -> Iterator[Solution]:
    """Schedules at the best trade-offs of bytes saved between forward and backward against time.

    Each is the minimum of bytes plus seconds times a price. The prices are found between the two known
    trade-offs whose bytes differ most: in the end that gives the convex hull of all of them.

    Args:
        problem: The recomputation problem.
        kept: Storages that are saved in any case; with the borders of blocks, little is alive while one runs
            again.
        limit: The most schedules.

    Source:
        The cut is a project selection (Picard, Maximal Closure of a Graph, 1976); prices as in Eisner and
        Severance, Mathematical Techniques for Efficient Record Segmentation in Large Shared Databases (1976).
    """
    saved = _Network(problem, kept).hull()
    yield from (_saving(problem, more | kept) for more in islice(saved, limit))


def _saving(problem: CheckpointProblem, kept: Kept) -> Solution:
    return problem.keeping(kept)


_KNAPSACK_UNITS = 10_000
"""The number of units that the capacity of a knapsack is divided into; sizes are rounded up to them."""

_PARTS_OF_BYTE = 64
"""The parts of a byte that widths of arcs count, so that prices are nearly exact on small graphs too."""


class _Trade(NamedTuple):
    """Bytes saved, for the seconds that then run again."""

    nbytes: int
    seconds: float
    kept: Kept


class _Network:
    """Forward as a flow network in which a cut is the set of storages to save.

    A storage is an arc as wide as its bytes from `made` to `held`; an operation is a vertex between what it
    reads and what it makes. The source feeds each operation, as widely as running it again costs; the sink
    draws what backward reads. Storages that are kept anyway cost nothing: the first operation of backward
    reads them. Storages that annotations keep from staying are never cut, and their operations may run again
    at any price.

    Args:
        problem: The recomputation problem.
        kept: More storages that are kept anyway.
    """

    def __init__(self, problem: CheckpointProblem, kept: Kept = frozenset()) -> None:
        self.problem = problem
        free = kept.union(*(problem.forward_reads[node] for node in problem.backward[:1]))
        self.bytes = {storage: 0 if storage in free else storage.nbytes for storage in problem.wanted}
        makers = dict.fromkeys(problem.producer[storage] for storage in self.bytes)
        self.wide = _PARTS_OF_BYTE * (sum(self.bytes.values()) + 1)
        """Wider than saving everything: cut only if there is no other way."""
        self.closed = self.wide * (1 + sum(node.is_transient for node in makers))
        """Wider than all of that together: such an arc is never cut."""
        self.flow = FlowNetwork()
        vertices = count(2)
        self.made = {storage: next(vertices) for storage in self.bytes}
        self.held = {storage: next(vertices) for storage in self.bytes}
        self.feeds = {node: self._connect(node, next(vertices)) for node in makers}
        for storage, nbytes in self.bytes.items():
            width = self.closed if storage in problem.transient else nbytes * _PARTS_OF_BYTE
            self.flow.add_arc(self.made[storage], self.held[storage], width)
            if storage in problem.read_positions:
                self.flow.add_arc(self.held[storage], 1, self.closed)

    def _connect(self, node: Node, vertex: int) -> int:
        """Adds an operation; returns the arc that feeds it."""
        problem = self.problem
        for storage in self._results(node):
            self.flow.add_arc(vertex, self.made[storage], self.closed)
        for storage in problem.forward_reads[node] if node.is_recomputable else ():
            self.flow.add_arc(self.held[storage], vertex, self.closed)
        return self.flow.add_arc(0, vertex, self.closed)

    def cut(self, price: Callable[[Node], float]) -> Kept:
        """The storages of a minimum cut; among several, that with the fewest operations to run again.

        Args:
            price: The bytes that running an operation again is worth; infinite if it must not run again.
        """
        for node, arc in self.feeds.items():
            width = price(node) * _PARTS_OF_BYTE if node.is_recomputable else math.inf
            most = self.wide if node.is_transient else self.closed
            self.flow.set_capacity(arc, round(min(width, most)))
        again = self.flow.sink_side()
        return frozenset(s for s in self.bytes if self.held[s] in again and self.made[s] not in again)

    # A fraction of what the slow operations make.

    @cached_property
    def slow(self) -> frozenset[Node]:
        """The operations that take more seconds a byte of results than all of them together."""
        seconds = self.problem.costs.seconds
        makers = [node for node in self.feeds if node.is_recomputable and not node.is_transient]
        made = {node: sum(s.nbytes for s in self._results(node)) for node in makers}
        average = math.fsum(seconds[node] for node in makers) / max(sum(made.values()), 1)
        return frozenset(node for node in makers if seconds[node] > average * made[node])

    def _results(self, node: Node) -> list[Storage]:
        return [storage for storage in self.problem.graph.allocates(node) if storage in self.bytes]

    @cached_property
    def ends(self) -> tuple[Kept, Kept]:
        """The storages to save if nothing is forbidden to run again, and if the slow operations are."""
        return self.cut(lambda node: 0), self.cut(lambda node: math.inf if node in self.slow else 0)

    def at(self, fraction: float) -> Kept:
        """The storages that `min_cut` saves."""
        least, most = self.ends
        if fraction >= 1:
            return most
        between = self._size(most) - self._size(least)
        chosen = self._knapsack(fraction * between)
        return self.cut(lambda node: math.inf if node in chosen else 0)

    def _knapsack(self, capacity_bytes: float) -> frozenset[Node]:
        """The slow operations that take the most seconds, with at most these bytes of results."""
        nbytes = {node: self._size(self._results(node)) for node in self.feeds if node in self.slow}
        items = [node for node in nbytes if nbytes[node] <= capacity_bytes]
        if not items:
            return frozenset()
        unit = max(capacity_bytes / _KNAPSACK_UNITS, 1)
        nanoseconds = [round(1e9 * self.problem.costs.seconds[node]) for node in items]
        sizes = [math.ceil(nbytes[node] / unit) for node in items]
        return frozenset(items[k] for k in knapsack(nanoseconds, sizes, int(capacity_bytes / unit)))

    def _size(self, storages: Iterable[Storage]) -> int:
        return sum(self.bytes[storage] for storage in storages)

    # All trade-offs of bytes against seconds.

    def hull(self) -> Iterator[Kept]:
        """The choices on the convex hull of bytes and seconds: the ends, then between the largest gaps."""
        dear = self._trade(self.cut(lambda node: math.inf))
        cheap = self._trade(self.cut(lambda node: 0))
        yield dear.kept
        if cheap.nbytes < dear.nbytes:
            yield cheap.kept
        order = count()
        gaps = [(cheap.nbytes - dear.nbytes, next(order), dear, cheap)]
        while gaps:
            _, _, dear, cheap = heapq.heappop(gaps)
            between = self._trade(self.cut(self._price(dear, cheap)))
            if cheap.nbytes < between.nbytes < dear.nbytes:
                yield between.kept
                for more, less in ((dear, between), (between, cheap)):
                    heapq.heappush(gaps, (less.nbytes - more.nbytes, next(order), more, less))

    def _price(self, dear: _Trade, cheap: _Trade) -> Callable[[Node], float]:
        """The worth of an operation in bytes, at which both trades are worth the same."""
        seconds = max(cheap.seconds - dear.seconds, 1e-12)
        bytes_a_second = (dear.nbytes - cheap.nbytes) / seconds
        return lambda node: bytes_a_second * self.problem.costs.seconds[node]

    def _trade(self, kept: Kept) -> _Trade:
        problem = self.problem
        there = kept.union(storage for storage, nbytes in self.bytes.items() if not nbytes)
        there -= problem.transient
        again = problem.closure(problem.read_positions, set(there))
        return _Trade(self._size(kept), math.fsum(problem.costs.seconds[node] for node in again), kept)
