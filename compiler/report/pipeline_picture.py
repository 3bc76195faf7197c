"""Draws simulated steps of pipelines: what each device does when, and below it the memory."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ...ir.pipeline.schedule import PipelineSchedule, Work
from ...ir.pipeline.timing import MemoryPoint, PipelineTimeline
from ..pictures import STYLE, rendered

__all__ = ["DrawnStep", "draw_pipelines"]

# All of these are inches. The layout is fixed, as matplotlib's own differs in the last bit from run to run.
_WIDTH, _LEFT, _LEGEND_COLUMN = 11.0, 0.75, 0.85
_TITLE, _ROW, _GAP, _MEMORY, _TICKS, _FOOT = 0.35, 0.27, 0.08, 1.1, 0.25, 0.55
_LETTER = 0.075

_LEGEND_ROWS, _MOST_LEGEND_COLUMNS = 8, 4

_COLORS = {
    Work.FORWARD: "#2c5aa0",
    Work.BACKWARD: "#c0561f",
    Work.INPUT_GRADIENT: "#c0392b",
    Work.WEIGHT_GRADIENT: "#3f9e8c",
}
_WORDS = {
    Work.FORWARD: "forward (F)",
    Work.BACKWARD: "backward (B)",
    Work.INPUT_GRADIENT: "input gradients (I)",
    Work.WEIGHT_GRADIENT: "weight gradients (W)",
}
_SENT = "#8a8a8a"


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """A step to draw.

    Args:
        title: What stands above it.
        schedule: What was simulated.
        timeline: What came out.
        divisor: By which bytes are divided.
        unit: What that gives, as `GiB`.
    """

    title: str
    schedule: PipelineSchedule
    timeline: PipelineTimeline
    divisor: float
    unit: str


def draw_pipelines(steps: Sequence[DrawnStep], kind: str) -> bytes:
    """The picture as a file's content: one step below the other, all with one scale of time and of memory.

    Args:
        steps: At least one.
        kind: `svg`, `png` or `pdf`.
    """
    columns = max(_legend_columns(step) for step in steps)
    width = _WIDTH - _LEFT - columns * _LEGEND_COLUMN
    height = _FOOT + sum(_height(step) for step in steps)
    end_seconds = max(step.timeline.step_seconds for step in steps) or 1.0
    most = max(max(step.timeline.peak_bytes) / step.divisor for step in steps)
    with matplotlib.rc_context({**STYLE, "font.size": 8.5}):
        figure = Figure(figsize=(_WIDTH, height))
        bottom = height

        def axes_below(gap: float, tall: float) -> Axes:
            nonlocal bottom
            bottom -= gap + tall
            return figure.add_axes((_LEFT / _WIDTH, bottom / height, width / _WIDTH, tall / height))

        for step in steps:
            rows = axes_below(_TITLE, _ROW * step.schedule.devices)
            rows.set_title(step.title, loc="left", fontsize=9.5)
            rows.set_xlim(0, end_seconds)
            rows.set_xticks([])
            _draw_actions(rows, step, width / end_seconds)
            _draw_transfers(rows, step)
            memory = axes_below(_GAP, _MEMORY)
            memory.set_xlim(0, end_seconds)
            _draw_memory(memory, step, most)
            bottom -= _TICKS
            if step is steps[-1]:
                memory.set_xlabel("seconds", labelpad=2)
        _legend(figure, steps)
        return rendered(figure, kind)


def _height(step: DrawnStep) -> float:
    return _TITLE + _ROW * step.schedule.devices + _GAP + _MEMORY + _TICKS


def _draw_actions(axes: Axes, step: DrawnStep, inches_per_second: float) -> None:
    """A row for each device, the first on top; of its stages, later ones are paler."""
    for device, line in enumerate(step.timeline.lines):
        bars: defaultdict[tuple[Work, int], list[tuple[float, float]]] = defaultdict(list)
        stages = step.schedule.stages_on(device)
        for timed in line:
            chunk = stages.index(timed.action.stage)
            seconds = timed.end_seconds - timed.start_seconds
            bars[timed.action.work, chunk].append((timed.start_seconds, seconds))
            label = str(timed.action.micro_batch)
            if seconds * inches_per_second > _LETTER * (len(label) + 0.5):
                at = timed.start_seconds + seconds / 2, device
                color = "white" if 2 * chunk < len(stages) else "black"
                axes.text(*at, label, ha="center", va="center_baseline", fontsize=7, color=color)
        for (work, chunk), spans in bars.items():
            narrowest_inches = min(seconds for _, seconds in spans) * inches_per_second
            axes.broken_barh(
                spans,
                (device - 0.43, 0.86),
                facecolor=_shade(work, chunk, len(stages)),
                edgecolor="white",
                linewidth=min(0.6, 10 * narrowest_inches),  # in points: a seventh of the bar at the most
            )
    axes.set_ylim(step.schedule.devices - 0.5, -0.5)
    axes.set_yticks(range(step.schedule.devices), [f"device {d}" for d in range(step.schedule.devices)])
    axes.tick_params(length=0)
    axes.set_facecolor("#f4f4f4")
    axes.spines[:].set_visible(False)


def _shade(work: Work, chunk: int, chunks: int) -> tuple[float, float, float]:
    """The colour of a kind of work: the first stage of a device has it in full."""
    pale = 0.62 * chunk / max(chunks - 1, 1)
    red, green, blue = (1 - (1 - part) * (1 - pale) for part in to_rgb(_COLORS[work]))
    return red, green, blue


def _draw_transfers(axes: Axes, step: DrawnStep) -> None:
    """A thin line from device to device for each transfer that takes time."""
    for sent in step.timeline.transfers:
        if sent.end_seconds > sent.start_seconds:
            down = math.copysign(0.43, sent.target_device - sent.source_device)
            axes.plot(
                [sent.start_seconds, sent.end_seconds],
                [sent.source_device + down, sent.target_device - down],
                color=_SENT,
                linewidth=0.7,
                zorder=0.5,
            )


def _draw_memory(axes: Axes, step: DrawnStep, most: float) -> None:
    """A line for each device; the later ones are thinner, so that lines in one place are all seen."""
    colors = matplotlib.colormaps["viridis"]
    last = max(step.schedule.devices - 1, 1)
    for device, points in enumerate(step.timeline.memory):
        seconds, amounts = zip(*_seen(points), strict=True)
        axes.step(
            [*seconds, step.timeline.step_seconds],
            [amount / step.divisor for amount in (*amounts, amounts[-1])],
            where="post",
            color=colors(0.85 * device / last),
            linewidth=2.8 - 1.8 * device / last,
            label=f"device {device}",
        )
    axes.set_ylim(0, 1.08 * most or 1)
    axes.set_ylabel(step.unit)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True) if most > 5 else MaxNLocator(5))
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=7,
        handlelength=1.2,
        ncols=_legend_columns(step),
    )


def _legend_columns(step: DrawnStep) -> int:
    return min(math.ceil(step.schedule.devices / _LEGEND_ROWS), _MOST_LEGEND_COLUMNS)


def _seen(points: Sequence[MemoryPoint]) -> Iterator[tuple[float, int]]:
    """Moments and bytes, without what falls and rises again at one moment."""
    before = 0
    for seconds, together in itertools.groupby(points, lambda point: point.seconds):
        amounts = [point.nbytes for point in together]
        if max(amounts) > max(before, amounts[-1]):
            yield seconds, max(amounts)
        yield seconds, amounts[-1]
        before = amounts[-1]


def _legend(figure: Figure, steps: Sequence[DrawnStep]) -> None:
    works = {action.work for step in steps for line in step.schedule.lines for action in line}
    handles = [Patch(color=_COLORS[work], label=_WORDS[work]) for work in Work if work in works]
    if any(step.schedule.stages > step.schedule.devices for step in steps):
        handles.append(Patch(color="#cccccc", label="paler: later stages of a device"))
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False)
