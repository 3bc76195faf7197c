"""The pass that says how many forwards may be in flight at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

from ...ir import Gradients, UsageError
from ..program import Program

__all__ = ["HoldForwards"]


@dataclass(frozen=True, slots=True)
class HoldForwards:
    """Plans for several forwards before their backwards: all bytes count that many (see `ir.live_forwards`).

    Args:
        count: The number of forwards before the first backward; the backwards follow in any order.
    """

    name: ClassVar[str] = "hold-forwards"

    count: int = 1

    def check(self, *, applies: bool = False) -> None:
        """Refuses a count that is not a positive whole number, or does not go with optimizers in backward.

        Args:
            applies: Whether gradients are applied within backward.

        Raises:
            UsageError: IRC565.
        """
        given = cast(object, self.count)
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise UsageError(
                "IRC565",
                f"{given!r} forwards in flight cannot be planned for",
                help="give how many forwards run before the first backward: a whole number, 1 or more",
            )
        if given > 1 and applies:
            raise UsageError(
                "IRC565",
                f"{given} forwards cannot be in flight when optimizers run within backward: the first "
                "backward updates the parameters that the others read",
                help="plan for one forward in flight, or without optimizer_in_backward",
            )

    def run(self, program: Program, /) -> Program:
        """Gives the program's graphs, the original too, this many forwards in flight.

        Raises:
            UsageError: IRC565 for a wrong count, more than one if gradients are applied within backward or
                are sparse, or after a schedule was chosen.
        """
        self.check(applies=program.graph.gradients is Gradients.APPLIED)
        if self.count > 1 and program.graph.sparse_gradients:
            raise UsageError(
                "IRC565",
                f"{self.count} forwards cannot be in flight where gradients are sparse: those of "
                f"{program.graph.sparse_gradients[0]} grow with each backward",
                help="give the embedding sparse=False, or plan for one forward in flight",
            )
        if program.schedule is not None:
            raise UsageError(
                "IRC565",
                f"{self.name} comes after a schedule was chosen",
                help="put it before: hold-forwards{count=2},plan-memory{...}",
            )
        original = program.original and replace(program.original, forwards_in_flight=self.count)
        graph = replace(program.graph, forwards_in_flight=self.count)
        return replace(
            program, graph=graph, original=original, eager=None if self.count > 1 else program.eager
        )
