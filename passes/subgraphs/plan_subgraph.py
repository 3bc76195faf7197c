"""Plans one subgraph within its share of the budget."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...ir import BudgetError, Graph, TimeLimitError
from ..program import Program
from ..remat.certificate import certify
from ..remat.choice import GAP, ChosenSchedule, Limits
from ..remat.choose_recomputation import choose_recomputation
from ..remat.eviction import evict_greedily
from ..remat.planner import Planner
from ..remat.problem import CheckpointProblem, Solution
from ..remat.search import Incumbent
from .footprint import Footprint, footprint, outputs_bytes, tangents_bytes
from .subgraph import Choice, Subgraph

__all__ = ["certified", "minimum_bytes", "plan_subgraph"]


@dataclass(frozen=True, slots=True)
class _Share:
    """The part of the budget for one subgraph, and what the others take between its two runs."""

    budget_bytes: int
    loss_bytes: int
    loss_held_bytes: int

    def of(self, graph: Graph) -> Graph:
        """Gives the graph a loss that takes what the others take."""
        return replace(graph, loss_bytes=self.loss_bytes, loss_held_bytes=self.loss_held_bytes)

    def program(self, program: Program) -> Program:
        """Does the same for a program."""
        original = None if program.original is None else self.of(program.original)
        kernels = None if program.kernels is None else self.program(program.kernels)
        return replace(program, graph=self.of(program.graph), original=original, kernels=kernels)


def _share(subgraph: Subgraph, budget_bytes: int, chosen: Mapping[Subgraph, Footprint]) -> _Share:
    """The share of a subgraph, with the others as chosen; those above it that are not chosen do not count."""
    assert subgraph.ambient is not None
    graph, ambient = subgraph.solutions.graph, subgraph.ambient
    below = sum(chosen[other].saved_bytes for other in subgraph.below)
    above = [p for p in subgraph.tree if p is not subgraph and all(q in chosen for q in (p, *p.below))]
    # the bytes there are while this subgraph's saved bytes wait, without these
    waiting = max([ambient.loss_bytes + below, *(p.peak_bytes(chosen, subgraph) for p in above)])
    held = max(ambient.backward_bytes - ambient.forward_bytes, 0)
    handed = outputs_bytes(graph) + tangents_bytes(graph)
    return _Share(
        budget_bytes=budget_bytes - (ambient.forward_bytes - graph.static_bytes) - below,
        loss_bytes=max(waiting - ambient.forward_bytes - below - handed, held),
        loss_held_bytes=held,
    )


def plan_subgraph(
    subgraph: Subgraph,
    budget_bytes: int,
    chosen: Mapping[Subgraph, Footprint],
    *,
    time_limit: float,
    gap: float = GAP,
) -> Choice:
    """Plans the best schedule for a subgraph in what the others leave of the budget.

    Args:
        subgraph: The subgraph.
        budget_bytes: The budget of the whole step.
        chosen: The footprints of the other subgraphs; it must have those below, and subgraphs above that are
            not in it do not count.
        time_limit: Seconds for the search.
        gap: The distance from the best at which to stop, as a fraction of the subgraph's time.

    Raises:
        BudgetError: IRC204 when no schedule was found within what is left.
        TimeLimitError: IRC205 when the time limit ended before one was found, and greedy eviction finds none.
    """
    share = _share(subgraph, budget_bytes, chosen)
    planner = Planner(share.program(subgraph.solutions.program))
    if share.budget_bytes < planner.problem.floor_bytes:
        raise BudgetError(
            "IRC204",
            f"a graph needs {planner.problem.floor_bytes} bytes at least, and {share.budget_bytes} are left",
            minimum_bytes=budget_bytes - share.budget_bytes + planner.problem.floor_bytes,
            help="raise the budget, or lower the batch size",
        )
    limits = Limits(share.budget_bytes, time_limit, gap)
    try:
        planned = choose_recomputation(planner, "auto", limits)
    except TimeLimitError:
        evicted = evict_greedily(planner.problem, share.budget_bytes)
        if evicted is None:
            raise
        return certified(subgraph, budget_bytes, chosen, planner.problem, evicted, name="eviction")
    problem, solution = planned.problem, planned.incumbent.best
    plan = certify(
        planned,
        share.budget_bytes,
        baseline=planner.baseline,
        seconds=time.thread_time() - limits.started,
        kernels_seconds=planner.kernels_seconds,
    )
    return Choice(problem, solution, footprint(solution.schedule, problem.costs.workspace_bytes), plan)


def minimum_bytes(
    subgraph: Subgraph, budget_bytes: int, chosen: Mapping[Subgraph, Footprint], deadline: float
) -> int:
    """The smallest budget of the step that the subgraph has a schedule for, with the others as chosen."""
    share = _share(subgraph, budget_bytes, chosen)
    needed = Planner(share.program(subgraph.solutions.program)).minimum_bytes(deadline)
    return budget_bytes - share.budget_bytes + needed


def certified(
    subgraph: Subgraph,
    budget_bytes: int,
    chosen: Mapping[Subgraph, Footprint],
    problem: CheckpointProblem,
    solution: Solution,
    *,
    name: str,
) -> Choice:
    """Makes a known schedule the choice for a subgraph, in its share; its bound is the step's time."""
    share = _share(subgraph, budget_bytes, chosen)
    shared = CheckpointProblem(share.of(problem.graph), problem.costs, problem.sequence)
    again = shared.simulate_order(*solution.schedule.halves)
    plan = certify(
        ChosenSchedule(shared, Incumbent(name, again), again.peak_bytes, shared.floor_bytes),
        share.budget_bytes,
        baseline=subgraph.solutions.baseline_alone,
        seconds=0.0,
        kernels_seconds=subgraph.solutions.kernels_seconds,
    )
    return Choice(shared, again, footprint(again.schedule, problem.costs.workspace_bytes), plan)
