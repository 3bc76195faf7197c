"""Derives from the nodes of a graph what the check of its schedules keeps its books with."""

from __future__ import annotations

from ..graph import Gradients, Graph, InputRole, Node, OutputRole, Trait
from ..types import Storage, Value

__all__ = ["IN_ORDER", "GraphFacts"]

IN_ORDER = frozenset({Trait.RANDOM, Trait.EFFECT, Trait.EXCHANGE})
"""Operations with these traits keep the order of the graph, except those that release a gradient."""


class GraphFacts:
    """Says who allocates, who overwrites and what stays, derived here from the nodes alone.

    Attributes:
        tangents: Storages that arrive with the loss.
        static: Storages that are on the device before and after the step.
        delivered: Storages that the caller receives.
        inputs: Static storages that each call has of its own.
        offloaded: The tier of each storage that lives in one between steps.
        changes: For each optimizer step within backward, the offloaded storages that it changes.
        allocates: The storages that each operation allocates.
        producer: The operation that allocates each storage.
        effects_behind: The effects that must have run before a value in a static storage holds its numbers.
        runs_before: For each effect, the pinned nodes that read the storage before it is overwritten.
        in_order: The operations that every schedule runs in the order of the graph.
        left: Storages that a call leaves with the caller.
        gradients: Bytes of the gradient of each parameter; tied parameters are one tensor with one gradient.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        tangents = {i.value.storage for i in graph.inputs if i.role is InputRole.TANGENT}
        self.offloaded = {each.storage: each.tier for each in graph.offloaded_parameters}
        self.static = {i.value.storage for i in graph.inputs if i.role is not InputRole.TANGENT}
        self.static -= self.offloaded.keys()
        self.tangents = tangents - self.static
        delivered = {o.value.storage for o in graph.outputs if o.value is not None}
        self.delivered = delivered - self.static - self.tangents
        shared = {i.value.storage for i in graph.inputs if i.role is not InputRole.INPUT}
        self.inputs = self.static - tangents - shared
        self.changes = self._find_changes()
        self.allocates: dict[Node, set[Storage]] = {}
        self.producer: dict[Storage, Node] = {}
        self.effects_behind: dict[Value, frozenset[Node]] = {}
        self.runs_before: dict[Node, list[Node]] = {}
        self._read_nodes()
        self.in_order = [n for n in self.allocates if n.traits & IN_ORDER and n.releases is None]
        self.left: set[Storage] = set()
        self.gradients: dict[object, int] = {}
        self._read_outputs()

    def effects_read(self, node: Node) -> frozenset[Node]:
        """Returns the effects that must have run before a node reads its operands."""
        none: frozenset[Node] = frozenset()
        return none.union(*(self.effects_behind.get(value, none) for value in node.operands))

    def _find_changes(self) -> dict[Node, set[Storage]]:
        targets = {i.value: i.target for i in self.graph.inputs if i.role is InputRole.PARAMETER}
        states = {each.parameter: each.storage for each in self.graph.offloaded_parameters if each.is_state}
        changes: dict[Node, set[Storage]] = {}
        for node in self.graph.nodes:
            if node.releases is Gradients.APPLIED:
                parameter = node.operands[0]
                touched = {parameter.storage, states.get(targets[parameter], parameter.storage)}
                changes[node] = touched & self.offloaded.keys()
        return changes

    def _read_nodes(self) -> None:
        pinned: list[Node] = []
        for node in self.graph.nodes:
            if node.is_view:
                behind = self.effects_read(node)
                self.effects_behind.update((value, behind) for value in node.values if behind)
                continue
            storages = {value.storage for value in node.values} - self.static - self.tangents
            storages -= self.offloaded.keys()
            self.allocates[node] = {s for s in storages if self.producer.setdefault(s, node) is node}
            if Trait.EFFECT in node.traits:
                target = node.operands[0].storage
                self.runs_before[node] = [p for p in pinned if any(v.storage is target for v in p.operands)]
                own = frozenset((node,))
                self.effects_behind.update((v, own) for v in node.values if v.storage is target)
            if Trait.PINNED in node.traits:
                pinned.append(node)

    def _read_outputs(self) -> None:
        entries = {f"{i.role.value}:{i.target}": i for i in self.graph.inputs}
        results = {o.value.storage for o in self.graph.outputs if o.value and o.role is OutputRole.OUTPUT}
        for output in self.graph.outputs:
            storage = output.value.storage if output.value is not None else None
            if storage is None or storage not in self.producer:
                continue
            if storage in results or entries[output.target].role is InputRole.INPUT:
                self.left.add(storage)
            else:
                value = entries[output.target].value
                self.gradients[value.storage, value.type] = storage.nbytes
