"""The tables: the grid beside its predictions, and plans of our own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from irc.ir import format_bytes

from ..pages import to_markdown
from .own_plan import OwnPlan, RankRun
from .published import DeviceRow

__all__ = ["Page", "errors", "told"]

_MIB = 2**20
_PLAN_HEADER = [
    "schedule",
    "divided",
    "masks of dropout",
    "budget of each",
    "peaks, MiB",
    "largest",
    "step",
    "computed again",
]
_RUN_HEADER = ["schedule", "rank", "predicted bytes", "measured bytes", "off by", "losses"]


@dataclass(frozen=True)
class Page:
    """The tables of a grid.

    Args:
        devices: Each device of each published row with its replay.
        plans: Our own plans.
        runs: Some of them on ranks of this machine.
    """

    devices: tuple[DeviceRow, ...]
    plans: tuple[OwnPlan, ...] = ()
    runs: tuple[RankRun, ...] = ()

    @cached_property
    def published(self) -> list[int]:
        """Bytes of each device."""
        return [each.published_bytes for each in self.devices]

    @cached_property
    def predictions(self) -> dict[str, list[int]]:
        """Bytes of each device by several models, the simplest one first."""
        return {
            "tensors": [each.held.alive_bytes for each in self.devices],
            "with the allocator": [each.held.reserved_bytes for each in self.devices],
        }

    def summary(self) -> str:
        """How far each model is off."""
        header = ["prediction", "mean", "median", "worst", "where"]
        return to_markdown(header, [self._summed(name) for name in self.predictions])

    def _summed(self, name: str) -> list[str]:
        off = errors(self.predictions[name], self.published)
        worst = max(range(len(off)), key=lambda k: abs(off[k]))
        each = self.devices[worst]
        return [
            name,
            f"{statistics.mean(map(abs, off)):.2%}",
            f"{statistics.median(map(abs, off)):.2%}",
            f"{off[worst]:+.1%}",
            f"K = {each.row.devices}, M = {each.row.run.micro_batches}, {_mode(each)}, device {each.device}",
        ]

    def with_(self, found: OwnPlan | RankRun) -> Page:
        """The page with another plan, or another run of one."""
        if isinstance(found, OwnPlan):
            return replace(self, plans=(*self.plans, found))
        return replace(self, runs=(*self.runs, found))

    def text(self) -> str:
        """What goes between the markers of the page, as Markdown."""
        parts = ["### Errors", self.summary(), "### All rows", self._grid()]
        if self.plans:
            parts += ["### Plans", to_markdown(_PLAN_HEADER, [_plan_cells(own) for own in self.plans])]
        if self.runs:
            cells = [row for run in self.runs for row in _run_cells(run)]
            parts += ["### Ranks", to_markdown(_RUN_HEADER, cells)]
        return "\n\n".join(parts)

    def _grid(self) -> str:
        names = list(self.predictions)
        header = [
            "K",
            "M",
            "checkpoint",
            "by",
            "published, MiB",
            *(f"{name}, MiB" for name in names),
            "off by",
        ]
        rows: list[list[str]] = []
        place = 0
        while place < len(self.devices):
            row = self.devices[place].row
            mine = range(place, place + row.devices)
            place += row.devices
            off = errors([self.predictions[names[-1]][k] for k in mine], [self.published[k] for k in mine])
            rows.append(
                [
                    str(row.devices),
                    str(row.run.micro_batches),
                    "on" if row.run.checkpoints else "off",
                    row.run.implementation,
                    _mebibytes([self.published[k] for k in mine]),
                    *(_mebibytes([self.predictions[name][k] for k in mine]) for name in names),
                    ", ".join(f"{value:+.1%}" for value in off),
                ]
            )
        return to_markdown(header, rows)


def errors(predicted: Sequence[float], bytes_: Sequence[float]) -> list[float]:
    """By which part of it each prediction is above what it should be."""
    return [ours / its - 1 for ours, its in zip(predicted, bytes_, strict=True)]


def _mode(each: DeviceRow) -> str:
    return f"{each.row.run.implementation}, checkpoint {'on' if each.row.run.checkpoints else 'off'}"


def _mebibytes(values: Sequence[float]) -> str:
    return ", ".join(f"{value / _MIB:.0f}" for value in values)


def _plan_cells(own: OwnPlan) -> list[str]:
    plan, budget = own.plan, "-" if own.budget_bytes is None else format_bytes(own.budget_bytes)
    if plan is None:
        least = f"none; one was found for {format_bytes(own.minimum_bytes)}"
        return [own.schedule, own.partition, "-", budget, least, "-", "-", "-"]
    again = sum(stage.again_seconds for stage in plan.stages) * plan.micro_batches
    return [
        own.schedule,
        own.partition,
        "drawn again" if own.draws_again else "kept",
        budget,
        _mebibytes(plan.peak_bytes),
        f"{max(plan.peak_bytes) / _MIB:.0f}",
        f"{plan.step_seconds:.2f} s",
        f"{again / plan.single_seconds:.1%}",
    ]


def _run_cells(run: RankRun) -> list[list[str]]:
    """A row for each rank."""
    losses = ", ".join(f"{loss:.4f}" for loss in run.losses)
    return [
        [
            run.schedule,
            str(rank),
            f"{predicted:,}",
            f"{measured:,}",
            f"{predicted / measured - 1:+.3%}",
            losses,
        ]
        for rank, (predicted, measured) in enumerate(
            zip(run.predicted_bytes, run.measured_bytes, strict=True)
        )
    ]


def told(found: OwnPlan | RankRun) -> str:
    """What was found, for the terminal."""
    rows = [_plan_cells(found)] if isinstance(found, OwnPlan) else _run_cells(found)
    return "\n".join(" | ".join(cells) for cells in rows)
