"""The memory that the allocator hands out while something runs, from its own events."""

# The history of the CUDA allocator has no public interface, nor has a session without operations.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Generator, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch._C._profiler import RecordScope  # pyright: ignore[reportAttributeAccessIssue]

from ...ir import UsageError, allocation_bytes

__all__ = ["allocation_events", "cuda_events", "peak_bytes", "recorded_allocations"]


def peak_bytes(run: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The highest level of a device's allocator while `run` runs, above its level at the start, in bytes."""
    return max(accumulate(allocation_events(run, device)), default=0)


def allocation_events(run: Callable[[], Any], device: torch.device | str = "cpu") -> list[int]:
    """The events of a device's allocator while `run` runs, in order: bytes taken (positive) or given back.

    Raises:
        UsageError: As `recorded_allocations`.
    """
    gc.collect()
    with recorded_allocations(device) as events:
        run()
    return events


def recorded_allocations(
    device: torch.device | str = "cpu",
) -> contextlib.AbstractContextManager[list[int]]:
    """Records the events of a device's allocator, into the list that it gives, which is filled at the end.

    On the CPU, memory that was taken before and is given back meanwhile makes no event, and a session of
    torch's profiler that begins meanwhile takes the events: there are none then.

    Raises:
        UsageError: IRC458 when the history of CUDA memory is recorded already.
    """
    found = torch.device(device)
    return _cuda_recorded(found) if found.type == "cuda" else _cpu_recorded()


# ---------------------------------------------------------------------- CUDA


def cuda_events(run: Callable[[], Any], device: torch.device) -> list[int]:
    """The events of the CUDA caching allocator on a device while `run` runs, by its own history.

    The counters of the allocator (`max_memory_allocated`) say more than was asked for: a block of which less
    than 1 MiB would be left is handed out whole, so that they depend on what ran before.

    Raises:
        UsageError: IRC458 when the history is recorded already.
    """
    with _cuda_recorded(device) as events:
        run()
    return events


@contextlib.contextmanager
def _cuda_recorded(device: torch.device) -> Generator[list[int]]:
    events: list[int] = []
    torch.cuda.synchronize(device)
    if torch._C._cuda_isHistoryEnabled():
        raise UsageError(
            "IRC458",
            "torch records the history of CUDA memory, by which irc measures peaks",
            help="call torch.cuda.memory._record_memory_history(enabled=None) before",
        )
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python")
    try:
        before = len(_history(device))
        yield events
        torch.cuda.synchronize(device)
        events += _levelled(_history(device)[before:])
    finally:
        torch.cuda.memory._record_memory_history(None)


def _history(device: torch.device) -> list[dict[str, Any]]:
    snapshot: Any = torch.cuda.memory._snapshot()
    index: Any = device.index
    return snapshot["device_traces"][torch.cuda.current_device() if index is None else index]


def _levelled(history: Iterable[dict[str, Any]]) -> list[int]:
    """The bytes of each entry that takes memory or makes it free for others, in whole blocks of 512 bytes."""
    events: list[int] = []
    for entry in history:
        nbytes = allocation_bytes(entry.get("size", 0), "cuda")
        if entry["action"] == "alloc":
            events.append(nbytes)
        elif entry["action"] == "free_completed":
            events.append(-nbytes)
    return events


# ---------------------------------------------------------------------- CPU


@contextlib.contextmanager
def _cpu_recorded() -> Generator[list[int]]:
    from torch.autograd import profiler

    events: list[int] = []
    session = profiler.profile(profile_memory=True)
    is_beside = profiler._is_profiler_enabled  # a session of the user's, which this one ends
    with _quiet_stderr():
        profiler._prepare_profiler(session.config(), session.kineto_activities)
        enable: Callable[..., None] = profiler._enable_profiler  # its stub lacks the scopes
        enable(session.config(), session.kineto_activities, _NO_OPERATIONS)
    try:
        yield events
    finally:
        recorded: list[Any] = []
        if torch.autograd._profiler_enabled() and profiler._is_profiler_enabled == is_beside:
            with _quiet_stderr():
                recorded = list(profiler._disable_profiler().events())
    found = [
        (event.start_ns(), index, event.nbytes())
        for index, event in enumerate(recorded)
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    events += [nbytes for _, _, nbytes in sorted(found)]


_NO_OPERATIONS = {RecordScope.STATIC_RUNTIME_MODEL}
"""A scope that nothing enters: with operations recorded, a session could neither begin nor end within one."""


_NO_LOG = "99"
"""Above every level of torch's profiler, whose highest one, 5, tells of each start and stop."""


@contextlib.contextmanager
def _quiet_stderr() -> Generator[None]:
    """Silences what the profiler's native code writes to the terminal when it starts and stops.

    It reads its level once, at the first session of the process; stderr is turned away for a session of the
    user's that came before.
    """
    level = os.environ.setdefault("KINETO_LOG_LEVEL", _NO_LOG)
    if sys.stderr:  # None in a daemon
        sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # closed: nothing to silence
        kept = None
    if kept is not None:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        if kept is not None:
            os.dup2(kept, 2)
            os.close(kept)
        if level is _NO_LOG:
            del os.environ["KINETO_LOG_LEVEL"]
