"""A measured step beside the predicted one, as one trace."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ...ir import MemoryTimeline
from .traces import chrome_trace

__all__ = ["measured_trace"]

_STEP = "irc: the measured step"
_FIRST_PROCESS = 1_000_000
"""The processes of predictions are numbered from here, above those of any system."""


def measured_trace(step: Callable[[], object], predicted: MemoryTimeline) -> dict[str, Any]:
    """Runs a step under torch's profiler, and returns its trace with the predicted step beside it.

    The measured step has its operations and its allocations; the predicted one its operations, its copies and
    its memory by kind, as processes of their own that begin when the measured step begins.

    Args:
        step: Runs one training step.
        predicted: The memory of the planned step.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with (
        profile(activities=activities, profile_memory=True) as profiler,
        torch.profiler.record_function(_STEP),
    ):
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text(errors="replace"))
    events = trace["traceEvents"]
    began = next(event["ts"] for event in events if event.get("name") == _STEP and event.get("ph") == "X")
    events += _totals(events)
    for event in chrome_trace({"predicted": predicted})["traceEvents"]:
        event["pid"] += _FIRST_PROCESS
        if "ts" in event:
            event["ts"] += began
        events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _totals(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bytes that are allocated after each event of the allocator, as a curve."""
    return [
        {
            "ph": "C",
            "pid": _FIRST_PROCESS,
            "ts": event["ts"],
            "name": "bytes allocated",
            "args": {"measured": event["args"]["Total Allocated"]},
        }
        for event in events
        if event.get("name") == "[memory]" and "Total Allocated" in event.get("args", {})
    ]
