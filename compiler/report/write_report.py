"""Writes what a plan's memory looks like: into a page, a trace, a snapshot or a picture."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...ir import Plan, StepMemory, UsageError, printable, require
from ...ir.files import write_whole
from ...ir.pipeline.plan import PipelinePlan
from ...ir.pipeline.schedule import PipelineSchedule
from ...ir.pipeline.timing import PipelineTimeline
from ...ir.units import memory_unit
from ..reports import UNWRITABLE
from .front import Front
from .page import page
from .pipeline_page import pipeline_page
from .pipeline_trace import trace_events
from .timeline_picture import draw_timelines
from .traces import chrome_trace, memory_snapshot

__all__ = ["check_report", "report", "write_pipeline_report", "write_report"]

_PICTURES = (".svg", ".png")


def _page(title: str, plan: Plan, memory: StepMemory, front: Front | None) -> bytes:
    return page(title, plan, memory, front).encode()


def _trace(title: str, plan: Plan, memory: StepMemory, front: Front | None) -> bytes:
    timelines = {f"{title}, planned": memory.planned, f"{title}, original": memory.original}
    return json.dumps(chrome_trace(timelines), separators=(",", ":")).encode()


def _snapshot(title: str, plan: Plan, memory: StepMemory, front: Front | None) -> bytes:
    return pickle.dumps(memory_snapshot(memory.planned), protocol=4)


_KINDS: dict[str, Callable[[str, Plan, StepMemory, Front | None], bytes]] = {
    ".html": _page,
    ".json": _trace,
    ".pickle": _snapshot,
}


def check_report(path: Path, option: str) -> None:
    """Refuses a file of a kind that no report has, before any work is done.

    Args:
        path: Where the report shall go.
        option: What the user gave it with, as `--report`.

    Raises:
        UsageError: IRC400 for another suffix, IRC448 for a picture without the extra `plot`.
    """
    if path.suffix in _PICTURES:
        require("plot", f"a picture, as {option} asks for,")
    elif path.suffix not in _KINDS:
        raise UsageError(
            "IRC400",
            f"{option} {path} is of no known kind",
            help="give a file ending in .html (a page), .svg or .png (a picture), .json (a trace for "
            "Perfetto) or .pickle (a snapshot for pytorch.org/memory_viz)",
        )


def write_report(path: Path, title: str, plan: Plan, memory: StepMemory, front: Front | None = None) -> None:
    """Writes a report of the kind that the file's suffix says, as a whole or not at all.

    Args:
        path: The file.
        title: The name of the model.
        plan: The plan.
        memory: The memory of its step, and of the original's.
        front: Plans within other budgets, for a page.

    Raises:
        UsageError: IRC400 and IRC448 as `check_report`; IRC442 when the file cannot be written.
    """
    check_report(path, "the report")
    if path.suffix in _PICTURES:
        content = draw_timelines(title, plan, memory, path.suffix.removeprefix("."))
    else:
        content = _KINDS[path.suffix](title, plan, memory, front)
    write_whole(path, content, UNWRITABLE)


def write_pipeline_report(path: Path, title: str, plan: PipelinePlan) -> None:
    """Writes a report of a pipeline: a page, a picture, or a trace of its simulated step.

    Args:
        path: The file.
        title: The name of the model.
        plan: The plan.

    Raises:
        UsageError: IRC400 and IRC448 as `check_report`, and for a snapshot; IRC442 when the file cannot be
            written; IRC595 if the plan has no simulated step.
    """
    check_report(path, "the report")
    if plan.timeline is None:
        raise UsageError(
            "IRC595",
            "this plan does not know its simulated step",
            help="plan the pipeline again with this version",
        )
    if path.suffix == ".pickle":
        raise UsageError(
            "IRC400",
            f"a pipeline has no snapshot: {path}",
            help="give a file ending in .html, .svg, .png or .json",
        )
    if path.suffix == ".html":
        content = pipeline_page(title, plan, plan.timeline).encode()
    elif path.suffix == ".json":
        content = json.dumps(trace_events(plan.timeline), separators=(",", ":")).encode()
    else:
        content = _pipeline_picture(title, plan, plan.timeline, path.suffix.removeprefix("."))
    write_whole(path, content, UNWRITABLE)


def _pipeline_picture(title: str, plan: PipelinePlan, timeline: PipelineTimeline, kind: str) -> bytes:
    from .pipeline_picture import DrawnStep, draw_pipelines

    divisor, unit, _ = memory_unit(max(plan.peak_bytes))
    schedule = PipelineSchedule(
        plan.schedule,
        tuple(stage.device for stage in plan.stages),
        plan.micro_batches,
        tuple(tuple(timed.action for timed in line) for line in timeline.lines),
    )
    return draw_pipelines([DrawnStep(printable(title), schedule, timeline, divisor, unit)], kind)


def report(fitted: Any, path: str | os.PathLike[str]) -> None:
    """Writes a report of a fitted module's plan.

    The suffix says which: `.html` is a page that opens offline, with the memory of original and plan, tensor
    by tensor; `.svg` or `.png` a picture of both; `.json` a trace for Perfetto (ui.perfetto.dev) or
    chrome://tracing; `.pickle` a snapshot for pytorch.org/memory_viz.

    Args:
        fitted: What `irc.optimize` or `irc.pipeline` returned, or its plan.
        path: The file to write; an earlier one is replaced.

    Raises:
        UsageError: IRC400 for another suffix or for something without a plan; IRC442 when the file cannot be
            written; IRC448 for a picture without the extra `plot`; IRC595 if the plan does not know its
            memory.
    """
    plan = fitted if isinstance(fitted, Plan | PipelinePlan) else getattr(fitted, "plan", None)
    if isinstance(plan, PipelinePlan):
        return write_pipeline_report(Path(path), "A pipeline", plan)
    if not isinstance(plan, Plan):
        raise UsageError(
            "IRC400", f"a {type(fitted).__name__} has no plan", help="give what irc.optimize returned"
        )
    title = "A plan" if fitted is plan else type(fitted).__name__
    write_report(Path(path), title, plan, plan.timeline())
