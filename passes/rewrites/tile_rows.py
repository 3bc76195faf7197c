"""The pass that runs loss heads and wide layers in tiles of rows: one tile need be there at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

from ...ir import (
    Argument,
    DType,
    Graph,
    Node,
    Region,
    Storage,
    Symbol,
    TensorType,
    Trait,
    UsageError,
    Value,
    allocation_bytes,
)
from ..program import Program
from .compare_rows import RowsOf, compare_rows
from .row_regions import EACH, LOSS, TOTAL, RowRegion, order_around, row_regions
from .row_rules import COPIES, DIMS, SLICE, SLICE_BACKWARD, SWAP, Kept, Rows, RowValues, is_pointwise

__all__ = ["TileRows"]

_NOT_COUNTED = -100
"""The class of a row that does not count, in the sum over the rows of all tiles."""

_TRANSPOSE = "aten.t.default"
_PRODUCT = "aten.mm.default"
_ADD_IN_PLACE = {
    _PRODUCT: "aten.addmm_.default",
    "aten.sum.dim_IntList": "aten.add_.Tensor",
}


@dataclass(frozen=True, slots=True)
class TileRows:
    """Divides the rows of loss heads (projection to classes, log-softmax, cross entropy) and of wide layers.

    A wide layer has hidden tensors that are wider than what it reads and makes, as the perceptron of a
    transformer. The tiles run one after the other in forward, and from the last one to the first in backward.
    Their operations are those of the whole on fewer rows, so that a schedule keeps what a tile makes or makes
    it again as any other storage's. The losses of all rows are joined and summed by the head's own
    operation, in its order; the gradient of a projection's weight is the sum of the tiles' products.

    Args:
        tiles: The tiles of the widest region. A region of smaller tensors has as many as make those of a tile
            no larger than the widest's.
        exact: Whether to tile only what keeps all bits: no gradient of a weight is summed over tiles, and
            all operations were compared.
        compare: Whether operations of tiles are compared with the whole ones, which runs each here, on
            tensors of its real sizes. Of those that were not, only pointwise ones count as the same.
        most_bytes: The operands and results of the largest operation that may run to be compared.

    Source:
        Bekman et al., Arctic Long Sequence Training (2025) tile modules by rows; Wijmans et al., Cut Your
        Losses in Large-Vocabulary Language Models (ICLR 2025) keep no logits by a kernel.
    """

    name: ClassVar[str] = "tile-rows"

    tiles: int = 8
    exact: bool = False
    compare: bool = True
    most_bytes: int | None = field(default=None, metadata={"in_text": False})

    def check(self) -> None:
        """Refuses a number of tiles that divides nothing.

        Raises:
            UsageError: IRC413.
        """
        if self.tiles < 2:
            raise UsageError("IRC413", f"{self.tiles} tiles divide nothing", help="give 2 tiles, or more")

    def run(self, program: Program, /) -> Program:
        """Rewrites the program's graph; returns the same program if nothing in it can be tiled.

        Raises:
            UsageError: IRC413 for wrong options, or after a pass that looked at the operations.
        """
        self.check()
        if program.costs is not None or program.schedule is not None:
            raise UsageError(
                "IRC413",
                f"{self.name} comes after the operations' costs were found",
                help="put it before them: tile-rows{...},cost{...},plan-memory{...}",
            )
        graph = program.graph
        regions = [r for r in row_regions(graph) if not (self.exact and r.sums)]
        while numbers := self._numbers(regions):
            tilings = _in_tiles(graph, numbers)
            unlike = {region: self._unlike(tiling) for region, tiling in tilings.items()}
            if not self.exact or not any(unlike.values()):
                marked = set[Node]().union(*unlike.values())
                nodes = (_marked(node) if node in marked else node for node in _nodes(graph, tilings))
                return replace(
                    program,
                    graph=replace(graph, nodes=tuple(nodes)),
                    original=program.original or graph,
                    tiles=self.tiles,
                )
            regions = [region for region in regions if not unlike.get(region)]
        return program

    def _numbers(self, regions: Sequence[RowRegion]) -> dict[RowRegion, int]:
        """The number of tiles of each region that is to have more than one, and can do with about as many."""
        widest_bytes = max((region.wide_bytes for region in regions), default=0)
        found = {
            region: min(-(-region.wide_bytes * self.tiles // widest_bytes), region.most_tiles)
            for region in regions
        }
        return {r: number for r, number in found.items() if number > 1 and r.fewest_tiles <= 2 * number}

    def _unlike(self, tiling: _Tiling) -> set[Node]:
        """The operations of tiles that may give other bits than the whole ones."""
        pairs = [pair for pair in tiling.pairs if pair.whole.op not in COPIES]
        runs = self.compare and not any(v.type.device == "meta" for pair in pairs for v in pair.whole.values)
        same = compare_rows(pairs, most_bytes=self.most_bytes) if runs else {}
        return {
            pair.part
            for pair in pairs
            if not same.get(pair.part, not self.exact and is_pointwise(pair.part.op))
            or not (is_pointwise(pair.part.op) or pair.is_aligned)
        }


def _marked(node: Node) -> Node:
    return replace(node, traits=node.traits | {Trait.REORDERED})


def _in_tiles(graph: Graph, tiles: Mapping[RowRegion, int]) -> dict[RowRegion, _Tiling]:
    """Regions of a graph in so many tiles each."""
    names = _Names(graph, tiles)
    return {region: _Tiling(region, number, names) for region, number in tiles.items()}


def _nodes(graph: Graph, tilings: Mapping[RowRegion, _Tiling]) -> Iterator[Node]:
    """The nodes of a graph with regions of it in tiles, in order."""
    order = order_around(graph, tilings)
    assert order is not None
    for each in order:
        if isinstance(each, Node):
            yield each
        else:
            region, half = each
            yield from tilings[region].halves[half]


# ---------------------------------------------------------------------- tiles


class _Names:
    """The names that a graph has, and those of its tiles."""

    def __init__(self, graph: Graph, regions: Iterable[RowRegion]) -> None:
        replaced = {node for region in regions for node in region.nodes}
        self.nodes = {node.name for node in graph.nodes if node not in replaced}
        self.values = {value.name for node in graph.nodes for value in node.values}
        self.values |= {entry.value.name for entry in graph.inputs}
        self.values |= {storage.name for storage in graph.storages}


class _Tiling:
    """Writes the tiles of one region.

    Args:
        whole: The region.
        tiles: The number of tiles, at most that of the rows.
        names: The names that are taken.
    """

    def __init__(self, whole: RowRegion, tiles: int, names: _Names) -> None:
        self.whole, self.names = whole, names
        group = whole.group
        length = min(-(-whole.rows // tiles), group)
        self.bounds = [
            (low, min(low + length, start + group, whole.rows))
            for start in range(0, whole.rows, group)
            for low in range(start, start + group, length)
        ]
        self.of_tile: list[dict[Value, Value]] = [{} for _ in self.bounds]
        """The part that each tile has of each value."""
        each = (node for node in whole.nodes if node.op == LOSS and node.arguments[3] == EACH)
        self.counts = {node.results[1] for node in each}
        """What each tile has of its own of losses that are not summed: the number of rows that count."""
        self.flat: dict[Value, Value] = {}
        self.needed = set(whole.needed)
        self.made: list[Node] = []
        self.pairs: list[RowsOf] = []
        """The operations of tiles that are not sums over rows, each with the whole one."""
        self.halves = {region: self._half(region) for region in Region}
        """The nodes of all tiles in forward, and in backward."""

    def _half(self, region: Region) -> list[Node]:
        self.made = []
        half = self.whole.half(region)
        order = list(range(len(self.bounds)))
        if region is Region.BACKWARD:
            order.reverse()  # the last tile of forward is at hand
        for turn, tile in enumerate(order):
            for node in half:
                self._tile(node, tile, is_first=turn == 0, is_last=turn == len(order) - 1)
        for node in half:
            if node.op == LOSS and node.results[1] not in self.counts:
                if node.arguments[2] is None:
                    self._join_losses(node)
                else:
                    self._add_losses(node)
                continue
            for value in node.values:
                if value in self.needed and value in self.whole.nodes[node].rows:
                    self._join(value, node)
        return self.made

    # ------------------------------------------------------------------ one tile

    def _tile(self, node: Node, tile: int, *, is_first: bool, is_last: bool) -> None:
        its, parts = self.whole.nodes[node], self.of_tile[tile]
        if node.is_view:
            (operand,), (result,) = node.operands, node.values
            part = self._part(operand, its.rows[operand], tile, node)
            parts[result] = self._transposed(part, node, tile) if node.op in (_TRANSPOSE, SWAP) else part
            return
        if node.op == SLICE_BACKWARD:  # the rows that a slice drops have no gradient already
            (operand,), (result,) = node.operands, node.values
            parts[result] = self._part(operand, its.rows[operand], tile, node)
            return
        arguments = tuple(self._argument(argument, its, tile, node) for argument in _from_the_last(node))
        keywords = tuple((key, self._argument(a, its, tile, node)) for key, a in node.keywords)
        name = self._of_node(f"{node.name}_tile{tile}")
        own = replace(node, name=name, arguments=arguments, keywords=keywords)
        if its.sums:
            self._sum(node, own, parts, is_first=is_first, is_last=is_last)
            return
        if node.op == LOSS and node.arguments[3] != EACH:
            reduction = EACH if node.arguments[2] is None else TOTAL
            own = replace(own, arguments=(*arguments[:3], reduction, *arguments[4:]))
        for value in node.values:
            rows = its.rows.get(value)
            shape = value.type.shape if rows is None else rows.of(value.type.shape, self._length(tile))
            if node.op == LOSS and value is node.results[0] and own.arguments[3] == EACH:
                shape = (self._length(tile),)
            parts[value] = self._value(f"{value.name}_tile{tile}", shape, value.type)
        own = replace(own, results=tuple(None if v is None else parts[v] for v in node.results))
        self.made.append(own)
        if node.op != LOSS:
            self.pairs.append(RowsOf(node, its, own, self.bounds[tile][0]))

    def _length(self, tile: int) -> int:
        low, high = self.bounds[tile]
        return high - low

    def _sum(
        self, node: Node, own: Node, parts: dict[Value, Value], *, is_first: bool, is_last: bool
    ) -> None:
        """Adds what a tile has of a sum over rows to that of the tiles before it."""
        (result,) = node.values
        total = result if is_last else Value(self._unused(own.name), result.type, result.storage)
        if is_first:
            self.made.append(_marked(replace(own, results=(total,))))
        else:
            so_far, added = self.flat[result], own.arguments
            if node.op != _PRODUCT:
                term = self._value(f"{own.name}_term", result.type.shape, result.type)
                self.made.append(_marked(replace(own, name=self._of_node(term.name), results=(term,))))
                added = (term,)
            self.made.append(
                replace(
                    own,
                    op=_ADD_IN_PLACE[node.op],
                    arguments=(so_far, *added),
                    keywords=(),
                    results=(total,),
                    traits=frozenset((Trait.EFFECT, Trait.REORDERED)),
                )
            )
        self.flat[result] = total

    def _argument(self, argument: Argument, its: RowValues, tile: int, node: Node) -> Argument:
        if isinstance(argument, tuple):
            return tuple(self._argument(item, its, tile, node) for item in argument)
        if not isinstance(argument, Value):
            return argument
        if argument in its.rows:
            return self._part(argument, its.rows[argument], tile, node)
        if argument in its.groups:
            return self._of_group(argument, *its.groups[argument], tile, node)
        return self.of_tile[tile].get(argument, argument) if argument in self.counts else argument

    def _part(self, value: Value, rows: Rows, tile: int, node: Node) -> Value:
        """The rows of a value that a tile has: a slice of it, unless the tiles make it."""
        known = self.of_tile[tile].get(value)
        if known is None:
            whole = value if rows == Rows(rows.axis) else self._flattened(value, rows, node)
            axis, (low, high) = rows.axis, self.bounds[tile]
            type = replace(whole.type, shape=Rows(axis).of(whole.type.shape, high - low))
            known = Value(self._unused(f"{value.name}_tile{tile}"), type, whole.storage)
            self._view(known, "aten.slice.Tensor", (whole, axis, low, high), node)
            self.of_tile[tile][value] = known
        return known

    def _flattened(self, value: Value, rows: Rows, node: Node) -> Value:
        if value not in self.flat and rows.kept is not None:
            self.flat[value] = self._padded(value, rows.kept, node)
        elif value not in self.flat:
            shape = rows.of(value.type.shape, self.whole.rows)
            type = _of(shape, value.type)
            self.flat[value] = Value(self._unused(f"{value.name}_rows"), type, value.storage)
            self._view(self.flat[value], "aten.view.default", (value, shape), node)
        return self.flat[value]

    def _padded(self, classes: Value, kept: Kept, node: Node) -> Value:
        """The classes of all rows: those that a slice drops do not count."""
        type = classes.type
        shaped = Value(self._unused(f"{classes.name}_kept"), _of(kept.kept_shape, type), classes.storage)
        self._view(shaped, "aten.view.default", (classes, kept.kept_shape), node)
        padded = self._value(f"{classes.name}_padded", kept.shape, type)
        after = (kept.first, kept.shape[kept.dim] - kept.last)
        pads = (*(0, 0) * (len(kept.shape) - 1 - kept.dim), *after)
        not_counted = node.arguments[4 if node.op == LOSS else 5]
        self._operation(padded, "aten.constant_pad_nd.default", (shaped, pads, not_counted), node)
        flat = Value(self._unused(f"{classes.name}_rows"), _of((self.whole.rows,), type), padded.storage)
        self._view(flat, "aten.view.default", (padded, flat.type.shape), node)
        return flat

    def _kept(self, losses: Value, kept: Kept, node: Node) -> Value:
        """The losses of the rows that a slice leaves."""
        name, type = losses.name, losses.type
        shaped = Value(self._unused(f"{name}_shaped"), _of(kept.shape, type), losses.storage)
        self._view(shaped, "aten.view.default", (losses, kept.shape), node)
        strided = replace(shaped.type, shape=kept.kept_shape)
        sliced = Value(self._unused(f"{name}_sliced"), strided, losses.storage)
        self._view(sliced, SLICE, (shaped, kept.dim, kept.first, kept.last), node)
        copied = self._value(f"{name}_kept", kept.kept_shape, type)
        contiguous = (("memory_format", Symbol("memory_format", "contiguous_format")),)
        self._operation(copied, "aten.clone.default", (sliced,), node, keywords=contiguous)
        flat = Value(self._unused(f"{name}_flat"), _of((copied.type.numel,), type), copied.storage)
        self._view(flat, "aten.view.default", (copied, flat.type.shape), node)
        return flat

    def _transposed(self, part: Value, node: Node, tile: int) -> Value:
        """A part with two dimensions in each other's place: the only two, or some behind the rows'."""
        rank = len(node.operands[0].type.shape)
        dims = [cast(int, dim) % rank - rank for dim in node.arguments[1:]] or [-2, -1]
        order = list(range(-len(part.type.shape), 0))
        order[dims[0]], order[dims[1]] = dims[1], dims[0]
        shape, strides = (tuple(sizes[i] for i in order) for sizes in (part.type.shape, part.type.strides))
        result = Value(
            self._unused(f"{node.name}_tile{tile}"),
            replace(part.type, shape=shape, strides=strides),
            part.storage,
        )
        self._view(result, node.op, (part, *(dims if node.op == SWAP else ())), node)
        return result

    def _of_group(self, value: Value, group: int, count: int, tile: int, node: Node) -> Value:
        """The part of an operand with one for each group of rows that the rows of a tile share."""
        place, found = self.bounds[tile][0] // group, value
        leading = value.type.shape[:count]
        for dim, size in enumerate(leading):
            index = place // math.prod(leading[dim + 1 :]) % size
            shape, strides = found.type.shape[1:], found.type.strides[1:]
            if dim == count - 1:
                shape, strides = (1, *shape), (found.type.strides[0], *strides)
                op, arguments = "aten.slice.Tensor", (found, 0, index, index + 1)
            else:
                op, arguments = "aten.select.int", (found, 0, index)
            type = replace(found.type, shape=shape, strides=strides)
            found = Value(self._unused(f"{value.name}_tile{tile}"), type, value.storage)
            self._view(found, op, arguments, node)
        return found

    # ------------------------------------------------------------------ all tiles

    def _join(self, value: Value, node: Node) -> None:
        """Makes a value whole of what the tiles have of it."""
        rows = self.whole.nodes[node].rows[value]
        whole = value
        if rows.count > 1:
            shape = rows.of(value.type.shape, self.whole.rows)
            type = _of(shape, value.type)
            whole = Value(self._unused(f"{value.name}_rows"), type, value.storage)
        self._joined(whole, value, rows.axis, node)
        if whole is not value:
            self._view(value, "aten.view.default", (whole, value.type.shape), node)

    def _joined(self, whole: Value, value: Value, axis: int, node: Node) -> None:
        parts = tuple(parts[value] for parts in self.of_tile)
        self._operation(whole, "aten.cat.default", (parts, axis), node)

    def _join_losses(self, node: Node) -> None:
        """Sums the losses of all rows as the head does: they are the scores of a single class, negated."""
        losses, _ = node.results
        classes, not_counted = node.arguments[1], node.arguments[4]
        assert losses is not None and isinstance(classes, Value)
        name, kept = node.name, self.whole.nodes[node].rows[classes].kept
        joined = self._value(f"{name}_rows", (self.whole.rows,), losses.type)
        self._joined(joined, losses, 0, node)
        if kept is not None:
            joined = self._kept(joined, kept, node)
        (rows,) = joined.type.shape
        scores = self._value(f"{name}_scores", (rows,), losses.type)
        self._operation(scores, "aten.neg.default", (joined,), node)
        column = _of((rows, 1), losses.type)
        columns = Value(self._unused(f"{name}_column"), column, scores.storage)
        self._view(columns, "aten.unsqueeze.default", (scores, 1), node)
        masked = replace(classes.type, dtype=DType.BOOL)
        is_left_out = self._value(f"{name}_left_out", (rows,), masked)
        self._operation(is_left_out, "aten.eq.Scalar", (classes, not_counted), node)
        marks = self._value(f"{name}_marks", (rows,), classes.type)
        self._operation(marks, "aten.mul.Scalar", (is_left_out, _NOT_COUNTED), node)
        self.made.append(replace(node, arguments=(columns, marks, None, node.arguments[3], _NOT_COUNTED)))

    def _add_losses(self, node: Node) -> None:
        """Adds the losses of the tiles, and the weights of their classes, by which a mean is divided."""
        losses, weights = node.results
        assert losses is not None and weights is not None
        total = losses if node.arguments[3] == TOTAL else self._value(f"{node.name}_sum", (), losses.type)
        for value, made in ((losses, total), (weights, weights)):
            parts = tuple(parts[value] for parts in self.of_tile)
            each = self._value(f"{made.name}_tiles", (len(parts),), value.type)
            self._operation(each, "aten.stack.default", (parts,), node)
            self._operation(made, "aten.sum.default", (each,), node, traits=frozenset((Trait.REORDERED,)))
        if total is not losses:
            self._operation(losses, "aten.div.Tensor", (total, weights), node)

    # ------------------------------------------------------------------ nodes and values

    def _value(self, name: str, shape: tuple[int, ...], like: TensorType) -> Value:
        type = _of(shape, like)
        unused = self._unused(name)
        return Value(unused, type, Storage(unused, allocation_bytes(type.nbytes, type.device), type.device))

    def _view(self, made: Value, op: str, arguments: tuple[Argument, ...], near: Node) -> None:
        self._operation(made, op, arguments, near, traits=frozenset((Trait.VIEW,)))

    def _operation(
        self,
        made: Value,
        op: str,
        arguments: tuple[Argument, ...],
        near: Node,
        traits: frozenset[Trait] = frozenset(),
        keywords: tuple[tuple[str, Argument], ...] = (),
    ) -> None:
        self.made.append(
            Node(
                self._of_node(made.name),
                op,
                arguments,
                (made,),
                keywords=keywords,
                region=near.region,
                traits=traits,
                at=near.at,
            )
        )

    def _of_node(self, name: str) -> str:
        return _unused(name, self.names.nodes)

    def _unused(self, name: str) -> str:
        """A name for a value, and for its storage."""
        return _unused(name, self.names.values)


def _of(shape: tuple[int, ...], like: TensorType) -> TensorType:
    return TensorType.contiguous(shape, like.dtype, like.device)


def _from_the_last(node: Node) -> tuple[Argument, ...]:
    """The arguments, with dimensions counted from the last one, since a tile has its rows in one."""
    arguments = list(node.arguments)
    if node.op in DIMS:
        dims, rank = arguments[DIMS[node.op]], len(node.operands[0].type.shape)
        if isinstance(dims, tuple):
            arguments[DIMS[node.op]] = tuple(cast(int, dim) % rank - rank for dim in dims)
        else:
            arguments[DIMS[node.op]] = cast(int, dims) % rank - rank
    return tuple(arguments)


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
