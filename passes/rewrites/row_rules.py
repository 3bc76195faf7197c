"""Rules of operations that treat each row by itself: which values hold the rows, and which sum them up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from ...ir import Node, Value
from ...torch_support.draws import DROPOUT_BACKWARD, DROPOUT_PRODUCT

__all__ = [
    "COPIES",
    "DIMS",
    "SLICE",
    "SLICE_BACKWARD",
    "SWAP",
    "Kept",
    "RowValues",
    "Rows",
    "UntileableError",
    "is_pointwise",
    "rows_through",
]


SWAP = "aten.transpose.int"
SLICE = "aten.slice.Tensor"
SLICE_BACKWARD = "aten.slice_backward.default"


@dataclass(frozen=True, slots=True)
class Kept:
    """The rows that a slice leaves: from `first` to before `last` in one dimension of all rows' shape."""

    shape: tuple[int, ...]
    dim: int
    first: int
    last: int

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """The shape of the rows that are left."""
        return (*self.shape[: self.dim], self.last - self.first, *self.shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Rows:
    """The dimensions of a value that hold the rows: `count` of them, from `axis` on, flattened.

    If only some rows are there, `kept` says which.
    """

    axis: int = 0
    count: int = 1
    kept: Kept | None = None

    def of(self, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """The shape with that many rows, in one dimension."""
        return (*shape[: self.axis], rows, *shape[self.axis + self.count :])

    def held(self, shape: tuple[int, ...]) -> int:
        """The number of rows that are there, in a shape."""
        return math.prod(shape[self.axis : self.axis + self.count])

    def number(self, shape: tuple[int, ...]) -> int:
        """The number of all rows."""
        return self.held(shape) if self.kept is None else math.prod(self.kept.shape)


@dataclass(frozen=True, slots=True)
class RowValues:
    """The values of an operation that hold rows, and what becomes of rows in others.

    Args:
        rows: The dimensions of each value that holds rows.
        sums: The results that are sums over all rows.
        groups: The operands that hold one row for each group of rows, as a mask of a batch for all heads of
            its attention: the number of rows in a group, and of dimensions that the rows have there.
    """

    rows: Mapping[Value, Rows]
    sums: frozenset[Value] = frozenset()
    groups: Mapping[Value, tuple[int, int]] = field(default_factory=dict[Value, "tuple[int, int]"])


class UntileableError(Exception):
    """An operation mixes rows, or has no rule."""


def rows_through(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    """Says which operands and results of an operation hold rows, given those of some.

    Operands that are not named are read whole for each tile.

    Raises:
        UntileableError: The operation has no rule, or is none of rows.
    """
    rule = _RULES.get(node.op)
    if rule is None and is_pointwise(node.op):
        rule = _pointwise
    if rule is None:
        raise UntileableError(f"{node.op} has no rule")
    found = rule(node, known)
    if node.op not in _OF_KEPT and any(rows.kept is not None for rows in found.rows.values()):
        raise UntileableError(f"{node.op} has no rule for some of the rows")
    for value, rows in found.rows.items():
        if known.get(value, rows) != rows:
            raise UntileableError(f"{node.name} needs {value} by {rows}, and it holds {known[value]}")
    return found


def _require(condition: bool, node: Node) -> None:
    if not condition:
        raise UntileableError(f"{node.name} mixes rows")


def _tensors(node: Node, count: int) -> list[Value]:
    operands = node.arguments[:count]
    _require(len(operands) == count and all(isinstance(operand, Value) for operand in operands), node)
    return [cast(Value, operand) for operand in operands]


# ---------------------------------------------------------------------- element by element

COPIES = frozenset(
    ("aten._to_copy.default", "aten.clone.default", "aten.detach.default", "aten.alias.default")
)
"""The operations that give their operand's numbers again, perhaps in another type."""
_DROPOUT = frozenset((DROPOUT_PRODUCT, DROPOUT_BACKWARD, "aten.native_dropout_backward.default"))


def is_pointwise(op: str) -> bool:
    """Whether an operation makes each element of those at its place."""
    import torch

    if op in COPIES | _DROPOUT:
        return True
    space, _, rest = op.partition(".")
    name, _, overload = rest.partition(".")
    if space != "aten" or not hasattr(torch.ops.aten, name):
        return False
    found = getattr(getattr(torch.ops.aten, name), overload, None)
    return found is not None and torch.Tag.pointwise in found.tags


def _pointwise(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    _require(len(node.values) == 1, node)
    (result,) = node.values
    shape = result.type.shape
    rows = known.get(result) or next(
        (known[value] for value in node.operands if value in known and value.type.shape == shape), None
    )
    if rows is None:
        raise UntileableError(f"{node.name} broadcasts rows")
    found = {result: rows}
    groups: dict[Value, tuple[int, int]] = {}
    trailing = len(shape) - rows.axis - rows.count
    for value in node.operands:
        its = value.type.shape
        if (
            len(its) == len(shape)
            and its[rows.axis : rows.axis + rows.count] == shape[rows.axis :][: rows.count]
        ):
            found[value] = rows
        elif len(its) > trailing:
            groups[value] = _group(node, its, shape, rows), rows.count
    return RowValues(found, groups=groups)


def _group(node: Node, its: tuple[int, ...], shape: tuple[int, ...], rows: Rows) -> int:
    """The number of rows that share one of an operand, which is broadcast over their last dimensions."""
    _require(len(its) == len(shape) and rows.axis == 0 and rows.kept is None, node)
    own = next((i for i in range(rows.count) if its[i] != shape[i]), rows.count)
    _require(all(size == 1 for size in its[own : rows.count]), node)
    return math.prod(shape[own : rows.count])


# ---------------------------------------------------------------------- products


def _mm(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    left, right = _tensors(node, 2)
    return _product(node, left, right, known)


def _addmm(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    bias, left, right = _tensors(node, 3)
    found = _product(node, left, right, known)
    _require(not found.sums and len(bias.type.shape) < 2 and node.values[0] in found.rows, node)
    _require(found.rows[node.values[0]] == Rows(), node)
    return found


def _products(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    """A product of matrices for each row."""
    values = (*_tensors(node, 2), *node.values)
    _require(all(known.get(value, Rows()) == Rows() for value in values), node)
    return RowValues(dict.fromkeys(values, Rows()))


def _product(node: Node, left: Value, right: Value, known: Mapping[Value, Rows]) -> RowValues:
    """The rows of the result, those of the left or the columns of the right, or the axis that is summed."""
    (result,) = node.values
    of_left, of_right, of_result = known.get(left), known.get(right), known.get(result)
    if Rows(1) == of_left or Rows(0) == of_right:
        _require(of_left in (None, Rows(1)) and of_right in (None, Rows(0)) and of_result is None, node)
        return RowValues({left: Rows(1), right: Rows(0)}, frozenset((result,)))
    if Rows(0) in (of_left, of_result):
        _require(of_right is None, node)
        return RowValues({left: Rows(0), result: Rows(0)})
    if Rows(1) in (of_right, of_result):
        _require(of_left is None, node)
        return RowValues({right: Rows(1), result: Rows(1)})
    raise UntileableError(f"{node.name} mixes rows")


# ---------------------------------------------------------------------- views


def _transposed(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    (operand,), (result,) = node.operands, node.values
    _require(len(operand.type.shape) == 2, node)
    given = known.get(operand) or Rows(1 - known[result].axis, known[result].count)
    _require(given.count == 1, node)
    return RowValues({operand: given, result: Rows(1 - given.axis)})


def _swapped(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    """Two dimensions, behind those of the rows, change places."""
    (operand,), (result,) = node.operands, node.values
    rows, rank = known.get(operand) or known[result], len(operand.type.shape)
    dims = [cast(int, dim) % rank for dim in node.arguments[1:]]
    _require(rows.axis == 0 and min(dims) >= rows.count, node)
    return RowValues({operand: rows, result: rows})


def _expanded(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    """The same tensor: nothing of it is expanded."""
    (operand,), (result,) = node.operands, node.values
    _require(operand.type.shape == result.type.shape, node)
    return RowValues(dict.fromkeys((operand, result), known.get(operand) or known[result]))


def _viewed(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    """The same rows in other leading dimensions."""
    (operand,), (result,) = node.operands, node.values
    value, other = (operand, result) if operand in known else (result, operand)
    rows = known[value]
    _require(rows.axis == 0, node)
    held, rest = rows.held(value.type.shape), value.type.shape[rows.count :]
    count = len(other.type.shape) - len(rest)
    _require(count > 0 and other.type.shape[count:] == rest, node)
    _require(Rows(0, count).held(other.type.shape) == held, node)
    return RowValues({value: rows, other: Rows(0, count, rows.kept)})


def _sliced(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    """Some of the rows; or all of them, of which others are elsewhere."""
    (operand,), (result,) = node.operands, node.values
    if operand.type.shape == result.type.shape:
        rows = known.get(operand) or known[result]
        return RowValues({operand: rows, result: rows})
    rows = known.get(operand)
    _require(rows is not None and rows.kept is None, node)
    return RowValues({operand: cast(Rows, rows), result: _kept(node, cast(Rows, rows), operand.type.shape)})


def _unsliced(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    """The gradient of such a slice: zero in the rows that it drops."""
    (operand,), (result,) = node.operands, node.values
    rows = known.get(result) or Rows(0, known[operand].count)
    return RowValues({operand: _kept(node, rows, result.type.shape), result: rows})


def _kept(node: Node, rows: Rows, shape: tuple[int, ...]) -> Rows:
    """The rows that a slice of a shape, or the gradient of it, keeps."""
    dim, first, last, *step = cast("list[int]", node.arguments[1 if node.op == SLICE else 2 :])
    dim %= len(shape)
    _require(rows.axis == 0 and dim < rows.count and step in ([], [1]), node)
    first, last, _ = slice(first, last).indices(shape[dim])
    kept = Kept(shape[: rows.count], dim, first, last)
    _require(2 * math.prod(kept.kept_shape) >= math.prod(kept.shape), node)  # of the others much is in vain
    return Rows(0, rows.count, kept)


# ---------------------------------------------------------------------- along a row


def _along(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    """A softmax over the last dimension, or its gradient: all tensors have one shape."""
    values = (*node.operands, *node.values)
    rows = next(known[value] for value in values if value in known)
    shape = node.values[0].type.shape
    _require(node.arguments[DIMS[node.op]] in (-1, len(shape) - 1), node)
    _require(rows.axis == 0 and rows.count <= len(shape) - 1, node)
    _require(all(value.type.shape == shape for value in values), node)
    return RowValues(dict.fromkeys(values, rows))


def _summed(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    """A sum along each row, or over all of them."""
    (operand,), (result,) = node.operands, node.values
    rows = known.get(operand)
    if rows is None:
        raise UntileableError(f"{node.name} makes rows of what it sums")
    rank = len(operand.type.shape)
    dims = node.arguments[1] if len(node.arguments) > 1 else ()
    _require(isinstance(dims, tuple) and bool(dims), node)
    summed = {dim % rank for dim in cast(tuple[int, ...], dims)}
    its = set(range(rows.axis, rows.axis + rows.count))
    if summed == its and rows.count == 1:
        return RowValues({operand: rows}, frozenset((result,)))
    _require(not summed & its and rows.axis == 0, node)
    return RowValues({operand: rows, result: rows})


def _row_losses(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    """The cross entropy of rows."""
    scores, classes = _tensors(node, 2)
    _require(len(scores.type.shape) == 2 and len(node.arguments) == 5, node)
    (losses, _) = node.results
    rows, is_each = known.get(scores, Rows()), node.arguments[3] == 0
    _require(rows.axis == 0 and rows.count == 1 and not (is_each and rows.kept), node)
    found = {scores: rows, classes: rows}
    return RowValues(found | {losses: rows} if is_each and losses is not None else found)


def _row_loss_gradients(node: Node, known: Mapping[Value, Rows]) -> RowValues:
    gradient, scores, classes = _tensors(node, 3)
    (result,) = node.values
    _require(len(scores.type.shape) == 2, node)
    rows = known.get(scores) or known.get(result, Rows())
    _require(rows.axis == 0 and rows.count == 1 and not (gradient.type.shape and rows.kept), node)
    found = {scores: rows, classes: rows, result: rows}
    return RowValues(found | ({gradient: rows} if gradient.type.shape else {}))


DIMS = {
    "aten._log_softmax.default": 1,
    "aten._log_softmax_backward_data.default": 2,
    "aten._softmax.default": 1,
    "aten._softmax_backward_data.default": 2,
    "aten.sum.dim_IntList": 1,
    "aten.logsumexp.default": 1,
}
"""The arguments that name dimensions of the first operand, by operation."""

_OF_KEPT = COPIES | {
    SLICE,
    SLICE_BACKWARD,
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten._log_softmax.default",
    "aten._log_softmax_backward_data.default",
    "aten.nll_loss_forward.default",
    "aten.nll_loss_backward.default",
}
"""The operations that may run on all rows where only some of them are there: others give no gradient then."""

_RULES: dict[str, Callable[[Node, Mapping[Value, Rows]], RowValues]] = {
    "aten.mm.default": _mm,
    "aten.addmm.default": _addmm,
    "aten.bmm.default": _products,
    "aten.t.default": _transposed,
    SWAP: _swapped,
    "aten.expand.default": _expanded,
    "aten.view.default": _viewed,
    "aten._unsafe_view.default": _viewed,
    SLICE: _sliced,
    SLICE_BACKWARD: _unsliced,
    "aten._log_softmax.default": _along,
    "aten._log_softmax_backward_data.default": _along,
    "aten._softmax.default": _along,
    "aten._softmax_backward_data.default": _along,
    "aten.sum.dim_IntList": _summed,
    "aten.logsumexp.default": _summed,
    "aten.nll_loss_forward.default": _row_losses,
    "aten.nll_loss_backward.default": _row_loss_gradients,
}
