"""A step of several graphs: each subgraph has a schedule of its own, and all share one budget.

The forwards of the subgraphs run one after the other, then their backwards in reverse. What a subgraph saves
for its backward is alive while the subgraphs above it run. So each subgraph sees the others as ambient
memory, and the subgraphs above it as a loss that takes as much as they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...ir import Graph, Plan, Schedule
from ..program import Program
from ..remat.planner import Baseline, Planner
from ..remat.problem import CheckpointProblem, Solution
from .footprint import Footprint, footprint

__all__ = ["AmbientMemory", "Choice", "KnownSchedule", "Subgraph", "SubgraphSolutions"]


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


class KnownSchedule(NamedTuple):
    """A schedule of a graph.

    Args:
        problem: The problem that it solves.
        solution: The schedule.
        footprint: The memory that it takes.
    """

    problem: CheckpointProblem
    solution: Solution
    footprint: Footprint

    @property
    def numbers(self) -> tuple[float, int, int, int]:
        """The numbers of which a schedule with smaller ones is better."""
        taken = self.footprint
        return self.solution.seconds, taken.saved_bytes, taken.backward_bytes, taken.forward_bytes

    def beats(self, other: KnownSchedule) -> bool:
        """Whether it is no worse than another one in time and in all bytes."""
        return all(a <= b for a, b in zip(self.numbers, other.numbers, strict=True))


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
    def baseline_alone(self) -> Baseline:
        """The memory of the graph alone, as eager runs it."""
        return self._known.baseline

    @property
    def baseline(self) -> Footprint:
        """The footprint of the graph as eager runs it."""
        if self.program.kernels is not None:
            return SubgraphSolutions(self.program.kernels).baseline
        original = self._known.original
        return footprint(original.keep_all.schedule, original.costs.workspace_bytes)

    @property
    def kernels_seconds(self) -> float:
        """The time of the graph by kernels, as `kernels_seconds` of its planner."""
        return self._known.kernels_seconds

    @property
    def _known(self) -> Planner:
        if self._planner is None:
            self._planner = Planner(self.program)
        return self._planner

    def add_solution(self, problem: CheckpointProblem, solution: Solution) -> None:
        """Makes a schedule one of those known."""
        if all(solution is not known for _, known in self._learned):
            self._learned.append((problem, solution))

    def schedules(self, deadline: float) -> list[KnownSchedule]:
        """Lists the schedules that no other one beats in time and in all bytes.

        Args:
            deadline: `time.thread_time()` after which nothing more is tried.
        """
        planner = self._known
        found = [(planner.problem, solution) for _, solution in planner.candidates(deadline).candidates]
        known = [
            KnownSchedule(problem, solution, footprint(solution.schedule, problem.costs.workspace_bytes))
            for problem, solution in (*found, *self._learned)
        ]
        best: list[KnownSchedule] = []
        for schedule in sorted(known, key=lambda schedule: schedule.numbers):
            if not any(other.beats(schedule) for other in best):
                best.append(schedule)
        return best
