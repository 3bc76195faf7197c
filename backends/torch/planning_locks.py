"""Locks for planning: one module is planned at a time, and nobody reads its parameters while it is traced."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["is_tracing", "parameters_lock", "planning", "tracing"]

planning = threading.RLock()
"""Held while a module is planned: the tracer and the profiler have one state for all threads."""

parameters_lock = threading.RLock()
"""Held while a planned step looks up its parameters, and while any module is traced: torch's tracer puts
stand-ins into the module. A thread that holds it does not wait for `planning`."""

_thread = threading.local()


@contextmanager
def tracing() -> Generator[None]:
    """Marks this thread as tracing a module: planned modules inside of it run their original forward."""
    with parameters_lock:
        _thread.depth = getattr(_thread, "depth", 0) + 1
        try:
            yield
        finally:
            _thread.depth -= 1


def is_tracing() -> bool:
    """Whether this thread traces a module."""
    return getattr(_thread, "depth", 0) > 0
