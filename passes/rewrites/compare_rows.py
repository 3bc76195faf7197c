"""Compares operations on fewer rows with those on all: kernels for fewer rows may add in another order."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ir import Node, TensorType, Value, allocation_bytes
from ..costs.table import signature
from .row_rules import Rows, RowValues

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RowsOf", "compare_rows"]


@dataclass(frozen=True, slots=True)
class RowsOf:
    """An operation on some rows of another one.

    Args:
        whole: The operation on all rows.
        values: The values of it that hold rows.
        part: The one on some.
        first: The first of these rows.
    """

    whole: Node
    values: RowValues
    part: Node
    first: int

    @property
    def is_aligned(self) -> bool:
        """Whether each row lies as in the whole tensors, seen from the lines of a processor's cache.

        Libraries of products add in another order where it does not.
        """
        offsets_bytes = (
            self._rows_apart(value, its)
            * value.type.strides[its.axis + its.count - 1]
            * value.type.dtype.itemsize
            for value, its in self.values.rows.items()
        )
        return not any(nbytes % _LINE_BYTES for nbytes in offsets_bytes)

    def _rows_apart(self, value: Value, its: Rows) -> int:
        """The rows between one's places; where a slice drops some, any number, which matters on a GPU."""
        return 1 if its.kept is not None and value.type.device != "cpu" else self.first


_LINE_BYTES = 64
"""The alignment of what torch allocates on a CPU; other devices align to more."""

_compared: dict[tuple[object, ...], bool] = {}
"""Whether both give the same bits, by what decides on their kernels."""


def compare_rows(pairs: Collection[RowsOf], *, most_bytes: int | None = None) -> dict[Node, bool]:
    """Returns, for operations on some rows, whether they give the same bits as those on all.

    Each that was not compared before runs once, as does the one on all rows, on made-up numbers.

    Args:
        pairs: The operations.
        most_bytes: What touches more bytes does not run, and is left out. None lets all run.
    """
    import torch

    settings = torch.get_num_threads(), torch.backends.mkldnn.enabled
    keys = {pair.part: (signature(pair.whole), signature(pair.part), *settings) for pair in pairs}
    missing = {keys[pair.part]: pair for pair in pairs if keys[pair.part] not in _compared}
    by_whole: dict[str, list[RowsOf]] = {}
    for (of_whole, *_), pair in missing.items():
        by_whole.setdefault(of_whole, []).append(pair)
    for group in by_whole.values():
        whole = group[0].whole
        if most_bytes is None or _touched_bytes(whole) <= most_bytes:
            with contextlib.suppress(torch.OutOfMemoryError), torch.no_grad():
                _compared.update((keys[pair.part], same) for pair, same in _compare(whole, group))
    return {part: _compared[key] for part, key in keys.items() if key in _compared}


def _touched_bytes(node: Node) -> int:
    return sum(allocation_bytes(v.type.nbytes, v.type.device) for v in (*node.operands, *node.values))


def _compare(whole: Node, pairs: Iterable[RowsOf]) -> Iterator[tuple[RowsOf, bool]]:
    """Yields whether operations on some rows give the bits of that on all, which is one for all of them."""
    from ...torch_support.bits import same_bits
    from ..costs.profiling import made_up_operands, runner

    inputs = made_up_operands(whole)
    expected = _listed(runner(whole, inputs)())
    for pair in pairs:
        operands = zip(inputs, pair.whole.operands, pair.part.operands, strict=True)
        parts = [_part(tensor, pair, value, own.type) for tensor, value, own in operands]
        results = zip(pair.whole.results, expected, _listed(runner(pair.part, parts)()), strict=False)
        yield (
            pair,
            all(
                same_bits(_rows(tensor, pair, value, own.shape[pair.values.rows[value].axis]), own)
                for value, tensor, own in results
                if value is not None and value in pair.values.rows
            ),
        )


def _listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _part(tensor: Tensor, pair: RowsOf, value: Value, type: TensorType) -> Tensor:
    """The part of a tensor that an operation on some rows reads, laid out as there."""
    if value in pair.values.groups:
        group, count = pair.values.groups[value]
        return tensor.flatten(0, count - 1).narrow(0, pair.first // group, 1)
    if value not in pair.values.rows:
        return tensor
    rows = _rows(tensor, pair, value, type.shape[pair.values.rows[value].axis])
    is_laid_out = rows.stride() == type.strides
    return rows if is_laid_out else tensor.new_empty_strided(type.shape, type.strides).copy_(rows)


def _rows(tensor: Tensor, pair: RowsOf, value: Value, count: int) -> Tensor:
    """The rows of a tensor that an operation on some of them has."""
    its = pair.values.rows[value]
    flat = tensor.flatten(its.axis, its.axis + its.count - 1)
    first = min(
        pair.first, flat.shape[its.axis] - count
    )  # if a slice dropped some: which ones does not matter
    return flat.narrow(its.axis, first, count)
