"""Distances between the outputs of two runs of one graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor

__all__ = ["apart", "furthest"]


def furthest(expected: Sequence[Any], found: Sequence[Any]) -> float:
    """The largest of the differences (see `apart`) between outputs; those that are lists, by element.

    Infinity if they are not as many.
    """
    mine, other = list(_flat(expected)), list(_flat(found))
    if len(mine) != len(other):
        return float("inf")
    return max((apart(a, b) for a, b in zip(mine, other, strict=True)), default=0.0)


def _flat(outputs: Sequence[Any]) -> Iterator[Any]:
    """The outputs, and the elements of those that are lists."""
    for output in outputs:
        if isinstance(output, list):
            yield from cast("list[Any]", output)
        else:
            yield output


def apart(module_output: Any, other_output: Any) -> float:
    """Returns the distance of two outputs, as a share of the largest element, which counts as 0.001 at least.

    Equal infinities, and NaN and NaN, are not apart; NaN and a number are infinitely far. Strings, and values
    that are absent, are equal or infinitely far.
    """
    if module_output is None or other_output is None:
        return 0.0 if module_output is other_output else float("inf")
    a, b = _wide(module_output), _wide(other_output)
    if a.shape != b.shape or (a.dtype == object) != (b.dtype == object):
        return float("inf")
    if a.dtype == object:
        return 0.0 if bool(np.all(a == b)) else float("inf")
    differs = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if not differs.any():
        return 0.0
    finite = np.abs(a[np.isfinite(a)])
    largest = max(float(finite.max()) if finite.size else 0.0, 1e-3)
    gap = float(np.abs(a[differs] - b[differs]).max())
    return float("inf") if np.isnan(gap) else gap / largest


def _wide(output: Any) -> Any:
    if isinstance(output, Tensor):
        tensor = output.detach().cpu().resolve_conj()
        return tensor.numpy() if tensor.is_complex() else tensor.double().numpy()
    array = np.asarray(output)
    if array.dtype.kind in "OSU":
        return array.astype(object)
    return array if array.dtype.kind == "c" else array.astype(np.float64)
