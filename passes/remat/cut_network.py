"""A network whose minimum cuts say what stays at a time step and what runs again behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import count

from ...ir import Node, Storage
from ..combinatorial import FlowNetwork
from .problem import CheckpointProblem

__all__ = ["CutNetwork", "Kept"]

Kept = frozenset[Storage]
"""Storages that stay from before a time step until after it."""

_PARTS_OF_BYTE = 64
_PARTS = 1 << 40
"""The parts of a byte, and of all bytes, that widths of arcs count at least: prices are nearly exact."""

_WIDEST = 1 << 60
"""The width that no arc reaches, far from what a flow can count to."""


def _parts_of_byte(nbytes: int, widths: int) -> float:
    """The parts of a byte that widths count, so that all bytes so many times over stay below `_WIDEST`."""
    wanted = max(_PARTS_OF_BYTE, _PARTS // max(nbytes, 1))
    return min(wanted, _WIDEST / (2 * (nbytes + 1) * widths))


class CutNetwork:
    """Forward as a flow network in which a cut is the set of storages that stay at a time step.

    A storage is an arc as wide as its bytes from `made` to `held`; an operation is a vertex between what it
    reads and what it makes. The source feeds each operation, as widely as running it again costs; the sink
    draws what is read after the time step. Storages that are there anyway cost nothing. Storages that
    annotations keep from staying at the loss are never cut there, and their operations may run again at any
    price.

    Args:
        problem: The recomputation problem.
        time_step: The time step; at the loss, as many as there are forward operations.
        kept: Storages that stay anyway, beside those that the time step reads.
        weights: The bytes that each byte of a storage counts as; 1 if nothing is said.

    Source:
        The cut is a project selection (Picard, Maximal Closure of a Graph, 1976).
    """

    def __init__(
        self,
        problem: CheckpointProblem,
        time_step: int,
        *,
        kept: Kept = frozenset(),
        weights: Mapping[Storage, float] | None = None,
    ) -> None:
        self.problem, self.time_step = problem, time_step
        index, producer = problem.index, problem.producer
        made = (storage for storage, node in producer.items() if index[node] < time_step)
        demanded = [storage for storage in made if problem.is_read(storage, time_step + 1)]
        there = kept.union(problem.read_at(time_step))
        wanted = problem.with_sources(demanded)
        self.bytes = {storage: 0 if storage in there else storage.nbytes for storage in wanted}
        self.free = frozenset(storage for storage, nbytes in self.bytes.items() if not nbytes)
        """The storages that cost nothing."""
        self.weights = {} if weights is None else weights
        makers = dict.fromkeys(producer[storage] for storage in self.bytes)
        widths = 1 + sum(node.is_transient for node in makers)
        self.parts = _parts_of_byte(sum(self.bytes.values()), widths)
        arcs = {s: self._width(s) for s in self.bytes}
        self.wide = sum(arcs.values()) + math.ceil(self.parts)
        """Wider than keeping everything: cut only if there is no other way."""
        self.closed = self.wide * widths
        """Wider than all of that together: such an arc is never cut."""
        self.most_weight = max(
            (arcs[s] / (self.parts * nbytes) for s, nbytes in self.bytes.items() if nbytes), default=1.0
        )
        """The largest number of bytes that a byte counts as."""
        self.flow = FlowNetwork()
        vertices = count(2)
        self.made = {storage: next(vertices) for storage in self.bytes}
        self.held = {storage: next(vertices) for storage in self.bytes}
        self.vertex = {node: next(vertices) for node in makers}
        self.feeds = {node: self._connect(node, vertex) for node, vertex in self.vertex.items()}
        never = problem.transient if time_step == len(problem.forward) else frozenset[Storage]()
        for storage, width in arcs.items():
            self.flow.add_arc(
                self.made[storage], self.held[storage], self.closed if storage in never else width
            )
        for storage in demanded:
            self.flow.add_arc(self.held[storage], FlowNetwork.SINK, self.closed)

    def _width(self, storage: Storage) -> int:
        return round(self.bytes[storage] * self.weights.get(storage, 1.0) * self.parts)

    def _connect(self, node: Node, vertex: int) -> int:
        """Adds an operation; returns the arc that feeds it."""
        for storage in self.results(node):
            self.flow.add_arc(vertex, self.made[storage], self.closed)
        for storage in self.problem.forward_reads[node] if node in self.problem.recomputable else ():
            self.flow.add_arc(self.held[storage], vertex, self.closed)
        return self.flow.add_arc(FlowNetwork.SOURCE, vertex, self.closed)

    def results(self, node: Node) -> list[Storage]:
        """The storages of the network that an operation makes."""
        return [storage for storage in self.problem.graph.allocates(node) if storage in self.bytes]

    def cut(self, price: Callable[[Node], float]) -> Kept:
        """The storages of a minimum cut; among several, that with the fewest operations to run again.

        Args:
            price: The bytes that running an operation again is worth; infinite if it must not run again.
        """
        return self.cut_with_repeats(price)[0]

    @property
    def width_bytes(self) -> float:
        """The bytes of the cut that was found last, with the prices of what runs again as bytes."""
        return self.flow.width / self.parts

    @property
    def rounding_bytes(self) -> float:
        """The most by which rounded prices can make a cut wider."""
        return len(self.feeds) / 2 / self.parts

    def cut_with_repeats(self, price: Callable[[Node], float]) -> tuple[Kept, list[Node]]:
        """The same, with the operations that run again."""
        for node, arc in self.feeds.items():
            width = price(node) * self.parts if node in self.problem.recomputable else math.inf
            most = self.wide if node.is_transient else self.closed
            self.flow.set_capacity(arc, round(min(width, most)))
        again = self.flow.sink_side()
        kept = frozenset(s for s in self.bytes if self.held[s] in again and self.made[s] not in again)
        return kept, [node for node, vertex in self.vertex.items() if vertex in again]
