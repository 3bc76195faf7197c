"""The program that flows through a pipeline of passes: a graph, its costs, its schedule and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..ir import EagerMemory, Graph, Plan, Schedule, Tier, print_graph, print_schedule, with_frees
from .costs.table import Costs

if TYPE_CHECKING:
    from .costs.profiling import Measured

__all__ = ["Program", "without_annotations"]


@dataclass(frozen=True)
class Program:
    """A training graph on its way to a schedule.

    Args:
        graph: The training graph.
        costs: The costs of its operations, once known.
        schedule: The straight line of instructions, once chosen.
        plan: The certificate of that choice.
        original: The graph as it was captured, if a pass has rewritten it; None if it is the same.
        tiers: The tiers that storages may go to, beside the device; the fastest first.
        eager: The memory of the step as its user wrote it, if it is known and comparable: no gradient is
            released in backward, and no second forward is in flight.
        kernels: The program with costs of the kernels that eager runs, if this one has the time steps of LSTM
            layers in their place; plans are compared with it.
        tiles: The number of tiles of its widest layer, if a pass made some; else 0.
        measured: Measurements of operations that rewrites have run, by `signature`.
    """

    graph: Graph
    costs: Costs | None = None
    schedule: Schedule | None = None
    plan: Plan | None = None
    original: Graph | None = None
    tiers: tuple[Tier, ...] = ()
    eager: EagerMemory | None = None
    kernels: Program | None = None
    tiles: int = 0
    measured: Mapping[str, Measured] = field(default_factory=dict[str, "Measured"])

    @property
    def baseline(self) -> Schedule:
        """The schedule that computes nothing twice."""
        forward = [n for n in self.graph.operations if n.region.value == "forward"]
        backward = [n for n in self.graph.operations if n.region.value == "backward"]
        return with_frees(self.graph, forward, backward)

    def __str__(self) -> str:
        return print_graph(self.graph) if self.schedule is None else print_schedule(self.schedule)


def without_annotations(program: Program) -> Program:
    """The graph and its costs, with nothing asked for and nothing chosen."""
    assert program.costs is not None, "costs come first"
    graphs = [graph for graph in (program.graph, program.original) if graph is not None]
    free = {node: replace(node, annotation=None) for graph in graphs for node in graph.nodes}
    freed = [replace(graph, nodes=tuple(free[n] for n in graph.nodes), annotations=()) for graph in graphs]
    costs = Costs(
        {free[node]: seconds for node, seconds in program.costs.seconds.items()},
        {free[node]: nbytes for node, nbytes in program.costs.workspace_bytes.items()},
        program.costs.source,
        program.costs.has_times,
    )
    original = freed[1] if len(freed) > 1 else None
    return Program(
        freed[0],
        costs,
        original=original,
        eager=program.eager,
        kernels=program.kernels,
    )
