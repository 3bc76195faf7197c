"""The pass that runs a loss head in tiles of rows: one tile's logits need be there at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from ...ir import (
    Argument,
    DType,
    Graph,
    Node,
    Region,
    Storage,
    TensorType,
    Trait,
    UsageError,
    Value,
    allocation_bytes,
)
from ..program import Program
from .row_rules import DIMS, Rows, RowValues, UntileableError, rows_through

__all__ = ["LossHead", "TileLossHeads", "loss_heads"]

_SOFTMAX = "aten._log_softmax.default"
_LOSS = "aten.nll_loss_forward.default"
_NOT_COUNTED = -100
"""The class of a row that does not count, in the sum over the rows of all tiles."""

_TRANSPOSE = "aten.t.default"
_EACH = 0
"""The reduction that keeps the loss of each row."""

_PRODUCT = "aten.mm.default"
_ADD_IN_PLACE = {
    _PRODUCT: "aten.addmm_.default",
    "aten.sum.dim_IntList": "aten.add_.Tensor",
}


@dataclass(frozen=True, slots=True)
class TileLossHeads:
    """Divides the rows of each loss head (projection to classes, log-softmax, cross entropy) into tiles.

    The tiles run one after the other in forward, and from the last one to the first in backward. Their
    operations are those of the head on fewer rows, so that a schedule keeps a tile's logits or makes them
    again as any other storage's. The losses of all rows are joined and summed by the head's own operation, in
    its order; the gradient of the projection's weight is the sum of the tiles' products.

    Args:
        tiles: The most tiles.

    Source:
        Bekman et al., Arctic Long Sequence Training (2025) tile modules by rows; Wijmans et al., Cut Your
        Losses in Large-Vocabulary Language Models (ICLR 2025) keep no logits by a kernel.
    """

    name: ClassVar[str] = "tile-loss-heads"

    tiles: int = 8

    def check(self) -> None:
        """Refuses a number of tiles that divides nothing.

        Raises:
            UsageError: IRC413.
        """
        if self.tiles < 2:
            raise UsageError("IRC413", f"{self.tiles} tiles divide nothing", help="give 2 tiles, or more")

    def run(self, program: Program, /) -> Program:
        """Rewrites the program's graph; returns the same program if it has no head that can be tiled.

        Raises:
            UsageError: IRC413 for wrong options, or after a pass that looked at the operations.
        """
        self.check()
        if program.costs is not None or program.schedule is not None:
            raise UsageError(
                "IRC413",
                f"{self.name} comes after the operations' costs were found",
                help="put it before them: tile-loss-heads{...},cost{...},plan-memory{...}",
            )
        graph, roundings = program.graph, list(program.roundings)
        for head in loss_heads(graph):
            tiles = min(self.tiles, head.rows)
            roundings.append(_rounded(graph, head, tiles))
            graph = _Tiling(graph, head, tiles).run()
        if graph is program.graph:
            return program
        original = program.original or program.graph
        return replace(program, graph=graph, original=original, roundings=tuple(roundings))


def _rounded(graph: Graph, head: LossHead, tiles: int) -> str:
    """Says which numbers may differ by rounding if a head is in tiles."""
    reached = {value for node, its in head.nodes.items() for value in node.values if value in its.sums}
    named: dict[str, None] = {}
    parameters = {entry.value: entry.target for entry in graph.inputs}
    for node in graph.nodes:
        if not reached.isdisjoint(node.operands):
            reached.update(node.values)
            if node.releases is not None:
                named[parameters[node.operands[0]]] = None
    for output in graph.outputs:
        if output.value in reached:
            named[output.target.partition(":")[2]] = None
    products = "what follows from products of fewer rows, if their kernels add in another order"
    if not named:
        return products
    return f"the gradient of {', '.join(named)}, a sum over {tiles} tiles of rows, and {products}"


# ---------------------------------------------------------------------- what a head is


@dataclass(frozen=True)
class LossHead:
    """The operations and views that read or make tensors as large as the logits.

    Args:
        rows: The number of rows.
        logits_bytes: The bytes of the tensor that the softmax reads.
        nodes: These operations, in the order of the graph, with the values of theirs that hold rows.
    """

    rows: int
    logits_bytes: int
    nodes: Mapping[Node, RowValues]

    @property
    def sums_in_16_bits(self) -> bool:
        """Whether a sum over the tiles is rounded to 16 bits at each of them."""
        sums = (value for its in self.nodes.values() for value in its.sums)
        return any(value.type.dtype.itemsize < DType.FLOAT32.itemsize for value in sums)

    def half(self, region: Region) -> list[Node]:
        """The nodes of forward, or of backward."""
        return [node for node in self.nodes if node.region is region]


def loss_heads(graph: Graph) -> list[LossHead]:
    """Returns the loss heads of a graph that can be tiled, the first one first."""
    found: list[LossHead] = []
    taken: set[Node] = set()
    for node in graph.nodes:
        if node.op == _SOFTMAX and node.region is Region.FORWARD and node not in taken:
            head = _head_of(graph, node)
            if head is not None and taken.isdisjoint(head.nodes):
                found.append(head)
                taken.update(head.nodes)
    return found


def _head_of(graph: Graph, softmax: Node) -> LossHead | None:
    """The head around a softmax; None if something in it mixes rows, or is needed whole."""
    (scores,) = softmax.operands
    shape = scores.type.shape
    rows = Rows(0, len(shape) - 1)
    if len(shape) < 2 or rows.number(shape) < 2 or scores.storage in graph.static_storages:
        return None
    around = _around(graph)
    known = {scores: rows}
    found: dict[Node, RowValues] = {}
    pending = [softmax]
    while pending:
        node = next((n for n in pending if not known.keys().isdisjoint((*n.operands, *n.values))), None)
        if node is None or node.traits - {Trait.VIEW} or node.annotation is not None:
            return None
        pending.remove(node)
        try:
            found[node] = rows_through(node, known)
        except UntileableError:
            return None
        known.update(found[node].rows)
        for value in found[node].rows:
            storage = value.storage
            is_wide = value.type.numel == scores.type.numel and storage.nbytes >= value.type.nbytes
            if is_wide and storage in graph.producers:
                pending += (n for n in around[storage] if n not in found and n not in pending)
    nodes = {node: found[node] for node in graph.nodes if node in found}
    head = LossHead(rows.number(shape), scores.type.nbytes, nodes)
    return head if _is_separable(graph, head) else None


def _around(graph: Graph) -> dict[Storage, list[Node]]:
    """The nodes that read or make each storage."""
    found: dict[Storage, list[Node]] = {}
    for node in graph.nodes:
        for storage in dict.fromkeys(value.storage for value in (*node.operands, *node.values)):
            found.setdefault(storage, []).append(node)
    return found


def _is_separable(graph: Graph, head: LossHead) -> bool:
    """Whether the tiles can run one after the other, and nothing else needs the logits."""
    makers = {value: node for node in head.nodes for value in node.values}
    sums = {value for its in head.nodes.values() for value in its.sums}
    for node, its in head.nodes.items():
        if not sums.isdisjoint(its.rows):
            return False  # read by rows, before all tiles have run
        for value in node.operands:
            maker = makers.get(value)
            if maker is None:
                if its.rows.get(value, Rows()).count > 1 and not value.type.is_contiguous:
                    return False
            elif value not in its.rows and (node.region, maker.region) != (Region.BACKWARD, Region.FORWARD):
                return False  # read whole, before all tiles have run
        if its.sums and (node.op not in _ADD_IN_PLACE or node.region is Region.FORWARD):
            return False
        if not node.is_view and not all(
            value in its.sums or value.type.is_contiguous for value in node.values
        ):
            return False
    needed = _needed(graph, head)
    if any(
        node.is_view or value not in (*its.rows, *its.sums) for value, node, its in needed if node.op != _LOSS
    ):
        return False
    return all(map(head.half, Region)) and _order(graph, head) is not None


def _needed(graph: Graph, head: LossHead) -> list[tuple[Value, Node, RowValues]]:
    """The results of a head that others read, or that are the graph's, each with its node."""
    read = {value for node in graph.nodes if node not in head.nodes for value in node.operands}
    read |= {output.value for output in graph.outputs if output.value is not None}
    return [(v, node, its) for node, its in head.nodes.items() for v in node.values if v in read]


def _order(graph: Graph, head: LossHead) -> list[Node | Region] | None:
    """The nodes of a graph, with the half of a region in one place; None if others run amid one.

    Operations of others that a half needs come before it, unless they keep their order.
    """
    makers = {value: node for node in graph.nodes for value in node.values}
    halves = {region: dict.fromkeys(head.half(region)) for region in Region}
    done: dict[Node | Region, None] = {}
    begun: dict[Node | Region, Iterator[Node | Region]] = {}

    def what(node: Node) -> Node | Region:
        return node.region if node in head.nodes else node

    def before(each: Node | Region) -> Iterator[Node | Region]:
        nodes = halves[each] if isinstance(each, Region) else (each,)
        needed = (what(makers[v]) for node in nodes for v in node.operands if v in makers)
        return (other for other in dict.fromkeys(needed) if other is not each)

    for node in graph.nodes:
        begun[what(node)] = before(what(node))
        while begun:
            each = next(reversed(begun))
            other = None if each in done else next((n for n in begun[each] if n not in done), None)
            if other is None:
                del begun[each]
                done[each] = None
            elif other in begun or (
                isinstance(other, Node)
                and other.traits - {Trait.VIEW}
                and any(isinstance(n, Region) for n in begun)
            ):
                return None  # it needs, by others, what it makes; or one that keeps its place comes before
            else:
                begun[other] = before(other)
    return list(done)


# ---------------------------------------------------------------------- tiles


class _Tiling:
    """Writes the tiles of one head into a graph.

    Args:
        graph: The graph.
        head: A head of it.
        tiles: The number of tiles, at most that of the rows.
    """

    def __init__(self, graph: Graph, head: LossHead, tiles: int) -> None:
        self.graph, self.head = graph, head
        length = -(-head.rows // tiles)
        self.bounds = [(low, min(low + length, head.rows)) for low in range(0, head.rows, length)]
        self.of_tile: list[dict[Value, Value]] = [{} for _ in self.bounds]
        """The part that each tile has of each value."""
        each = (node for node in head.nodes if node.op == _LOSS and node.arguments[3] == _EACH)
        self.counts = {node.results[1] for node in each}
        """What each tile has of its own of losses that are not summed: the number of rows that count."""
        self.flat: dict[Value, Value] = {}
        self.needed = {value for value, _, _ in _needed(graph, head)}
        self.made: list[Node] = []
        self.nodes = {node.name for node in graph.nodes if node not in head.nodes}
        self.names = {value.name for node in graph.nodes for value in node.values}
        self.names |= {entry.value.name for entry in graph.inputs}
        self.names |= {storage.name for storage in graph.storages}

    def run(self) -> Graph:
        order = _order(self.graph, self.head)
        assert order is not None
        for each in order:
            if isinstance(each, Region):
                self._write(each)
            else:
                self.made.append(each)
        return replace(self.graph, nodes=tuple(self.made))

    def _write(self, region: Region) -> None:
        half = self.head.half(region)
        order = list(range(len(self.bounds)))
        if region is Region.BACKWARD:
            order.reverse()  # the last tile of forward is at hand
        for turn, tile in enumerate(order):
            for node in half:
                self._tile(node, tile, is_first=turn == 0, is_last=turn == len(order) - 1)
        for node in half:
            if node.op == _LOSS and node.results[1] not in self.counts:
                self._join_losses(node)
                continue
            for value in node.values:
                if value in self.needed and value in self.head.nodes[node].rows:
                    self._join(value, node)

    # ------------------------------------------------------------------ one tile

    def _tile(self, node: Node, tile: int, *, is_first: bool, is_last: bool) -> None:
        its, parts = self.head.nodes[node], self.of_tile[tile]
        if node.is_view:
            (operand,), (result,) = node.operands, node.values
            part = self._part(operand, its.rows[operand], tile, node)
            parts[result] = self._transposed(part, node, tile) if node.op == _TRANSPOSE else part
            return
        arguments = tuple(self._argument(argument, its, tile, node) for argument in _from_the_last(node))
        keywords = tuple((key, self._argument(a, its, tile, node)) for key, a in node.keywords)
        name = self._of_node(f"{node.name}_tile{tile}")
        own = replace(node, name=name, arguments=arguments, keywords=keywords)
        if its.sums:
            self._sum(node, own, parts, is_first=is_first, is_last=is_last)
            return
        if node.op == _LOSS:
            own = replace(own, arguments=(*arguments[:3], _EACH, *arguments[4:]))
        for value in node.values:
            rows = its.rows.get(value)
            shape = value.type.shape if rows is None else rows.of(value.type.shape, self._length(tile))
            if node.op == _LOSS and value is node.results[0]:
                shape = (self._length(tile),)
            parts[value] = self._value(f"{value.name}_tile{tile}", shape, value.type)
        self.made.append(replace(own, results=tuple(None if v is None else parts[v] for v in node.results)))

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
            self.made.append(replace(own, results=(total,)))
        else:
            so_far, added = self.flat[result], own.arguments
            if node.op != _PRODUCT:
                term = self._value(f"{own.name}_term", result.type.shape, result.type)
                self.made.append(replace(own, name=self._of_node(term.name), results=(term,)))
                added = (term,)
            self.made.append(
                replace(
                    own,
                    op=_ADD_IN_PLACE[node.op],
                    arguments=(so_far, *added),
                    keywords=(),
                    results=(total,),
                    traits=frozenset((Trait.EFFECT,)),
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
        return self.of_tile[tile].get(argument, argument) if argument in self.counts else argument

    def _part(self, value: Value, rows: Rows, tile: int, node: Node) -> Value:
        """The rows of a value that a tile has: a slice of it, unless the tiles make it."""
        known = self.of_tile[tile].get(value)
        if known is None:
            whole = value if rows.count == 1 else self._flattened(value, rows, node)
            axis, (low, high) = rows.axis, self.bounds[tile]
            type = replace(whole.type, shape=Rows(axis).of(whole.type.shape, high - low))
            known = Value(self._unused(f"{value.name}_tile{tile}"), type, value.storage)
            self._view(known, "aten.slice.Tensor", (whole, axis, low, high), node)
            self.of_tile[tile][value] = known
        return known

    def _flattened(self, value: Value, rows: Rows, node: Node) -> Value:
        if value not in self.flat:
            shape = rows.of(value.type.shape, self.head.rows)
            type = TensorType.contiguous(shape, value.type.dtype, value.type.device)
            self.flat[value] = Value(self._unused(f"{value.name}_rows"), type, value.storage)
            self._view(self.flat[value], "aten.view.default", (value, shape), node)
        return self.flat[value]

    def _transposed(self, part: Value, node: Node, tile: int) -> Value:
        type = replace(part.type, shape=part.type.shape[::-1], strides=part.type.strides[::-1])
        result = Value(self._unused(f"{node.name}_tile{tile}"), type, part.storage)
        self._view(result, _TRANSPOSE, (part,), node)
        return result

    # ------------------------------------------------------------------ all tiles

    def _join(self, value: Value, node: Node) -> None:
        """Makes a value whole of what the tiles have of it."""
        rows = self.head.nodes[node].rows[value]
        whole = value
        if rows.count > 1:
            shape = rows.of(value.type.shape, self.head.rows)
            type = TensorType.contiguous(shape, value.type.dtype, value.type.device)
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
        rows, name = self.head.rows, node.name
        joined = self._value(f"{name}_rows", (rows,), losses.type)
        self._joined(joined, losses, 0, node)
        scores = self._value(f"{name}_scores", (rows,), losses.type)
        self._operation(scores, "aten.neg.default", (joined,), node)
        column = TensorType.contiguous((rows, 1), losses.type.dtype, losses.type.device)
        columns = Value(self._unused(f"{name}_column"), column, scores.storage)
        self._view(columns, "aten.unsqueeze.default", (scores, 1), node)
        masked = replace(classes.type, dtype=DType.BOOL)
        is_left_out = self._value(f"{name}_left_out", (rows,), masked)
        self._operation(is_left_out, "aten.eq.Scalar", (classes, not_counted), node)
        marks = self._value(f"{name}_marks", (rows,), classes.type)
        self._operation(marks, "aten.mul.Scalar", (is_left_out, _NOT_COUNTED), node)
        self.made.append(replace(node, arguments=(columns, marks, None, node.arguments[3], _NOT_COUNTED)))

    # ------------------------------------------------------------------ nodes and values

    def _value(self, name: str, shape: tuple[int, ...], like: TensorType) -> Value:
        type = TensorType.contiguous(shape, like.dtype, like.device)
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
    ) -> None:
        self.made.append(
            Node(
                self._of_node(made.name),
                op,
                arguments,
                (made,),
                region=near.region,
                traits=traits,
                at=near.at,
            )
        )

    def _of_node(self, name: str) -> str:
        return _unused(name, self.nodes)

    def _unused(self, name: str) -> str:
        """A name for a value, and for its storage."""
        return _unused(name, self.names)


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
