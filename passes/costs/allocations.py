"""The memory that the allocator hands out while something runs, from its own events."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from itertools import accumulate
from typing import Any

import torch

__all__ = ["allocation_events", "peak_bytes"]


def peak_bytes(run: Callable[[], Any]) -> int:
    """The highest level of the CPU allocator while `run` runs, above its level at the start, in bytes."""
    return max(accumulate(allocation_events(run)), default=0)


def allocation_events(run: Callable[[], Any]) -> list[int]:
    """The CPU allocator's events while `run` runs, in order: bytes taken (positive) or given back."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    session = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False)
    with _quiet_stderr(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # older releases warn of cycles, although there are none
        session.start()
    try:
        run()
    finally:
        with _quiet_stderr():
            session.stop()
    profiler: Any = session.profiler
    recorded: Iterable[Any] = profiler.kineto_results.events()
    events = [
        (event.start_ns(), index, event.nbytes())
        for index, event in enumerate(recorded)
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    return [nbytes for _, _, nbytes in sorted(events)]


@contextlib.contextmanager
def _quiet_stderr() -> Generator[None]:
    """Silences what the profiler's native code writes to the terminal when it starts and stops."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
