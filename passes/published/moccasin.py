"""MOCCASIN: a constraint programme over the intervals in which results are retained."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from ...ir import Node, Storage
from ..constraint_programming import (
    Expression,
    Interval,
    IntVariable,
    Model,
    Outcome,
    domain_of,
    solve,
    weighted_sum,
)
from ..remat.exact import Exact
from ..remat.problem import CheckpointProblem, Solution
from ..strategy_registry import Strategy
from .time_steps import TimeSteps, check_size

__all__ = ["MOCCASIN", "MOST_OPERATIONS", "moccasin"]

MOCCASIN = Strategy(
    "moccasin",
    "Bartan et al. 2023",
    lambda problem, asked: filter(None, [moccasin(problem, asked.budget_bytes, asked.deadline).best]),
)

MOST_OPERATIONS = 400
"""The most operations of a graph: of larger ones hardly any solution is found in minutes."""

_SECONDS_UNITS = 10**9
"""The number of units that the time of a step is counted in."""

_MOST_UNITS = 1 << 40
"""The most units that the budget is counted in: beyond it sizes are rounded up, and nothing is proved."""


def moccasin(problem: CheckpointProblem, budget_bytes: int, deadline: float, intervals: int = 2) -> Exact:
    """Finds the fastest schedule of `TimeSteps` that runs no operation more than `intervals` times.

    Args:
        problem: The recomputation problem of a graph of at most `MOST_OPERATIONS` operations.
        budget_bytes: The most that may be alive at once, static bytes included.
        deadline: `time.thread_time()` at which to stop.
        intervals: The most runs of an operation, each of which begins an interval of retention. With as many
            as there are time steps the class is Checkmate's.

    Returns:
        The best schedule found, and whether it is proved that the class has none faster, or none at all; by
        more than a part in 10^9 of the step's time for each run.

    Raises:
        UsageError: IRC403 if the graph has more than `MOST_OPERATIONS` operations.

    Source:
        Bartan et al., Moccasin: Efficient Tensor Rematerialization for Neural Networks (ICML 2023), section 2
        with the events of an input topological order; two phases as theirs, the first of which minimises what
        is over the budget. Ours retains each storage of an operation for its own time, and runs backward
        operations once; a literal for each pair of a read and an interval replaces a reservoir constraint.
    """
    check_size(problem, "moccasin", MOST_OPERATIONS)
    if time.thread_time() > deadline:
        return Exact(None, False)
    programme = _Programme(problem, budget_bytes, intervals)
    outcome = programme.solve(deadline)
    if outcome.value_of is None:
        return Exact(None, outcome.is_infeasible and programme.is_exact)
    solution = programme.simulate(outcome)
    if solution.peak_bytes > budget_bytes:  # something is read after it was written over, and made again
        return Exact(None, False)
    return Exact(solution, outcome.is_optimal and programme.is_exact)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of an operation, with what is retained of it.

    Args:
        start: The event of the run.
        is_active: Whether it runs; None for the first run.
        ends: For each storage, the event before which it is freed.
    """

    start: Expression
    is_active: IntVariable | None
    ends: Mapping[Storage, IntVariable]

    @property
    def enforced(self) -> list[IntVariable]:
        """The literals under which the run is there."""
        return [] if self.is_active is None else [self.is_active]


@dataclass
class _Programme:
    r"""The constraint programme.

    Events are numbered in the order of time steps: at each time step those at which something may run again,
    in forward order, then the first run or the loss. Variables, for run i of operation v and a storage s:

    - a[v, i] in {0, 1}: there is such a run; a[v, 1] = 1;
    - b[v, i]: the event at which it runs, one of those of v; b[v, 1] is the first run;
    - e[s, i]: the event before which s, made by that run, is freed.

    Minimise the seconds of all a[v, i] with i > 1, subject to

    - order: a[v, i + 1] <= a[v, i], and e[s, i] <= b[v, i + 1];
    - precedence: for each run at event p and each storage s that it reads there is a run j of s's operation
      with b[., j] < p < e[s, j];
    - memory: at each event, bytes of all s with b[., i] <= event < e[s, i], and what is held besides <=
      budget, by one cumulative constraint in which what is held besides is an interval as well.

    The first phase lets the capacity of that constraint grow, and minimises by how much. It begins with the
    schedule that runs nothing again, and ends when nothing is over.

    What is transient is retained in no interval across the loss. Other forwards in flight that wait hold what
    is retained across the loss: intervals of variable demand.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once.
        most_runs: The most runs of an operation.
    """

    problem: CheckpointProblem
    budget_bytes: int
    most_runs: int
    model: Model = field(init=False)
    runs: dict[Node, list[_Run]] = field(init=False)
    may_fit: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self.model = Model()
        self.steps = TimeSteps(self.problem)
        self._number_events()
        self.in_flight = self.problem.graph.forwards_in_flight > 1
        self.across: list[tuple[int, IntVariable]] = []
        self.runs = {node: list(self._runs_of(node)) for node in self.problem.forward}
        for node in self.problem.forward:
            self._add_order(node)
        self._add_precedence()
        self._add_memory()

    def _number_events(self) -> None:
        """Numbers the events, and notes when each operation may run, and the first run of each time step."""
        self.again_at: dict[Node, list[int]] = {node: [] for node in self.problem.forward}
        self.time_step_of: list[int] = []
        self.first_at: list[int] = []
        for time_step, again in enumerate(self.steps.again):
            for node in again:
                self.again_at[node].append(len(self.time_step_of))
                self.time_step_of.append(time_step)
            self.first_at.append(len(self.time_step_of))
            self.time_step_of.append(time_step)

    @property
    def loss(self) -> int:
        """The event of the loss."""
        return self.first_at[self.steps.loss]

    # ------------------------------------------------------------------ formulating

    def _runs_of(self, node: Node) -> Iterator[_Run]:
        """Adds the runs of an operation, with their ends."""
        first = self.first_at[self.steps.first(node)]
        yield _Run(first, None, {s: self._end(s, first, first) for s in self.steps.makes[node]})
        events = self.again_at[node]
        for number in range(1, min(self.most_runs, len(events) + 1)):
            later = events[number - 1 :]
            start = self.model.new_int_var_from_domain(domain_of(later), "")
            active = self.model.new_bool_var("")
            ends = {s: self._end(s, later[0], later[-1]) for s in self.steps.makes[node]}
            run = _Run(start, active, ends)
            for end in run.ends.values():
                self.model.add(end >= start + 1).only_enforce_if(active)
            self.model.add(start == later[0]).only_enforce_if(~active)
            yield run

    def _end(self, storage: Storage, first: int, last: int) -> IntVariable:
        """Adds the end of an interval that begins between two events."""
        needed = self.problem.last_needed[storage]
        after = last if needed < 0 else max(last, self.first_at[needed])
        return self.model.new_int_var(first + 1, after + 1, "")

    def _add_order(self, node: Node) -> None:
        """Adds that the runs of an operation follow each other, and what is retained across the loss."""
        for before, after in pairwise(self.runs[node]):
            if before.is_active is not None and after.is_active is not None:
                self.model.add_implication(after.is_active, before.is_active)
            for end in before.ends.values():
                self.model.add(end <= after.start).only_enforce_if(after.enforced)
        for run in self.runs[node]:
            for storage, end in run.ends.items():
                if storage in self.problem.transient or self.in_flight:
                    self._add_loss(storage, run, end)

    def _add_loss(self, storage: Storage, run: _Run, end: IntVariable) -> None:
        """Adds whether a storage is retained from before the loss until after it."""
        if storage not in self.problem.transient:
            crosses = self.model.new_bool_var("")
            self.across.append((storage.nbytes, crosses))
            escapes = [crosses]
        else:
            escapes = []
        if isinstance(run.start, int):
            self.model.add(end <= self.loss).only_enforce_if([~each for each in escapes])
            return
        is_after = self.model.new_bool_var("")
        self.model.add(run.start >= self.loss).only_enforce_if(is_after)
        self.model.add(end <= self.loss).only_enforce_if([~is_after, *run.enforced, *(~e for e in escapes)])

    def _add_precedence(self) -> None:
        """Adds that what each run reads is retained by an interval that began before."""
        problem = self.problem
        for time_step, event in enumerate(self.first_at):
            for storage in problem.read_at(time_step):
                self._add_read(_Run(event, None, {}), storage)
        for node, runs in self.runs.items():
            for run in runs[1:]:
                for storage in problem.forward_reads[node]:
                    self._add_read(run, storage)

    def _add_read(self, reader: _Run, storage: Storage) -> None:
        """Adds that a storage is there at a run."""
        covered: list[IntVariable] = []
        for run in self.runs[self.problem.producer[storage]]:
            covers = self.model.new_bool_var("")
            covered.append(covers)
            if run.is_active is not None:
                self.model.add_implication(covers, run.is_active)
                self.model.add(run.start + 1 <= reader.start).only_enforce_if(covers)
            self.model.add(run.ends[storage] >= reader.start + 1).only_enforce_if(covers)
        self.model.add_bool_or(covered).only_enforce_if(reader.enforced)

    def _add_memory(self) -> None:
        """Adds the bytes at each event."""
        sizes = [s.nbytes for s in self.problem.producer]
        running = {node: self.steps.running_bytes(node) for node in self.problem.forward}
        cases = (case for t in (0, self.steps.loss) for case in self.problem.others_at(t))
        divisor = math.gcd(*sizes, *running.values(), *(case.bytes_at(0) for case in cases)) or 1
        self.unit_bytes = max(divisor, -(-self.budget_bytes // _MOST_UNITS))
        self.is_exact = self.unit_bytes == divisor
        rooms = self._rooms()
        most = max((units for _, _, units in rooms), default=0)
        if min((units for _, _, units in rooms), default=0) < 0:
            self.may_fit = False  # not even what is held in any case does
            return
        intervals, demands = self._retained(running)
        for begin, end, units in rooms:
            if units < most:
                intervals.append(self.model.new_fixed_size_interval_var(begin, end - begin, ""))
                demands.append(most - units)
        if self.in_flight:
            for begin, end in ((0, self.loss), (self.loss, len(self.time_step_of))):
                intervals.append(self.model.new_fixed_size_interval_var(begin, end - begin, ""))
                demands.append(self._others_units(self.time_step_of[begin], most))
        self.over = self.model.new_int_var(0, sum(map(self._units, sizes)), "")
        self.model.add_cumulative(intervals, demands, most + self.over)

    def _units(self, nbytes: int) -> int:
        """Bytes in units, rounded up."""
        return -(-nbytes // self.unit_bytes)

    def _rooms(self) -> list[tuple[int, int, int]]:
        """The events from one to another and the units that are left there for what comes and goes."""
        problem, found = self.problem, list[tuple[int, int, int]]()
        begin = 0
        for time_step, event in enumerate(self.first_at):
            spans = ((begin, event, problem.held_between), (event, event + 1, problem.held_in))
            for first, last, held in spans:
                if first < last:
                    room_bytes = self.budget_bytes - held(time_step)
                    found.append((first, last, room_bytes // self.unit_bytes))
            begin = event + 1
        return found

    def _retained(self, running: Mapping[Node, int]) -> tuple[list[Interval], list[Expression]]:
        """The intervals of retention, and those of what is taken only while something runs again."""
        intervals: list[Interval] = []
        demands: list[Expression] = []
        for node, runs in self.runs.items():
            for run in runs:
                active = True if run.is_active is None else run.is_active
                taken_bytes = 0 if run.is_active is None else running[node]
                # a run that writes over what it reads takes less than it makes, and no demand is negative
                writes_over = taken_bytes < 0
                for storage, end in run.ends.items():
                    if storage.nbytes:
                        size = self.model.new_int_var(1 - writes_over, len(self.time_step_of), "")
                        add = self.model.new_optional_interval_var
                        intervals.append(add(run.start + int(writes_over), size, end, active, ""))
                        demands.append(self._units(storage.nbytes))
                if writes_over:
                    taken_bytes += sum(storage.nbytes for storage in run.ends)
                if taken_bytes:
                    fixed = self.model.new_optional_fixed_size_interval_var
                    intervals.append(fixed(run.start, 1, active, ""))
                    demands.append(self._units(taken_bytes))
        return intervals, demands

    def _others_units(self, time_step: int, most: int) -> IntVariable:
        """Adds the most that other forwards in flight hold: those that wait retain what this one does."""
        found = self.model.new_int_var(0, most, "")
        literals = [crosses for _, crosses in self.across]
        sizes = [self._units(nbytes) for nbytes, _ in self.across]
        for case in self.problem.others_at(time_step):
            kept = weighted_sum(literals, [case.waiting * units for units in sizes])
            self.model.add(found >= kept + self._units(case.bytes_at(0)))
        return found

    # ------------------------------------------------------------------ solving

    def solve(self, deadline: float) -> Outcome:
        """Solves until a deadline: first for any solution, then for the best."""
        if not self.may_fit:
            return Outcome(None, True, False)
        self.model.minimize(self.over)
        left = deadline - time.thread_time()
        first = solve(self.model, seconds=left, hints=self._eager(), is_interleaved=True)
        if first.value_of is None or first.value_of(self.over):
            return Outcome(None, first.is_optimal or first.is_infeasible, False)
        hints = {variable: first.value_of(variable) for variable in self._variables()}
        if (left := deadline - time.thread_time()) <= 0:
            return Outcome(first.value_of, False, False)
        self.model.add(self.over == 0)
        self.model.minimize(self._objective())
        best = solve(self.model, seconds=left, hints=hints)
        return Outcome(first.value_of, False, False) if best.value_of is None else best

    def _objective(self) -> Expression:
        problem = self.problem
        unit_seconds = max(problem.step_seconds, 1e-12) / _SECONDS_UNITS
        pairs = [(node, run.is_active) for node, runs in self.runs.items() for run in runs]
        units = {node: max(round(problem.costs.seconds[node] / unit_seconds), 1) for node in self.runs}
        literals = [active for _, active in pairs if active is not None]
        return weighted_sum(literals, [units[node] for node, active in pairs if active is not None])

    def _eager(self) -> dict[IntVariable, int]:
        """The values of the schedule that runs nothing again."""
        found: dict[IntVariable, int] = {}
        for node, (first, *others) in self.runs.items():
            for run in others:
                assert run.is_active is not None
                found[run.is_active] = 0
            for storage, end in first.ends.items():
                last = max(self._last_read.get(storage, 0), self.first_at[self.steps.first(node)])
                crosses = last > self.loss and storage in self.problem.transient
                found[end] = self.loss if crosses else last + 1
        return found

    @cached_property
    def _last_read(self) -> dict[Storage, int]:
        """The event of the last first run that reads each storage."""
        return {s: event for t, event in enumerate(self.first_at) for s in self.problem.read_at(t)}

    def _variables(self) -> Iterator[IntVariable]:
        """The variables that say what runs, and what is retained."""
        for runs in self.runs.values():
            for run in runs:
                yield from run.ends.values()
                if isinstance(run.start, IntVariable) and run.is_active is not None:
                    yield from (run.start, run.is_active)

    def simulate(self, outcome: Outcome) -> Solution:
        """Simulates the schedule of a solution."""
        value_of = outcome.value_of
        assert value_of is not None
        events: dict[int, Node] = {}
        for node, (_, *others) in self.runs.items():
            for run in others:
                assert isinstance(run.start, IntVariable) and run.is_active is not None
                if value_of(run.is_active):
                    events[value_of(run.start)] = node
        again: list[list[Node]] = [[] for _ in self.first_at]
        for event in sorted(events):
            again[self.time_step_of[event]].append(events[event])
        return self.steps.simulate(again)
