"""Timelines in the formats of other tools: Chrome traces, and snapshots of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...ir import Kind, MemoryTimeline, TimelineStep

__all__ = ["chrome_trace", "memory_snapshot"]

_MICROSECONDS = 1e6
_ALIGNMENT = 512
"""The bytes between two addresses of a snapshot, as CUDA's allocator rounds."""


def chrome_trace(timelines: Mapping[str, MemoryTimeline]) -> dict[str, Any]:
    """Returns steps as a trace: a process each, with its operations, its copies, and its memory by kind.

    Perfetto (ui.perfetto.dev) and chrome://tracing read it. Times are in microseconds; where operations were
    not timed each takes a second.

    Args:
        timelines: The steps, by their names.
    """
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items(), start=1):
        events += _events(process, name, timeline)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(process: int, name: str, timeline: MemoryTimeline) -> Iterator[dict[str, Any]]:
    lanes = ["computations", *dict.fromkeys(f"{c.tier} {c.direction}" for c in timeline.copies)]
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for thread, lane in enumerate(lanes):
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": lane}}
    during = timeline.during_bytes
    for index, step in enumerate(timeline.steps):
        at = {"pid": process, "ts": step.start_seconds * _MICROSECONDS}
        if step.end_seconds > step.start_seconds:
            yield {
                "ph": "X",
                "tid": 0,
                **at,
                "dur": (step.end_seconds - step.start_seconds) * _MICROSECONDS,
                "name": step.name,
                "cat": step.phase,
                "args": {
                    "operation": step.op,
                    "module": step.module,
                    "source": step.source,
                    "bytes": during[index],
                    "workspace_bytes": step.workspace_bytes,
                },
            }
    for at_seconds, kinds in _counters(timeline):
        yield {"ph": "C", "pid": process, "ts": at_seconds * _MICROSECONDS, "name": "bytes", "args": kinds}
    for copy in timeline.copies:
        yield {
            "ph": "X",
            "pid": process,
            "tid": lanes.index(f"{copy.tier} {copy.direction}"),
            "ts": copy.start_seconds * _MICROSECONDS,
            "dur": (copy.end_seconds - copy.start_seconds) * _MICROSECONDS,
            "name": copy.name,
            "cat": "copy",
            "args": {"bytes": copy.nbytes},
        }


def _counters(timeline: MemoryTimeline) -> Iterator[tuple[float, dict[str, int]]]:
    """Yields the bytes of each kind at each step."""
    now = dict.fromkeys(map(str, Kind), 0)
    comes: list[list[tuple[str, int]]] = [[] for _ in range(len(timeline.steps) + 1)]
    for each in timeline.residents:
        comes[each.first].append((str(each.kind), each.nbytes))
        comes[each.last + 1].append((str(each.kind), -each.nbytes))
    for step, changes in zip(timeline.steps, comes, strict=False):
        for kind, nbytes in changes:
            now[kind] += nbytes
        beside = {Kind.WORKSPACE: step.workspace_bytes, Kind.OTHER: now[Kind.OTHER] + step.other_bytes}
        yield step.start_seconds, {**now, **beside}


def memory_snapshot(timeline: MemoryTimeline) -> dict[str, Any]:
    """Returns a step as a snapshot of CUDA's allocator, which pytorch.org/memory_viz draws.

    Each stay of a tensor, each workspace and each change of the other bytes is an allocation, with the module
    and the line of the user's code as its stack.

    Args:
        timeline: The step.
    """
    return {"segments": [], "device_traces": [list(_allocations(timeline))]}


def _allocations(timeline: MemoryTimeline) -> Iterator[dict[str, Any]]:
    address = _ALIGNMENT
    ends: list[list[tuple[int, int, list[Any]]]] = [[] for _ in range(len(timeline.steps) + 1)]
    starts: list[list[Any]] = [[] for _ in range(len(timeline.steps) + 1)]
    for each in timeline.residents:
        starts[each.first].append(each)
    for index, step in enumerate(timeline.steps):
        time_us = int(step.start_seconds * _MICROSECONDS)
        for where, nbytes, frames in ends[index]:
            yield _event("free_completed", where, nbytes, frames, time_us)
        wanted = [
            (r.nbytes, r.last, _frames(r.name, r.kind, timeline.steps[r.maker] if r.maker >= 0 else None))
            for r in starts[index]
        ]
        wanted += [
            (nbytes, index, _frames(step.name, kind, step))
            for nbytes, kind in ((step.workspace_bytes, Kind.WORKSPACE), (step.other_bytes, Kind.OTHER))
            if nbytes > 0
        ]
        for nbytes, last, frames in wanted:
            yield _event("alloc", address, nbytes, frames, time_us)
            ends[last + 1].append((address, nbytes, frames))
            address += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    time_us = int(timeline.step_seconds * _MICROSECONDS)
    for where, nbytes, frames in ends[len(timeline.steps)]:
        yield _event("free_completed", where, nbytes, frames, time_us)


def _frames(name: str, kind: str, by: TimelineStep | None) -> list[dict[str, Any]]:
    """The stack of an allocation: what it is, and where it is made."""
    found = [{"filename": str(kind), "line": 0, "name": name}]
    if by is not None:
        file, _, rest = by.source.partition(":")
        line, _, function = rest.partition(" in ")
        number = int(line) if line.isdecimal() and len(line) < 10 else 0
        found.append({"filename": by.op, "line": 0, "name": by.module or by.name})
        found.append({"filename": file, "line": number, "name": function})
    return found


def _event(
    action: str, address: int, nbytes: int, frames: list[dict[str, Any]], time_us: int
) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": nbytes,
        "stream": 0,
        "frames": frames,
        "time_us": time_us,
    }
