"""A partition problem over items: sets of nodes that stay together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

__all__ = ["CoarsenedProblem", "DeviceClass", "add_net"]


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Devices of one kind.

    Args:
        name: Such as `accelerator`.
        count: The number of them; a partition may leave some without nodes.
        capacity_bytes: The memory of each; infinite if memory does not matter.
        pays_transfers: Whether transfers count in its load. The host, in whose memory they end, pays none.
    """

    name: str
    count: int
    capacity_bytes: float = math.inf
    pays_transfers: bool = True


@dataclass(frozen=True)
class CoarsenedProblem:
    """Items in an order of dependence, with what each takes, and the nets that transfers are paid for.

    A net is a set of items: those that make or read some outputs. A device pays for the net if it has some
    of its items but not all: as the one that makes, if another reads, or as one that reads, if another
    makes. So outputs between the same items are one net, whichever way they go.

    Args:
        members: For each item, the positions of its nodes in the problem.
        seconds: For each item, its time on a device of each class.
        memory_bytes: For each item, the memory that it takes.
        edges: Pairs of items; the first must not be behind the second. They have no cycle.
        nets: The seconds to transfer the outputs of each net, by its items.
    """

    members: tuple[tuple[int, ...], ...]
    seconds: tuple[tuple[float, ...], ...]
    memory_bytes: tuple[int, ...]
    edges: frozenset[tuple[int, int]]
    nets: Mapping[frozenset[int], float]

    @cached_property
    def predecessors(self) -> tuple[frozenset[int], ...]:
        """For each item, the items that edges lead from."""
        return _ends(len(self.members), ((head, tail) for tail, head in self.edges))

    @cached_property
    def successors(self) -> tuple[frozenset[int], ...]:
        """For each item, the items that edges lead to."""
        return _ends(len(self.members), self.edges)

    def joined(self, pairs: Iterable[tuple[int, int]]) -> CoarsenedProblem:
        """Joins the items of each pair, and whatever is then on a cycle."""
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(len(self.members)))
        graph.add_edges_from(self.edges)
        for one, other in pairs:
            graph.add_edges_from([(one, other), (other, one)])
        condensed = nx.condensation(graph)
        parts = [sorted(condensed.nodes[part]["members"]) for part in condensed]
        into: dict[int, int] = condensed.graph["mapping"]
        nets: dict[frozenset[int], float] = {}
        for items, seconds in self.nets.items():
            add_net(nets, frozenset(into[item] for item in items), seconds)
        return CoarsenedProblem(
            tuple(tuple(node for item in part for node in self.members[item]) for part in parts),
            tuple(
                tuple(map(sum, zip(*(self.seconds[item] for item in part), strict=True))) for part in parts
            ),
            tuple(sum(self.memory_bytes[item] for item in part) for part in parts),
            frozenset(condensed.edges),
            nets,
        )


def _ends(count: int, edges: Iterable[tuple[int, int]]) -> tuple[frozenset[int], ...]:
    found: list[set[int]] = [set() for _ in range(count)]
    for tail, head in edges:
        found[tail].add(head)
    return tuple(map(frozenset, found))


def add_net(nets: dict[frozenset[int], float], items: frozenset[int], seconds: float) -> None:
    """Adds a net, unless all its items are one, or it costs nothing."""
    if len(items) > 1 and seconds > 0:
        nets[items] = nets.get(items, 0.0) + seconds
