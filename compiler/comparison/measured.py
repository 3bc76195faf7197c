"""The measurements of one plan."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Measured"]


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one plan.

    Args:
        peak_bytes: The peak of a step, from allocator events, static bytes included.
        overhead: The median over steps in turns of its time over the original's, less one.
    """

    peak_bytes: int
    overhead: float
