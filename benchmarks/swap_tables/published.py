"""The published numbers: memory and time of a training step, as the files beside this one have them."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

__all__ = ["MODELS", "Case", "Published", "cases", "largest_batches"]

MODELS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet200", "inception_v4")

_MB = 1_000_000
_GB = 1_000_000_000
_BASE_BATCHES = {"inception_v4": 24}
_BASE_BATCH = 32
_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Published:
    """A published row; megabytes and gigabytes are taken as powers of ten.

    Args:
        device_bytes: The most memory on the device.
        host_bytes: The most memory on the host, that of the framework included.
        seconds: Time of a step.
    """

    device_bytes: int
    host_bytes: int
    seconds: float


@dataclass(frozen=True)
class Case:
    """A network at one batch.

    Args:
        model: Its name among the benchmark models.
        batch: Images in a step.
        published: The rows, by strategy: `original`, `recompute`, `swap` (Large Model Support), `ome`. The
            original is missing where it did not fit.
    """

    model: str
    batch: int
    published: Mapping[str, Published] = field(hash=False)

    @property
    def name(self) -> str:
        """The case in one word."""
        return f"{self.model}-{self.batch}"

    def slow_down(self, strategy: str) -> float | None:
        """The published time of a strategy over the original's; None where one of them is missing."""
        original, other = self.published.get("original"), self.published.get(strategy)
        return other.seconds / original.seconds - 1 if original and other else None


def _read(name: str) -> Iterator[dict[str, str]]:
    with open(_FOLDER / name, newline="") as file:
        yield from csv.DictReader(file)


@cache
def cases() -> tuple[Case, ...]:
    """All cases, those of the base batches first."""
    found: dict[tuple[str, int], dict[str, Published]] = {}
    for row in _read("ome_resnet_table.csv"):
        batch = _BASE_BATCH if row["batch"] == "base" else int(row["batch"])
        found.setdefault((row["model"], batch), {})[row["strategy"]] = Published(
            round(float(row["device_mb"]) * _MB),
            round(float(row["host_gb"]) * _GB),
            float(row["seconds_per_step"]),
        )
    for row in _read("ome_inception_v4.csv"):
        found.setdefault(("inception_v4", _BASE_BATCHES["inception_v4"]), {})[row["strategy"]] = Published(
            round(float(row["device_mb"]) * _MB),
            round(float(row["host_mb"]) * _MB),
            float(row["seconds_per_step"]),
        )
    made = (Case(model, batch, rows) for (model, batch), rows in found.items())
    return tuple(sorted(made, key=lambda case: (case.batch > _BASE_BATCH, MODELS.index(case.model))))


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch of ResNet-50 that a strategy trains.

    Args:
        batch: Images in a step.
        device_bytes: The most memory on the device.
        seconds: Time of a step.
    """

    batch: int
    device_bytes: int
    seconds: float


@cache
def largest_batches() -> Mapping[str, LargestBatch]:
    """By strategy, as of `Case.published`."""
    return {
        row["strategy"]: LargestBatch(
            int(row["max_batch"]), round(float(row["device_mb"]) * _MB), float(row["seconds_per_step"])
        )
        for row in _read("ome_max_batch_resnet50.csv")
    }
