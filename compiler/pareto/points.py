"""The points of a front, the bound below them, and its knee."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...ir import Tier, TierUse

__all__ = ["PROOF_GAP", "Known", "Point", "Refusal", "Survey", "find_knee", "merge"]

PROOF_GAP = 1e-4
"""Up to this much above the bound an overhead counts as proved."""

_ROUNDING = 1e-9


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
        time_steps: Whether LSTM layers run as their time steps in place of the kernels that eager runs; the
            bound is then one for all schedules of time steps, and numbers differ from eager's by rounding.
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
    time_steps: bool = False

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
        kernels_minimum_bytes: The smallest budget that a schedule of LSTM kernels was found for, if there are
            budgets below, which are planned with time steps in their place; else 0.
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
    kernels_minimum_bytes: int = 0


# ---------------------------------------------------------------------- the front


def merge(outcomes: Iterable[Point | Refusal]) -> tuple[tuple[Point, ...], tuple[Refusal, ...]]:
    """Merges all outcomes into what is known at each budget, the largest first.

    A plan serves every budget that its peak fits in, and a bound holds for every smaller budget. So the
    overhead never falls, the peak never rises and the bound never falls as the budget shrinks; a bound for
    LSTM kernels holds for kernels alone, and one for time steps for these. Of plans that
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
    bounds = {False: 0.0, True: 0.0}
    for budget, outcome in sorted(by_budget.items(), reverse=True):
        if isinstance(outcome, Point):
            bounds[outcome.time_steps] = max(bounds[outcome.time_steps], outcome.bound)
        fitting = [plan for plan in plans if plan.peak_bytes <= budget]
        if fitting:
            best = min(fitting, key=lambda p: (*_rank(p), p is not outcome, p.budget_bytes))
            points.append(_restated(best, budget, bounds[best.time_steps], outcome.plan_seconds))
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
