"""One module is planned at a time; while it is traced, nobody may look at its parameters."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["is_tracing", "planning", "settled", "tracing"]

planning = threading.RLock()
"""Held while a module is planned: the tracer and the profiler have one state for all threads."""

settled = threading.RLock()
"""Held while a planned step looks up its parameters, and while any module is traced: torch's tracer puts
stand-ins into the module. Who holds it does not wait for `planning`."""

_thread = threading.local()


@contextmanager
def tracing() -> Generator[None]:
    """While it is open, this thread traces a module; planned ones inside of it run their original forward."""
    with settled:
        _thread.depth = getattr(_thread, "depth", 0) + 1
        try:
            yield
        finally:
            _thread.depth -= 1


def is_tracing() -> bool:
    """Whether this thread traces a module."""
    return getattr(_thread, "depth", 0) > 0
