"""The places of values in their storages: each is a tensor without data, and a view of all of its storage."""

# The identity of a storage has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir import Argument, Node, TensorType, Value, allocation_bytes
from ...torch_support.arguments import to_torch
from ...torch_support.operations import function_of

__all__ = ["Places", "Step", "fills", "is_same_place"]

Step = tuple[str, tuple[Argument, ...]]
"""A view: its operation, and the arguments behind the first."""

_KEEPING_OFFSETS = frozenset(
    f"aten.{name}.default"
    for name in ("as_strided_scatter", "copy", "diagonal_scatter", "select_scatter", "slice_scatter")
)
"""Operations whose result lies in its storage where the first operand lies in its own."""


class Places:
    """The places of a graph's values, found once they are asked for.

    Args:
        maker: Returns the node that makes a value; None for an input.
    """

    def __init__(self, maker: Callable[[Value], Node | None]) -> None:
        self._maker = maker
        self._places: dict[Value, Tensor | None] = {}

    def of(self, value: Value) -> Tensor | None:
        """Returns the place of a value; None if it is not known."""
        if value not in self._places:
            self._places[value] = self._find(value)
        return self._places[value]

    def viewed(self, value: Value, step: Step) -> Tensor | None:
        """Returns the place of a view of a value."""
        place, (op, arguments) = self.of(value), step
        if place is None:
            return None
        return _plain(function_of(op)(place, *(to_torch(each, _no_value) for each in arguments)), place)

    def through(self, value: Value, views: Sequence[Node]) -> Tensor | None:
        """Returns the place of a view of a view ... of a value, though these are of something else."""
        place = self.of(value)
        for node in views:
            place = None if place is None else _viewed_by(node, place, node.values[0])
        return place

    def move(self, whole: Value, part: Value, before: Value) -> None:
        """Takes down that a value has all of a new storage, and a part lies there as `before` in its own."""
        place = self.of(before)
        assert place is not None
        base = self._places[whole] = _whole(whole)
        self._places[part] = base.as_strided(place.shape, place.stride(), place.storage_offset())

    def _find(self, value: Value) -> Tensor | None:
        node = self._maker(value)
        if node is None:
            return None
        if not node.is_view:
            if node.op in _KEEPING_OFFSETS and isinstance(node.arguments[0], Value):
                place = self.of(node.arguments[0])
                return None if place is None else _whole(value, int(place.storage_offset()))
            return _whole(value) if fills(value) else None
        if len(node.operands) != 1 or (place := self.of(node.operands[0])) is None:
            return None
        view, type = _viewed_by(node, place, value), value.type
        is_as_traced = view is not None and (view.shape, view.stride()) == (type.shape, type.strides)
        return view if is_as_traced else None


def fills(value: Value) -> bool:
    """Whether a value has all elements of its storage."""
    type, storage = value.type, value.storage
    return type.is_dense and allocation_bytes(type.nbytes, storage.device) == storage.nbytes != 0


def is_same_place(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two places are known, and one."""
    if a is None or b is None or a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    return (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())


def _whole(value: Value, offset: int = 0) -> Tensor:
    """The place of the value that an operation makes in a storage."""
    elements = offset + value.storage.nbytes // max(value.type.dtype.itemsize, 1)
    flat = torch.empty(elements, dtype=_dtype(value.type), device="meta")
    return flat.as_strided(value.type.shape, value.type.strides, offset)


def _viewed_by(node: Node, place: Tensor, value: Value) -> Tensor | None:
    """The place of what a view makes of its operand."""
    arguments = [to_torch(each, lambda _: place) for each in node.arguments]
    keywords = {key: to_torch(each, lambda _: place) for key, each in node.keywords}
    view: Any = function_of(node.op)(*arguments, **keywords)
    return _plain(view[node.results.index(value)] if node.is_sequence else view, place)


def _plain(view: Any, place: Tensor) -> Tensor | None:
    """A view as a place; None for one whose numbers are others than those of the memory."""
    is_plain = isinstance(view, Tensor) and view.dtype == place.dtype
    return view if is_plain and not view.is_conj() and not view.is_neg() else None


def _dtype(type: TensorType) -> torch.dtype:
    return getattr(torch, type.dtype.value)


def _no_value(argument: object) -> Any:
    raise ValueError("the place of a write depends on a tensor")
