"""The machine's load, for solvers that count the seconds that pass and not those of the processor."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator

__all__ = ["Load", "load"]

_LEAST_MEASURED_SECONDS = 0.05
_MOST_LOAD = 10.0


class Load(threading.local):
    """The machine's load, as this thread's last long solve met it.

    Attributes:
        factor: The seconds that pass for one of the processor.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    @contextlib.contextmanager
    def measured(self) -> Generator[None]:
        """Measures the load by what goes on within."""
        began, worked = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            if (seconds := time.thread_time() - worked) >= _LEAST_MEASURED_SECONDS:
                passed = time.monotonic() - began
                self.factor = min(max(passed / seconds, 1.0), _MOST_LOAD)


load = Load()
"""One for each thread: the solvers of a thread share what it met."""
