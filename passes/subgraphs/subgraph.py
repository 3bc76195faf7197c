"""A step of several graphs: each subgraph has a schedule of its own, and all share one budget.

The forwards of the subgraphs run one after the other, then their backwards in reverse. What a subgraph saves
for its backward is alive while the subgraphs above it run. So each subgraph sees the others as ambient
memory, and the subgraphs above it as a loss that takes as much as they do.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...ir import BudgetError, Compute, Graph, Loss, Plan, Schedule, Storage, TimeLimitError
from ..milp import LinearSum, Model, add_memory_row, solve
from ..program import Program
from ..remat.certificate import certify
from ..remat.choice import ChosenSchedule, Limits
from ..remat.choose_recomputation import choose_recomputation
from ..remat.eviction import evict_greedily
from ..remat.planner import Planner
from ..remat.problem import CheckpointProblem, Solution
from ..remat.search import Incumbent
from .footprint import Footprint, footprint, outputs_bytes, tangents_bytes

__all__ = [
    "AmbientMemory",
    "Choice",
    "Subgraph",
    "SubgraphSolutions",
    "choose_together",
    "minimum_bytes",
    "plan_subgraph",
    "saved_by",
]


@dataclass(frozen=True, slots=True)
class AmbientMemory:
    """Bytes that are alive around a subgraph whatever is chosen: all static ones, and outputs of the others.

    The bytes that subgraphs below it save are not among them, and neither are those of its own schedule.

    Args:
        forward_bytes: The bytes while its forward runs.
        loss_bytes: The bytes while the caller computes the loss, if no other subgraph comes between: with the
            subgraph's outputs, their gradients, and what the loss takes.
        backward_bytes: The bytes while its backward runs: with the outputs and the gradients of the subgraphs
            above.
    """

    forward_bytes: int
    loss_bytes: int
    backward_bytes: int

    def plus(self, nbytes: int) -> AmbientMemory:
        """Adds bytes that are alive all the time."""
        return AmbientMemory(
            self.forward_bytes + nbytes, self.loss_bytes + nbytes, self.backward_bytes + nbytes
        )

    def __or__(self, other: AmbientMemory) -> AmbientMemory:
        """Takes the larger of each."""
        return AmbientMemory(
            max(self.forward_bytes, other.forward_bytes),
            max(self.loss_bytes, other.loss_bytes),
            max(self.backward_bytes, other.backward_bytes),
        )


@dataclass(frozen=True)
class Choice:
    """The choice for a subgraph.

    Args:
        problem: The problem that the schedule was chosen for.
        solution: The schedule.
        footprint: The memory that it takes.
        plan: Its certificate, within the subgraph's share of the budget.
    """

    problem: CheckpointProblem
    solution: Solution
    footprint: Footprint
    plan: Plan

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.solution.schedule


@dataclass(eq=False)
class Subgraph:
    """A graph that runs above certain others, whose backwards are still to come.

    Args:
        name: The name of the graph in the user's code.
        solutions: The graph's program, with schedules known for it.
        parent: The subgraph right below; None if nothing waits for its backward.
        children: The subgraphs right above.
        ambient: The memory that is alive around it, as far as it was seen.
        choice: The choice as planned.
    """

    name: str
    solutions: SubgraphSolutions
    parent: Subgraph | None = None
    children: list[Subgraph] = field(default_factory=list["Subgraph"])
    ambient: AmbientMemory | None = None
    choice: Choice | None = None

    @property
    def below(self) -> tuple[Subgraph, ...]:
        """The subgraphs whose backwards are still to come when this one runs, the lowest first."""
        return () if self.parent is None else (*self.parent.below, self.parent)

    @property
    def tree(self) -> Iterator[Subgraph]:
        """Yields this subgraph and all above it; each after the one that it stands on."""
        yield self
        for child in self.children:
            yield from child.tree

    def peak_bytes(self, choices: Mapping[Subgraph, Footprint], upto: Subgraph | None = None) -> int:
        """The most that is alive while this subgraph runs, static bytes included.

        Args:
            choices: The footprints of the choices for it and for those below.
            upto: A subgraph; if given, only the bytes that those above it save count below this one.
        """
        assert self.ambient is not None
        below = sum(choices[subgraph].saved_bytes for subgraph in self.below)
        if upto is not None:
            below -= choices[upto].saved_bytes
        own = choices[self]
        return below + max(
            self.ambient.forward_bytes + own.forward_bytes,
            self.ambient.loss_bytes + own.saved_bytes,
            self.ambient.backward_bytes + own.backward_bytes,
        )


@dataclass(eq=False)
class SubgraphSolutions:
    """A graph with costs, and the schedules that are found for it once, whatever the budget.

    Args:
        program: The graph with its costs, without a schedule.
    """

    program: Program
    _planner: Planner | None = None
    _learned: list[tuple[CheckpointProblem, Solution]] = field(
        default_factory=list[tuple[CheckpointProblem, Solution]]
    )

    @property
    def graph(self) -> Graph:
        """The training graph."""
        return self.program.graph

    @property
    def baseline_bytes(self) -> int:
        """The peak of the graph alone, as eager runs it."""
        return self._known.baseline_bytes

    @property
    def baseline(self) -> Footprint:
        """The footprint of the graph as eager runs it."""
        original = self._known.original
        return footprint(original.keep_all.schedule, original.costs.workspace_bytes)

    @property
    def _known(self) -> Planner:
        if self._planner is None:
            self._planner = Planner(self.program)
        return self._planner

    def add_solution(self, problem: CheckpointProblem, solution: Solution) -> None:
        """Makes a schedule one of those known."""
        if all(solution is not known for _, known in self._learned):
            self._learned.append((problem, solution))

    def schedules(self, deadline: float) -> list[tuple[CheckpointProblem, Solution, Footprint]]:
        """Lists the schedules that no other one beats in time and in all bytes.

        Args:
            deadline: `time.monotonic()` after which nothing more is tried.
        """
        planner = self._known
        found = [(planner.problem, solution) for _, solution in planner.candidates(deadline).candidates]
        taken = [(p, s, footprint(s.schedule, p.costs.workspace_bytes)) for p, s in (*found, *self._learned)]
        taken.sort(key=lambda entry: _numbers(entry[1], entry[2]))
        best: list[tuple[CheckpointProblem, Solution, Footprint]] = []
        for entry in taken:
            mine = _numbers(entry[1], entry[2])
            others = (_numbers(s, f) for _, s, f in best)
            if not any(all(a <= b for a, b in zip(other, mine, strict=True)) for other in others):
                best.append(entry)
        return best


def _numbers(solution: Solution, taken: Footprint) -> tuple[float, int, int, int]:
    return solution.seconds, taken.saved_bytes, taken.backward_bytes, taken.forward_bytes


# ---------------------------------------------------------------------- one subgraph within its share


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
        return replace(program, graph=self.of(program.graph), original=original)


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
    subgraph: Subgraph, budget_bytes: int, chosen: Mapping[Subgraph, Footprint], *, time_limit: float
) -> Choice:
    """Plans the best schedule for a subgraph in what the others leave of the budget.

    Args:
        subgraph: The subgraph.
        budget_bytes: The budget of the whole step.
        chosen: The footprints of the other subgraphs; it must have those below, and subgraphs above that are
            not in it do not count.
        time_limit: Seconds for the search.

    Raises:
        BudgetError: IRC204 when no schedule was found within what is left.
        TimeLimitError: IRC205 when the time limit ended before one was found, and greedy eviction finds none.
    """
    share = _share(subgraph, budget_bytes, chosen)
    planner = Planner(share.program(subgraph.solutions.program))
    if share.budget_bytes < planner.problem.floor_bytes:
        raise BudgetError(
            "IRC204",
            f"{share.budget_bytes} bytes are left, {planner.problem.floor_bytes} the least",
            minimum_bytes=budget_bytes - share.budget_bytes + planner.problem.floor_bytes,
        )
    limits = Limits(share.budget_bytes, time_limit)
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
        baseline_bytes=planner.baseline_bytes,
        seconds=time.monotonic() - limits.started,
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
    split = sum(1 for _ in _before_loss(solution.schedule))
    again = shared.simulate_order(solution.order[:split], solution.order[split:])
    plan = certify(
        ChosenSchedule(shared, Incumbent(name, again), again.peak_bytes, shared.floor_bytes),
        share.budget_bytes,
        baseline_bytes=subgraph.solutions.baseline_bytes,
        seconds=0.0,
    )
    return Choice(shared, again, footprint(again.schedule, problem.costs.workspace_bytes), plan)


def _before_loss(schedule: Schedule) -> Iterator[Compute]:
    for instruction in schedule.instructions:
        if isinstance(instruction, Loss):
            return
        if isinstance(instruction, Compute):
            yield instruction


def saved_by(schedule: Schedule) -> frozenset[Storage]:
    """The storages that a schedule holds between forward and backward, without the outputs."""
    alive: set[Storage] = set()
    for instruction in schedule.instructions:
        if isinstance(instruction, Loss):
            break
        if isinstance(instruction, Compute):
            alive |= instruction.retained
        else:
            alive.discard(instruction.storage)
    return frozenset(alive) - schedule.graph.output_storages


# ---------------------------------------------------------------------- all subgraphs together

_GAP = 1e-3
"""The absolute gap of the programme, as a fraction of the time of a step that computes nothing twice."""

_TRIES = 4
_SLACK = 10_000
"""If a choice is over the budget, within the solver's tolerance, one part in this many is taken off."""


def choose_together(root: Subgraph, budget_bytes: int, *, time_limit: float) -> dict[Subgraph, Choice] | None:
    """Chooses schedules for all known subgraphs of a tree, such that every path through it fits the budget.

    First an integer programme with the least time in total picks one of the known schedules for each
    subgraph. Then each subgraph is planned anew in what the others leave to it.

    Args:
        root: The lowest subgraph.
        budget_bytes: The budget of the whole step.
        time_limit: The time limit in seconds.

    Returns:
        The choices; None if the known schedules do not fit together.
    """
    deadline = time.monotonic() + time_limit
    subgraphs = [subgraph for subgraph in root.tree if subgraph.ambient is not None]
    if len(subgraphs) == 1:
        try:
            return {root: plan_subgraph(root, budget_bytes, {}, time_limit=time_limit)}
        except (BudgetError, TimeLimitError):
            return None
    picked = _pick(subgraphs, budget_bytes, deadline)
    if picked is None:
        return None
    chosen = {subgraph: taken for subgraph, (_, _, taken) in picked.items()}
    choices: dict[Subgraph, Choice] = {}
    for index, subgraph in enumerate(subgraphs):
        problem, solution, _ = picked[subgraph]
        better: Choice | None = None
        left = (deadline - time.monotonic()) / (len(subgraphs) - index)
        if left > 0:
            with contextlib.suppress(BudgetError, TimeLimitError):
                better = plan_subgraph(subgraph, budget_bytes, chosen, time_limit=left)
        if better is None or better.solution.seconds > solution.seconds:
            better = certified(subgraph, budget_bytes, chosen, problem, solution, name="shared")
        choices[subgraph] = better
        chosen[subgraph] = better.footprint
    return choices


_Picked = dict[Subgraph, tuple[CheckpointProblem, Solution, Footprint]]


def _pick(subgraphs: Sequence[Subgraph], budget_bytes: int, deadline: float) -> _Picked | None:
    pools = list(dict.fromkeys(subgraph.solutions for subgraph in subgraphs))
    each = max(deadline - time.monotonic(), 0.0) / 2 / len(pools)
    schedules = {solutions: solutions.schedules(time.monotonic() + each) for solutions in pools}
    room_bytes = budget_bytes
    for _ in range(_TRIES):
        picked = _solve(subgraphs, schedules, room_bytes, deadline)
        if picked is None:
            return None
        chosen = {subgraph: taken for subgraph, (_, _, taken) in picked.items()}
        over = max(subgraph.peak_bytes(chosen) for subgraph in subgraphs) - budget_bytes
        if over <= 0:
            return picked
        room_bytes -= max(over, budget_bytes // _SLACK)
    return None


def _solve(
    subgraphs: Sequence[Subgraph],
    schedules: Mapping[SubgraphSolutions, list[tuple[CheckpointProblem, Solution, Footprint]]],
    room_bytes: int,
    deadline: float,
) -> _Picked | None:
    """Solves the programme: one schedule for each subgraph; forward, loss and backward fit into the room."""
    model = Model()
    takes = {
        subgraph: [model.add_binary_variable() for _ in schedules[subgraph.solutions]]
        for subgraph in subgraphs
    }
    pairs = {
        subgraph: [
            (taken, variable)
            for (_, _, taken), variable in zip(schedules[subgraph.solutions], takes[subgraph], strict=True)
        ]
        for subgraph in subgraphs
    }
    for subgraph in subgraphs:
        assert subgraph.ambient is not None
        model.add_linear_constraint(LinearSum(takes[subgraph]) == 1)
        below = [(t.saved_bytes, v) for other in subgraph.below for t, v in pairs[other]]
        own = pairs[subgraph]
        for ambient_bytes, terms in (
            (subgraph.ambient.forward_bytes, [(t.forward_bytes, v) for t, v in own]),
            (subgraph.ambient.loss_bytes, [(t.saved_bytes, v) for t, v in own]),
            (subgraph.ambient.backward_bytes, [(t.backward_bytes, v) for t, v in own]),
        ):
            add_memory_row(model, [*below, *terms], room_bytes - ambient_bytes)
    seconds = [
        solution.seconds * variable
        for subgraph in subgraphs
        for (_, solution, _), variable in zip(schedules[subgraph.solutions], takes[subgraph], strict=True)
    ]
    model.minimize(LinearSum(seconds))
    least = math.fsum(min(s.seconds for _, s, _ in schedules[subgraph.solutions]) for subgraph in subgraphs)
    outcome = solve(model, seconds=max(deadline - time.monotonic(), 1.0), gap=_GAP * least)
    values = outcome.values
    if values is None:
        return None
    return {
        subgraph: max(
            zip(schedules[subgraph.solutions], takes[subgraph], strict=True),
            key=lambda pair, found=values: found[pair[1]],
        )[0]
        for subgraph in subgraphs
    }
