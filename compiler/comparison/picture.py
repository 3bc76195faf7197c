"""Draws a comparison: the front of each strategy, overhead against memory, above what is proved."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...ir import printable
from ...ir.units import memory_unit
from ..pictures import STYLE, rendered
from .cells import Cell

__all__ = ["draw_comparison"]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's colours, which people tell apart who are blind to some."""

_LINES = ("-", "--", "-.", ":")
_MARKERS = "osD^v<>PX*"
_BAND, _GREY = "#d9d9d9", "#777777"
_STYLE: dict[Any, Any] = {**STYLE, "font.size": 9.5}
_CLOSE = 0.035
"""Labels stand apart by this part of the picture's height."""

_MOST_OVERHEAD = 3.0
"""The picture's height, as a multiple of the largest overhead of the best plan, if others are far above."""

_LEAST_OVERHEAD = 0.4
"""The least height of the picture, as a fraction of a step's time."""


class Drawn(Protocol):
    """The parts of a comparison that its picture shows; see `Comparison`."""

    @property
    def model(self) -> str:
        """The model's name."""
        ...

    @property
    def baseline_bytes(self) -> int:
        """Peak of a step as eager runs it."""
        ...

    @property
    def floor_bytes(self) -> int:
        """The bytes that no schedule goes below."""
        ...

    @property
    def cells(self) -> Sequence[Cell]:
        """The strategies at the budgets."""
        ...

    @property
    def strategies(self) -> Sequence[str]:
        """The names of the strategies."""
        ...


class _Front(NamedTuple):
    """The plans of one strategy: megabytes or the like, and per cent, the least memory first.

    The settings of one of PyTorch's methods are one front.
    """

    strategy: str
    memory: list[float]
    overhead: list[float]


def draw_comparison(comparison: Drawn, kind: str) -> bytes:
    """Draws the picture of a comparison.

    Args:
        comparison: The comparison. If there are measurements, they are drawn, and what was not run is left
            out; else predictions are.
        kind: `svg` or `png`.

    Returns:
        The content of the file.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9.5, 6), layout="constrained")
        axes = figure.add_subplot()
        divisor, unit, _ = memory_unit(comparison.baseline_bytes)
        _draw_bound(axes, comparison, divisor)
        is_measured = any(cell.measured is not None for cell in comparison.cells)
        fronts = _fronts(comparison, divisor, is_measured=is_measured)
        top = _top(comparison, fronts)
        leftmost = min(comparison.floor_bytes / divisor, *(front.memory[0] for front in fronts), math.inf)
        axes.set_xlim(0.97 * leftmost, 1.03 * comparison.baseline_bytes / divisor)
        lowest = min(0.0, *(min(front.overhead) for front in fronts), 0.0)
        axes.set_ylim(lowest - 0.02 * top, top)
        for number, front in enumerate(fronts):
            axes.plot(
                front.memory,
                front.overhead,
                linestyle=_LINES[number // len(_COLOURS) % len(_LINES)],
                color=_COLOURS[number % len(_COLOURS)],
                marker=_MARKERS[number % len(_MARKERS)],
                markersize=5,
                linewidth=2.2 if front.strategy == "auto" else 1.2,
            )
        _label(axes, fronts, top)
        for nbytes, text, style in (
            (comparison.baseline_bytes, "baseline", "--"),
            (comparison.floor_bytes, "floor: no plan fits below", ":"),
        ):
            axes.axvline(nbytes / divisor, color=_GREY, linewidth=1, linestyle=style)
            axes.text(
                nbytes / divisor, 0.985 * top, f" {text} ", color=_GREY, rotation=90, ha="right", va="top"
            )
        axes.set_xlabel(f"{'measured' if is_measured else 'predicted'} peak of a step, {unit}")
        axes.set_ylabel("time added to a step, %")
        title = f"{printable(comparison.model)}: strategies beside the best plan and its bound"
        axes.set_title(title, loc="left", parse_math=False)
        bound = "no plan, by predicted times" if is_measured else "proved impossible"
        axes.set_title(f"grey: {bound}", loc="right", color=_GREY, fontsize=9)
        return rendered(figure, kind)


def _fronts(comparison: Drawn, divisor: float, *, is_measured: bool) -> list[_Front]:
    """The plans of each strategy that are not beaten by another of its own."""
    found: list[_Front] = []
    for strategy in dict.fromkeys(map(_family, comparison.strategies)):
        own = [cell for cell in comparison.cells if _family(cell.strategy) == strategy]
        points = [cell.measured if is_measured else cell for cell in own]
        plans = {
            (point.peak_bytes / divisor, 100 * point.overhead)
            for point in points
            if point is not None and point.peak_bytes is not None and point.overhead is not None
        }
        best: list[tuple[float, float]] = []
        for memory, overhead in sorted(plans):
            if not best or overhead < best[-1][1]:
                best.append((memory, overhead))
        if best:
            found.append(_Front(strategy, [m for m, _ in best], [o for _, o in best]))
    return found


def _family(strategy: str) -> str:
    """A strategy's name without the setting of one of PyTorch's methods."""
    return re.sub(r" [0-9.]+$", "", strategy)


def _top(comparison: Drawn, fronts: Sequence[_Front]) -> float:
    """The largest overhead that is shown, in per cent: far above the best plan's there is little to see."""
    largest = max((max(front.overhead) for front in fronts), default=0.0)
    best = max((max(front.overhead) for front in fronts if front.strategy == "auto"), default=largest)
    return 1.08 * min(largest, max(_MOST_OVERHEAD * best, 100 * _LEAST_OVERHEAD)) or 1.0


def _draw_bound(axes: Axes, comparison: Drawn, divisor: float) -> None:
    """Shades what is proved to be impossible: no schedule is below the bound at each budget."""
    bounds = {cell.budget_bytes: cell.bound for cell in comparison.cells}
    budgets = sorted(bounds)
    edges = [comparison.floor_bytes, *budgets]
    heights = [100 * bounds[budget] for budget in budgets]
    axes.fill_between(
        [edge / divisor for edge in edges],
        [*heights, heights[-1]],
        step="post",
        color=_BAND,
        linewidth=0,
        zorder=0,
    )


def _label(axes: Axes, fronts: Sequence[_Front], top: float) -> None:
    """Writes each name at the leftmost plan that is in the picture, moved up where two would meet."""
    places: list[tuple[float, float]] = []
    left, right = axes.get_xlim()
    for number, front in enumerate(fronts):
        shown = [(m, o) for m, o in zip(front.memory, front.overhead, strict=True) if o <= top]
        if not shown:
            continue
        x, y = shown[0]
        at = y + 0.012 * top
        while any(
            abs(at - other) < _CLOSE * top and abs(x - m) < 0.22 * (right - left) for m, other in places
        ):
            at += 0.25 * _CLOSE * top
        places.append((x, at))
        axes.annotate(
            front.strategy,
            (x, y),
            (x, at),
            color=_COLOURS[number % len(_COLOURS)],
            fontsize=8.5,
            fontweight="bold" if front.strategy == "auto" else "normal",
            ha="left",
            va="bottom",
            arrowprops={"arrowstyle": "-", "color": _GREY, "linewidth": 0.6}
            if at - y > _CLOSE * top
            else None,
        )
