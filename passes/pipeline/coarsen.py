"""A partition problem with blocks instead of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from .partition_problem import PartitionProblem

__all__ = ["Coarse", "coarsen"]


@dataclass(frozen=True)
class Coarse:
    """Items in an order of dependence, what each takes, and the nets that transfers are paid for.

    A net is a set of items: those that make or read some outputs. A device pays for the net if it has some
    of its items but not all: as the one that makes, if another reads, or as one that reads, if another
    makes. So outputs between the same items are one net, whichever way they go.

    Args:
        members: For each item the positions of its nodes in the problem.
        seconds: For each item its time on a device of each class.
        memory_bytes: For each item.
        edges: Pairs of items; the first must not be behind the second. They have no cycle.
        nets: Seconds to move what a net is about, by its items.
    """

    members: tuple[tuple[int, ...], ...]
    seconds: tuple[tuple[float, ...], ...]
    memory_bytes: tuple[int, ...]
    edges: frozenset[tuple[int, int]]
    nets: Mapping[frozenset[int], float]

    @cached_property
    def predecessors(self) -> tuple[frozenset[int], ...]:
        """For each item those that edges lead from."""
        return _ends(len(self.members), ((head, tail) for tail, head in self.edges))

    @cached_property
    def successors(self) -> tuple[frozenset[int], ...]:
        """For each item those that edges lead to."""
        return _ends(len(self.members), self.edges)

    def spread(self, chosen: Sequence[int], nodes: int) -> tuple[int, ...]:
        """What was chosen for each item, for each of `nodes` nodes."""
        found = [0] * nodes
        for members, choice in zip(self.members, chosen, strict=True):
            for node in members:
                found[node] = choice
        return tuple(found)

    def joined(self, pairs: Iterable[tuple[int, int]]) -> Coarse:
        """The same with the items of each pair in one, and whatever is then on a cycle."""
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
            _add(nets, frozenset(into[item] for item in items), seconds)
        return Coarse(
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


def _add(nets: dict[frozenset[int], float], items: frozenset[int], seconds: float) -> None:
    if len(items) > 1 and seconds > 0:
        nets[items] = nets.get(items, 0.0) + seconds


def coarsen(
    problem: PartitionProblem, members: Sequence[Sequence[int]], edges: Iterable[tuple[int, int]]
) -> Coarse:
    """The problem with given sets of nodes as items.

    Args:
        problem: The graph.
        members: The positions of the nodes of each item; all nodes, each once.
        edges: The order that partitions have to follow, between items.
    """
    item_of = {node: item for item, part in enumerate(members) for node in part}
    nets: dict[frozenset[int], float] = {}
    for position, node in enumerate(problem.nodes):
        touched = {item_of[position]} | {item_of[reader] for reader in problem.readers[position]}
        _add(nets, frozenset(touched), node.transfer_seconds)
    kinds = range(len(problem.classes))
    return Coarse(
        tuple(map(tuple, members)),
        tuple(
            tuple(sum(problem.nodes[node].seconds[kind] for node in part) for kind in kinds)
            for part in members
        ),
        tuple(sum(problem.nodes[node].memory_bytes for node in part) for part in members),
        frozenset(edges),
        nets,
    )
