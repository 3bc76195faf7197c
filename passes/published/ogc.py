"""OGC: the checkpoints of least memory on any graph, by a tree of its divisions."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import networkx as nx

from ...ir import Storage
from ..remat.problem import CheckpointProblem, Solution
from ..remat.strategies.segments import keeping
from ..strategy_registry import Strategy

__all__ = ["OGC", "Checkpoints", "ogc", "optimal_checkpoints"]

OGC = Strategy("ogc", "Feng and Huang 2021", lambda problem, asked: [ogc(problem, asked.deadline)])

Vertex = Hashable
Graph: TypeAlias = "nx.DiGraph[Vertex]"

_MOST_INSIDE = 10
"""The most vertices of a set that cannot be divided, of which every subset is tried as checkpoints."""

_MOST_LEVELS = 200
"""The most bounds of a segment's size that are tried; with more sizes of segments, every so many of them."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The outcome for a graph.

    Args:
        kept: The vertices that are kept.
        kept_bytes: Their bytes.
        segment_bytes: The bytes of the largest segment between them.
    """

    kept: frozenset[Vertex]
    kept_bytes: int
    segment_bytes: int

    @property
    def nbytes(self) -> int:
        """The memory by the method's own model: what is kept, and one segment."""
        return self.kept_bytes + self.segment_bytes


def ogc(problem: CheckpointProblem, deadline: float = math.inf) -> Solution:
    """Keeps the tensors for which the method's model takes least: there is one schedule, whatever the budget.

    The vertices are storages that forward makes. A checkpoint counts with its bytes; within a segment counts
    what backward reads. The paper's graphs have one end each way. So a storage that leads nowhere (the
    statistics of a normalisation) counts with what its operation makes beside it, and one that comes from
    nowhere and meets others (a mask that is drawn) with what is made of it. What only one run makes is kept
    in any case, and is no vertex.

    Args:
        problem: The recomputation problem.
        deadline: `time.thread_time()` after which the best found so far is taken.

    Source:
        Feng and Huang, Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs (CVPR 2021).
    """
    graph, inside = _graph_of(problem)
    own: dict[Vertex, int] = {s: s.nbytes for s in problem.producer if s in inside}
    found = optimal_checkpoints(graph, own, inside, deadline)
    return keeping(problem, frozenset(s for s in found.kept if isinstance(s, Storage)))


def _graph_of(problem: CheckpointProblem) -> tuple[Graph, dict[Vertex, int]]:
    """The graph of storages, and the bytes of each within a segment."""
    graph: Graph = nx.DiGraph()
    vertices = [s for s, node in problem.producer.items() if node.is_recomputable]
    graph.add_nodes_from(vertices)
    for storage in vertices:
        reads = problem.forward_reads[problem.producer[storage]]
        graph.add_edges_from((read, storage) for read in reads if read in graph)
    inside: dict[Vertex, int] = {s: s.nbytes if s in problem.read_positions else 0 for s in vertices}

    def fold(vertex: Vertex, into: Vertex) -> None:
        inside[into] += inside.pop(vertex)
        graph.remove_node(vertex)

    for node in problem.forward:
        made = [s for s in problem.graph.allocates(node) if s in inside]
        main = max(made, key=lambda s: (graph.out_degree(s) > 0, s.nbytes), default=None)
        for storage in made:
            if main is not None and storage is not main and not graph.out_degree(storage):
                fold(storage, main)
    for storage in vertices:  # in the order of forward: one that is left without others meets them later
        if storage in inside and not graph.in_degree(storage) and graph.out_degree(storage) == 1:
            (user,) = graph.successors(storage)
            if graph.in_degree(user) > 1:
                fold(storage, user)
    return graph, inside


def optimal_checkpoints(
    graph: Graph,
    kept_bytes: Mapping[Vertex, int],
    segment_bytes: Mapping[Vertex, int],
    deadline: float = math.inf,
) -> Checkpoints:
    """The vertices of an acyclic graph to keep, so that the kept bytes and one segment's are least.

    A segment is what hangs together between kept vertices. For each bound of a segment's bytes the least that
    must be kept is found over a tree of divisions: a set of vertices between two kept ones is

    - one segment, if that is within the bound;
    - a series, if some of its vertices lie on every path: the kept ones among them by a shortest path;
    - parallel, if it falls apart without its two ends: each part by itself;
    - else indivisible: each subset of a small one is tried; of a large one all vertices are kept where closed
      sets meet, those that a reduction of its series and parallels leaves, and each closed set by itself.

    That is the optimum where every indivisible set is small. If segments have more than some hundred
    different sizes, a part of them is tried as bounds.

    Args:
        graph: The graph; its sources and sinks are joined to two ends, which cost nothing.
        kept_bytes: For each vertex the bytes that keeping it takes.
        segment_bytes: For each vertex the bytes that it takes within a segment.
        deadline: As for `ogc`.

    Source:
        Feng and Huang (2021): sections 4.2 (linear graphs), 4.3 (division tree, independent segments).
    """
    whole = _Division.of(graph, kept_bytes, segment_bytes)
    levels = sorted(set(whole.sizes()))
    step = max(1, math.ceil(len(levels) / _MOST_LEVELS))
    best: Checkpoints | None = None
    for most in dict.fromkeys([*levels[::step], levels[-1]]):
        if best is not None and (most >= best.nbytes or time.thread_time() > deadline):
            break
        found = _least(whole, most)
        if found is None:
            continue
        cost, kept = found
        size = whole.largest(frozenset(kept))
        if best is None or cost + size < best.nbytes:
            best = Checkpoints(frozenset(kept), cost, size)
    assert best is not None, "the whole as one segment is within the largest bound"
    return best


class _Choice(NamedTuple):
    """Some vertices that are kept of a set that cannot be divided.

    Args:
        largest_bytes: The bytes of the largest segment that is left.
        cost: The bytes that are kept.
        kept: The vertices.
    """

    largest_bytes: int
    cost: int
    kept: tuple[Vertex, ...]


@dataclass(eq=False)
class _Division:
    """A set of vertices between two ends, which are kept, and how it divides.

    Args:
        graph: The vertices inside, and the edges between them.
        kept_bytes: For each of them, the bytes that keeping it takes.
        nbytes: For each of them, the bytes within a segment.
        entries: The vertices inside that the first end leads to.
        exits: The vertices inside that lead to the other end.
    """

    graph: Graph
    kept_bytes: Mapping[Vertex, int]
    nbytes: Mapping[Vertex, int]
    entries: frozenset[Vertex]
    exits: frozenset[Vertex]

    @staticmethod
    def of(graph: Graph, kept_bytes: Mapping[Vertex, int], nbytes: Mapping[Vertex, int]) -> _Division:
        """The whole graph."""
        entries = frozenset(v for v in graph if graph.in_degree(v) == 0)
        exits = frozenset(v for v in graph if graph.out_degree(v) == 0)
        return _Division(graph, kept_bytes, nbytes, entries, exits)

    @cached_property
    def inside_bytes(self) -> int:
        """The bytes of the set as one segment."""
        return sum(self.nbytes[v] for v in self.graph)

    @cached_property
    def parts(self) -> tuple[_Division, ...]:
        """The parts that it falls into without its ends."""
        found = list(nx.weakly_connected_components(self.graph))
        if len(found) <= 1:
            return ()
        return tuple(self._within(part) for part in found)

    def _within(
        self, part: Iterable[Vertex], before: Set[Vertex] | None = None, after: Set[Vertex] | None = None
    ) -> _Division:
        """A set inside, between what leads to it and what it leads to: the ends of this one, if left out."""
        inside = frozenset(part)
        graph = self.graph.subgraph(inside).copy()
        entries = inside & (self.entries if before is None else before)
        exits = inside & (self.exits if after is None else after)
        return _Division(graph, self.kept_bytes, self.nbytes, entries, exits)

    @cached_property
    def splits(self) -> tuple[Vertex, ...]:
        """The vertices inside that every path from end to end goes through, in order."""
        if not self.graph:
            return ()
        order = {v: k for k, v in enumerate(nx.topological_sort(self.graph))}
        reach, found = -1, list[Vertex]()
        pending = set(self.entries)
        for v in order:
            # all edges that began before v end at v or before it, and so do those of the first end
            if pending <= {v} and reach <= order[v]:
                found.append(v)
            pending.discard(v)
            reach = max(reach, *(order[w] for w in self.graph.successors(v)), -1)
            if v in self.exits:
                reach = max(reach, len(order))
        return tuple(found)

    @cached_property
    def _order(self) -> list[Vertex]:
        return list(nx.topological_sort(self.graph))

    @cached_property
    def _marks(self) -> list[int]:
        """The places of the ends and of the splits between them."""
        place = {v: k for k, v in enumerate(self._order)}
        return [-1, *(place[v] for v in self.splits), len(self._order)]

    @cached_property
    def _before(self) -> list[int]:
        """The bytes of all vertices before each place."""
        return [0, *accumulate(self.nbytes[v] for v in self._order)]

    def stretch_bytes(self, i: int, j: int) -> int:
        """The bytes between two of the ends and splits, by their numbers; 0 is the first end."""
        return self._before[self._marks[j]] - self._before[self._marks[i] + 1]

    @cached_property
    def stretches(self) -> list[_Division]:
        """The sets between each end or split and the next."""
        order = self._order
        found: list[_Division] = []
        for first, last in pairwise(self._marks):
            before = set(self.graph.successors(order[first])) if first >= 0 else None
            after = set(self.graph.predecessors(order[last])) if last < len(order) else None
            found.append(self._within(order[first + 1 : last], before, after))
        return found

    @cached_property
    def choices(self) -> list[_Choice]:
        """The best choices of a small set that cannot be divided, those that keep most first; else none."""
        order = self._order
        if len(order) > _MOST_INSIDE:
            return []
        place = {v: k for k, v in enumerate(order)}
        beside = [0] * len(order)
        for u, v in self.graph.edges:
            beside[place[u]] |= 1 << place[v]
            beside[place[v]] |= 1 << place[u]
        found: dict[int, _Choice] = {}
        for kept in range(1 << len(order)):
            largest = max(self._segments(order, beside, ~kept & ((1 << len(order)) - 1)), default=0)
            vertices = tuple(v for k, v in enumerate(order) if kept >> k & 1)
            cost = sum(self.kept_bytes[v] for v in vertices)
            if largest not in found or cost < found[largest].cost:
                found[largest] = _Choice(largest, cost, vertices)
        best: list[_Choice] = []
        for largest in sorted(found):
            if not best or found[largest].cost < best[-1].cost:
                best.append(found[largest])
        return best

    @cached_property
    def core(self) -> tuple[tuple[Vertex, ...], tuple[_Division, ...]]:
        """The vertices where closed sets meet, and these sets, each between two of them or the ends."""
        first, last = object(), object()
        reduced: Graph = nx.DiGraph(self.graph)
        reduced.add_edges_from((first, v) for v in self.entries)
        reduced.add_edges_from((v, last) for v in self.exits)
        pending = list(self.graph)
        while pending:
            vertex = pending.pop()
            if vertex in reduced and reduced.in_degree(vertex) == 1 == reduced.out_degree(vertex):
                (before,), (after,) = reduced.predecessors(vertex), reduced.successors(vertex)
                reduced.remove_node(vertex)
                reduced.add_edge(before, after)
                pending += [v for v in (before, after) if v is not first and v is not last]
        meeting = tuple(v for v in self._order if v in reduced)
        before = self.entries.union(*(self.graph.successors(v) for v in meeting))
        after = self.exits.union(*(self.graph.predecessors(v) for v in meeting))
        rest = self.graph.subgraph(v for v in self.graph if v not in reduced)
        parts = nx.weakly_connected_components(rest)
        return meeting, tuple(self._within(part, before, after) for part in parts)

    def _segments(self, order: Sequence[Vertex], beside: Sequence[int], left: int) -> Iterator[int]:
        """The bytes of what hangs together among vertices, all given by their places as bits."""
        while left:
            part = pending = left & -left
            while pending:
                place = pending.bit_length() - 1
                more = beside[place] & left & ~part
                part, pending = part | more, pending & ~(1 << place) | more
            left &= ~part
            yield sum(self.nbytes[v] for k, v in enumerate(order) if part >> k & 1)

    def sizes(self) -> Iterator[int]:
        """The bytes of segments that a search may leave whole."""
        yield self.inside_bytes
        if self.parts:
            for part in self.parts:
                yield from part.sizes()
        elif self.splits:
            count = len(self._marks)
            step = max(1, count // _MOST_LEVELS)
            yield from (self.stretch_bytes(i, j) for j in range(1, count) for i in range(0, j, step))
            for division in self.stretches:
                yield from division.sizes()
        elif self.choices:
            yield from (choice.largest_bytes for choice in self.choices)
        else:
            for part in self.core[1]:
                yield from part.sizes()

    def largest(self, kept: frozenset[Vertex]) -> int:
        """The bytes of the largest segment that is left between kept vertices."""
        left = self.graph.subgraph(v for v in self.graph if v not in kept)
        components = nx.weakly_connected_components(left)
        return max((sum(self.nbytes[v] for v in part) for part in components), default=0)


_Found = tuple[int, tuple[Vertex, ...]]
"""The bytes that are kept, and the vertices."""


def _least(division: _Division, most_bytes: int) -> _Found | None:
    """The least to keep within a set so that no segment takes more than `most_bytes`; None if one does."""
    if division.inside_bytes <= most_bytes:
        return 0, ()
    if division.parts:
        return _joined(_least(part, most_bytes) for part in division.parts)
    if division.splits:
        return _series(division, most_bytes)
    if not division.choices:
        meeting, parts = division.core
        own = sum(division.kept_bytes[v] for v in meeting), meeting
        return _joined((own, *(_least(part, most_bytes) for part in parts)))
    fitting = [choice for choice in division.choices if choice.largest_bytes <= most_bytes]
    return (fitting[-1].cost, fitting[-1].kept) if fitting else None


def _series(division: _Division, most_bytes: int) -> _Found | None:
    """A shortest path over the vertices that every path goes through."""
    count = len(division.splits)
    best: list[_Found | None] = [(0, ()), *[None] * (count + 1)]
    for j in range(1, count + 2):
        own = (division.splits[j - 1],) if j <= count else ()
        own_bytes = sum(division.kept_bytes[v] for v in own)
        for i in reversed(range(j)):
            inside: _Found | None = (0, ())
            if division.stretch_bytes(i, j) > most_bytes:
                if i < j - 1:
                    break  # all longer ones are too large as well
                inside = _least(division.stretches[i], most_bytes)
            before = best[i]
            if before is None or inside is None:
                continue
            cost = before[0] + inside[0] + own_bytes
            known = best[j]
            if known is None or cost < known[0]:
                best[j] = cost, (*before[1], *inside[1], *own)
    return best[-1]


def _joined(parts: Iterable[_Found | None]) -> _Found | None:
    cost, kept = 0, list[Vertex]()
    for part in parts:
        if part is None:
            return None
        cost += part[0]
        kept += part[1]
    return cost, tuple(kept)
