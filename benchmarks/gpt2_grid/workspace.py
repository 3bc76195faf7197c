"""What published runs reserve beyond the replayed tensors: a linear model, and how well it does unseen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .published import PublishedRow
from .replay import Held

__all__ = ["TERMS", "DeviceRow", "errors", "fitted", "held_out"]

TERMS = (
    "reserved bytes of the replay",
    "a device",
    "bytes that a micro-batch receives for forward, and sends",
    "bytes that the other micro-batches save, where one device computes forward again",
    "bytes that one more micro-batch saves, where `self` computes forward again on several devices",
)
"""What the coefficients belong to, in order."""


@dataclass(frozen=True)
class DeviceRow:
    """A device of a published row.

    Args:
        row: The published row.
        device: Which of its devices.
        held: What the replay found.
    """

    row: PublishedRow
    device: int
    held: Held

    @property
    def published_bytes(self) -> int:
        """What was reserved."""
        return self.row.reserved_bytes[self.device]

    def terms(self) -> tuple[float, ...]:
        """The values of `TERMS`."""
        run, held = self.row.run, self.held
        others = run.micro_batches - 1 if run.checkpoints else 0
        is_alone = self.row.devices == 1
        is_ahead = others and run.implementation == "self" and not is_alone
        return (
            held.reserved_bytes,
            1.0,
            held.boundary_bytes,
            others * held.saved_bytes if is_alone else 0.0,
            held.saved_bytes if is_ahead else 0.0,
        )


def fitted(terms: Sequence[Sequence[float]], bytes_: Sequence[float]) -> list[float]:
    """The coefficients with the least sum of squares of relative errors.

    Args:
        terms: [rows, terms].
        bytes_: What each row should give.
    """
    wanted = np.asarray(bytes_, dtype=float)
    scaled = np.asarray(terms, dtype=float) / wanted[:, None]
    size = np.linalg.norm(scaled, axis=0)
    size[size == 0] = 1.0  # a term that no row has gets no coefficient
    found = np.linalg.lstsq(scaled / size, np.ones(len(wanted)), rcond=None)[0]
    return [float(value) for value in found / size]


def held_out(
    terms: Sequence[Sequence[float]], bytes_: Sequence[float], groups: Sequence[object]
) -> list[float]:
    """For each row, what the coefficients give that were fitted to the rows of all other groups.

    Args:
        terms: [rows, terms].
        bytes_: What each row should give.
        groups: Of each row.
    """
    found = [0.0] * len(bytes_)
    for group in dict.fromkeys(groups):
        others = [k for k, its in enumerate(groups) if its != group]
        coefficients = fitted([terms[k] for k in others], [bytes_[k] for k in others])
        for k, its in enumerate(groups):
            if its == group:
                found[k] = float(np.dot(terms[k], coefficients))
    return found


def errors(predicted: Sequence[float], bytes_: Sequence[float]) -> list[float]:
    """By which part of it each prediction is above what it should be."""
    return [ours / its - 1 for ours, its in zip(predicted, bytes_, strict=True)]
