"""An integer programme that chooses among recomputations at given positions, with exact memory."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...ir import Node, Others, Storage
from ..milp import Model, Variable, add_memory_row, solve
from .problem import CheckpointProblem, Recomputations, Solution

__all__ = ["Chosen", "RetentionProgramme", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """A position of the master sequence.

    Args:
        node: The operation that runs there.
        base: Index of the step of the base order that it is, or before which it runs again.
        is_repeat: Whether it runs again there, if chosen; the base order itself always runs.
    """

    node: Node
    base: int
    is_repeat: bool


@dataclass(frozen=True, slots=True)
class Chosen:
    """The outcome of the programme.

    Args:
        solution: The schedule, or None if there is none within the rows.
        is_best: Whether it fits, and no choice from the master sequence is faster (or lower).
        is_infeasible: Whether no choice from the master sequence fits.
    """

    solution: Solution | None
    is_best: bool
    is_infeasible: bool


_ROUNDS = 12
_NEW_ROWS = 40
_CAP_UNIT_BYTES = 1 << 16

_Residency = Variable | float


@dataclass
class RetentionProgramme:
    r"""The integer programme over one master sequence.

    The master sequence is the base order with, before each of its steps, operations that may run there again.
    Variables: y[t] in {0, 1}, repeat t runs; r[s, i] in [0, 1], storage s is resident between the i-th and
    the next position of the sequence that makes or reads it. Minimise the seconds of all y, subject to

    - read: y[t] <= r[s, before t] for what step t reads (1 in place of y for the base order);
    - carry: r[s, after t] <= r[s, before t] (+ y[t] if t makes s, and then r[s, before t] + y[t] <= 1);
    - memory: at each step, bytes of all r there, of what it makes if it runs, and of the rest <= budget; the
      rest has the r at the loss once for each other forward in flight that waits;
    - annotations: r[s, i] = 0 across the loss if s is transient.

    Rows of memory are added when a solution, simulated, goes over the budget. With whole y the least r are
    whole, so only y are integers. The programme covers whatever a schedule does at the positions of the
    master sequence: recomputing several times, in forward, and freeing at any time.

    Args:
        problem: The recomputation problem.
        recomputations: The operations that may run again before each step of the base order.
        budget_bytes: The most that may be alive at once; None asks for the least peak instead.
        rows: The steps whose memory was a row before; those found here are added.
        below_seconds: A limit: only schedules that recompute for less are asked for.

    Source:
        Retention intervals: MOCCASIN (Bartan et al., ICML 2023); the memory of each step: Checkmate (Jain et
        al., MLSys 2020). Ours chooses among given positions, and adds the memory of a step when it is needed.
    """

    problem: CheckpointProblem
    recomputations: Recomputations
    budget_bytes: int | None
    rows: dict[Step, None]
    below_seconds: float | None = None
    model: Model = field(init=False)

    def __post_init__(self) -> None:
        problem = self.problem
        self.model = Model()
        self.steps = tuple(_master(problem, self.recomputations))
        self.loss = next(
            (t for t, step in enumerate(self.steps) if step.base >= len(problem.forward)), len(self.steps)
        )
        self.runs = {
            t: self.model.add_binary_variable() for t, step in enumerate(self.steps) if step.is_repeat
        }
        self.cap = self.model.add_variable(lower=0.0) if self.budget_bytes is None else None
        self.touched: dict[Storage, list[int]] = {}
        self.resident: dict[Storage, list[_Residency]] = {}
        self._add_storages()
        self._add_objective()
        self.in_rows: set[Step] = set()
        self._add_loss_row()
        position_of = {step: t for t, step in enumerate(self.steps)}
        for step in self.rows:
            if step in position_of:
                self._add_row(position_of[step])

    # ------------------------------------------------------------------ formulating

    def _add_storages(self) -> None:
        """Adds a variable for each stretch between two positions that touch a storage, unless it is clear."""
        problem = self.problem
        touches_of: dict[Storage, list[tuple[int, bool]]] = {}
        for t, step in enumerate(self.steps):
            for storage in problem.forward_reads[step.node]:
                touches_of.setdefault(storage, []).append((t, False))
            for storage in problem.graph.allocates(step.node):
                if storage in problem.producer:
                    touches_of.setdefault(storage, []).append((t, True))
        for storage, touches in touches_of.items():
            self.touched[storage] = [t for t, _ in touches]
            self.resident[storage] = self._stretches(touches, storage in problem.transient)

    def _stretches(self, touches: Sequence[tuple[int, bool]], is_transient: bool) -> list[_Residency]:
        """Adds the residencies after each touch; what is transient is not there at the loss."""
        before: _Residency = 0.0
        found: list[_Residency] = []
        for index, (t, makes) in enumerate(touches):
            following = touches[index + 1] if index + 1 < len(touches) else None
            must_stay = following is not None and not following[1] and following[0] not in self.runs
            after: _Residency = 0.0 if following is None else 1.0
            if is_transient and following is not None and t < self.loss <= following[0]:
                after = 0.0
            elif following is not None and not must_stay:
                after = self.model.add_variable(lower=0.0, upper=1.0)
            if makes:
                self._add_making(t, before, after)
            else:
                self._add_reading(t, before, after)
            found.append(after)
            before = after
        return found

    def _add_making(self, t: int, before: _Residency, after: _Residency) -> None:
        if t not in self.runs:
            return  # the first run
        there = [before, self.runs[t]]
        terms = [(1.0, variable) for variable in there if isinstance(variable, Variable)]
        known = 0.0 if isinstance(before, Variable) else before
        if isinstance(after, Variable):
            self.model.add_row([(1.0, after), *((-1.0, variable) for _, variable in terms)], upper=known)
        elif after > 0.0:
            self.model.add_row(terms, lower=after - known)
        if isinstance(before, Variable):
            self.model.add_row(terms, upper=1.0)

    def _add_reading(self, t: int, before: _Residency, after: _Residency) -> None:
        self._at_most(self.runs.get(t, 1.0), before)
        self._at_most(after, before)

    def _at_most(self, low: _Residency, high: _Residency) -> None:
        """Adds `low <= high`, as a bound of a variable if one side is a number."""
        if isinstance(low, Variable):
            if isinstance(high, Variable):
                self.model.add_row([(1.0, low), (-1.0, high)], upper=0.0)
            else:
                low.upper = min(low.upper, high)
        elif low > 0.0:
            if isinstance(high, Variable):
                high.lower = low
            else:
                assert low <= high, "a base step reads what is not there"

    def _add_objective(self) -> None:
        problem = self.problem
        self.unit_seconds = max(problem.step_seconds, 1e-12) / 1000
        seconds = [
            (max(problem.costs.seconds[self.steps[t].node] / self.unit_seconds, 1e-7), runs)
            for t, runs in self.runs.items()
        ]
        if self.below_seconds is not None:
            self.model.add_row(seconds, upper=self.below_seconds / self.unit_seconds)
        if self.cap is not None:
            seconds = [(1.0, self.cap), *((1e-4 * each, runs) for each, runs in seconds)]
        self.model.minimize(seconds)

    def _add_loss_row(self) -> None:
        forward = len(self.problem.forward)
        held = self.problem.held_before[forward] - self.problem.graph.loss_held_bytes
        terms, alive = self._resident_at(self.loss)
        cases = self.problem.others_at(forward)
        self._add_terms(terms, alive + held + self.problem.graph.loss_bytes, cases)

    def _add_row(self, t: int) -> bool:
        """Adds the memory of a step; returns whether it was not there yet."""
        step = self.steps[t]
        if step in self.in_rows:
            return False
        self.in_rows.add(step)
        problem = self.problem
        terms, fixed = self._resident_at(t)
        if step.is_repeat:
            made = sum(s.nbytes for s in problem.graph.allocates(step.node))
            terms.append((made + problem.costs.workspace_bytes[step.node], self.runs[t]))
            fixed += problem.held_before[step.base]
        else:
            fixed += sum(s.nbytes for s in problem.graph.allocates(step.node) if s in problem.producer)
            fixed += problem.held_at[step.base]
        self._add_terms(terms, fixed, problem.others_at(step.base))
        return True

    @cached_property
    def _kept(self) -> tuple[list[tuple[int, Variable]], int]:
        """The terms and the bytes of what may be and what is there at the loss."""
        return self._resident_at(self.loss)

    def _resident_at(self, t: int) -> tuple[list[tuple[int, Variable]], int]:
        """The terms and the bytes of what may be and what is there when step t begins."""
        terms: list[tuple[int, Variable]] = []
        fixed = 0
        for storage, touched in self.touched.items():
            stretch = bisect.bisect_left(touched, t) - 1
            if stretch < 0:
                continue
            there = self.resident[storage][stretch]
            if isinstance(there, Variable):
                terms.append((storage.nbytes, there))
            elif there:
                fixed += storage.nbytes
        return terms, fixed

    def _add_terms(
        self, terms: list[tuple[int, Variable]], fixed_bytes: int, cases: Sequence[Others]
    ) -> None:
        """Adds the memory of this call, and of the others in flight, which keep the same at the loss."""
        for case in cases:
            kept, kept_bytes = self._kept if case.waiting else ([], 0)
            waiting = ((case.waiting * nbytes, variable) for nbytes, variable in kept)
            self._add_at_most([*terms, *waiting], fixed_bytes + case.bytes_at(kept_bytes))

    def _add_at_most(self, terms: list[tuple[int, Variable]], fixed_bytes: int) -> None:
        if self.budget_bytes is not None:
            add_memory_row(self.model, terms, self.budget_bytes - fixed_bytes)
            return
        assert self.cap is not None
        units = ((nbytes / _CAP_UNIT_BYTES, variable) for nbytes, variable in terms)
        self.model.add_row([*units, (-1.0, self.cap)], upper=-fixed_bytes / _CAP_UNIT_BYTES)

    # ------------------------------------------------------------------ solving

    def solve(self, *, seconds: float, gap: float, node_limit: int | None = None) -> Chosen:
        """Solves, simulates, adds rows for steps that go over the budget, and solves again.

        Args:
            seconds: The time limit of all solves together.
            gap: The gap at which to stop, as a fraction of the step's time.
            node_limit: The number of branch-and-bound nodes after which each solve stops.
        """
        best: Solution | None = None
        deadline = time.thread_time() + seconds
        for _ in range(_ROUNDS):
            left = deadline - time.thread_time()
            if left <= 0:
                break
            outcome = solve(self.model, seconds=left, gap=gap * 1000, node_limit=node_limit)
            if outcome.values is None:
                return Chosen(best, False, outcome.is_infeasible)
            chosen = {t for t, runs in self.runs.items() if outcome.values[runs] > 0.5}
            kept = [t for t, step in enumerate(self.steps) if not step.is_repeat or t in chosen]
            solution = self._simulate(kept)
            limit = self.budget_bytes
            if limit is None:
                assert self.cap is not None
                limit = int(outcome.values[self.cap] * _CAP_UNIT_BYTES) + 1
                if best is None or solution.peak_bytes < best.peak_bytes:
                    best = solution
            else:
                best = solution
            if solution.peak_bytes <= limit:
                return Chosen(best, outcome.is_optimal, False)
            if not self._add_rows_over(limit, solution, kept):
                return Chosen(best, False, False)
        return Chosen(best, False, False)

    def _add_rows_over(self, limit_bytes: int, solution: Solution, kept: Sequence[int]) -> int:
        ran = zip(solution.order, solution.during_bytes, strict=True)
        pairs = ((next(nbytes for node, nbytes in ran if node is self.steps[t].node), t) for t in kept)
        over = [(-nbytes, t) for nbytes, t in pairs if nbytes > limit_bytes]
        added = 0
        for _, t in sorted(over):
            if added < _NEW_ROWS and self._add_row(t):
                self.rows[self.steps[t]] = None
                added += 1
        return added

    def _simulate(self, kept: Iterable[int]) -> Solution:
        again: list[list[Node]] = [[] for _ in self.problem.base]
        for t in kept:
            if self.steps[t].is_repeat:
                again[self.steps[t].base].append(self.steps[t].node)
        return self.problem.simulate_recomputations(again)


def _master(problem: CheckpointProblem, recomputations: Recomputations) -> Iterator[Step]:
    for index, (node, before) in enumerate(zip(problem.base, recomputations, strict=True)):
        yield from (Step(again, index, True) for again in before)
        yield Step(node, index, False)
