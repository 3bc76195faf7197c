"""Amounts of memory as users write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

from .errors import UsageError

__all__ = ["format_bytes", "memory_unit", "parse_budget"]

_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_PART = re.compile(r"\s*([0-9]*\.[0-9]+)\s*")
_HELP = 'write bytes (1073741824), "4GiB" (4 x 2^30), "4GB" or "4G" (4 x 10^9) or "60%" of the baseline peak'

_MOST_BYTES = 1 << 62
"""Budgets from here on are refused: what programmes count with ends soon after."""


def parse_budget(budget: int | str, baseline_bytes: int | None = None) -> int:
    """A budget in bytes.

    Args:
        budget: Bytes, or text such as `4GiB`, `1.5GB`, `60%`.
        baseline_bytes: The bytes that `%` refers to; None if only the form is to be checked (a percentage is
            0).

    Raises:
        UsageError: IRC401 when it is not a positive amount of bytes; bits (`4Gb`) are refused.
    """
    if not _is_number_or_text(budget):
        raise UsageError(
            "IRC401", f"a budget is a number of bytes or a text, not {type(budget).__name__}", help=_HELP
        )
    if isinstance(budget, int):
        if budget <= 0:
            raise UsageError("IRC401", f"the budget is {budget} bytes; it must be positive", help=_HELP)
        return _possible(budget)
    if percent := _PERCENT.fullmatch(budget):
        if Fraction(percent[1]) <= 0:
            raise UsageError("IRC401", f"the budget is {budget}; it must be positive", help=_HELP)
        return int(Fraction(percent[1]) / 100 * (baseline_bytes or 0))
    if (part := _PART.fullmatch(budget)) and Fraction(part[1]) < 1:
        percent = f"{float(Fraction(part[1]) * 100):g}%"
        raise UsageError(
            "IRC401",
            f"{budget!r} is less than a byte",
            help=f"{percent}? That is a part of the baseline peak; {_HELP}",
        )
    amount = _AMOUNT.fullmatch(budget)
    if amount is None:
        raise UsageError("IRC401", f"{budget!r} is not an amount of memory", help=_HELP)
    number, unit = amount.groups()
    if unit not in _UNITS:
        reason = " (a small b is for bits)" if unit.endswith("b") else ""
        raise UsageError("IRC401", f"{budget!r}: there is no unit {unit!r}{reason}", help=_HELP)
    nbytes = int(Fraction(number) * _UNITS[unit])
    if nbytes <= 0:
        raise UsageError("IRC401", f"the budget is {budget!r}; it must be positive", help=_HELP)
    return _possible(nbytes)


def _possible(nbytes: int) -> int:
    """The bytes of a budget, which a machine can count to.

    Raises:
        UsageError: IRC401.
    """
    if nbytes >= _MOST_BYTES:
        raise UsageError("IRC401", "the budget is out of all proportion", help=_HELP)
    return nbytes


def _is_number_or_text(given: object) -> bool:
    return isinstance(given, int | str) and not isinstance(given, bool)


def format_bytes(nbytes: float) -> str:
    """Bytes with a binary unit, three digits or so: `4 GiB`, `1.25 GiB`, `381 MiB`, `12 B`."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    if unit == "B":
        return f"{int(size)} B"
    return f"{size:.3g} {unit}" if abs(size) < 999.5 else f"{size:.0f} {unit}"


def memory_unit(nbytes: int) -> tuple[int, str, int]:
    """Returns the binary unit for amounts up to `nbytes`: its size, its name, and the decimals to show."""
    for exponent, name, decimals in ((30, "GiB", 3), (20, "MiB", 1), (10, "KiB", 1)):
        if nbytes >= 1 << exponent:
            return 1 << exponent, name, decimals
    return 1, "B", 0
