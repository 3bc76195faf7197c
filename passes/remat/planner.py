"""The knowledge about a program that holds for every budget: its problem, schedules and bounds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...ir import Graph, liveness
from ..costs.measure_costs import Cost
from ..program import Program
from ..rewrites.split_convolutions import rejoined
from .backward_order import weight_gradients_last
from .candidates import Candidates, find_candidates
from .problem import CheckpointProblem, Solution
from .search import Incumbent

__all__ = ["Baseline", "Planner", "baseline_of", "kernels_seconds", "recomputation_problem"]

_RATIOS = (1.0, 4.0, 16.0, 64.0)
"""A gradient is made last if it is this many times as large as what is held for it."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The memory of a program's step before it is planned.

    Args:
        peak_bytes: What 100% is: eager's peak, or the floor of the plans if that is more.
        eager_bytes: Eager's peak, as it was followed or modelled.
        without_unused_bytes: The same of a caller who drops the outputs that the loss does not use before
            backward.
        source: `followed` if the step was followed as its user wrote it; `modelled` if it is the graph as it
            was captured, with everything kept.
    """

    peak_bytes: int
    eager_bytes: int
    without_unused_bytes: int
    source: str


@dataclass
class Planner:
    """A program's recomputation problem, with all that is found once for every budget.

    Args:
        program: A graph; without costs it gets those of the machine `cpu`.

    Attributes:
        problem: The problem to solve: of the rewritten graphs and orders of backward, the one that takes
            least.
        original: The graph as it was captured, in its own order.
        baseline: The memory of the step as its user wrote it; if that is not known, of the original if
            nothing runs twice, whatever annotations ask for.
        kernels_seconds: Time of the step by kernels, as `kernels_seconds`.
    """

    program: Program
    problem: CheckpointProblem = field(init=False)
    original: CheckpointProblem = field(init=False)
    baseline: Baseline = field(init=False)
    kernels_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        if self.program.costs is None:
            self.program = Cost(profile="cpu").run(self.program)
        assert self.program.costs is not None
        self.original = CheckpointProblem(self.program.original or self.program.graph, self.program.costs)
        self.problem = recomputation_problem(self.program)
        self.baseline = baseline_of(self.program, self.original, self.problem.floor_bytes)
        self.kernels_seconds = kernels_seconds(self.program)
        self._known: dict[bool, Candidates] = {}
        self._cut_off: Candidates | None = None
        self._learned: list[tuple[str, Solution]] = []
        self._bounds: list[tuple[int, float]] = []

    @property
    def baseline_bytes(self) -> int:
        """The bytes of a budget of 100%."""
        return self.baseline.peak_bytes

    def program_of(self, problem: CheckpointProblem) -> Program:
        """The program with the graph of a problem."""
        return replace(self.program, graph=problem.graph)

    def candidates(self, deadline: float = math.inf, *, is_thorough: bool = False) -> Candidates:
        """Schedules found without regard to one budget, and those that earlier searches found.

        Args:
            deadline: `time.thread_time()` after which nothing more is tried.
            is_thorough: Whether to look for the smallest peak by all means.
        """
        known = self._known.get(True) or (None if is_thorough else self._known.get(False))
        if known is None:
            if self._cut_off is not None and time.thread_time() >= deadline:
                known = self._cut_off
            else:
                known = find_candidates(self.problem, deadline=deadline, is_thorough=is_thorough)
            if known.is_complete:
                self._known[is_thorough] = known
            else:
                self._cut_off = known
        return replace(known, candidates=(*known.candidates, *self._learned))

    def minimum_bytes(self, deadline: float = math.inf, *, is_thorough: bool = False) -> int:
        """The smallest budget that a schedule is known for; the arguments are those of `candidates`."""
        found = self.candidates(deadline, is_thorough=is_thorough).minimum_bytes
        return min(found, self.original.keep_all.peak_bytes)

    def add_solution(self, budget_bytes: int, incumbent: Incumbent) -> None:
        """Makes a schedule a candidate for other budgets, and its bound a bound for them."""
        self._learned.append((incumbent.name, incumbent.best))
        self._bounds.append((budget_bytes, incumbent.bound_seconds))

    def bound_seconds(self, budget_bytes: int) -> float:
        """The bound that was proved at this budget or at a larger one."""
        return max((seconds for larger, seconds in self._bounds if larger >= budget_bytes), default=0.0)


def baseline_of(program: Program, original: CheckpointProblem, floor_bytes: int) -> Baseline:
    """The memory of a program's step before it is planned.

    Its peak is that of the step as its user wrote it, if workspaces were measured: analytic ones are upper
    bounds, and only the graph as it was captured is comparable then. It is the floor if no plan can take as
    little as eager: the engine holds the gradients of all outputs for a module that has one backward.

    Args:
        program: The program.
        original: The problem of its graph as it was captured.
        floor_bytes: The bytes that no plan goes below.
    """
    if program.kernels is not None:
        return Planner(program.kernels).baseline
    workspace_bytes = original.costs.workspace_bytes
    if program.eager is not None and not original.costs.is_analytic:
        holding, dropping = (
            program.eager.peak_bytes(original.graph, workspace_bytes, without_unused=without_unused)
            for without_unused in (False, True)
        )
        return Baseline(max(holding, floor_bytes), holding, dropping, "followed")
    holding = original.eager.peak_bytes
    dropping = liveness(original.eager.schedule, workspace_bytes, without_unused=True).peak_bytes
    return Baseline(holding, holding, dropping, "modelled")


def kernels_seconds(program: Program) -> float:
    """The time of a step by the kernels that time steps are in the place of; infinite if there are none."""
    kernels = program.kernels
    if kernels is None:
        return math.inf
    assert kernels.costs is not None
    return CheckpointProblem(kernels.original or kernels.graph, kernels.costs).step_seconds


def recomputation_problem(program: Program) -> CheckpointProblem:
    """Chooses the problem that `plan-memory` solves.

    Candidates are the graph as it was captured, as it was rewritten, and with only those convolutions
    taken apart for which that takes no more memory; each in its own order of backward and with large
    gradients last. The one with the least sum of the peak that keeps all and the floor is taken.
    """
    assert program.costs is not None, "costs come first"
    problems = [
        CheckpointProblem(graph, program.costs, order)
        for graph in _graphs(program)
        for order in dict.fromkeys(
            ((), *(weight_gradients_last(graph, program.costs, ratio) for ratio in _RATIOS))
        )
    ]
    return min(problems, key=lambda problem: problem.keep_all.peak_bytes + problem.floor_bytes)


def _graphs(program: Program) -> Iterator[Graph]:
    yield program.graph
    if program.original is not None:
        assert program.costs is not None
        yield rejoined(program.original, program.graph, program.costs)
        yield program.original
