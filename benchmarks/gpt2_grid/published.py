"""The published rows."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .replay import Held, Run

__all__ = ["PLANS", "DeviceRow", "PublishedRow", "published"]

PLANS = {1: (16,), 2: (8, 8), 4: (5, 3, 3, 5)}
"""For each number of devices, how many of the model's 16 modules each stage has."""


@dataclass(frozen=True)
class PublishedRow:
    """A row of the grid.

    Args:
        devices: How many.
        run: How it trains.
        reserved_bytes: Of each device: what torch's allocator had reserved.
        parameters: How many the model has.
        parameter_memory_bytes: Parameter, gradient and momentum.
    """

    devices: int
    run: Run
    reserved_bytes: tuple[int, ...]
    parameters: int
    parameter_memory_bytes: int


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
        """The bytes that the published run reserved."""
        return self.row.reserved_bytes[self.device]


@cache
def published() -> Sequence[PublishedRow]:
    """All 84 rows."""
    with open(Path(__file__).parent / "published.csv", newline="") as file:
        return [
            PublishedRow(
                int(row["K"]),
                Run(row["impl"], row["checkpoint"] == "1", int(row["M"])),
                tuple(int(row[f"dev{device}_max"]) for device in range(int(row["K"]))),
                int(row["n_params"]),
                int(row["param_mem_bytes"]),
            )
            for row in csv.DictReader(file)
        ]
