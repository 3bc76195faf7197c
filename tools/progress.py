"""Progress, shown on the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..ir import printable

if TYPE_CHECKING:
    from rich.status import Status

    from ..passes import Pass, Program
    from ..passes.progress import Progress as Planning

__all__ = ["Progress"]


class Progress:
    """Says on the terminal what is going on; silent when piped or quiet."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.verbose = bool(options.verbose)
        self.shown = sys.stderr.isatty() and not options.quiet and not options.json
        self.status: Status | None = None

    @contextmanager
    def phase(self, what: str) -> Generator[None]:
        """Shows `what` while it goes on; it may hold a name of a folder."""
        what = printable(what, 1000)
        started = time.perf_counter()
        if self.shown:
            from rich.console import Console

            from ..passes.progress import listening

            with Console(stderr=True).status(what) as self.status, listening(self._show):
                yield
            self.status = None
        else:
            yield
        self._took(what, started)

    def _show(self, progress: Planning) -> None:
        """Shows how planning goes on."""
        if self.status is not None:
            self.status.update(str(progress))

    def before(self, step: Pass, program: Program) -> None:
        """Shows nothing: passes report themselves."""

    def after(self, step: Pass, program: Program, seconds: float) -> None:
        """Says how long a pass took."""
        self._took(f"pass {step.name}", time.perf_counter() - seconds)

    def _took(self, what: str, started: float) -> None:
        if self.verbose:
            print(f"{what}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
