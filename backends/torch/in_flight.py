"""Counts the forwards of a module that are in flight: their backward has not run, and may still run."""

from __future__ import annotations

import logging
import weakref
from typing import Any

__all__ = ["InFlight"]

_logger = logging.getLogger("irc")


class InFlight:
    """The calls of one module that hold what they saved for backward.

    More of them than planned give the right numbers, but take memory that the plan did not count. That is
    logged, once for each module, and not refused: whether it matters depends on how much memory is left, and
    a script may do it on purpose, or for a moment.

    Args:
        planned: How many the plan counted.
    """

    def __init__(self, planned: int) -> None:
        self.planned = planned
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        """Autograd nodes; one whose outputs were dropped without a backward is gone by itself."""
        self._is_told = False

    def __reduce__(self) -> tuple[type[InFlight], tuple[int]]:
        """A copy has no calls of its own yet."""
        return InFlight, (self.planned,)

    def __len__(self) -> int:
        return len(self._calls)

    def enter(self, call: Any) -> None:
        """A call runs forward."""
        self._calls.add(call)
        self._tell(len(self), "their backward has not run")

    def leave(self, call: Any) -> None:
        """The backward of a call gives up what forward saved."""
        self._calls.discard(call)

    def retain(self) -> None:
        """The backward of a call runs, and keeps what forward saved: it takes as much as one call more."""
        self._tell(len(self) + 1, "a backward that retains its graph counts as one more")

    def _tell(self, count: int, why: str) -> None:
        if count > self.planned and not self._is_told:
            self._is_told = True
            _logger.warning(
                "IRC567: %d forwards are in flight (%s), and the plan counted %d: the step may take more "
                "memory than its budget. Plan with forwards_in_flight=%d, or let go of outputs that need no "
                "backward",
                count,
                why,
                self.planned,
                count,
            )
