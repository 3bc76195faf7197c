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
    of different plans, as each plan counts only its own calls. Neither is refused: whether it matters depends
    on the memory that is left, and a script may do it on purpose or for a moment. It is logged when the first
    backward begins, as the number of calls is known only then, once for each kind and number; and the first
    time as soon as it happens, as memory may end before a backward begins.
    """

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[Any, tuple[Program, str]] = weakref.WeakKeyDictionary()
        """The autograd nodes of the calls. A node disappears when its outputs are dropped."""
        self._lock = threading.Lock()
        self._is_forward = False
        """Whether no backward has begun since the last call."""
        self._told: set[tuple[str, int]] = set()
        """The kinds of messages, each with the number of calls."""

    def __reduce__(self) -> tuple[type[LiveForwards], tuple[()]]:
        """Makes an empty one: a copy of a module has no calls yet."""
        return LiveForwards, ()

    def __len__(self) -> int:
        return len(self._calls)

    def enter(self, call: Any, program: Program, reason: str) -> None:
        """Adds a call that runs forward.

        Args:
            call: Its autograd node.
            program: The program that it runs.
            reason: The call that its plan was made for, in words.
        """
        with self._lock:
            self._calls[call] = program, reason
        self._is_forward = True
        self._compare(program, is_first=True)

    def begin_backward(self, call: Any, program: Program, *, is_retained: bool) -> None:
        """Counts the calls when a backward begins; removes its call if it frees the saved values.

        A backward that keeps them takes as much memory as one more call.
        """
        if self._is_forward:
            self._is_forward = False
            self._compare(program)
        if is_retained:
            why = "a backward that retains its graph counts as one more"
            self._tell_more("retained", len(self) + 1, program, why)
            return
        with self._lock:
            self._calls.pop(call, None)

    def _compare(self, program: Program, *, is_first: bool = False) -> None:
        with self._lock:
            calls = list(self._calls.values())
        count, reasons = len(calls), {id(each.forward): reason for each, reason in calls}
        told = {kind for kind, _ in self._told} if is_first else set[str]()
        if "more" not in told:
            self._tell_more("more", count, program, "their backward has not run")
        if len(reasons) > 1 and "plans" not in told:
            self._tell(
                "plans",
                count,
                f"{count} forwards of {len(reasons)} plans are in flight, and each plan counted only its own",
                "Run their backwards in between, or make them calls of one plan; now the plans are for "
                f"{'; '.join(dict.fromkeys(reasons.values()))}",
            )

    def _tell_more(self, kind: str, count: int, program: Program, why: str) -> None:
        planned = program.forwards_in_flight
        if count > planned:
            self._tell(
                kind,
                count,
                f"{count} forwards are in flight ({why}), and the plan counted {planned}",
                f"Plan with forwards_in_flight={count}, or drop outputs that need no backward",
            )

    def _tell(self, kind: str, count: int, message: str, help: str) -> None:
        if (kind, count) not in self._told:
            self._told.add((kind, count))
            _logger.warning("IRC567: %s: the step may take more memory than its budget. %s", message, help)
