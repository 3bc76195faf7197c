"""The memory/time front of a model, and its written forms."""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...ir import format_bytes, printable
from ...ir.units import memory_unit
from .. import reports
from .points import Point, Refusal, Survey, find_knee, merge

__all__ = ["FILES", "Front"]

_STEM = "front"
FILES = reports.files_of(_STEM)
"""The files that `Front.save` writes."""

_FORMAT = "irc-front-1"
_TIER_COLUMNS = ("out_bytes", "in_bytes", "held_bytes")
_KNEE = (
    "the plan furthest below the straight line between the two ends of the front, peak and overhead both "
    "scaled to 0..1 (Kneedle, Satopaa et al. 2011, without smoothing)"
)


@dataclass(frozen=True)
class Front:
    """The least overhead at each budget, with what is proved about it.

    Args:
        model: The model's name.
        survey: What does not depend on the budget.
        points: The plans, the largest budget first; monotone, as `merge` makes them.
        refusals: The budgets without a plan, the largest first.
    """

    model: str
    survey: Survey
    points: tuple[Point, ...]
    refusals: tuple[Refusal, ...] = ()

    @staticmethod
    def of(model: str, survey: Survey, outcomes: Iterable[Point | Refusal]) -> Front:
        """The monotone front of what planning at each budget gave."""
        return Front(model, survey, *merge(outcomes))

    @property
    def knee(self) -> Point | None:
        """The point at which the front bends most, as `find_knee` defines it; None if it does not bend."""
        return find_knee(self.points)

    def of_baseline(self, nbytes: int) -> float:
        """Bytes as a fraction of the baseline's peak."""
        return nbytes / max(self.survey.baseline_bytes, 1)

    def of_dynamic(self, nbytes: int) -> float:
        """Bytes above the static ones, as a fraction of those of the baseline."""
        static = self.survey.static_bytes
        return (nbytes - static) / max(self.survey.baseline_bytes - static, 1)

    def table(self) -> str:
        """The front for a person."""
        _, unit, _ = memory_unit(self.survey.baseline_bytes)
        header = ("", f"budget {unit}", "of baseline", "dynamic", f"peak {unit}", "overhead", "bound")
        header = (*header, "from optimal", *self._copy_header(unit), "strategy", "planned")
        rows = [header, *map(self._row, self.points)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        for refusal in self.refusals:
            budget = self._amount(refusal.budget_bytes).rjust(widths[1])
            reason = printable(refusal.reason.partition(";")[0])
            lines.append(f"{'':{widths[0]}}  {budget}  refused, {refusal.code}: {reason}")
        return "\n".join([*lines, *self._remarks()])

    def _row(self, point: Point) -> tuple[str, ...]:
        gap = (point.overhead - point.bound) / (1 + point.bound)
        return (
            "knee" if point is self.knee else "",
            self._amount(point.budget_bytes),
            f"{self.of_baseline(point.budget_bytes):.1%}",
            f"{self.of_dynamic(point.budget_bytes):.1%}",
            self._amount(point.peak_bytes),
            f"{point.overhead:.2%}",
            f"{point.bound:.2%}",
            "proved" if point.proved else f"{gap:.2%}",
            *self._copies(point),
            printable(point.strategy, 60),
            f"{point.plan_seconds:.1f} s",
        )

    def _copy_header(self, unit: str) -> Iterator[str]:
        for tier in self.survey.tiers:
            yield f"to {tier.name} {unit}"
            yield f"from {tier.name} {unit}"
        if self.survey.tiers:
            yield "waited"

    def _copies(self, point: Point) -> Iterator[str]:
        """Describes the bytes copied out and back for each tier, and the time waited for them."""
        for tier in self.survey.tiers:
            out_bytes, in_bytes, _ = point.tier_bytes(tier.name)
            yield self._amount(out_bytes)
            yield self._amount(in_bytes)
        if self.survey.tiers:
            yield f"{point.exposed_seconds * 1e3:.3g} ms"

    def _remarks(self) -> Iterator[str]:
        survey, knee = self.survey, self.knee
        _, unit, _ = memory_unit(survey.baseline_bytes)
        yield (
            f"baseline {self._amount(survey.baseline_bytes)} {unit}, "
            f"{self._amount(survey.static_bytes)} of them static, "
            f"no schedule below {self._amount(survey.floor_bytes)}; "
            f"a step takes {survey.step_seconds * 1e3:.4g} ms (costs {survey.costs})"
        )
        for tier in survey.tiers:
            rates = tier.out_bytes_per_second / 1e9, tier.in_bytes_per_second / 1e9
            turns = "" if tier.is_duplex else ", one at a time"
            yield (
                f"{tier.name}: {format_bytes(tier.capacity_bytes)}, copies at {rates[0]:.3g} GB/s there and "
                f"{rates[1]:.3g} GB/s back beside computations{turns}"
            )
        if survey.tiers:
            yield "waited is for copies, and part of the overhead; bounds hold for schedules that copy too"
        if survey.kernels_minimum_bytes:
            yield (
                f"below {self._amount(survey.kernels_minimum_bytes)} {unit} LSTM layers are planned as their "
                "time steps, in place of the kernels that eager runs"
            )
        if knee is None:
            yield "knee: none, the front does not bend"
            return
        yield (
            f"knee: {self._amount(knee.peak_bytes)} {unit} "
            f"({self.of_baseline(knee.peak_bytes):.1%} of the baseline) for {knee.overhead:.2%} more time; "
            f"plan it with --budget {knee.found_at_bytes}{self._swap_options}"
        )
        yield f"the knee is {_KNEE}"

    @property
    def _swap_options(self) -> str:
        """The tiers as options of `irc optimize`."""
        return "".join(f" --swap {shlex.quote(tier)}" for tier in self.survey.swap)

    def _amount(self, nbytes: int) -> str:
        """Bytes in the table's unit."""
        divisor, _, decimals = memory_unit(self.survey.baseline_bytes)
        return f"{nbytes / divisor:,.{decimals}f}"

    def to_json(self) -> dict[str, Any]:
        """The front as JSON-ready data."""
        knee = self.knee
        return {
            "format": _FORMAT,
            "model": self.model,
            **asdict(self.survey),
            "knee": None if knee is None else asdict(knee),
            "knee_definition": _KNEE,
            "points": [asdict(point) for point in self.points],
            "refusals": [asdict(refusal) for refusal in self.refusals],
        }

    def to_csv(self) -> str:
        """The points as comma-separated values with a header; refused budgets have a code alone.

        If there are tiers, each has columns for what is copied out and back and what it holds at most.
        """
        text = io.StringIO()
        names = [field.name for field in fields(Point) if field.name not in ("tiers", "exposed_seconds")]
        copied = [f"{tier.name}_{what}" for tier in self.survey.tiers for what in _TIER_COLUMNS]
        names += [*copied, "exposed_seconds"] if copied else []
        writer = csv.DictWriter(text, [*names, "knee", "refused"], restval="", lineterminator="\n")
        writer.writeheader()
        knee = self.knee
        for point in self.points:
            row = {name: value for name, value in asdict(point).items() if name in names}
            moved = [nbytes for tier in self.survey.tiers for nbytes in point.tier_bytes(tier.name)]
            row.update(zip(copied, moved, strict=True))
            writer.writerow({**row, "knee": point is knee})
        for refusal in self.refusals:
            row = {"budget_bytes": refusal.budget_bytes, "plan_seconds": refusal.plan_seconds}
            writer.writerow({**row, "knee": False, "refused": refusal.code})
        return text.getvalue()

    def picture(self, kind: str) -> bytes:
        """Its picture as the content of a file, `svg` or `png`."""
        from .picture import draw_front

        return draw_front(self, kind)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws the front into an `.svg` or `.png` file.

        Raises:
            UsageError: As `reports.draw`.
        """
        reports.draw(self, path)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `front.json`, `front.csv`, `front.svg` and `front.png`, each as a whole or not at all.

        Raises:
            UsageError: As `reports.save`.
        """
        reports.save(self, folder, _STEM)
