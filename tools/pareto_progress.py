"""Shows on the terminal how far a front is."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..compiler.pareto.points import Point, Refusal
from ..ir import format_bytes

__all__ = ["FrontProgress"]


class FrontProgress:
    """A bar with the points that are done, the budget at hand and the time so far.

    Args:
        shown: Whether there is a bar.
        verbose: Whether each point gets a line as well.
    """

    def __init__(self, *, shown: bool, verbose: bool) -> None:
        self.verbose = verbose
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not shown,
        )
        self.task = self.bar.add_task("smallest budget", total=None)

    def __enter__(self) -> FrontProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def start(self, budgets: int, finished: int) -> None:
        """Shows how many points there are."""
        self.bar.update(self.task, total=budgets, completed=finished)
        if self.verbose and finished:
            self._say(f"{finished} of {budgets} points were finished before")

    def before(self, budget_bytes: int) -> None:
        """Shows the budget at hand."""
        self.bar.update(self.task, description=f"budget {format_bytes(budget_bytes)}")

    def after(self, outcome: Point | Refusal) -> None:
        """Counts a point."""
        self.bar.advance(self.task)
        if not self.verbose:
            return
        if isinstance(outcome, Point):
            copies = f", {format_bytes(outcome.copied_bytes)} copied" if outcome.copied_bytes else ""
            text = f"overhead {outcome.overhead:.2%}, bound {outcome.bound:.2%}{copies}, {outcome.strategy}"
        else:
            text = f"refused: {outcome.code}"
        self._say(f"budget {format_bytes(outcome.budget_bytes)}: {text}, {outcome.plan_seconds:.1f} s")

    def _say(self, text: str) -> None:
        if self.bar.disable:
            print(text, file=sys.stderr)
        else:
            self.bar.console.print(text, markup=False, highlight=False)
