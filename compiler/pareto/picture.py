"""Draws a front: overhead against memory, what is proved below it, where it bends, and what is copied."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any, Protocol

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ...ir import printable
from ...ir.units import memory_unit
from ..pictures import STYLE, rendered
from .points import Known, Point, Survey

__all__ = ["draw_front", "steps"]

_MARKERS = "x+sD^v*"
_FRONT, _BAND, _KNEE, _GREY = "#0b5394", "#9fc5e8", "#cc4125", "#777777"
_TIERS = ("#38761d", "#b45f06")
_STYLE: dict[Any, Any] = {**STYLE, "font.size": 9.5, "axes.spines.right": False}


class Drawn(Protocol):
    """The parts of a front that its picture shows; see `Front`."""

    @property
    def model(self) -> str:
        """The model's name."""
        ...

    @property
    def survey(self) -> Survey:
        """The facts that hold whatever the budget."""
        ...

    @property
    def points(self) -> Sequence[Point]:
        """The plans, the largest budget first."""
        ...

    @property
    def knee(self) -> Point | None:
        """The point at which the front bends most."""
        ...

    def of_baseline(self, nbytes: int) -> float:
        """An amount as a share of the baseline's peak."""
        ...


def draw_front(front: Drawn, kind: str) -> bytes:
    """Draws the picture of a front that has points.

    Args:
        front: What to draw.
        kind: `svg` or `png`.

    Returns:
        The content of the file.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8, 6.8 if front.survey.tiers else 5.4), layout="constrained")
        axes, *copies = _panels(figure, front)
        _draw_front(axes, front)
        _draw_known(axes, front)
        _draw_limits(axes, front)
        _draw_knee(axes, front)
        for panel in copies:
            _draw_copies(panel, front)
        _describe(figure, axes, front)
        return rendered(figure, kind)


def _panels(figure: Figure, front: Drawn) -> list[Axes]:
    """One for the front, and if there are tiers one below it for what is copied."""
    if not front.survey.tiers:
        return [figure.add_subplot()]
    return list(figure.subplots(2, 1, sharex=True, height_ratios=(4, 1)))


def steps(front: Drawn) -> tuple[list[int], list[float], list[float]]:
    """Returns the best overhead and bound known at any memory, between the budgets too.

    With memory between two peaks the plan with the smaller one is the best known; a bound holds for all
    memory up to its budget.

    Returns:
        Where something changes, in bytes; and from each of them to the next the least overhead that was
        found (known strategies included) and its bound, as fractions.
    """
    reachable = [*front.points, *_shown_known(front)]
    edges = sorted({p.peak_bytes for p in reachable} | {p.budget_bytes for p in front.points})
    reached: list[float] = []
    bound: list[float] = []
    for left, right in itertools.pairwise([*edges, edges[-1]]):
        reached.append(min(p.overhead for p in reachable if p.peak_bytes <= left))
        bound.append(max((p.bound for p in front.points if p.budget_bytes >= right), default=0.0))
    return edges, reached, bound


def _draw_front(axes: Axes, front: Drawn) -> None:
    divisor, _, _ = memory_unit(front.survey.baseline_bytes)
    edges, reached, bound = steps(front)
    x = [edge / divisor for edge in edges]
    top, bottom = [100 * overhead for overhead in reached], [100 * overhead for overhead in bound]
    axes.fill_between(
        x, bottom, top, step="post", color=_BAND, alpha=0.6, linewidth=0, label="not settled by the proof"
    )
    axes.step(x, bottom, where="post", color=_BAND, linewidth=1)
    axes.plot(
        [point.budget_bytes / divisor for point in front.points],
        [100 * point.bound for point in front.points],
        "_",
        color=_FRONT,
        markersize=8,
        label="proved lower bound",
    )
    axes.step(x, top, where="post", color=_FRONT, linewidth=1.6, label="least time found")
    plans = {point.peak_bytes: point for point in front.points}.values()
    for proved, face, text in ((True, _FRONT, "plan, proved optimal"), (False, "white", "plan")):
        shown = [plan for plan in plans if plan.proved is proved]
        axes.plot(
            [plan.peak_bytes / divisor for plan in shown],
            [100 * plan.overhead for plan in shown],
            "o",
            color=_FRONT,
            markerfacecolor=face,
            markersize=5,
            clip_on=False,
            label=text if shown else None,
            zorder=3,
        )


def _draw_known(axes: Axes, front: Drawn) -> None:
    """Known strategies as grey marks, as far as they lie in the picture; keep-all is the baseline."""
    divisor, _, _ = memory_unit(front.survey.baseline_bytes)
    families: dict[str, list[Known]] = {}
    for known in _shown_known(front):
        families.setdefault(re.sub(r"-\d+$", "-k", known.strategy), []).append(known)
    for (name, family), marker in zip(families.items(), itertools.cycle(_MARKERS)):
        axes.plot(
            [known.peak_bytes / divisor for known in family],
            [100 * known.overhead for known in family],
            marker,
            color=_GREY,
            markerfacecolor="none",
            markersize=5,
            linestyle="none",
            label=name,
        )


def _shown_known(front: Drawn) -> list[Known]:
    """Those within the range of memory that lose at most twice the time that the front does."""
    left, right = _range(front)
    worst = 2 * max(point.overhead for point in front.points)
    known = (k for k in front.survey.known if k.strategy != "keep-all")
    return [k for k in known if left <= k.peak_bytes <= right and k.overhead <= worst]


def _draw_limits(axes: Axes, front: Drawn) -> None:
    divisor, _, _ = memory_unit(front.survey.baseline_bytes)
    baseline, floor = front.survey.baseline_bytes, front.survey.floor_bytes
    axes.axvline(
        baseline / divisor, color=_GREY, linewidth=1, linestyle="--", label="baseline: everything is kept"
    )
    axes.axvline(floor / divisor, color=_GREY, linewidth=1, linestyle=":", label="floor: nothing fits below")


def _draw_knee(axes: Axes, front: Drawn) -> None:
    divisor, unit, decimals = memory_unit(front.survey.baseline_bytes)
    knee = front.knee
    if knee is None:
        return
    at = knee.peak_bytes / divisor, 100 * knee.overhead
    share = front.of_baseline(knee.peak_bytes)
    axes.plot(
        *at,
        "o",
        color=_KNEE,
        markersize=11,
        markerfacecolor="none",
        markeredgewidth=1.8,
        label=f"knee: {at[0]:,.{decimals}f} {unit} ({share:.0%}), +{at[1]:.1f}%",
        zorder=4,
    )
    axes.annotate("knee", at, (7, 7), textcoords="offset points", color=_KNEE, zorder=4)


def _draw_copies(axes: Axes, front: Drawn) -> None:
    """Draws the bytes that each plan copies to each tier, at the memory that it takes."""
    divisor, unit, _ = memory_unit(front.survey.baseline_bytes)
    plans = {point.peak_bytes: point for point in reversed(front.points)}
    right = max(front.survey.baseline_bytes, *plans)
    for tier, color in zip(front.survey.tiers, itertools.cycle(_TIERS)):
        moved = [plan.tier_bytes(tier.name)[0] / divisor for plan in plans.values()]
        axes.step(
            [peak / divisor for peak in (*plans, right)],
            [*moved, moved[-1]],
            where="post",
            color=color,
            linewidth=1.6,
            label=f"copied to {tier.name} in a step",
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"copied out [{unit}]")
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)


def _range(front: Drawn) -> tuple[float, float]:
    """The bytes at the left and right end of the picture."""
    survey = front.survey
    low = min(survey.floor_bytes, *(point.budget_bytes for point in front.points))
    high = max(survey.baseline_bytes, *(point.peak_bytes for point in front.points))
    margin = 0.04 * max(high - low, high / 100)
    return low - margin, high + margin


def _describe(figure: Figure, axes: Axes, front: Drawn) -> None:
    survey = front.survey
    divisor, unit, _ = memory_unit(survey.baseline_bytes)
    left, right = _range(front)
    top = max(shown.overhead for shown in (*front.points, *_shown_known(front)))
    axes.set_xlim(left / divisor, right / divisor)
    axes.set_ylim(0, 112 * max(top, 0.01))
    tiers = " and ".join(tier.name for tier in survey.tiers)
    where = " on the device" if tiers else ""
    figure.axes[-1].set_xlabel(f"peak memory of a training step{where} [{unit}]")
    axes.set_ylabel("overhead [% of the baseline's time]")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda percent, _: f"{percent:g}%"))
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    scale = 100 * divisor / max(survey.baseline_bytes, 1)

    def to_percent(x: Any) -> Any:
        return x * scale

    def from_percent(x: Any) -> Any:
        return x / scale

    upper = axes.secondary_xaxis("top", functions=(to_percent, from_percent))
    upper.set_xlabel("% of the baseline's peak", fontsize=8, color=_GREY)
    upper.tick_params(labelsize=8, colors=_GREY)
    copies = f", with copies to {tiers}" if tiers else ""
    figure.suptitle(f"{printable(front.model)}: overhead against memory{copies}", parse_math=False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
