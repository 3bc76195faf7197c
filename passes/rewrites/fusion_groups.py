"""Groups of operations that one kernel can compute, and what kernels of backward make again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from ...ir import Graph, Node, Region, Storage, Trait, Value, is_plain_argument, output_dependencies
from ...torch_support.fusible import DIVISIONS, is_cheap, is_fusible

__all__ = ["FusionGroups", "dependencies"]

_INTERNAL = 1.5
"""The weight of a byte that is written for backward alone, to that of one that is written anyway."""


def dependencies(graph: Graph) -> dict[Node, list[Node]]:
    """Returns the operations that each has to come after: those that make or write what it reads or writes.

    Draws, and exchanges between stages, keep their order.
    """
    found: dict[Node, list[Node]] = {}
    writer: dict[Storage, Node] = dict(graph.producers)
    readers: dict[Storage, list[Node]] = defaultdict(list)
    last: dict[Trait, Node] = {}
    for node in graph.operations:
        before = dict.fromkeys(writer[s] for s in graph.reads(node) if s in writer and writer[s] is not node)
        if Trait.EFFECT in node.traits:
            written = node.operands[0].storage
            before.update(dict.fromkeys(each for each in readers[written] if each is not node))
            writer[written] = node
        for trait in (Trait.RANDOM, Trait.EXCHANGE):
            if trait in node.traits:
                before.update(dict.fromkeys(filter(None, [last.get(trait)])))
                last[trait] = node
        for storage in graph.reads(node):
            readers[storage].append(node)
        found[node] = list(before)
    return found


@dataclass(frozen=True)
class FusionGroups:
    """The groups of a graph.

    Operations are in one group if data flows between them without leaving it: on each way from one to the
    other there are only operations of the group (their level is the same). They share large tensors, are of
    one half, are computed from the gradients of the same outputs, and have one annotation.

    Args:
        graph: The graph.
        whole: Operations, by name, that are left as they are.
    """

    graph: Graph
    whole: AbstractSet[str] = frozenset()

    def is_fusible(self, node: Node) -> bool:
        """Whether an operation can be part of a kernel: it makes new tensors of numbers, and nothing else."""
        is_bare = not node.traits - {Trait.REORDERED, Trait.IN_PLACE}
        if node.name in self.whole or not is_fusible(node.op) or not is_bare:
            return False
        made = self.graph.allocates(node)
        types = [value.type for value in (*node.operands, *node.values)]
        return (
            len(made) == len(node.values) > 0
            and len({type.device for type in types}) == 1
            and all(type.numel and type.dtype.value in _TYPES for type in types)
            and all(v.type.is_dense and v.type.nbytes <= v.storage.nbytes for v in node.values)
            and is_plain_argument(node.arguments)
            and all(map(self._is_view_within, node.operands))
            and (node.op not in DIVISIONS or all(type.dtype.value in _POINT for type in types))
            and all(is_plain_argument(argument) for _, argument in node.keywords)
        )

    def _is_view_within(self, value: Value) -> bool:
        """Whether a kernel can derive a value from the one that fills its storage."""
        view = self._views.get(value)
        return view is None or (is_fusible(view.op) and all(map(self._is_view_within, view.operands)))

    @cached_property
    def _views(self) -> dict[Value, Node]:
        return {value: node for node in self.graph.nodes if node.is_view for value in node.values}

    @cached_property
    def fusible(self) -> frozenset[Node]:
        """The operations that can be part of a kernel."""
        return frozenset(filter(self.is_fusible, self.graph.operations))

    @cached_property
    def groups(self) -> list[list[Node]]:
        """The groups, each in the order of the graph; an operation that makes numbers of none is in none."""
        found: dict[Node, _Group] = {}
        levels: dict[Node, int] = {}
        depends = output_dependencies(self.graph)
        for node, before in dependencies(self.graph).items():
            is_fused = node in self.fusible
            levels[node] = max((levels[p] + (is_fused and p not in self.fusible) for p in before), default=0)
            if not is_fused or not node.operands:
                continue
            outputs = depends.get(node.values[0], frozenset[int]())
            own = _Group((node.region, outputs, node.annotation), {}, [])
            own.add(node, self.graph)
            near = dict.fromkeys(found[p] for p in before if p in found and levels[p] == levels[node])
            if not own.joins(near):
                levels[node] += 1
                near = {}
            for group in near:
                own.touched.update(group.touched)
                own.members = [*group.members, *own.members]
            found.update(dict.fromkeys(own.members, own))
        position = {node: index for index, node in enumerate(self.graph.operations)}
        groups = dict.fromkeys(found.values())
        return [sorted(group.members, key=position.__getitem__) for group in groups]

    # ------------------------------------------------------------------ made again within backward

    @cached_property
    def remade(self) -> frozenset[Storage]:
        """The storages of forward that kernels of backward make within, of what they read instead.

        A minimum cut chooses what they read: the fewest bytes that only kernels of backward need. Reading
        what other operations of backward read anyway is free.
        """
        grouped = {node: index for index, group in enumerate(self.groups) for node in group}
        anyway = set(self.graph.static_storages | self.graph.output_storages)
        demanded: dict[Storage, None] = {}
        for node in self.graph.operations:
            if node.region is not Region.BACKWARD:
                continue
            for storage in self.graph.reads(node):
                if node not in grouped:
                    anyway.add(storage)
                elif self._cheap_maker(storage) is not None:
                    demanded[storage] = None
        network = nx.DiGraph()
        closure = self._closure(demanded)
        for storage in closure:
            cost = 0.0 if storage in anyway else storage.nbytes * self._weight(storage, grouped)
            network.add_edge((storage, "in"), (storage, "out"), capacity=cost)
            maker = self._cheap_maker(storage)
            if maker is None:
                network.add_edge("made", (storage, "in"))
            else:
                for read in self.graph.reads(maker):
                    network.add_edge((read, "out"), (storage, "in"))
            if storage in demanded:
                network.add_edge((storage, "out"), "read")
        if not demanded or "made" not in network:
            return frozenset()
        _, (made, _) = nx.minimum_cut(network, "made", "read")
        read = {s for s in closure if (s, "in") in made and (s, "out") not in made}
        again: set[Storage] = set()
        open_storages = [storage for storage in demanded if storage not in read]
        while open_storages:
            storage = open_storages.pop()
            if storage in again:
                continue
            again.add(storage)
            maker = self._cheap_maker(storage)
            assert maker is not None, "the cut is between what is made and what is read"
            open_storages += [s for s in self.graph.reads(maker) if s not in read and self._cheap_maker(s)]
        return frozenset(again)

    def _cheap_maker(self, storage: Storage) -> Node | None:
        """The operation of forward that makes a storage, if any kernel can do so for next to nothing."""
        node = self.graph.producers.get(storage)
        if node is None or node.region is not Region.FORWARD or node not in self.fusible:
            return None
        return node if node.operands and is_cheap(node.op) and node.annotation is None else None

    def _closure(self, demanded: Mapping[Storage, None]) -> list[Storage]:
        found = dict.fromkeys(demanded)
        waiting = list(demanded)
        while waiting:
            maker = self._cheap_maker(waiting.pop())
            for read in () if maker is None else self.graph.reads(maker):
                if read not in found:
                    found[read] = None
                    waiting.append(read)
        return list(found)

    def _weight(self, storage: Storage, grouped: Mapping[Node, int]) -> float:
        maker = self.graph.producers.get(storage)
        group = grouped.get(maker) if maker is not None else None
        if group is None:
            return 1.0
        readers = self._readers.get(storage, [])
        return _INTERNAL if all(grouped.get(node) == group for node in readers) else 1.0

    @cached_property
    def _readers(self) -> dict[Storage, list[Node]]:
        found: dict[Storage, list[Node]] = defaultdict(list)
        for node in self.graph.operations:
            if node.region is Region.FORWARD:
                for storage in self.graph.reads(node):
                    found[storage].append(node)
        return found


_SMALL = 16
"""A tensor is small if the largest beside it has more than this many times its bytes."""


@dataclass(eq=False, slots=True)
class _Group:
    """A group while it grows.

    Args:
        key: Equal for all operations of one group.
        touched: The bytes of each storage that it reads or makes.
        members: Its operations.
    """

    key: object
    touched: dict[Storage, int]
    members: list[Node]

    def add(self, node: Node, graph: Graph) -> None:
        """Adds an operation."""
        self.members.append(node)
        self.touched.update((s, s.nbytes) for s in (*graph.reads(node), *graph.allocates(node)))

    def joins(self, groups: Collection[_Group]) -> bool:
        """Whether one kernel can run an operation, which is this group, with those whose results it reads.

        It cannot if it knows the large tensors of one of them by small ones alone, such as sums over tiles,
        and reads others: all would have to be there at once.
        """
        largest_bytes = max((max(group.touched.values()) for group in (self, *groups)), default=0)
        large = {
            s for g in (self, *groups) for s, nbytes in g.touched.items() if nbytes * _SMALL >= largest_bytes
        }
        apart = [
            g
            for g in groups
            if large & g.touched.keys() and not large & g.touched.keys() & self.touched.keys()
        ]
        is_one = not apart or (len(groups) == 1 and not large & self.touched.keys())
        return is_one and all(group.key == self.key for group in groups)


_POINT = frozenset(("float32", "float64", "bfloat16", "float16"))
_TYPES = _POINT | frozenset(("bool", "int64", "int32", "int16", "int8", "uint8"))
