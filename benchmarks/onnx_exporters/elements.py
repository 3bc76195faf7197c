"""Finds the numbers of a model in tensors of another form: transposed, packed, copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

__all__ = ["Elements"]

_Array = np.ndarray[Any, Any]
_SAMPLE = 4096
_MOST = 0.99


class Elements:
    """The float32 numbers of a model, found by their bits.

    Weights that are drawn at random hardly repeat, so that a number tells where it belongs. Those that do
    repeat tell nothing.

    Args:
        values: The model's tensors, by name.
    """

    def __init__(self, values: Mapping[str, _Array]) -> None:
        self._bits = {name: _bits(array) for name, array in values.items()}
        self.spans: dict[str, slice] = {}
        end = 0
        for name, bits in self._bits.items():
            self.spans[name] = slice(end, end := end + bits.size)
        self.size = end

    @cached_property
    def _order(self) -> _Array:
        return np.argsort(self._all, kind="stable")

    @cached_property
    def _all(self) -> _Array:
        return np.concatenate(list(self._bits.values()))

    @cached_property
    def _sorted(self) -> _Array:
        return self._all[self._order]

    @cached_property
    def unique(self) -> _Array:
        """Which numbers occur once, in the order of `spans`."""
        new = np.ones(self.size + 1, bool)
        new[1:-1] = self._sorted[1:] != self._sorted[:-1]
        found = np.empty(self.size, bool)
        found[self._order] = new[1:] & new[:-1]
        return found

    def holds(self, array: _Array) -> bool:
        """Whether a tensor is made of the model's numbers."""
        sample = _sample(_bits(array))
        sample = sample[sample << 1 != 0]  # zeros are everywhere
        return bool(sample.size) and bool(_among(sample, self._sorted).mean() >= _MOST)

    def present(self, arrays: Iterable[_Array]) -> set[str]:
        """The names of the model's tensors whose numbers are among those of the arrays."""
        parts = [_bits(array) for array in arrays]
        if not parts:
            return set()
        there = np.unique(np.concatenate(parts))
        samples = {name: _sample(bits) for name, bits in self._bits.items()}
        return {name for name, sample in samples.items() if _among(sample, there).mean() >= _MOST}

    def places(self, array: _Array) -> tuple[_Array, _Array]:
        """For each element of a tensor, where in the model it stands, and whether that is certain."""
        bits = _bits(array)
        at = self._order[_find(bits, self._sorted)]
        return at, (self._all[at] == bits) & self.unique[at]


def _find(bits: _Array, ordered: _Array) -> _Array:
    return np.minimum(np.searchsorted(ordered, bits), ordered.size - 1)


def _among(bits: _Array, ordered: _Array) -> _Array:
    return ordered[_find(bits, ordered)] == bits


def _bits(array: _Array) -> _Array:
    return np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint32)


def _sample(bits: _Array) -> _Array:
    return bits[:: max(1, bits.size // _SAMPLE)]
