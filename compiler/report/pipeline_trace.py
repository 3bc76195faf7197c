"""A simulated step of a pipeline as a Chrome trace, for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...ir.pipeline.timing import PipelineTimeline, TimedTransfer

__all__ = ["trace_events"]

_MICROSECONDS = 1e6
_COMPUTE, _SEND = 0, 1


def trace_events(timeline: PipelineTimeline) -> dict[str, Any]:
    """The trace, ready for `json.dump`.

    Each device is a process: its actions are the slices of one thread, what it sends to another device those
    of a thread for each link, and a counter has its bytes.

    Args:
        timeline: A step; its seconds become microseconds.
    """
    events = [event for part in (_names, _actions, _transfers, _bytes) for event in part(timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(timeline: PipelineTimeline) -> Iterator[dict[str, Any]]:
    def name(kind: str, device: int, thread: int, text: str) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": device, "tid": thread, "args": {"name": text}}

    for device in range(len(timeline.lines)):
        yield name("process_name", device, _COMPUTE, f"device {device}")
        yield name("thread_name", device, _COMPUTE, "compute")
    for source, target in sorted({(t.source_device, t.target_device) for t in timeline.transfers}):
        yield name("thread_name", source, _SEND + target, f"to device {target}")


def _actions(timeline: PipelineTimeline) -> Iterator[dict[str, Any]]:
    for device, line in enumerate(timeline.lines):
        for timed in line:
            action = timed.action
            yield {
                "ph": "X",
                "name": str(action),
                "cat": action.work.name.lower(),
                "pid": device,
                "tid": _COMPUTE,
                "ts": timed.start_seconds * _MICROSECONDS,
                "dur": (timed.end_seconds - timed.start_seconds) * _MICROSECONDS,
                "args": {"stage": action.stage, "micro_batch": action.micro_batch},
            }


def _transfers(timeline: PipelineTimeline) -> Iterator[dict[str, Any]]:
    for sent in timeline.transfers:
        yield {
            "ph": "X",
            "name": _sent_name(sent),
            "cat": "transfer",
            "pid": sent.source_device,
            "tid": _SEND + sent.target_device,
            "ts": sent.start_seconds * _MICROSECONDS,
            "dur": (sent.end_seconds - sent.start_seconds) * _MICROSECONDS,
            "args": {"bytes": sent.transfer.nbytes, "micro_batch": sent.micro_batch},
        }


def _sent_name(sent: TimedTransfer) -> str:
    what = "activations" if sent.transfer.is_forward else "gradients"
    return f"{what} {sent.micro_batch}: stage {sent.transfer.source_stage} to {sent.transfer.target_stage}"


def _bytes(timeline: PipelineTimeline) -> Iterator[dict[str, Any]]:
    for device, points in enumerate(timeline.memory):
        for point in points:
            yield {
                "ph": "C",
                "name": "memory",
                "pid": device,
                "ts": point.seconds * _MICROSECONDS,
                "args": {"bytes": point.nbytes},
            }
