"""The graph that fused nodes make, and the operations that each of them runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx

from ...ir import (
    FUSED,
    RESULT,
    Argument,
    Graph,
    Node,
    Region,
    Step,
    Storage,
    Symbol,
    Trait,
    Value,
    fused_arguments,
    place_of,
    results_in,
)
from ...torch_support.fusible import is_multipass
from .fusion_groups import FusionGroups, dependencies

__all__ = ["Covered", "Fusion"]


@dataclass(frozen=True, slots=True)
class Covered:
    """The operations that a kernel runs, by name: its own, and those that it makes again."""

    own: frozenset[str]
    again: frozenset[str]


class Fusion:
    """Writes a graph with groups of operations as one node each."""

    def __init__(self, groups: FusionGroups, parts: Mapping[Node, Node]) -> None:
        self.groups, self.parts = groups, parts
        self.before = groups.graph
        self.maker = {value: node for node in self.before.nodes for value in node.values}

    def graph(self) -> tuple[Graph, Mapping[str, Covered]]:
        """Returns the graph, and the operations that each fused node runs, by its name."""
        bodies = [_Body(self, group) for group in self.groups.groups]
        kept = [body for body in bodies if body.is_kernel]
        inside = {node for body in kept for node in body.members}
        needed = self._needed(kept)
        fused = [(body, node) for body in kept if (node := body.node(needed)) is not None]
        rest = [n for n in self.before.operations if n not in inside and _is_live(n, needed)]
        covered = {
            node.name: Covered(self._names(body.members), self._names(body.again)) for body, node in fused
        }
        return replace(self.before, nodes=tuple(self._in_order(rest, fused))), covered

    def _names(self, nodes: Iterable[Node]) -> frozenset[str]:
        """The names of operations, or of those that they are parts of."""
        return frozenset(self.parts.get(node, node).name for node in nodes)

    def _needed(self, bodies: Sequence[_Body]) -> set[Storage]:
        """The storages that others than their own kernel read, and results.

        An operation whose results are made again wherever they were read is not there any more, nor what it
        alone reads.
        """
        needed = {o.value.storage for o in self.before.outputs if o.value is not None}
        of_body = {node: body for body in bodies for node in body.members}
        waiting = [*needed]
        live = {node for node in self.before.operations if node not in of_body and _is_live(node, ())}
        waiting += [storage for node in live for storage in self.before.reads(node)]
        while waiting:
            storage = waiting.pop()
            needed.add(storage)
            maker = self.before.producers.get(storage)
            if maker is None or maker in live:
                continue
            body = of_body.get(maker)
            live.update([maker] if body is None else body.members)
            reads = self.before.reads(maker) if body is None else [value.storage for value in body.reads]
            waiting += [read for read in reads if read not in needed]
        return needed

    def _in_order(self, rest: Sequence[Node], fused: Sequence[tuple[_Body, Node]]) -> Iterator[Node]:
        """Yields all operations after those that they depend on, near their old places, and their views."""
        position = {node: index for index, node in enumerate(self.before.operations)}
        unit: dict[Node, Node] = {node: node for node in rest}
        place = {node: position[node] for node in rest}
        for body, node in fused:
            unit.update(dict.fromkeys(body.members, node))
            place[node] = max(map(position.__getitem__, body.members))
        waits = nx.DiGraph()
        waits.add_nodes_from(place)
        for node, before in dependencies(self.before).items():
            waits.add_edges_from((unit[each], unit[node]) for each in before if each in unit and node in unit)
        for _, node in fused:  # of what a kernel makes again, the operands
            makers = map(self.before.producers.get, (value.storage for value in node.operands))
            waits.add_edges_from((unit[maker], node) for maker in makers if maker is not None)
        waits.remove_edges_from([(node, node) for node in place])

        def key(node: Node) -> tuple[bool, int]:
            return node.region is Region.BACKWARD, place[node]

        yield from _with_views(self.before, list(nx.lexicographical_topological_sort(waits, key)))


def _is_live(node: Node, needed: Container[Storage]) -> bool:
    """Whether an operation is there for its effect, or makes what is needed."""
    has_effect = bool(node.traits - {Trait.REORDERED, Trait.IN_PLACE}) or not node.values
    return has_effect or any(value.storage in needed for value in node.values)


def _with_views(graph: Graph, order: Sequence[Node]) -> Iterator[Node]:
    """Yields operations with the views that they, or outputs, read: each as soon as its operand is there."""
    wanted = {value for node in order for value in node.operands}
    wanted |= {output.value for output in graph.outputs if output.value is not None}
    views: dict[Value, list[Node]] = defaultdict(list)
    for node in reversed(graph.nodes):
        if node.is_view and wanted.intersection(node.values):
            wanted.update(node.operands)
            views[node.operands[0]].append(node)
    late: list[Node] = []
    is_backward = False

    def of(values: Sequence[Value]) -> Iterator[Node]:
        for value in values:
            for view in reversed(views.pop(value, [])):
                if view.region is Region.BACKWARD and not is_backward:
                    late.append(view)
                else:
                    yield view
                    yield from of(view.values)

    yield from of([entry.value for entry in graph.inputs])
    for node in order:
        if node.region is Region.BACKWARD and not is_backward:
            is_backward = True
            for view in late:
                yield view
                yield from of(view.values)
        yield node
        yield from of(node.values)


# ---------------------------------------------------------------------- one kernel


class _Body:
    """The operations of one group, with those that its kernel makes again and the views between them."""

    def __init__(self, fusion: Fusion, members: Sequence[Node]) -> None:
        self.fusion, self.members = fusion, list(members)
        self.steps: list[Step] = []
        self.inside: dict[Value, Symbol] = {}
        self.reads: tuple[Value, ...] = ()
        self.again: list[Node] = []
        """The operations of others that the kernel runs too."""
        own = set(members)
        self.remade = frozenset[Storage]()
        if members[0].region is Region.BACKWARD:
            self.remade = fusion.groups.remade
        self.own = frozenset(s for node in own for s in fusion.before.allocates(node))
        read: dict[Value, None] = {}
        for node in self.members:
            self._add(node, read)
        self.reads = tuple(read)

    @property
    def is_kernel(self) -> bool:
        """Whether it is more than one operation that goes over its data once."""
        first = self.members[0]
        is_one = len(self.members) == 1 and not self.again and first not in self.fusion.parts
        return not is_one or is_multipass(first.op)

    def _add(self, node: Node, read: dict[Value, None]) -> None:
        """Appends an operation, after those that its operands come from."""
        arguments = tuple(self._argument(argument, read) for argument in node.arguments)
        keywords = tuple((key, self._argument(argument, read)) for key, argument in node.keywords)
        index = len(self.steps)
        self.steps.append(Step(node.op, arguments, keywords))
        for which, value in enumerate(node.results):
            if value is not None:
                self.inside[value] = Symbol(RESULT, f"{index}.{which}" if node.is_sequence else str(index))

    def _argument(self, argument: Argument, read: dict[Value, None]) -> Argument:
        if isinstance(argument, tuple):
            return tuple(self._argument(item, read) for item in argument)
        if not isinstance(argument, Value):
            return argument
        if argument in self.inside:
            return self.inside[argument]
        maker = self.fusion.maker.get(argument)
        if maker is not None and self._is_within(argument.storage, maker):
            if not maker.is_view:
                self.again.append(maker)
            self._add(maker, read)
            return self.inside[argument]
        read[argument] = None
        return argument

    def _is_within(self, storage: Storage, maker: Node) -> bool:
        """Whether the kernel makes a value itself: a view of its own result, or what it makes again."""
        producer = self.fusion.before.producers.get(storage)
        if producer is None or storage in self.own:
            return producer is not None and maker.is_view
        if storage in self.remade:
            return True
        return not producer.operands and producer in self.fusion.groups.fusible

    def node(self, needed: AbstractSet[Storage]) -> Node | None:
        """The node that runs all of it; None if nothing that it makes is needed."""
        made = [value for node in self.members for value in node.values if value.storage in needed]
        if not made:
            return None
        steps, returns = _pruned(self.steps, [self.inside[value] for value in made])
        arguments, keywords = fused_arguments(steps, returns)
        return replace(
            self.members[-1],
            op=FUSED,
            arguments=arguments,
            keywords=keywords,
            results=tuple(made),
            is_sequence=True,
            traits=frozenset((Trait.REORDERED,)),
        )


def _pruned(steps: Sequence[Step], returns: Sequence[Symbol]) -> tuple[list[Step], list[Symbol]]:
    """Leaves out the operations that nothing which is returned depends on."""
    wanted = {place_of(symbol) for symbol in returns}
    for index in reversed(range(len(steps))):
        if index in wanted:
            wanted.update(map(place_of, results_in((steps[index].arguments, steps[index].keywords))))
    places = {old: new for new, old in enumerate(sorted(wanted))}
    kept = [
        Step(step.op, _moved(step.arguments, places), _moved(step.keywords, places))
        for index, step in enumerate(steps)
        if index in wanted
    ]
    return kept, [_moved(symbol, places) for symbol in returns]


def _moved(argument: Any, places: Mapping[int, int]) -> Any:
    if isinstance(argument, tuple):
        return tuple(_moved(item, places) for item in argument)
    if isinstance(argument, Symbol) and argument.kind == RESULT:
        _, dot, which = argument.name.partition(".")
        return Symbol(RESULT, f"{places[place_of(argument)]}{dot}{which}")
    return argument
