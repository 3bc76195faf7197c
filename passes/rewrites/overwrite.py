"""Lets kernels of backward write their results over what they read last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace

from ...ir import FUSED, Graph, Node, Region, Storage, Trait, Value, with_overwritten
from .fusion_groups import dependencies

__all__ = ["with_overwrites"]


def with_overwrites(graph: Graph) -> Graph:
    """Returns a graph whose kernels of backward reuse the memory of operands that nothing needs any more.

    That is so in whatever order a schedule runs: all that reads such an operand, or what forward could make
    of it again, has to come before the kernel.
    """
    fused = [node for node in graph.operations if node.op == FUSED and node.region is Region.BACKWARD]
    if not fused:
        return graph
    last = _Last(graph)
    changed: dict[Node, Node] = {}
    for node in fused:
        pairs: dict[Value, int] = {}
        free = {value: once for value in node.operands if (once := last.is_at(value, node)) is not None}
        for index, made in sorted(enumerate(node.values), key=lambda each: -each[1].type.nbytes):
            operand = next((value for value in free if value.type == made.type and value not in pairs), None)
            if operand is not None and made.type.nbytes == made.storage.nbytes:
                pairs[operand] = index
        if pairs:
            changed[node] = with_overwritten(node, pairs)
            for each in {reader for value in pairs for reader in free[value]}:
                changed[each] = replace(each, traits=each.traits | {Trait.PINNED})
    return replace(graph, nodes=tuple(changed.get(node, node) for node in graph.nodes)) if changed else graph


class _Last:
    """Tells which operations are the last to need a storage.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.fixed = graph.static_storages | graph.tangent_storages | graph.output_storages
        self.bits = {node: 1 << index for index, node in enumerate(graph.operations)}
        self.before: dict[Node, int] = {}
        for node, waits in dependencies(graph).items():
            self.before[node] = self.bits[node]
            for each in waits:
                self.before[node] |= self.before[each]
        self.readers: dict[Storage, list[Node]] = defaultdict(list)
        for node in graph.operations:
            for storage in graph.reads(node):
                self.readers[storage].append(node)

    def is_at(self, value: Value, node: Node) -> frozenset[Node] | None:
        """Tells whether nothing needs the memory of an operand of a node once the node has run.

        Returns:
            The operations of forward that must not run again for that; None if it is needed.
        """
        storage, type = value.storage, value.type
        if storage in self.fixed or storage not in self.graph.producers or not type.is_dense:
            return None
        if any(reader.releases is not None for reader in self.readers[storage]):
            return None  # it may be the parameter's `.grad` now
        if type.nbytes != storage.nbytes or [v.storage for v in node.operands].count(storage) > 1:
            return None
        for once in (frozenset[Node](), self._summing(storage)):
            if all(self.before[node] & self.bits[reader] for reader in self._in_backward(storage, once)):
                return once
        return None

    def _summing(self, storage: Storage) -> frozenset[Node]:
        """The operations of forward that make only small tensors of one, which may as well be kept."""
        return frozenset(
            node
            for node in self.readers[storage]
            if node.region is Region.FORWARD
            and not node.is_transient
            and self.graph.allocated_bytes(node) * _SMALL <= storage.nbytes
        )

    def _in_backward(self, storage: Storage, once: AbstractSet[Node]) -> Iterator[Node]:
        """The operations of backward that read a storage, or what forward can make of it again.

        Args:
            storage: The storage.
            once: Operations of forward that do not run again.
        """
        seen = {storage}
        waiting = [storage]
        while waiting:
            for reader in self.readers[waiting.pop()]:
                if reader.region is Region.BACKWARD:
                    yield reader
                elif reader.is_recomputable and reader not in once:
                    made = set(self.graph.allocates(reader)) - seen
                    seen |= made
                    waiting += made


_SMALL = 64
"""A tensor of less than this part of another one's bytes may as well be kept as be made of it again."""
