"""The recomputation benchmark as a picture: time over peak memory, one panel for each model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from irc.compiler.pictures import STYLE, rendered

from .bench_points import IRC, TORCH, ModelResult, Point

__all__ = ["draw"]

_COLUMNS = 3
_PANEL_INCHES = (4.4, 3.6)
_ENTRY_INCHES = 2.9
_IRC = "#0b6e4f"
# Of each of PyTorch's methods: how its name begins, marker and colour.
_MARKS = (
    ("checkpoint_sequential", "s", "#b08900"),
    ("checkpoint per block", "D", "#c0392b"),
    ("selective checkpoint per block", "^", "#8e44ad"),
    ("activation_memory_budget", "v", "#2c5aa0"),
)


def draw(results: Sequence[ModelResult], kind: str, *, wall: bool) -> bytes:
    """The picture as a file's content.

    Args:
        results: The models, a panel for each.
        kind: `svg`, `png` or `pdf`.
        wall: Whether times are the clock's rather than the processor's.
    """
    import matplotlib

    with matplotlib.rc_context({**STYLE, "font.size": 9}):
        from matplotlib.figure import Figure  # no window system is asked for

        columns = min(_COLUMNS, len(results))
        rows = math.ceil(len(results) / columns)
        width = max(columns * _PANEL_INCHES[0], 2 * _ENTRY_INCHES)
        height = rows * _PANEL_INCHES[1] + 1
        figure = Figure(figsize=(width, height), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False)
        for place, panel in enumerate(panels.flat):
            if place < len(results):
                _panel(panel, results[place], wall)
            else:
                panel.set_axis_off()
        figure.supxlabel("peak above parameters, buffers and inputs, over eager's")
        figure.supylabel(f"{'clock' if wall else 'CPU'} time of a step, over eager's")
        entries = _legend(results)
        per_row = max(int(width / _ENTRY_INCHES), 1)
        columns = min(len(entries), per_row)
        figure.legend(handles=entries, loc="outside upper left", ncols=columns, frameon=False)
        return rendered(figure, kind)


def _legend(results: Sequence[ModelResult]) -> list[Any]:
    """One line for each kind of mark that occurs."""
    from matplotlib.lines import Line2D

    def mark(marker: str, color: str, label: str, **style: Any) -> Any:
        return Line2D([], [], marker=marker, color=color, linestyle="none", label=label, **style)

    theirs = [point for result in results for point in result.of(TORCH) if point.times is not None]
    entries = [
        mark(marker, color, f"PyTorch: {prefix}")
        for prefix, marker, color in _MARKS
        if any(point.name.startswith(prefix) for point in theirs)
    ]
    if any(_is_wrong(point) for point in theirs):
        entries.append(mark("o", "0.4", "hollow: other numbers than eager's", markerfacecolor="white"))
    return [
        mark("o", "black", "eager"),
        mark("o", _IRC, "irc, measured (bars: quartiles)"),
        Line2D([], [], color=_IRC, linewidth=0.9, label="irc, predicted"),
        Line2D([], [], color=_IRC, linewidth=0.9, linestyle="--", label="irc, proved bound"),
        *entries,
    ]


def _is_wrong(point: Point) -> bool:
    return point.numbers is not None and not point.numbers.agrees


def _panel(panel: Any, result: ModelResult, wall: bool) -> None:
    panel.set_title(result.model)
    panel.axhline(1, color="0.8", linewidth=0.8, zorder=0)
    panel.plot([1], [1], "o", color="black", markersize=5)
    timed = [point for point in result.of(TORCH) if point.times is not None]
    for prefix, marker, color in _MARKS:
        points = [point for point in timed if point.name.startswith(prefix)]
        _scatter(panel, result, [p for p in points if not _is_wrong(p)], wall, marker, color, color)
        _scatter(panel, result, [p for p in points if _is_wrong(p)], wall, marker, color, "white")
    planned = [point for point in result.of(IRC) if point.times is not None]
    _scatter(panel, result, planned, wall, "o", _IRC, _IRC)
    _promises(panel, result, planned)
    panel.set_xlim(left=0)
    panel.grid(color="0.93")
    panel.set_axisbelow(True)


def _scatter(
    panel: Any,
    result: ModelResult,
    points: Sequence[Point],
    wall: bool,
    marker: str,
    color: str,
    fill: str,
) -> None:
    """Marks at the medians, with bars from quartile to quartile."""
    if not points:
        return
    shares: list[float] = []
    medians: list[float] = []
    below: list[float] = []
    above: list[float] = []
    for point in points:
        assert point.peak_bytes is not None and point.times is not None
        ratio = point.times.wall if wall else point.times.cpu
        shares.append(result.share(point.peak_bytes))
        medians.append(ratio.median)
        below.append(ratio.median - ratio.lower)
        above.append(ratio.upper - ratio.median)
    panel.errorbar(
        shares,
        medians,
        yerr=[below, above],
        fmt=marker,
        color=color,
        markerfacecolor=fill,
        markersize=5,
        elinewidth=0.7,
    )


def _promises(panel: Any, result: ModelResult, planned: Sequence[Point]) -> None:
    """Draws irc's predicted times and their bounds over the budgets; between them is the gap."""
    known = sorted(
        (result.share(point.budget_bytes), point.plan.bound, point.plan.time)
        for point in planned
        if point.plan is not None and point.budget_bytes is not None
    )
    if known:
        shares, bounds, times = (list(column) for column in zip(*known, strict=True))
        panel.plot(shares, times, color=_IRC, linewidth=0.9)
        panel.plot(shares, bounds, "--", color=_IRC, linewidth=0.9)
        panel.fill_between(shares, bounds, times, color=_IRC, alpha=0.15, linewidth=0)
