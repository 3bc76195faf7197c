"""The operations of forward in a linear order, with the time, the bytes and the transfers of its segments."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property

from ...ir import Graph, InputRole, Node, Region, Storage
from ..costs.table import Costs
from .boundaries import boundary_bytes
from .placement import Dataflow, place_backward

__all__ = ["LinearOrder"]

_MOST_CUT_POINTS = 160
"""The most cut points that are looked at: those that the fewest bytes cross, spread over the order."""


class LinearOrder:
    """The operations of forward in their order, each with the operations of backward that belong to it.

    An operation of backward belongs to the latest operation of forward that it cannot run in an earlier stage
    than. So it is in the stage of that one, wherever the order is cut.

    Args:
        graph: The training graph as it was captured.
        costs: The costs of its operations.
        release_seconds: The time of adding the gradient of a parameter to its sum, by the parameter's
            storage.
        order: The operations of forward in an order in which each comes after what it reads; None for the
            order in which they run.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        release_seconds: Mapping[Storage, float] | None = None,
        order: Sequence[Node] | None = None,
    ) -> None:
        self.flow = Dataflow(graph)
        self.costs = costs
        self.release_seconds = release_seconds or {}
        self.operations = self.flow.forward if order is None else tuple(order)
        self.placement = place_backward(
            self.flow,
            {node: position for position, node in enumerate(self.operations)},
            max(len(self.operations), 1),
        )
        self.cut_points = self._cut_points()

    @property
    def graph(self) -> Graph:
        """The training graph."""
        return self.flow.graph

    def in_order(self, order: Sequence[Node]) -> LinearOrder:
        """Gives the same operations in another order."""
        return LinearOrder(self.graph, self.costs, self.release_seconds, order)

    def stages(self, cuts: Sequence[int]) -> dict[Node, int]:
        """The stage of each operation of forward if the order is cut before the operations `cuts`."""
        return {node: bisect.bisect_right(cuts, position) for position, node in enumerate(self.operations)}

    @cached_property
    def crossing_bytes(self) -> list[tuple[int, int]]:
        """For each position, the bytes that go forward and that come back if the order is cut before it."""
        nothing = (0, 0)
        return [nothing, *boundary_bytes(self.flow, self.placement, len(self.operations)), nothing]

    def _cut_points(self) -> tuple[int, ...]:
        """Chooses the cut points to look at: 0, the end, and positions that something crosses."""
        count = len(self.operations)
        apart = {position for group in self.flow.together for position in self._within(group)}
        inner = [
            position
            for position in range(1, count)
            if position not in apart and self.crossing_bytes[position][0]
        ]
        if len(inner) <= _MOST_CUT_POINTS:
            return (0, *inner, count)
        seconds = self._prefix([self._seconds[k] for k in range(count)])
        chosen: set[int] = set()
        step = seconds[-1] / _MOST_CUT_POINTS
        buckets = itertools.groupby(
            inner, key=lambda position: int(seconds[position] / step) if step else position
        )
        for _, bucket in buckets:
            chosen.add(min(bucket, key=lambda position: (sum(self.crossing_bytes[position]), position)))
        return (0, *sorted(chosen), count)

    def _within(self, group: frozenset[Node]) -> range:
        """The positions at which a cut would part a group."""
        at = [position for position, node in enumerate(self.operations) if node in group]
        return range(min(at) + 1, max(at) + 1)

    @staticmethod
    def _prefix(values: Sequence[float]) -> list[float]:
        return list(itertools.accumulate(values, initial=0.0))

    @cached_property
    def _seconds(self) -> list[float]:
        return [a + b for a, b in zip(self._forward_seconds, self._backward_seconds, strict=True)]

    @cached_property
    def _forward_seconds(self) -> list[float]:
        return [self.costs.seconds[node] for node in self.operations]

    @cached_property
    def _backward_seconds(self) -> list[float]:
        found = [0.0] * len(self.operations)
        for node, position in self.placement.stages.items():
            if node.region is Region.BACKWARD and found:
                found[position] += self.costs.seconds[node]
        for storage, seconds in self.release_seconds.items():
            found[max(self.placement.reader_stages.get(storage, (0,)))] += seconds
        return found

    @cached_property
    def forward_prefix(self) -> list[float]:
        """Seconds of forward before each position."""
        return self._prefix(self._forward_seconds)

    @cached_property
    def backward_prefix(self) -> list[float]:
        """Seconds of the backward that belongs to what is before each position."""
        return self._prefix(self._backward_seconds)

    @cached_property
    def saved_prefix(self) -> list[float]:
        """Bytes that forward makes before each position, and backward reads."""
        graph = self.graph
        read = {s for node in graph.operations if node.region is Region.BACKWARD for s in graph.reads(node)}
        made = [sum(s.nbytes for s in graph.allocates(node) if s in read) for node in self.operations]
        return self._prefix([float(nbytes) for nbytes in made])

    @cached_property
    def largest(self) -> list[int]:
        """The most bytes that an operation at each position reads, makes and works with."""
        graph = self.graph
        found = [0] * len(self.operations)
        for node, position in self.placement.stages.items():
            if found:
                touched = {*graph.reads(node), *graph.allocates(node)} - self.flow.static.keys()
                nbytes = sum(s.nbytes for s in touched) + self.costs.workspace_bytes[node]
                found[position] = max(found[position], nbytes)
        return found

    @cached_property
    def statics(self) -> list[tuple[Storage, bool, tuple[int, ...]]]:
        """Static storages, whether each is a trained parameter, and the positions of their readers."""
        trained = {
            i.value.storage for i in self.graph.inputs if i.role is InputRole.PARAMETER and i.requires_grad
        }
        return [
            (storage, storage in trained, positions)
            for storage, positions in self.placement.reader_stages.items()
        ]

    def seconds(self, begin: int, end: int) -> float:
        """Time of the operations from `begin` to before `end`, forward and backward."""
        forward = self.forward_prefix[end] - self.forward_prefix[begin]
        return forward + self.backward_prefix[end] - self.backward_prefix[begin]
