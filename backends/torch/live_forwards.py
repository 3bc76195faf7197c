"""Counts the forwards of a module that are in flight: their backward has not run, and may still run."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

from .program import Program

__all__ = ["InFlight"]

_logger = logging.getLogger("irc")


class InFlight:
    """The calls of one module that hold what they saved for backward.

    More of them than planned give the right numbers, but take memory that the plan did not count; so do
    calls of different plans, as each counts calls like its own. That is logged, once for each module, and not
    refused: whether it matters depends on how much memory is left, and a script may do it on purpose, or
    for a moment.
    """

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[Any, Program] = weakref.WeakKeyDictionary()
        """Autograd nodes; one whose outputs were dropped without a backward is gone by itself."""
        self._lock = threading.Lock()
        self._is_told = False

    def __reduce__(self) -> tuple[type[InFlight], tuple[()]]:
        """A copy has no calls of its own yet."""
        return InFlight, ()

    def __len__(self) -> int:
        return len(self._calls)

    def enter(self, call: Any, program: Program) -> None:
        """A call of a program runs forward."""
        with self._lock:
            self._calls[call] = program
            count, kinds = len(self._calls), {id(each) for each in self._calls.values()}
        if len(kinds) > 1 and count <= program.forwards_in_flight:
            self._tell(
                f"{count} forwards of {len(kinds)} plans are in flight, and each counted its own alone",
                "Run calls of different shapes one after the other",
            )
        self._compare(count, program, "their backward has not run")

    def leave(self, call: Any) -> None:
        """The backward of a call gives up what forward saved."""
        with self._lock:
            self._calls.pop(call, None)

    def retain(self, program: Program) -> None:
        """The backward of a call runs, and keeps what forward saved: it takes as much as one call more."""
        self._compare(len(self) + 1, program, "a backward that retains its graph counts as one more")

    def _compare(self, count: int, program: Program, why: str) -> None:
        planned = program.forwards_in_flight
        if count > planned:
            self._tell(
                f"{count} forwards are in flight ({why}), and the plan counted {planned}",
                f"Plan with forwards_in_flight={count}, or let go of outputs that need no backward",
            )

    def _tell(self, what: str, help: str) -> None:
        if not self._is_told:
            self._is_told = True
            _logger.warning("IRC567: %s: the step may take more memory than its budget. %s", what, help)
