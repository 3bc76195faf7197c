"""The published numbers, as the files beside this one have them, and the networks that they are of."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..swap_tables.published import cases

__all__ = ["Ladder", "Resnet", "Searched", "ladder", "resnets", "searched"]

_MIB = 1 << 20
_MB = 1_000_000
_FOLDER = Path(__file__).parent

_NAMES = {
    "Inception v3": "inception_v3",
    "NASNet Cifar10": "nasnet_cifar",
    "AmoebaNet Cifar10": "amoebanet_cifar",
    "DARTS Cifar10": "darts_cifar",
}

_RUN_BATCHES = {"alexnet": 64, "vgg": 8, "cifar": 8}
_RUN_BATCH = 4


def _read(name: str) -> Iterator[dict[str, str]]:
    with open(_FOLDER / name, newline="") as file:
        yield from csv.DictReader(file)


@dataclass(frozen=True)
class Searched:
    """One row of Feng and Huang, Optimal Gradient Checkpoint Search (CVPR 2021), table 2.

    Megabytes are taken as 2**20 bytes, as the authors' program prints them. They are above what is there
    between two steps: parameters and their gradients. The input counts too.

    Args:
        model: The name of the benchmark model.
        batch: Images in a step.
        size: Height and width of an image.
        regular_bytes: The peak of the original step.
        cut: The part of it that their checkpoints save.
        seconds: Time of the original step on a GTX 1080 Ti.
        overhead: Time that their checkpoints add, as a part of the original's.
    """

    model: str
    batch: int
    size: int
    regular_bytes: int
    cut: float
    seconds: float
    overhead: float

    @property
    def name(self) -> str:
        """The row in one word."""
        return self.model

    @property
    def run_batch(self) -> int:
        """A batch at which a CPU takes seconds for a step."""
        return next((batch for part, batch in _RUN_BATCHES.items() if part in self.model), _RUN_BATCH)


@cache
def searched() -> tuple[Searched, ...]:
    """The rows, in the order of the table."""
    found: list[Searched] = []
    for row in _read("ogc.csv"):
        batch, _, size, _ = map(int, row["input_nchw"].split(","))
        regular, own = float(row["regular_mb"]), float(row["ogc_mb"])
        seconds, own_seconds = float(row["regular_s"]), float(row["ogc_s"])
        found.append(
            Searched(
                _NAMES.get(row["model"], row["model"].lower().replace(" ", "")),
                batch,
                size,
                round(regular * _MIB),
                1 - own / regular,
                seconds,
                own_seconds / seconds - 1,
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class Ladder:
    """One rung: a number of checkpoints, what a step takes then, and how long.

    Args:
        checkpoints: Their number.
        share: The peak over that without checkpoints.
        overhead: The time over that without checkpoints, less one.
    """

    checkpoints: int
    share: float
    overhead: float


@cache
def ladder() -> tuple[int, tuple[Ladder, ...]]:
    """The peak without checkpoints in bytes, and the rungs."""
    rows = {row["checkpoints"]: row for row in _read("ladder.csv")}
    none = rows.pop("none")
    peak_mb, seconds = float(none["peak_mb"]), float(none["seconds_per_step"])
    rungs = (
        Ladder(int(count), float(row["peak_mb"]) / peak_mb, float(row["seconds_per_step"]) / seconds - 1)
        for count, row in rows.items()
    )
    return round(peak_mb * _MB), tuple(rungs)


@dataclass(frozen=True)
class Resnet:
    """A ResNet of OME's table with its recomputation.

    Args:
        model: The name of the benchmark model.
        batch: Images in a step.
        device_bytes: The peak under recomputation.
        original_bytes: That of the original; None where it did not fit.
        overhead: The time that recomputation adds, as a part of the original's.
    """

    model: str
    batch: int
    device_bytes: int
    original_bytes: int | None = None
    overhead: float | None = None

    @property
    def name(self) -> str:
        """The row in one word."""
        return f"{self.model}-{self.batch}"


@cache
def resnets() -> tuple[Resnet, ...]:
    """The ResNets whose recomputation was published, the base batches first."""
    found: list[Resnet] = []
    for case in cases():
        if case.model.startswith("resnet") and "recompute" in case.published:
            original = case.published.get("original")
            found.append(
                Resnet(
                    case.model,
                    case.batch,
                    case.published["recompute"].device_bytes,
                    None if original is None else original.device_bytes,
                    case.slow_down("recompute"),
                )
            )
    return tuple(found)
