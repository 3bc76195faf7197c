"""Draws the memory of a step, original above plan, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...ir import Kind, MemoryTimeline, Plan, StepMemory, format_bytes, printable
from ..pictures import STYLE, rendered
from .colors import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_timelines"]


def draw_timelines(title: str, plan: Plan, memory: StepMemory, kind: str) -> bytes:
    """Returns a picture of both steps on the same scales, with the budget and both peaks.

    Args:
        title: The name of the model.
        plan: The plan.
        memory: The memory of its step, and of the original's.
        kind: `svg` or `png`.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 6), layout="constrained")
        axes: Any = figure.subplots(2, 1, sharex=True, sharey=True)
        drawn: dict[str, Any] = {}
        both = (("original", memory.original), ("plan", memory.planned))
        for each, (name, timeline) in zip(axes, both, strict=True):
            drawn |= _draw(each, timeline)
            each.axhline(plan.budget_bytes / _UNIT, color="#1f6feb", linestyle="--", linewidth=1)
            each.set_title(
                f"{name}: {format_bytes(timeline.peak_bytes)} at the peak", loc="left", fontsize=10
            )
            each.set_ylabel("MiB")
        axes[-1].set_xlabel("seconds" if memory.planned.has_seconds else "operations")
        handles = [drawn[kind] for kind in Kind if kind in drawn]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
        text = f"{title} in {format_bytes(plan.budget_bytes)} (dashed), overhead {plan.overhead:.2%}"
        figure.suptitle(printable(text).replace("$", r"\$"), fontsize=11)
        return rendered(figure, kind)


_UNIT = 1 << 20


def _draw(axes: Axes, timeline: MemoryTimeline) -> dict[str, Any]:
    """Draws the bytes of each kind above those of the kinds before; returns what the legend shows."""
    count = len(timeline.steps)
    times = [step.start_seconds for step in timeline.steps] + [timeline.step_seconds]
    rows = {kind: [0] * (count + 1) for kind in Kind}
    for each in timeline.residents:
        rows[Kind(each.kind)][each.first] += each.nbytes
        rows[Kind(each.kind)][each.last + 1] -= each.nbytes
    drawn: dict[str, Any] = {}
    below = [0.0] * (count + 1)
    for kind, changes in rows.items():
        alive, above = 0, list(below)
        for index, step in enumerate(timeline.steps):
            alive += changes[index]
            more = {Kind.WORKSPACE: step.workspace_bytes, Kind.OTHER: step.other_bytes}.get(kind, 0)
            above[index] += (alive + more) / _UNIT
        if above != below:
            drawn[kind] = axes.fill_between(
                times, below, above, step="post", color=COLORS[kind], linewidth=0, label=kind.value
            )
        below = above
    peak = timeline.peak_step
    axes.plot([times[peak]], [timeline.peak_bytes / _UNIT], "v", color="#c8102e", markersize=7)
    return drawn
