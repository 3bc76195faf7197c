"""The memory/time front of a model: its points, the bound below them, its knee, and its written forms."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...ir import Tier, TierUse, UsageError, format_bytes, printable, require

__all__ = [
    "FILES",
    "PROOF_GAP",
    "Front",
    "Known",
    "Point",
    "Refusal",
    "Survey",
    "find_knee",
    "memory_unit",
    "merge",
]

FILES = ("front.json", "front.csv", "front.svg", "front.png")
"""The files that `Front.save` writes."""

_FORMAT = "irc-front-1"
PROOF_GAP = 1e-4
"""Up to this much above the bound an overhead counts as proved."""

_ROUNDING = 1e-9
_TIER_COLUMNS = ("out_bytes", "in_bytes", "held_bytes")
_KNEE = (
    "the plan furthest below the straight line between the two ends of the front, peak and overhead both "
    "scaled to 0..1 (Kneedle, Satopaa et al. 2011, without smoothing)"
)


@dataclass(frozen=True, slots=True)
class Point:
    """The fastest plan that is known within one budget. All bytes include the static ones.

    Args:
        budget_bytes: What a step may take.
        peak_bytes: Predicted peak of a step under the plan.
        seconds: Predicted time of a step under the plan.
        overhead: Its extra time, as a fraction of the baseline's.
        bound: No schedule within the budget, with this order of backward, has a smaller overhead; if
            there are tiers, none that copies to them either.
        proved: Whether overhead and bound agree to 1e-4.
        strategy: What found the plan.
        found_at_bytes: The budget that the plan was found at: this one, unless another's plan is better.
        plan_seconds: How long planning at this budget took.
        tiers: What the plan copies to each tier that it uses.
        exposed_seconds: Predicted time of a step in which copies are waited for; part of the overhead.
    """

    budget_bytes: int
    peak_bytes: int
    seconds: float
    overhead: float
    bound: float
    proved: bool
    strategy: str
    found_at_bytes: int
    plan_seconds: float
    tiers: tuple[TierUse, ...] = ()
    exposed_seconds: float = 0.0

    @property
    def copied_bytes(self) -> int:
        """The bytes that a step copies, out and back."""
        return sum(use.out_bytes + use.in_bytes for use in self.tiers)

    def tier_bytes(self, tier: str) -> tuple[int, int, int]:
        """Returns the bytes that a step copies to a tier and back, and the most that the tier holds."""
        uses = ((use.out_bytes, use.in_bytes, use.held_bytes) for use in self.tiers if use.tier == tier)
        return next(uses, (0, 0, 0))


@dataclass(frozen=True, slots=True)
class Refusal:
    """A budget that no plan was found for.

    Args:
        budget_bytes: The budget.
        code: Of the refusal: IRC204 if nothing fits, IRC205 if the time limit ended.
        reason: The refusal in words.
        plan_seconds: How long planning took.
    """

    budget_bytes: int
    code: str
    reason: str
    plan_seconds: float


@dataclass(frozen=True, slots=True)
class Known:
    """The peak and the time of a known strategy; it does not look at a budget."""

    strategy: str
    peak_bytes: int
    overhead: float


@dataclass(frozen=True, slots=True)
class Survey:
    """The facts of a front that hold whatever the budget.

    Args:
        baseline_bytes: Peak of a step that computes nothing twice.
        static_bytes: Parameters, buffers, inputs and constants.
        floor_bytes: No schedule with this order of backward fits into less.
        minimum_bytes: The smallest budget that a schedule was found for.
        step_seconds: Predicted time of the baseline's step.
        costs: Where seconds and workspaces come from.
        options: How the budgets were chosen and planned, as text.
        budgets: The budgets in bytes, the largest first.
        known: Known strategies, to compare with.
        swap: The tiers that plans may copy to, as `irc optimize --swap` takes them.
        tiers: The same as they were planned with: how fast they are, and what they hold.
    """

    baseline_bytes: int
    static_bytes: int
    floor_bytes: int
    minimum_bytes: int
    step_seconds: float
    costs: str
    options: str
    budgets: tuple[int, ...]
    known: tuple[Known, ...] = ()
    swap: tuple[str, ...] = ()
    tiers: tuple[Tier, ...] = ()


# ---------------------------------------------------------------------- the front


def merge(outcomes: Iterable[Point | Refusal]) -> tuple[tuple[Point, ...], tuple[Refusal, ...]]:
    """Merges all outcomes into what is known at each budget, the largest first.

    A plan serves every budget that its peak fits in, and a bound holds for every smaller budget. So the
    overhead never falls, the peak never rises and the bound never falls as the budget shrinks. Of plans that
    are as fast the one that copies least counts, and of these the one with the smallest peak.

    Args:
        outcomes: One for each budget; of two for the same budget the later one counts.

    Returns:
        Points, and the refusals at budgets that no plan of another fits in.
    """
    by_budget = {outcome.budget_bytes: outcome for outcome in outcomes}
    plans = [outcome for outcome in by_budget.values() if isinstance(outcome, Point)]
    points: list[Point] = []
    refusals: list[Refusal] = []
    bound = 0.0
    for budget, outcome in sorted(by_budget.items(), reverse=True):
        if isinstance(outcome, Point):
            bound = max(bound, outcome.bound)
        fitting = [plan for plan in plans if plan.peak_bytes <= budget]
        if fitting:
            best = min(fitting, key=lambda p: (*_rank(p), p is not outcome, p.budget_bytes))
            points.append(_restated(best, budget, bound, outcome.plan_seconds))
        elif isinstance(outcome, Refusal):
            refusals.append(outcome)
    return tuple(points), tuple(refusals)


def _rank(plan: Point) -> tuple[float, int, int]:
    return plan.overhead, plan.copied_bytes, plan.peak_bytes


def _restated(plan: Point, budget_bytes: int, bound: float, plan_seconds: float) -> Point:
    """A plan as the one for `budget_bytes`; a bound above what is reached can only be rounding."""
    bound = min(bound, plan.overhead)
    proved = plan.overhead - bound <= PROOF_GAP
    return replace(plan, budget_bytes=budget_bytes, bound=bound, proved=proved, plan_seconds=plan_seconds)


def find_knee(points: Sequence[Point]) -> Point | None:
    """Finds the point at which the front bends most: beyond it, each byte saved costs clearly more time.

    It is the plan furthest below the chord, the straight line between the ends of the front, with peak
    and overhead both scaled to 0..1.

    Args:
        points: Of a merged front.

    Returns:
        The plan, at the smallest budget that it is best for; None if none is below the chord.

    Source:
        Satopaa, Albrecht, Irwin, Raghavan: Finding a "Kneedle" in a Haystack (2011); ours takes the
        points as they are (no smoothing spline) and the one largest distance.
    """
    if not points:
        return None
    low = min(points, key=lambda p: p.peak_bytes)
    high = max(points, key=lambda p: p.peak_bytes)
    width, height = high.peak_bytes - low.peak_bytes, low.overhead - high.overhead
    if width <= 0 or height <= 0:
        return None

    def below_chord(point: Point) -> float:
        x = (point.peak_bytes - low.peak_bytes) / width
        y = (point.overhead - high.overhead) / height
        return 1 - x - y

    knee = max(points, key=lambda p: (below_chord(p), -p.budget_bytes))
    return knee if below_chord(knee) > _ROUNDING else None


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

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws the front into an `.svg` or `.png` file.

        Raises:
            UsageError: IRC442 when the file cannot be written, IRC445 for another suffix, IRC448 without the
                extra `plot`.
        """
        target = Path(path)
        if target.suffix not in (".svg", ".png"):
            raise UsageError(
                "IRC445", f"{target} is neither an .svg nor a .png file", help="choose one of the two"
            )
        require("plot", "drawing a front")
        from .picture import draw_front

        _write_whole(target, lambda staging: draw_front(self, staging, target.suffix))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `front.json`, `front.csv`, `front.svg` and `front.png`, each as a whole or not at all.

        Args:
            folder: Where to; it is made if need be, and earlier files are replaced.

        Raises:
            UsageError: IRC442 when it cannot be written, IRC448 without the extra `plot`.
        """
        require("plot", "drawing a front")
        target = Path(folder)
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(target, error) from error
        text = json.dumps(self.to_json(), indent=1) + "\n"
        _write_whole(target / "front.json", lambda staging: staging.write_text(text))
        _write_whole(target / "front.csv", lambda staging: staging.write_text(self.to_csv()))
        self.draw(target / "front.svg")
        self.draw(target / "front.png")


def memory_unit(nbytes: int) -> tuple[int, str, int]:
    """A binary unit for bytes up to `nbytes`: its size, its name, and how many decimals it is shown with."""
    for exponent, name, decimals in ((30, "GiB", 3), (20, "MiB", 1), (10, "KiB", 1)):
        if nbytes >= 1 << exponent:
            return 1 << exponent, name, decimals
    return 1, "B", 0


def _write_whole(target: Path, write: Callable[[Path], object]) -> None:
    staging = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(staging)
        os.replace(staging, target)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        staging.unlink(missing_ok=True)


def _unwritable(target: Path, error: OSError) -> UsageError:
    return UsageError("IRC442", f"{target} cannot be written: {error}", help="choose another folder")
