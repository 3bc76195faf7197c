"""Whether outputs are the expected ones: in number, kind, shape, element type and value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["difference"]

_BFLOAT16_RTOL = 2.0**-6
"""Two units in the last place, the suite's own allowance."""


def difference(expected: Sequence[Any], found: Sequence[Any], rtol: float, atol: float) -> str | None:
    """What is wrong with the outputs; None where nothing is.

    Args:
        expected: The suite's outputs: arrays, lists of them, or None for an empty optional.
        found: The importer's.
        rtol: Relative tolerance; at least two units in the last place for bfloat16, as the suite has it.
        atol: Absolute tolerance.
    """
    if len(found) != len(expected):
        return f"{len(found)} outputs for {len(expected)}"
    for index, (wanted, given) in enumerate(zip(expected, found, strict=True)):
        told = _differs(wanted, given, rtol, atol)
        if told is not None:
            return f"output {index}: {told}"
    return None


def _differs(wanted: Any, given: Any, rtol: float, atol: float) -> str | None:
    if isinstance(wanted, list | tuple):
        if not isinstance(given, list | tuple):
            return f"{_kind(given)} for a sequence"
        told = difference(wanted, given, rtol, atol)
        return None if told is None else f"in the sequence, {told}"
    if wanted is None or not isinstance(given, np.ndarray | np.generic):
        return None if given is None and wanted is None else f"{_kind(given)} for {_kind(wanted)}"
    return _of_arrays(np.asarray(wanted), np.asarray(given), rtol, atol)


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return "an array" if isinstance(value, np.ndarray | np.generic) else f"a {type(value).__name__}"


def _of_arrays(wanted: Any, given: Any, rtol: float, atol: float) -> str | None:
    if given.shape != wanted.shape:
        return f"shape {list(given.shape)} for {list(wanted.shape)}"
    if wanted.dtype.kind in "OSUT":  # strings, in whatever way numpy holds them
        return None if np.array_equal(given.astype(object), wanted.astype(object)) else "other strings"
    if given.dtype != wanted.dtype:
        return f"{given.dtype} for {wanted.dtype}"
    if wanted.dtype.name == "bfloat16":
        rtol = max(rtol, _BFLOAT16_RTOL)
    wanted, given = _wide(wanted), _wide(given)
    close = np.isclose(given, wanted, rtol=rtol, atol=atol, equal_nan=True)
    if close.all():
        return None
    worst = np.abs(given[~close] - wanted[~close])
    largest = f", by up to {np.nanmax(worst):.3g}" if not np.isnan(worst).all() else ""
    return f"{int((~close).sum())} of {close.size} values are off{largest}"


def _wide(array: Any) -> Any:
    """The values in a type that numpy compares in; what 64-bit integers lose is far below the tolerance."""
    return array if array.dtype.kind == "c" else array.astype(np.float64)
