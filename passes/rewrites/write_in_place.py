"""The pass that lets operations write into memory whose numbers nothing needs any more, as the model does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ...ir import Graph, Node, Region, Storage, Trait, Value, overwritten, values_in
from ...torch_support.written_forms import in_place_form, out_form
from ..program import Program
from .storage_places import Places, Step, fills, is_same_place

__all__ = ["WriteInPlace"]

_REGIONS = {
    "aten.slice_scatter.default": "aten.slice.Tensor",
    "aten.select_scatter.default": "aten.select.int",
    "aten.diagonal_scatter.default": "aten.diagonal.default",
    "aten.as_strided_scatter.default": "aten.as_strided.default",
}
"""The operations (base, source, place) that copy a base with a part of it replaced, and the view that the
part is."""

_COPYING = frozenset(
    f"aten.{name}"
    for name in (
        *("index_add.default", "index_copy.default", "index_put.default", "masked_scatter.default"),
        *("scatter.src", "scatter.value", "scatter_add.default", "scatter_reduce.two"),
        *("index_fill.int_Scalar", "index_fill.int_Tensor", "index_reduce.default", "put.default"),
    )
)
"""Other operations that copy their first operand as a whole before they write into it."""

_COPY = "aten.copy_.default"
_AS_STRIDED = "aten.as_strided.default"


@dataclass(frozen=True, slots=True)
class WriteInPlace:
    """Writes results over operands whose numbers are not needed afterwards, where the model does so.

    A trace has no writes: what the model writes into a part of a tensor (`*_scatter`), or computes in place,
    becomes a tensor of its own, with all that was not written copied. Here the operation writes again. Its
    result lies in another storage of the graph, which takes over the memory of the operand's: a schedule that
    needs the old numbers later makes them again. Operations that copy an operand only to write into it are
    among these, written by the model or by autograd.

    An operation writes if all that reads the old numbers comes before it, if the old storage is nobody
    else's, and if what makes it can run again; else forward's operations around it run once.

    Source:
        The idea is that of torch/_inductor/fx_passes/reinplace.py, which keeps no order for recomputation.
    """

    name: ClassVar[str] = "write-in-place"

    def run(self, program: Program, /) -> Program:
        """Rewrites the program's graph, and the one as it was captured."""
        graph = in_place(program.graph)
        original = None if program.original is None else in_place(program.original)
        if graph is program.graph and original is program.original:
            return program
        return replace(program, graph=graph, original=original)


def in_place(graph: Graph) -> Graph:
    """Returns the graph with such writes; the same one if there are none."""
    if not any(_is_candidate(node) for node in graph.nodes):
        return graph
    return _Writer(graph).run()


def _is_candidate(node: Node) -> bool:
    if Trait.OVERWRITES in node.traits or node.is_view:
        return False
    if node.op in _REGIONS:
        return not node.keywords
    return node.op in _COPYING or Trait.IN_PLACE in node.traits


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a tensor that is written.

    Args:
        anchor: What lies in the memory of the tensor.
        step: The view of the anchor that is the part.
        region: Where the part lies, as of `Places`.
        source: What it becomes.
        scatters: The operations that made a copy with that part replaced: of the tensor, of a part of it, and
            so on.
        dropped: The nodes that are not needed if it is written, but for the first scatter.
        maker: The operation that makes the source for nothing else; None if there is none.
        views: The views from its result to the source.
    """

    anchor: Value
    step: Step
    region: Tensor
    source: Value
    scatters: Sequence[Node]
    dropped: Sequence[Node]
    maker: Node | None = None
    views: Sequence[Node] = ()


class _Writer:
    """Puts the writes of a graph in place, one after the other."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: dict[str, Node] = {node.name: node for node in graph.nodes}
        """The nodes as they are by now, in order."""
        self.position = {name: index for index, name in enumerate(self.nodes)}
        self.producer: dict[Value, str] = {v: node.name for node in graph.nodes for v in node.values}
        self.readers: dict[Storage, set[str]] = defaultdict(set)
        self.users: dict[Value, set[str]] = defaultdict(set)
        for node in graph.nodes:
            self._note(node)
        self.fixed = {*graph.static_storages, *graph.tangent_storages, *graph.output_storages}
        """Storages that may not be written: somebody else's, or gone already."""
        self.fixed |= graph.offloaded_of.keys()
        self.fixed |= {value.storage for node in graph.releases for value in node.operands}
        effects = (node for node in graph.nodes if Trait.EFFECT in node.traits)
        self.fixed |= {node.operands[0].storage for node in effects}
        self.writers = {value.storage: node.name for node in graph.nodes for value in overwritten(node)}
        """The operations that write into the storages that are gone."""
        self.fixed |= self.writers.keys()
        self.delivered = {output.value for output in graph.outputs if output.value is not None}
        self.makers: dict[Storage, list[Value]] = defaultdict(list)
        """The values that operations make in each storage."""
        for node in graph.operations:
            for value in node.values:
                self.makers[value.storage].append(value)
        self.places = Places(self._maker)
        self.before: dict[str, list[str]] = defaultdict(list)
        """The nodes that are added right before one."""
        self.is_changed = False

    def run(self) -> Graph:
        for name in list(self.nodes):
            node = self.nodes[name]
            if not _is_candidate(node):
                continue
            if node.op in _REGIONS:
                self._write_part(node)
            else:
                self._write_whole(node)
        if not self.is_changed:
            return self.graph
        return replace(self.graph, nodes=tuple(self._in_order()))

    # ------------------------------------------------------------------ one write

    def _write_whole(self, node: Node) -> None:
        """Lets an operation write its result over its first operand, which has the type of the result."""
        target = node.arguments[0] if node.arguments else None
        op = in_place_form(node.op)
        if op is None or not isinstance(target, Value) or node.is_sequence or len(node.values) != 1:
            return
        (result,) = node.values
        place = self.places.of(target)
        if place is None or result.type != target.type or place.storage_offset() or not fills(target):
            return
        if not fills(result) or not self._is_free(target.storage, node, {node.name}):
            return
        if _reads(node, target, 1):
            return
        self._put(replace(node, op=op, traits=_overwriting(node)))
        self._take(target.storage, node.name)

    def _write_part(self, node: Node) -> None:
        """Lets the operation that makes a part of a tensor write there, or copies the part there."""
        (result,) = node.values
        base, part = _operand(node, 0), self._part(node)
        place = self.places.of(base)
        if part is None or place is None or part.source.type.shape != part.region.shape:
            return
        if result.type != base.type or place.storage_offset() or not fills(base):
            return
        if result.storage.nbytes != base.storage.nbytes:
            return
        write = self._by_maker(part, base) or self._by_copy(part, base)
        target = None if write is None else write.written_operand
        if write is None or target is None:
            return
        memory = Value(f"{node.name}_part", target.type, result.storage)
        self._put(replace(write, results=(memory,), annotation=node.annotation or write.annotation))
        self._put(_seen_whole(node, memory))
        self.places.move(result, memory, target)
        self.makers[result.storage] = [memory]
        self._take(base.storage, write.name)

    def _part(self, node: Node) -> _Part | None:
        """Finds what is written in the end if a part of a tensor is made of a part of that, and so on."""
        anchor, source, step = _operand(node, 0), _operand(node, 1), _step_of(node)
        region = self.places.viewed(anchor, step)
        scatters, dropped = [node], list[Node]()
        while region is not None:
            maker, views = self._behind(source, scatters[-1])
            if maker is not None and maker.op in _REGIONS and not maker.keywords:
                inner = _operand(maker, 0)
                if not is_same_place(self.places.through(inner, views), region):
                    return _Part(anchor, step, region, source, scatters, dropped)
                anchor, source, step = inner, _operand(maker, 1), _step_of(maker)
                region = self.places.viewed(anchor, step)
                scatters.append(maker)
                dropped += [*views, maker]
                continue
            return _Part(anchor, step, region, source, scatters, dropped, maker, views)
        return None

    def _behind(self, source: Value, reader: Node) -> tuple[Node | None, list[Node]]:
        """The operation that makes a value for nothing but a node, in its half, and the views between."""
        views: list[Node] = []
        name = reader.name
        while (node := self._maker(source)) is not None:
            is_alone = self.users[source] == {name} and source not in self.delivered
            if (
                not is_alone
                or node.values != (source,)
                or node.is_sequence
                or node.region is not reader.region
            ):
                break
            if not node.is_view:
                return (None if Trait.OVERWRITES in node.traits else node), views
            if len(node.operands) != 1:
                break
            views.insert(0, node)
            name, source = node.name, node.operands[0]
        return None, []

    def _by_maker(self, part: _Part, base: Value) -> Node | None:
        """The operation that makes the source, if it can write in the place of it."""
        maker = part.maker
        if maker is None or Trait.IN_PLACE not in maker.traits:
            return None
        (result,) = maker.values
        if result.type.dtype is not part.anchor.type.dtype:
            return None
        if not self._is_free(base.storage, maker, {each.name for each in (*part.scatters, maker)}):
            return None
        target = maker.arguments[0] if maker.arguments else None
        op, keywords = in_place_form(maker.op), maker.keywords
        if op is not None and isinstance(target, Value) and self._is_at(target, result, part):
            if _reads(maker, target, 1):
                return None
        else:
            op = None if part.views else out_form(maker.op)
            if any(value.storage is base.storage for value in maker.operands):
                return None
            if op is not None:
                keywords = (*keywords, ("out", self._region(part, maker)))
        if op is None:
            return None
        for each in (*part.dropped, *part.views):
            self._drop(each)
        return replace(maker, op=op, keywords=keywords, traits=_overwriting(maker))

    def _is_at(self, target: Value, result: Value, part: _Part) -> bool:
        """Whether what is made in the place of an operand lies where the part does that is written."""
        is_alike = target.type.shape == result.type.shape
        return is_alike and is_same_place(self.places.through(target, part.views), part.region)

    def _by_copy(self, part: _Part, base: Value) -> Node | None:
        """An operation that copies the source to its place."""
        node = part.scatters[0]
        if part.source.storage is base.storage:
            return None
        if not self._is_free(base.storage, node, {each.name for each in part.scatters}):
            return None
        for each in part.dropped:
            self._drop(each)
        arguments = (self._region(part, node), part.source)
        # the scatter's name goes on with the view, by which readers know its value
        write = replace(node, name=f"{node.name}_write", op=_COPY, arguments=arguments, keywords=())
        write = replace(write, traits=_overwriting(node))
        self._add_before(node.name, write)
        return write

    def _region(self, part: _Part, at: Node) -> Value:
        """Derives the part of a base that is written, right before a node."""
        name, (op, arguments) = f"{part.scatters[0].name}_place", part.step
        region = part.region
        type = replace(part.anchor.type, shape=tuple(region.shape), strides=tuple(region.stride()))
        value = Value(name, type, part.anchor.storage)
        view = frozenset({Trait.VIEW})
        self._add_before(
            at.name,
            Node(name, op, (part.anchor, *arguments), (value,), region=at.region, traits=view, at=at.at),
        )
        return value

    # ------------------------------------------------------------------ nodes

    def _maker(self, value: Value) -> Node | None:
        return self.nodes.get(self.producer.get(value, ""))

    def _note(self, node: Node) -> None:
        for value in node.operands:
            self.users[value].add(node.name)
            if not node.is_view:
                self.readers[value.storage].add(node.name)

    def _put(self, node: Node) -> None:
        """Puts a node in the place of the one of its name."""
        self._forget(self.nodes[node.name])
        self.nodes[node.name] = node
        self._note(node)
        self.producer.update(dict.fromkeys(node.values, node.name))
        self.is_changed = True

    def _add_before(self, name: str, node: Node) -> None:
        self.before[name].append(node.name)
        self.nodes[node.name] = node
        self.position[node.name] = self.position[name]
        self._note(node)
        self.producer.update(dict.fromkeys(node.values, node.name))

    def _drop(self, node: Node) -> None:
        self._forget(node)
        del self.nodes[node.name]

    def _forget(self, node: Node) -> None:
        for value in node.operands:
            self.users[value].discard(node.name)
            self.readers[value.storage].discard(node.name)

    # ------------------------------------------------------------------ what may be written

    def _is_free(self, storage: Storage, node: Node, names: set[str]) -> bool:
        """Whether an operation may write into a storage: nothing else reads it then, and it is nobody's.

        Args:
            storage: What is written.
            node: The operation.
            names: The operations that read the storage for the sake of the write.
        """
        values = self.makers.get(storage, ())
        if storage in self.fixed or len(values) != 1:
            return False
        maker = self.nodes[self.producer[values[0]]]
        here = self.position[node.name]
        if self.position[maker.name] > here or (
            maker.region is not node.region and not maker.is_recomputable
        ):
            return False
        others = [self.nodes[name] for name in self.readers[storage] - names]
        is_backward = node.region is Region.BACKWARD
        return all(self.position[o.name] < here and (is_backward or o.region is node.region) for o in others)

    def _take(self, storage: Storage, writer: str) -> None:
        """Notes that a storage is gone; what reads it runs once if its numbers cannot be made again."""
        self.fixed.add(storage)
        self.writers[storage] = writer
        self._pin_readers(storage)

    def _pin_readers(self, storage: Storage) -> None:
        """Pins what reads a storage that is gone, and then what reads storages of these that are gone."""
        maker = self.nodes[self.producer[self.makers[storage][0]]]
        if maker.region is Region.BACKWARD or maker.is_recomputable:
            return
        for name in {*self.readers[storage], self.writers[storage]}:
            reader = self.nodes[name]
            if reader.region is not Region.FORWARD or Trait.PINNED in reader.traits:
                continue
            self.nodes[name] = replace(reader, traits=reader.traits | {Trait.PINNED})
            for value in reader.values:
                if value.storage in self.writers:
                    self._pin_readers(value.storage)

    # ------------------------------------------------------------------ the graph

    def _in_order(self) -> Iterator[Node]:
        """Yields the nodes, each after the views that it reads."""
        done: set[str] = set()

        def after_views(node: Node) -> Iterator[Node]:
            if node.name in done:
                return
            done.add(node.name)
            for value in node.operands:
                maker = self._maker(value)
                if maker is not None and maker.is_view:
                    yield from after_views(maker)
            yield node

        for name in self.position:
            for added in self.before.get(name, ()):
                yield from after_views(self.nodes[added])
            if name in self.nodes:
                yield from after_views(self.nodes[name])


# ---------------------------------------------------------------------- operations


def _operand(node: Node, index: int) -> Value:
    value = node.arguments[index]
    assert isinstance(value, Value)
    return value


def _step_of(scatter: Node) -> Step:
    """The view that a scatter writes."""
    return _REGIONS[scatter.op], scatter.arguments[2:]


def _seen_whole(scatter: Node, written: Value) -> Node:
    """The view of a written part's memory that has what a scatter made."""
    (result,) = scatter.values
    return replace(
        scatter,
        op=_AS_STRIDED,
        arguments=(written, result.type.shape, result.type.strides, 0),
        traits=frozenset({Trait.VIEW}),
        annotation=None,
    )


def _reads(node: Node, target: Value, times: int) -> bool:
    """Whether a node reads the storage of a value otherwise than by this argument."""
    read = [*values_in(node.arguments), *values_in(tuple(each for _, each in node.keywords))]
    return sum(value.storage is target.storage for value in read) > times


def _overwriting(node: Node) -> frozenset[Trait]:
    """The traits of a node that writes from now on."""
    return (node.traits - {Trait.IN_PLACE}) | {Trait.OVERWRITES}
