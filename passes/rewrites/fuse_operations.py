"""The pass that makes one operation of each run of operations that one kernel computes."""

from __future__ import annotations

import heapq
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import networkx as nx

from ...ir import (
    FUSED,
    RESULT,
    Argument,
    Graph,
    Kernel,
    Node,
    Region,
    Step,
    Storage,
    Symbol,
    Trait,
    UsageError,
    Value,
    fused_arguments,
    place_of,
    results_in,
)
from ...torch_support.fusible import is_multipass
from ...torch_support.kernels import compile_kernels
from ..costs.measure_costs import Cost
from ..costs.table import Costs
from ..program import Program
from ..progress import Progress, report
from .decompose import with_parts
from .fusion_groups import FusionGroups, dependencies
from .overwrite import with_overwrites

__all__ = ["FuseOperations"]


_LOG = logging.getLogger("irc")

_NOISE = 1.02
"""A kernel that is measured to take up to this much of the time of its operations is taken as fast."""


@dataclass(frozen=True, slots=True)
class FuseOperations:
    """Fuses runs of operations that go element by element, reduce or move data: each is one node then.

    A fused node is compiled as one kernel, and planned as one operation. What only its own operations read is
    never in memory: it is no storage of the graph any more. Kernels of backward make cheap values of forward
    again within, if that leaves fewer bytes for forward to keep.

    Args:
        measure: Whether kernels are compiled and run here, operations left whole that are faster so, and the
            plan compared with the step by whole operations.
        overwrite: Whether kernels of backward may write results over operands that nothing needs any more.
        time_limit: Seconds of the clock after which no other kernel is compiled; their operations stay as
            they are.
        cost: Finds the times of kernels and operations. Not part of the text form.
    """

    name: ClassVar[str] = "fuse-operations"

    measure: bool = True
    overwrite: bool = True
    time_limit: float = 300.0
    cost: Cost = field(default=Cost(), metadata={"in_text": False})

    def run(self, program: Program, /) -> Program:
        """Rewrites the program's graph; returns the same program if nothing in it is worth a kernel.

        Raises:
            UnsupportedError: IRC470 if Inductor does not compile a kernel.
            UsageError: IRC413 after a pass that looked at the operations.
        """
        if program.costs is not None or program.schedule is not None:
            raise UsageError(
                "IRC413",
                f"{self.name} comes after the operations' costs were found",
                help="put it before them: fuse-operations,cost{...},plan-memory{...}",
            )
        graph, covered = self._fused(program.graph)
        kernels = program.kernels
        if self.measure and covered:
            whole = self._without_kernel(graph, covered)
            if whole:
                graph, covered = self._fused(program.graph, whole)
            costs = self._costs(program, graph)
            kernels = kernels or replace(program, costs=costs)
            faster = _faster_whole(program.graph, graph, covered, costs)
            if faster:
                graph, covered = self._fused(program.graph, whole | faster)
        if not covered:
            return program
        return replace(program, graph=graph, original=None, eager=None, kernels=kernels)

    def _fused(
        self, graph: Graph, whole: AbstractSet[str] = frozenset()
    ) -> tuple[Graph, Mapping[str, _Covered]]:
        """The graph with its fused nodes, and the operations that each of them runs, by its name.

        Args:
            graph: The graph.
            whole: Operations, by name, that are left as they are.
        """
        in_parts, wholes = with_parts(graph, FusionGroups(graph, whole).is_fusible)
        fused, covered = _Fusion(FusionGroups(in_parts, whole), wholes).graph()
        return with_overwrites(fused) if self.overwrite else fused, covered

    def _without_kernel(self, graph: Graph, covered: Mapping[str, _Covered]) -> frozenset[str]:
        """The operations, by name, whose kernels do not compile, or not in time.

        Kernels that move most bytes in a step, all in all, are compiled first.
        """
        kernels = {node.name: Kernel.of(node) for node in graph.operations if node.name in covered}
        moved_bytes: Counter[Kernel] = Counter()
        for node in graph.operations:
            if node.name in kernels:
                moved = {*graph.reads(node), *graph.allocates(node)}
                moved_bytes[kernels[node.name]] += sum(storage.nbytes for storage in moved)
        order = sorted(moved_bytes, key=lambda kernel: -moved_bytes[kernel])
        found = compile_kernels(
            order, self.time_limit, lambda *kernel: report(Progress("compile", kernel=kernel))
        )
        errors = [error for error in found.values() if error is not None]
        if errors and len(errors) == len(found):
            raise errors[0]
        for error in errors:
            _LOG.warning("operations run by themselves: %s", error.message)
        if len(found) < len(order):
            _LOG.info("%d of %d kernels were compiled in time", len(found), len(order))
        there = {kernel for kernel, error in found.items() if error is None}
        names = (covered[name].own for name, kernel in kernels.items() if kernel not in there)
        return frozenset[str]().union(*names)

    def _costs(self, program: Program, fused: Graph) -> Costs:
        """The costs of a program's operations as they are, as they were captured, and fused."""
        graphs = [program.original, program.graph, fused]
        tables = [
            self.cost.run(replace(program, graph=graph, original=None)).costs for graph in graphs if graph
        ]
        return Costs.united([table for table in tables if table is not None])


def _faster_whole(
    graph: Graph, fused: Graph, covered: Mapping[str, _Covered], costs: Costs
) -> frozenset[str]:
    """The operations, by name, that take less time by themselves than in kernels.

    Operations and kernels between which an operation is divided are compared as a whole. A kernel that makes
    something again is compared with what making it again takes.
    """
    kernel_seconds = {node.name: costs.seconds[node] for node in fused.operations if node.name in covered}
    seconds = {node.name: costs.seconds[node] for node in graph.operations}
    links = nx.Graph()
    for kernel, runs in covered.items():
        links.add_edges_from((("kernel", kernel), ("operation", name)) for name in runs.own)
    found: set[str] = set()
    for parts in nx.connected_components(links):
        names = {name for kind, name in parts if kind == "operation"}
        kernels = [name for kind, name in parts if kind == "kernel"]
        again = sum(seconds[name] for kernel in kernels for name in covered[kernel].again)
        if sum(map(kernel_seconds.__getitem__, kernels)) > _NOISE * (
            again + sum(map(seconds.__getitem__, names))
        ):
            found |= names
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Covered:
    """The operations that a kernel runs, by name: its own, and those that it makes again."""

    own: frozenset[str]
    again: frozenset[str]


class _Fusion:
    """Writes a graph with groups of operations as one node each."""

    def __init__(self, groups: FusionGroups, parts: Mapping[Node, Node]) -> None:
        self.groups, self.parts = groups, parts
        self.before = groups.graph
        self.maker = {value: node for node in self.before.nodes for value in node.values}

    def graph(self) -> tuple[Graph, Mapping[str, _Covered]]:
        """Returns the graph, and the operations that each fused node runs, by its name."""
        bodies = [_Body(self, group) for group in self.groups.groups]
        kept = [body for body in bodies if body.is_kernel]
        inside = {node for body in kept for node in body.members}
        needed = self._needed(kept)
        fused = [(body, node) for body in kept if (node := body.node(needed)) is not None]
        rest = [n for n in self.before.operations if n not in inside and _is_live(n, needed)]
        covered = {
            node.name: _Covered(self._names(body.members), self._names(body.again)) for body, node in fused
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
        waits: dict[Node, set[Node]] = {node: set() for node in place}
        for node, before in dependencies(self.before).items():
            if node in unit:
                waits[unit[node]].update(unit[each] for each in before if each in unit)
        for _, node in fused:  # of what a kernel makes again, the operands
            waits[node].update(
                unit[maker]
                for value in node.operands
                if (maker := self.before.producers.get(value.storage)) is not None
            )
        order = _sorted(waits, lambda node: (node.region is Region.BACKWARD, place[node]))
        yield from _with_views(self.before, order)


def _is_live(node: Node, needed: Container[Storage]) -> bool:
    """Whether an operation is there for its effect, or makes what is needed."""
    has_effect = bool(node.traits - {Trait.REORDERED}) or not node.values
    return has_effect or any(value.storage in needed for value in node.values)


def _sorted(waits: Mapping[Node, AbstractSet[Node]], key: Callable[[Node], Any]) -> list[Node]:
    """Orders nodes by a key, each behind those that it waits for."""
    left = {node: len(before - {node}) for node, before in waits.items()}
    then: dict[Node, list[Node]] = defaultdict(list)
    for node, before in waits.items():
        for each in before - {node}:
            then[each].append(node)
    numbers = {node: index for index, node in enumerate(waits)}
    ready = [(key(node), numbers[node], node) for node, count in left.items() if not count]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        *_, node = heapq.heappop(ready)
        order.append(node)
        for each in then[node]:
            left[each] -= 1
            if not left[each]:
                heapq.heappush(ready, (key(each), numbers[each], each))
    assert len(order) == len(waits), "groups depend on one another in a circle"
    return order


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

    def __init__(self, fusion: _Fusion, members: Sequence[Node]) -> None:
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
