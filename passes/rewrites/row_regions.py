"""Finds regions whose operations treat each row by itself: loss heads, and layers wider than around."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ...ir import DType, Graph, Node, Region, Storage, Trait, Value, values_in
from .row_rules import COPIES, SLICE, Rows, RowValues, UntileableError, rows_through

__all__ = [
    "EACH",
    "LOSS",
    "LOSS_GRADIENT",
    "MEAN",
    "TOTAL",
    "Half",
    "RowRegion",
    "order_around",
    "row_regions",
]

LOSS = "aten.nll_loss_forward.default"
"""The operation whose losses of rows are joined and summed as it does, whatever the tiles."""

LOSS_GRADIENT = "aten.nll_loss_backward.default"
EACH, MEAN, TOTAL = 0, 1, 2
"""The reductions of a loss: to that of each row, to their mean, and to their sum."""

_CLASSES = {LOSS: 1, LOSS_GRADIENT: 2}
"""The place of the classes among the arguments; what is ignored is the one after the next but one."""

_SOFTMAX = "aten._log_softmax.default"
_READ = {"aten.mm.default": (0,), "aten.addmm.default": (1,), "aten.bmm.default": (0, 1)}
"""The places of the operands that products have by rows, among their arguments."""

_SUMS = frozenset(("aten.mm.default", "aten.sum.dim_IntList"))
"""The operations whose sum over rows can grow by one tile after the other."""


@dataclass(frozen=True, eq=False)
class RowRegion:
    """The operations and views that read or make tensors as wide as one of them.

    Args:
        rows: The number of rows.
        wide_bytes: The bytes of that tensor: logits, or what a hidden layer makes.
        nodes: The operations, in the order of the graph, with the values of theirs that hold rows.
        needed: The results that others read, or that are the graph's.
    """

    rows: int
    wide_bytes: int
    nodes: Mapping[Node, RowValues]
    needed: Collection[Value]

    @property
    def sums(self) -> list[Value]:
        """The values that are sums over the rows, in the order of the graph."""
        return [v for node, its in self.nodes.items() for v in node.values if v in its.sums]

    @property
    def most_tiles(self) -> int:
        """The most tiles that it may be in: few if a sum over them is rounded to 16 bits at each of them."""
        is_rounded = any(value.type.dtype.itemsize < DType.FLOAT32.itemsize for value in self.sums)
        return min(self.rows, _MOST_IN_16_BITS) if is_rounded else self.rows

    @property
    def group(self) -> int:
        """The rows that must not be in one tile with others: those that share one of a mask."""
        groups = (group for its in self.nodes.values() for group, _ in its.groups.values())
        return min(groups, default=self.rows)

    @property
    def fewest_tiles(self) -> int:
        """The fewest tiles that it may be in."""
        return -(-self.rows // self.group)

    def half(self, region: Region) -> list[Node]:
        """The nodes of forward, or of backward."""
        return [node for node in self.nodes if node.region is region]


_MOST_IN_16_BITS = 16
"""The most tiles whose sum is rounded to 16 bits at each of them.

The gradient of a head in bfloat16 is off from that in float64 by .3% whole, .5% of 16 tiles, 15% of 512.
"""


def row_regions(graph: Graph) -> list[RowRegion]:
    """Returns the regions of a graph that can be tiled, loss heads first."""
    around, readers, scaled = _around(graph), _readers(graph), _scaled(graph)
    found: list[RowRegion] = []
    taken: set[Node] = set()
    seen: set[Storage] = set()
    for wide, rows, node in (*_scores(graph), *_hidden(graph)):
        if node in taken or wide.storage in seen:
            continue
        seen.add(wide.storage)
        nodes = _grown(graph, around, scaled, wide, rows, [node])
        if nodes is None:
            continue
        seen |= {value.storage for node in nodes for value in node.values}
        made = [value for node in nodes for value in node.values]
        needed = [v for v in made if any(reader not in nodes for reader in readers.get(v, ()))]
        region = RowRegion(rows.held(wide.type.shape), wide.type.nbytes, nodes, needed)
        if taken.isdisjoint(nodes) and _is_separable(region, scaled):
            found.append(region)
            taken.update(nodes)
    if order_around(graph, found) is not None:
        return found
    apart: list[RowRegion] = []
    for region in found:
        if order_around(graph, [*apart, region]) is not None:
            apart.append(region)
    return apart


def _readers(graph: Graph) -> dict[Value, list[Node | None]]:
    """The nodes that read each value, and None for outputs of the graph."""
    found: dict[Value, list[Node | None]] = {}
    for node in graph.nodes:
        for value in node.operands:
            found.setdefault(value, []).append(node)
    for output in graph.outputs:
        if output.value is not None:
            found.setdefault(output.value, []).append(None)
    return found


def _scores(graph: Graph) -> Iterator[tuple[Value, Rows, Node]]:
    """Yields the tensors that softmaxes of losses read, perhaps some rows of them."""
    makers = {value: node for node in graph.nodes for value in node.values}
    for node in graph.nodes:
        if node.op == _SOFTMAX and node.region is Region.FORWARD:
            whole, reader = node.operands[0], node
            maker = makers.get(whole)
            while maker is not None and (maker.is_view or maker.op in COPIES):
                if maker.op == SLICE:
                    whole, reader = maker.operands[0], maker
                maker = makers.get(maker.operands[0])
            yield whole, Rows(0, len(whole.type.shape) - 1), reader


def _hidden(graph: Graph) -> Iterator[tuple[Value, Rows, Node]]:
    """Yields the products of forward that are wider than what they read by rows, the widest first."""
    products: list[tuple[Value, Rows, Node]] = []
    for node in graph.nodes:
        if node.op in _READ and node.region is Region.FORWARD:
            (made,), read = node.values, [v for i in _READ[node.op] for v in values_in(node.arguments[i])]
            if all(made.type.numel > value.type.numel for value in read):
                products.append((made, Rows(), node))
    yield from sorted(products, key=lambda each: -each[0].type.nbytes)


def _grown(
    graph: Graph,
    around: Mapping[Storage, list[Node]],
    scaled: AbstractSet[Storage],
    wide: Value,
    rows: Rows,
    pending: list[Node],
) -> dict[Node, RowValues] | None:
    """All nodes around tensors as wide as one; None if one of them mixes rows, or has a place to keep."""
    shape = wide.type.shape
    if len(shape) < 2 or rows.held(shape) < 2 or wide.storage in graph.static_storages:
        return None
    known, wide_row = {wide: rows}, wide.type.numel // rows.held(shape)
    found: dict[Node, RowValues] = {}
    while pending:
        node = next((n for n in pending if not known.keys().isdisjoint((*n.operands, *n.values))), None)
        if node is None:
            return None
        pending.remove(node)
        traits = node.traits - {Trait.VIEW}
        if all(value.storage in scaled for value in node.values):
            traits -= {Trait.PINNED}  # the sum itself may grow by one tile after the other
        if traits or node.annotation is not None:
            if _only_makes(node, known):
                continue
            return None
        try:
            found[node] = rows_through(node, known)
        except UntileableError:
            if _only_makes(node, known):
                continue  # as draws of a dropout do: tiles read their rows of it
            return None
        known.update(found[node].rows)
        for value, its in found[node].rows.items():
            storage, row = value.storage, value.type.numel // its.held(value.type.shape)
            is_wide = row == wide_row and storage.nbytes >= value.type.nbytes
            if is_wide and storage in graph.producers:
                pending += (n for n in around[storage] if n not in found and n not in pending)
    return {node: found[node] for node in graph.nodes if node in found}


def _only_makes(node: Node, known: Mapping[Value, Rows]) -> bool:
    """Whether a node makes tensors of rows of what is none: it may stay whole, before the tiles."""
    return not node.is_view and known.keys().isdisjoint(node.operands)


def _around(graph: Graph) -> dict[Storage, list[Node]]:
    """The nodes that read or make each storage."""
    found: dict[Storage, list[Node]] = {}
    for node in graph.nodes:
        for storage in dict.fromkeys(value.storage for value in (*node.operands, *node.values)):
            found.setdefault(storage, []).append(node)
    return found


def _scaled(graph: Graph) -> set[Storage]:
    """The sums that forward makes and backward scales in their place."""
    written = {node.operands[0].storage for node in graph.nodes if Trait.EFFECT in node.traits}
    return written - graph.static_storages


def _is_separable(region: RowRegion, scaled: AbstractSet[Storage]) -> bool:
    """Whether the tiles can run one after the other, and nothing else needs the wide tensors."""
    makers = {value: node for node in region.nodes for value in node.values}
    sums = set(region.sums)
    for node, its in region.nodes.items():
        if not sums.isdisjoint(its.rows):
            return False  # read by rows, before all tiles have run
        for value in node.operands:
            maker = makers.get(value)
            if maker is None:
                rows = its.rows.get(value, Rows())
                if (rows.count > 1 or rows.kept is not None) and not value.type.is_contiguous:
                    return False
                if rows.kept is not None and value not in _classes(node):
                    return False
            elif value not in its.rows and (node.region, maker.region) != (Region.BACKWARD, Region.FORWARD):
                return False  # read whole, before all tiles have run
        is_kept = node.region is Region.BACKWARD or all(value.storage in scaled for value in its.sums)
        if its.sums and not (node.op in _SUMS and is_kept):
            return False
        if not node.is_view and not all(
            value in its.sums or value.type.is_contiguous for value in node.values
        ):
            return False
    needed = set(region.needed)
    has_gradient = region.half(Region.BACKWARD) or any(node.op == LOSS_GRADIENT for node in region.nodes)
    return bool(region.half(Region.FORWARD) and has_gradient) and not any(
        value in needed and (node.is_view or value not in (*_whole(its), *its.sums))
        for node, its in region.nodes.items()
        if node.op != LOSS
        for value in node.values
    )


def _classes(node: Node) -> Iterator[Value]:
    """The classes of a loss, or of its gradient."""
    if node.op in _CLASSES:
        yield from values_in(node.arguments[_CLASSES[node.op]])


def _whole(its: RowValues) -> Iterator[Value]:
    """The values that hold all rows."""
    return (value for value, rows in its.rows.items() if rows.kept is None)


Half = tuple[RowRegion, Region]
"""The nodes of a row region in forward, or those in backward."""


def order_around(graph: Graph, regions: Iterable[RowRegion]) -> list[Node | Half] | None:
    """The nodes of a graph, with each half of each region in one place; None if others run amid one.

    Operations of others that a half needs come before it, unless they keep their order.
    """
    makers = {value: node for node in graph.nodes for value in node.values}
    halves = {(region, half): region.half(half) for region in regions for half in Region}
    half_of = {node: half for half, nodes in halves.items() for node in nodes}
    turn: dict[Node | Half, int] = {}
    """The places of those that keep their order."""
    kept = (node for node in graph.nodes if node.traits - {Trait.VIEW} and node not in half_of)
    turn.update((node, i) for i, node in enumerate(kept))
    ready = 0
    done: dict[Node | Half, None] = {}
    begun: dict[Node | Half, Iterator[Node | Half]] = {}

    def what(node: Node) -> Node | Half:
        return half_of.get(node, node)

    def before(each: Node | Half) -> Iterator[Node | Half]:
        needing = (each,) if isinstance(each, Node) else halves[each]
        needed = (what(makers[v]) for node in needing for v in node.operands if v in makers)
        return (other for other in dict.fromkeys(needed) if other != each)

    for node in graph.nodes:
        begun[what(node)] = before(what(node))
        while begun:
            each = next(reversed(begun))
            other = None if each in done else next((n for n in begun[each] if n not in done), None)
            if other is None:
                del begun[each]
                if each in turn and each not in done:
                    if turn[each] != ready:
                        return None  # an earlier one, which keeps its order, would run later
                    ready += 1
                done[each] = None
            elif other in begun:
                return None  # it needs, by others, what it makes
            else:
                begun[other] = before(other)
    return list(done)
