"""Tells whoever listens how planning goes on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["Listener", "Progress", "listening", "report"]

_log = logging.getLogger("irc.progress")


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of planning.

    Args:
        phase: What goes on: `capture`, or the name of a pass.
        operations: The number of operations of the graph; None before there is one.
        overhead: The time of the best schedule so far, as a fraction of the step's time above 1; None before
            one was found.
        bound: The proved bound of it.
        seconds_left: Seconds of the processor until the time limit of a search.
        kernel: The number of the kernel that is compiled, and how many there are.
    """

    phase: str
    operations: int | None = None
    overhead: float | None = None
    bound: float | None = None
    seconds_left: float | None = None
    kernel: tuple[int, int] | None = None

    @property
    def gap(self) -> float | None:
        """The distance of the best schedule from the bound, as a fraction of the step's time."""
        return None if self.overhead is None or self.bound is None else max(self.overhead - self.bound, 0.0)

    def __str__(self) -> str:
        parts = [] if self.operations is None else [f"{self.operations} operations"]
        if self.overhead is not None:
            parts.append(f"overhead {self.overhead:.2%}")
        if self.bound is not None:
            parts.append(f"bound {self.bound:.2%}")
        if self.gap is not None:
            parts.append(f"gap {self.gap:.2%}")
        if self.seconds_left is not None:
            parts.append(f"{self.seconds_left:.0f} s left")
        if self.kernel is not None:
            parts.append("kernel {} of {}".format(*self.kernel))
        return f"{self.phase}: {', '.join(parts)}" if parts else self.phase


Listener = Callable[[Progress], None]

_listener: ContextVar[Listener | None] = ContextVar("irc_progress", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Generator[None]:
    """Lets a function be told what goes on within, and logs it."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report(progress: Progress) -> None:
    """Tells the listener, if there is one, and the logger `irc.progress` at INFO how planning goes on."""
    listener = _listener.get()
    if listener is not None:
        _log.info("%s", progress)
        listener(progress)
