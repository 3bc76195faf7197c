"""Counts the forwards of a module that are in flight: their backward may still run."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

from .program import Program

__all__ = ["LiveForwards"]

_logger = logging.getLogger("irc")


class LiveForwards:
    """The calls of one module that hold saved values for backward.

    More calls than planned give the right numbers, but take memory that the plan did not count. So do calls
    of different plans, as each plan counts only its own calls. Both are logged once for each module, and not
    refused: whether it matters depends on the memory that is left, and a script may do it on purpose or for a
    moment.
    """

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[Any, Program] = weakref.WeakKeyDictionary()
        """The autograd nodes of the calls. A node disappears when its outputs are dropped."""
        self._lock = threading.Lock()
        self._is_told = False

    def __reduce__(self) -> tuple[type[LiveForwards], tuple[()]]:
        """Makes an empty one: a copy of a module has no calls yet."""
        return LiveForwards, ()

    def __len__(self) -> int:
        return len(self._calls)

    def enter(self, call: Any, program: Program) -> None:
        """Adds a call that runs forward."""
        with self._lock:
            self._calls[call] = program
            count, kinds = len(self._calls), {id(each.forward) for each in self._calls.values()}
        if len(kinds) > 1 and count <= program.forwards_in_flight:
            self._tell(
                f"{count} forwards of {len(kinds)} plans are in flight, and each plan counted only its own",
                "Run calls of different shapes one after the other",
            )
        self._compare(count, program, "their backward has not run")

    def leave(self, call: Any) -> None:
        """Removes a call whose backward frees the saved values."""
        with self._lock:
            self._calls.pop(call, None)

    def retain(self, program: Program) -> None:
        """Counts a backward that keeps the saved values: it takes as much memory as one more call."""
        self._compare(len(self) + 1, program, "a backward that retains its graph counts as one more")

    def _compare(self, count: int, program: Program, why: str) -> None:
        planned = program.forwards_in_flight
        if count > planned:
            self._tell(
                f"{count} forwards are in flight ({why}), and the plan counted {planned}",
                f"Plan with forwards_in_flight={count}, or drop outputs that need no backward",
            )

    def _tell(self, message: str, help: str) -> None:
        if not self._is_told:
            self._is_told = True
            _logger.warning("IRC567: %s: the step may take more memory than its budget. %s", message, help)
