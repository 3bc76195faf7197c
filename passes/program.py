"""What flows through a pipeline of passes: a graph, and what the passes have learned and chosen."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import Graph, Plan, Schedule, with_frees
from .costs import Costs

__all__ = ["Program"]


@dataclass(frozen=True)
class Program:
    """A training graph on its way to a schedule.

    Args:
        graph: The training graph.
        costs: What its operations cost, once known.
        schedule: The straight line of instructions, once chosen.
        plan: The certificate of that choice.
        original: The graph as it was captured, where a pass has rewritten it; None where it is the same.
    """

    graph: Graph
    costs: Costs | None = None
    schedule: Schedule | None = None
    plan: Plan | None = None
    original: Graph | None = None

    @property
    def baseline(self) -> Schedule:
        """The schedule that computes nothing twice."""
        forward = [n for n in self.graph.operations if n.region.value == "forward"]
        backward = [n for n in self.graph.operations if n.region.value == "backward"]
        return with_frees(self.graph, forward, backward)

    def __str__(self) -> str:
        return str(self.graph if self.schedule is None else self.schedule)
