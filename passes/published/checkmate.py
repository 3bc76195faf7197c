"""Checkmate: one integer programme over everything that may stay or run again at each time step."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from ...ir import Node, Storage
from ..milp import Model, Term, Variable, solve
from ..remat.exact import Exact
from ..remat.problem import CheckpointProblem, Solution
from ..strategy_registry import Strategy
from .time_steps import TimeSteps, check_size

__all__ = ["CHECKMATE", "MOST_OPERATIONS", "checkmate"]

CHECKMATE = Strategy(
    "checkmate",
    "Jain et al. 2020",
    lambda problem, asked: filter(None, [checkmate(problem, asked.budget_bytes, asked.deadline).best]),
)

MOST_OPERATIONS = 200
"""The most operations of a graph: there is a variable for each pair of them, and more rows than those."""

_MOST_UNITS = 1 << 20
"""The most units that the budget is counted in, if the common divisor of the sizes is smaller."""


def checkmate(problem: CheckpointProblem, budget_bytes: int, deadline: float) -> Exact:
    """Finds the fastest schedule that advances by one first run at each time step, as `TimeSteps` defines.

    Args:
        problem: The recomputation problem of a graph of at most `MOST_OPERATIONS` operations.
        budget_bytes: The most that may be alive at once, static bytes included.
        deadline: `time.thread_time()` at which to stop.

    Returns:
        The best schedule found, and whether it is proved that the class has none faster, or none at all.

    Raises:
        UsageError: IRC403 if the graph has more than `MOST_OPERATIONS` operations.

    Source:
        Jain et al., Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization (MLSys 2020),
        section 4, the complete programme. Ours counts storages instead of tensors, runs backward operations
        once, and leaves out what nothing can profit from; a schedule that the simulation finds over the
        budget is excluded by a row, so no tolerance of the solver lets one pass.
    """
    check_size(problem, "checkmate", MOST_OPERATIONS)
    programme = _Programme(problem, budget_bytes)
    if not programme.formulate(deadline):
        return Exact(None, False)
    while (left := deadline - time.thread_time()) > 0:
        outcome = solve(programme.model, seconds=left, gap=0.0)
        if outcome.is_infeasible:
            return Exact(None, True)
        if outcome.values is None:
            break
        chosen = {runs for runs in programme.runs.values() if outcome.values[runs] > 0.5}
        solution = programme.simulate(chosen)
        if solution.peak_bytes <= budget_bytes:
            return Exact(solution, outcome.is_optimal)
        programme.exclude(chosen)
    return Exact(None, False)


@dataclass
class _Programme:
    r"""The integer programme.

    Variables, for a time step t, an operation i and a storage s, made by operation m(s):

    - R[t, i] in {0, 1}: i runs again before t. R[t, i] = 1 for the first run, at the end of t.
    - S[t, s] in {0, 1}: s is there when t begins.
    - FREE[t, s, i] in [0, 1]: s is freed after i has run again before t.
    - U[t, i] >= 0: the bytes that come and go while i runs at t, in units.

    Minimise the seconds of all R, subject to, for u read by i and the operation j that precedes i at t,

    - reading: R[t, i] <= R[t, m(u)] + S[t, u];
    - staying: S[t + 1, s] <= S[t, s] + R[t, m(s)], and S[t, s] + R[t, m(s)] <= 1: a second copy is useless;
    - memory: U at the start of t is the bytes of all S[t, .];
    - memory: U[t, i] >= U[t, j] - bytes of all FREE[t, ., j] + bytes that i makes * R[t, i];
    - freeing: FREE[t, s, i] <= R[t, i], <= 1 - S[t + 1, s], and <= 1 - R[t, j] for each reader j of s that
      is later at t;
    - budget: U[t, i] + what i takes only while it runs * R[t, i] + what is held besides <= budget;
    - budget: at the loss, bytes of all S[loss + 1, .] + what is held besides <= budget.

    The paper counts the hazards of FREE in one row (num_hazards) and asks that FREE be whole. A row for
    each hazard has the same whole solutions and a better linear relaxation, and FREE need not be whole.
    Other forwards in flight that wait hold the bytes of S[loss + 1, .] as well.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once.
    """

    problem: CheckpointProblem
    budget_bytes: int
    model: Model = field(init=False)
    runs: dict[tuple[int, Node], Variable] = field(init=False)
    stays: dict[tuple[int, Storage], Variable] = field(init=False)

    def __post_init__(self) -> None:
        self.model = Model()
        self.steps = TimeSteps(self.problem)
        self.runs, self.stays = {}, {}
        sizes = [s.nbytes for s in self.problem.producer]
        running = [self.steps.running_bytes(node) for node in self.problem.forward]
        self.divisor = math.gcd(*sizes, *running) or 1
        self.unit_bytes = max(self.divisor, self.budget_bytes / _MOST_UNITS)

    def formulate(self, deadline: float) -> bool:
        """Writes the programme; returns whether that was done before the deadline."""
        problem, model = self.problem, self.model
        for t, again in enumerate(self.steps.again):
            self.runs.update(((t, node), model.add_binary_variable()) for node in again)
            self.stays.update(
                ((t, s), model.add_binary_variable()) for s in problem.producer if self.steps.may_stay(s, t)
            )
        self.kept = [
            (self._units(s.nbytes), stays) for (t, s), stays in self.stays.items() if t == self.steps.loss + 1
        ]
        for t in range(problem.time_steps):
            if time.thread_time() > deadline:
                return False
            self._add_reading(t)
            self._add_staying(t)
            self._add_memory(t)
        unit_seconds = max(problem.step_seconds, 1e-12) / 1000
        model.minimize(
            (max(problem.costs.seconds[node] / unit_seconds, 1e-7), runs)
            for (_, node), runs in self.runs.items()
        )
        return True

    def _units(self, nbytes: int) -> float:
        return nbytes / self.unit_bytes

    def _nodes(self, t: int) -> tuple[Node, ...]:
        """The operations that may run at a time step, in order; the first run is the last of them."""
        node = self.problem.base_of(t)
        return self.steps.again[t] if node is None else (*self.steps.again[t], node)

    def _runs(self, t: int, node: Node) -> Variable | float:
        """R[t, node]: 1 for the first run."""
        return self.runs.get((t, node), float(node is self.problem.base_of(t)))

    def _stays(self, t: int, storage: Storage) -> Variable | float:
        return self.stays.get((t, storage), 0.0)

    def _add_reading(self, t: int) -> None:
        """Adds that what an operation reads is there, or runs again before it."""
        problem = self.problem
        for node in self._nodes(t):
            for storage in problem.forward_reads[node]:
                here, made = self._stays(t, storage), self._runs(t, problem.producer[storage])
                self._add_at_most((1.0, self._runs(t, node)), (-1.0, here), (-1.0, made))

    def _add_staying(self, t: int) -> None:
        """Adds that what stays was there, or ran; and that nothing that is there is made again."""
        for storage, node in self.problem.producer.items():
            here, runs = self._stays(t, storage), self._runs(t, node)
            following = self._stays(t + 1, storage)
            if isinstance(following, Variable) and node is not self.problem.base_of(t):
                self._add_at_most((1.0, following), (-1.0, here), (-1.0, runs))
            if isinstance(here, Variable) and isinstance(runs, Variable):
                self.model.add_row([(1.0, here), (1.0, runs)], upper=1.0)

    def _add_at_most(self, *terms: tuple[float, Variable | float]) -> None:
        """Adds that these terms, some of which may be of numbers, have a sum of at most 0."""
        known = sum(coefficient * each for coefficient, each in terms if isinstance(each, float))
        self.model.add_row(((c, each) for c, each in terms if isinstance(each, Variable)), upper=0.0 - known)

    def _add_memory(self, t: int) -> None:
        """Adds the bytes of each run at a time step, or of the loss."""
        stays = ((s, self.stays.get((t, s))) for s in self.problem.producer)
        alive = [(self._units(s.nbytes), there) for s, there in stays if there is not None]
        nodes = self._nodes(t)
        for position, node in enumerate(nodes):
            runs = self._runs(t, node)
            made = self._units(sum(s.nbytes for s in self.steps.makes[node]))
            used = self.model.add_variable(lower=0.0)
            grown = [(1.0, used), *((-units, variable) for units, variable in alive)]
            if isinstance(runs, Variable):
                self.model.add_row([*grown, (-made, runs)], lower=0.0)
                running = self._units(self.steps.running_bytes(node))
                before = t if t != self.steps.loss else t - 1  # other forwards in flight still wait
                self._add_budget(before, [(1.0, used), (running, runs)], self.problem.held_between(t))
                freed = self._freed(t, node, nodes[position + 1 :])
                alive = [(1.0, used), *((-units, variable) for units, variable in freed)]
            else:
                self.model.add_row(grown, lower=made)
                self._add_budget(t, [(1.0, used)], self.problem.held_in(t))
        if t == self.steps.loss:
            self._add_budget(t, self.kept, self.problem.held_in(t))

    def _freed(self, t: int, node: Node, later: tuple[Node, ...]) -> list[Term]:
        """The units that are freed after an operation has run again."""
        problem = self.problem
        found: list[Term] = []
        for storage in (*problem.forward_reads[node], *self.steps.makes[node]):
            readers = [n for n in later if storage in problem.forward_reads[n]]
            if not storage.nbytes or problem.base_of(t) in readers:
                continue
            freed = self.model.add_variable(lower=0.0, upper=1.0)
            found.append((self._units(storage.nbytes), freed))
            self._add_at_most((1.0, freed), (-1.0, self._runs(t, node)))
            for hazard in (self._stays(t + 1, storage), *(self._runs(t, reader) for reader in readers)):
                if isinstance(hazard, Variable):
                    self.model.add_row([(1.0, freed), (1.0, hazard)], upper=1.0)
        return found

    def _add_budget(self, t: int, used: list[Term], held_bytes: int) -> None:
        for case in self.problem.others_at(t):
            room_bytes = self.budget_bytes - held_bytes - case.bytes_at(0)
            waiting = [(case.waiting * units, stays) for units, stays in self.kept] if case.waiting else []
            whole_bytes = room_bytes // self.divisor * self.divisor
            self.model.add_row([*used, *waiting], upper=self._units(whole_bytes))

    # ------------------------------------------------------------------ from a choice to a schedule

    def simulate(self, chosen: set[Variable]) -> Solution:
        """Simulates the schedule that runs this again."""
        again = (
            [node for node in nodes if self.runs[t, node] in chosen]
            for t, nodes in enumerate(self.steps.again)
        )
        return self.steps.simulate(list(again))

    def exclude(self, chosen: set[Variable]) -> None:
        """Excludes a choice of what runs again, and no other one."""
        differs = [(-1.0 if runs in chosen else 1.0, runs) for runs in self.runs.values()]
        self.model.add_row(differs, lower=1.0 - len(chosen))
