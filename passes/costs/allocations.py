"""The memory that the allocator hands out while something runs, from its own events."""

# The history of the CUDA allocator has no public interface, nor have the sessions of torch's first profiler.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch._C._profiler import ActiveProfilerType, _ExperimentalConfig
from torch.autograd import ProfilerConfig, ProfilerState, profiler, profiler_legacy

from ...ir import UsageError, allocation_bytes
from ...torch_support.autocast import autocast_state

__all__ = [
    "Recording",
    "allocation_events",
    "cuda_events",
    "peak_bytes",
    "recorded_allocations",
    "run_beside_sessions",
]

T = TypeVar("T")


@dataclass(eq=False)
class Recording:
    """The events of an allocator while something ran.

    Attributes:
        events: The bytes taken (positive) or given back, in order; they are filled in at the end.
        is_whole: Whether these are all; a session of torch's profiler that begins in the thread ends the
            recording, and takes what comes after.
    """

    events: list[int] = field(default_factory=list[int])
    is_whole: bool = True


def peak_bytes(run: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The highest level of a device's allocator while `run` runs, above its level at the start, in bytes."""
    return max(accumulate(allocation_events(run, device)), default=0)


def allocation_events(run: Callable[[], Any], device: torch.device | str = "cpu") -> list[int]:
    """The events of a device's allocator while `run` runs, in order: bytes taken (positive) or given back.

    Raises:
        UsageError: As `recorded_allocations`.
    """
    gc.collect()
    with recorded_allocations(device) as recording:
        run()
    if not recording.is_whole:
        raise UsageError(
            "IRC458",
            "a session of torch's profiler began within what is measured, and took the allocator's events",
            help="measure without it",
        )
    return recording.events


def recorded_allocations(
    device: torch.device | str = "cpu",
) -> contextlib.AbstractContextManager[Recording]:
    """Records the events of a device's allocator.

    On the CPU, memory that was taken before and is given back meanwhile makes no event.

    Raises:
        UsageError: IRC458 when the history of CUDA memory is recorded already, or for the CPU when a session
            of torch's profiler is open in this thread.
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
    with _cuda_recorded(device) as recording:
        run()
    return recording.events


@contextlib.contextmanager
def _cuda_recorded(device: torch.device) -> Generator[Recording]:
    recording = Recording()
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
        yield recording
        torch.cuda.synchronize(device)
        recording.events += _levelled(_history(device)[before:])
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
def _cpu_recorded() -> Generator[Recording]:
    """Records by a session of the profiler that torch had before Kineto, which knows one at a time."""
    _give_way()
    _make_way_for_sessions()
    if torch.autograd._profiler_enabled():
        raise UsageError(
            "IRC458",
            "a session of torch's profiler is open in this thread, and takes the events of the allocator",
            help="measure before the session begins, or after it has ended",
        )
    recording, thread = Recording(), threading.get_ident()
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    torch.autograd._enable_profiler_legacy(config)
    _open_recordings[thread] = recording
    try:
        yield recording
    finally:
        if thread == threading.get_ident() and _open_recordings.get(thread) is recording:
            recording.events += _end_session()
        else:
            recording.is_whole = False


_open_recordings: dict[int, Recording] = {}
"""The recordings by thread; one that another thread has left stays until its own begins a session."""


def _give_way() -> None:
    """Ends the recording of this thread, if it has one, before another session begins there."""
    recording = _open_recordings.get(threading.get_ident())
    if recording is not None:
        recording.is_whole = False
        _end_session()


def _end_session() -> list[int]:
    """Ends the session of this thread's recording, and returns its events in their order.

    A session that began within a backward ended with it, as all that torch keeps for a thread.
    """
    del _open_recordings[threading.get_ident()]
    torch_autograd: Any = vars(torch._C)["_autograd"]  # no stub has it
    if torch_autograd._profiler_type() != ActiveProfilerType.LEGACY:
        return []
    entries: list[Any] = [entry for thread in torch.autograd._disable_profiler_legacy() for entry in thread]
    start = next(entry for entry in entries if entry.name() == "__start_profile")
    taken = [entry for entry in entries if entry.kind() == "memory_alloc"]
    taken.sort(key=start.cpu_elapsed_us)  # each thread has a list
    return [entry.cpu_memory_usage() for entry in taken if entry.cpu_memory_usage()]


@functools.cache
def _make_way_for_sessions() -> None:
    """Lets each session that a user begins end the recording of its thread: torch refuses a second one."""
    for module, name in ((profiler, "_run_on_profiler_start"), (profiler_legacy, "_enable_profiler_legacy")):
        setattr(module, name, _after_giving_way(getattr(module, name)))


def _after_giving_way(begin: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(begin)
    def begin_alone(*args: Any) -> None:
        _give_way()
        begin(*args)

    return begin_alone


# ---------------------------------------------------------------------- beside sessions


def run_beside_sessions(run: Callable[[], T]) -> T:
    """Runs what records allocations: in another thread, if a session of torch's profiler is open in this one.

    It has the modes of this one (gradients, autocast, context variables), and hides its operations from
    sessions that look at all threads.
    """
    if not torch.autograd._profiler_enabled():
        return run()
    is_recording_gradients, autocast = torch.is_grad_enabled(), autocast_state()

    def run_apart() -> T:
        torch.autograd._enable_record_function(False)
        torch.set_grad_enabled(is_recording_gradients)
        for device, dtype, has_cache in autocast:  # no region, which would clear the casts of all threads
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, getattr(torch, dtype))
            torch.set_autocast_cache_enabled(has_cache)
        return run()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(contextvars.copy_context().run, run_apart).result()
