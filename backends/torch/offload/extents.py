"""Free ranges of a growing stretch of bytes. One allocation may consist of several scattered ranges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["PAGE_BYTES", "Extents", "Range", "in_pages"]

PAGE_BYTES = 4096
"""Ranges begin and end at multiples of this: a page of a file belongs to one copy."""


class Range(NamedTuple):
    """Bytes from `start` up to `stop`."""

    start: int
    stop: int


def in_pages(nbytes: int) -> int:
    """Rounds up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class Extents:
    """The free ranges in ascending order; adjacent ranges are merged."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.free: list[Range] = []

    @property
    def free_bytes(self) -> int:
        """The bytes of all free ranges."""
        return sum(stop - start for start, stop in self.free)

    def grow(self, nbytes: int) -> None:
        """Adds bytes at the end."""
        self.give_back((Range(self.size_bytes, self.size_bytes + nbytes),))
        self.size_bytes += nbytes

    def take(self, nbytes: int) -> tuple[Range, ...]:
        """Takes ranges for this many bytes, in whole pages; a single range if any is large enough.

        Raises:
            ValueError: Too few bytes are free.
        """
        wanted = in_pages(nbytes)
        if wanted > self.free_bytes:
            raise ValueError(f"{wanted} B of {self.free_bytes} B")
        whole = next((k for k, (start, stop) in enumerate(self.free) if stop - start >= wanted), None)
        taken: list[Range] = []
        while wanted:
            index = whole if whole is not None else 0
            start, stop = self.free[index]
            end = min(stop, start + wanted)
            taken.append(Range(start, end))
            wanted -= end - start
            self.free[index : index + 1] = [Range(end, stop)] if end < stop else []
        return tuple(taken)

    def give_back(self, ranges: Iterable[Range]) -> None:
        """Makes ranges free again."""
        merged: list[Range] = []
        for start, stop in sorted((*self.free, *ranges)):
            if merged and merged[-1].stop == start:
                merged[-1] = Range(merged[-1].start, stop)
            else:
                merged.append(Range(start, stop))
        self.free = merged
