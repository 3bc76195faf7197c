"""What to keep, make again and copy, and when: a constraint programme over a line of steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ortools.sat.python import cp_model

from irc.ir import Direction, Fetch, Offload, Storage, Tier

from .choice import Begin, Choice
from .line import ExactProblem, Step

__all__ = ["Solved", "SwapProgramme"]

_Units = cp_model.LinearExpr | int
"""A time or a duration, in whole units."""

_UNITS = 10_000_000
"""Into how many whole units of time a step that computes nothing twice is divided."""

_SLACK = 500
"""Units by which a schedule has to be better than one that is known; rounding may lose as much."""

_GAP = 1e-6
"""Relative gap at which the search ends; less than what rounding to units may lose."""


@dataclass(frozen=True, slots=True)
class Solved:
    """What one solve says.

    Args:
        choice: The best choice found, or None.
        bound_seconds: No choice takes less.
        is_best: The choice is the best, up to the gap.
        is_infeasible: There is none below the time given.
    """

    choice: Choice | None
    bound_seconds: float
    is_best: bool
    is_infeasible: bool


@dataclass(eq=False)
class _Stretch:
    """A storage between two places of the line that make or read it.

    Args:
        first: The first step behind the one place.
        last: The other place.
        there: Whether it is there when the stretch begins.
        kept: For each step of the stretch, whether it is still there while the step runs.
        fetched: For each of them, whether a copy back was begun before it; empty where none may be.
        start: When this copy starts.
        is_carried: Whether a copy begun before is still to be read.
    """

    first: int
    last: int
    there: cp_model.IntVar
    kept: list[cp_model.IntVar]
    fetched: list[cp_model.IntVar] = field(default_factory=list[cp_model.IntVar])
    start: cp_model.IntVar | None = None
    is_carried: cp_model.IntVar | None = None

    def steps(self) -> range:
        """The steps of the stretch, its other place included."""
        return range(self.first, self.last + 1)

    @property
    def is_fetched(self) -> cp_model.IntVar:
        """Whether a copy back is begun in the stretch."""
        return self.fetched[-1]


@dataclass(eq=False)
class _Copied:
    """The copies of a storage.

    Args:
        begun: For each step from the first that makes it on, whether the copy out was begun before it.
        first: The first of these steps.
        tiers: For each tier, whether it goes there.
        start: When the copy out starts.
        out: Its duration.
        back: The duration of a copy back.
        gone: For each step, whether the tier has no copy any more; empty where that does not matter.
    """

    begun: list[cp_model.IntVar]
    first: int
    tiers: dict[Tier, cp_model.IntVar]
    start: cp_model.IntVar
    out: _Units
    back: _Units
    gone: list[cp_model.IntVar] = field(default_factory=list[cp_model.IntVar])

    def begun_at(self, step: int) -> cp_model.IntVar:
        return self.begun[step - self.first]

    def gone_at(self, step: int) -> cp_model.IntVar:
        return self.gone[step - self.first]

    @property
    def end(self) -> _Units:
        return self.start + self.out


class SwapProgramme:
    """The constraint programme over one line of steps.

    The line is the base order, before its backward operations all that may run again there, and pauses:
    places where nothing runs but storages may come and go. Before each step, in this order: copies out are
    begun (at the end of the step before), copies out are waited for and their storages freed (by
    `freed[t]`), copies back are begun, copies back of what the step reads are waited for (by `starts[t]`).

    Between two touches (places that make or read a storage) it is there for the first steps, then away, then
    there again once a copy back is begun. Each of these two is a row of literals that changes once. A copy
    is an optional interval on its channel. At each step the bytes of what is there are a row of their own.

    Durations are whole units, rounded down: what the programme says is a bound of the time of every schedule.
    """

    def __init__(self, exact: ExactProblem, steps: Sequence[Step], below_seconds: float = math.inf) -> None:
        self.problem = problem = exact.problem
        self.budget_bytes = exact.budget_bytes
        self.copyable = exact.copyable
        self.tight = exact.tight
        self.steps = steps
        self.unit_seconds = max(problem.step_seconds, exact.longest_copy_seconds / _UNITS, 1e-9) / _UNITS
        self.below = math.inf if math.isinf(below_seconds) else self._units(below_seconds) - _SLACK
        self.model = cp_model.CpModel()
        self.no, self.yes = self.model.new_constant(0), self.model.new_constant(1)
        self.runs = [
            self._literal() if s.is_repeat else (self.yes if s.node or s.is_loss else self.no)
            for s in self.steps
        ]
        self.active = [
            self._literal() if s.is_pause else runs for s, runs in zip(self.steps, self.runs, strict=True)
        ]
        """Whether something is freed or begun to be copied back right before each step."""
        self.returning: list[list[cp_model.IntVar]] = [[] for _ in self.steps]
        """The copies back begun before each pause."""
        self.channels: dict[object, list[cp_model.IntervalVar]] = {}
        self.stretches: dict[Storage, list[_Stretch]] = {}
        self.copies: dict[Storage, _Copied] = {}
        self._add_times()
        for storage, touches in self._touches().items():
            self._add_residency(storage, touches)
            if storage in self.copies:
                self._add_copies(storage)
        for intervals in self.channels.values():
            self.model.add_no_overlap(intervals)
        self._add_order()
        self._add_memory()
        self._add_capacity()
        self.model.add(self.ends[-1] <= self.horizon)

    def _literal(self) -> cp_model.IntVar:
        return self.model.new_bool_var("")

    def _units(self, seconds: float) -> int:
        return math.floor(seconds / self.unit_seconds * (1 - 1e-12))

    # ------------------------------------------------------------------ time

    def _add_times(self) -> None:
        """When what is freed before each step is freed, when the step starts, and when it ends."""
        problem = self.problem
        seconds = [problem.costs.seconds[s.node] if s.node else 0.0 for s in self.steps]
        units = [self._units(s) for s in seconds]
        copies = 0
        for storage, tiers in self.copyable.items():
            out = max(tier.copy_seconds(storage.nbytes, Direction.OUT) for tier in tiers)
            back = max(tier.copy_seconds(storage.nbytes, Direction.IN) for tier in tiers)
            copies += self._units(out) + self._units(back) * len(self.steps)
        self.horizon = int(max(min(sum(units) + copies, self.below), 0))
        self.freed: list[_Units] = []
        self.starts: list[_Units] = []
        self.ends: list[_Units] = []
        before: _Units = 0
        for runs, duration in zip(self.runs, units, strict=True):
            freed = start = before
            if self.copyable:
                freed, start = self._moment(), self._moment()
                self.model.add(freed >= before)
                self.model.add(start >= freed)
            self.freed.append(freed)
            self.starts.append(start)
            before = start + duration * runs
            self.ends.append(before)

    def _moment(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, "")

    def _reached(self, step: int) -> _Units:
        """When the step before has ended."""
        return self.ends[step - 1] if step else 0

    # ------------------------------------------------------------------ what is where

    def _touches(self) -> dict[Storage, list[tuple[int, bool]]]:
        """For each storage that comes and goes, the steps that read it or (True) make it."""
        problem = self.problem
        found: dict[Storage, list[tuple[int, bool]]] = {}
        for t, step in enumerate(self.steps):
            if step.node is None:
                continue
            for storage in problem.forward_reads[step.node]:
                found.setdefault(storage, []).append((t, False))
            for storage in problem.graph.allocates(step.node):
                if storage in problem.producer:
                    found.setdefault(storage, []).append((t, True))
        return found

    def _add_residency(self, storage: Storage, touches: Sequence[tuple[int, bool]]) -> None:
        """The stretches of a storage, and what its readers ask for."""
        model = self.model
        self.stretches[storage] = []
        copied = None
        if storage in self.copyable and len(touches) > 1:
            copied = self.copies[storage] = self._new_copied(storage, touches[0][0] + 1, touches[-1][0])
        here = self.no
        for index, (t, makes) in enumerate(touches):
            if not makes:
                model.add_implication(self.runs[t], here)
                there = here
            elif here is self.no or self.runs[t] is self.yes:
                there = self.runs[t]
            else:
                there = self._literal()
                model.add_max_equality(there, [self.runs[t], here])
            if index + 1 == len(touches):
                break
            here = self._add_stretch(storage, t + 1, touches[index + 1][0], there, copied)

    def _add_stretch(
        self, storage: Storage, first: int, last: int, there: cp_model.IntVar, copied: _Copied | None
    ) -> cp_model.IntVar:
        """Adds a stretch; whether the storage is there at its end."""
        model = self.model
        if copied is None:
            crosses = storage in self.problem.transient and any(
                step.is_loss for step in self.steps[first : last + 1]
            )
            kept = self.no if crosses else self._literal()
            model.add_implication(kept, there)
            self.stretches[storage].append(_Stretch(first, last, there, [kept] * (last + 1 - first)))
            return kept
        stretch = _Stretch(first, last, there, [self._literal() for _ in range(first, last + 1)])
        stretch.fetched = [self._literal() for _ in stretch.kept]
        stretch.start, stretch.is_carried = self._moment(), self._literal()
        model.add_implication(stretch.kept[0], there)
        for before, after in pairwise(stretch.kept):
            model.add_implication(after, before)
        for before, after in pairwise(stretch.fetched):
            model.add_implication(before, after)
        for t, kept, fetched in zip(stretch.steps(), stretch.kept, stretch.fetched, strict=True):
            model.add_at_most_one(kept, fetched)
            model.add_implication(fetched, copied.begun_at(t))
        here = self._literal()
        model.add(here == stretch.kept[-1] + stretch.fetched[-1])
        self.stretches[storage].append(stretch)
        return here

    # ------------------------------------------------------------------ copies

    def _new_copied(self, storage: Storage, first: int, last: int) -> _Copied:
        model = self.model
        tiers = {tier: self._literal() for tier in self.copyable[storage]}
        durations = {
            direction: [
                (chosen, self._units(tier.copy_seconds(storage.nbytes, direction)))
                for tier, chosen in tiers.items()
            ]
            for direction in Direction
        }
        out, back = (
            cp_model.LinearExpr.weighted_sum([c for c, _ in pairs], [units for _, units in pairs])
            for pairs in (durations[Direction.OUT], durations[Direction.IN])
        )
        begun = [self._literal() for _ in range(first, last + 1)]
        copied = _Copied(begun, first, tiers, self._moment(), out, back)
        for before, after in pairwise(begun):
            model.add_implication(before, after)
        model.add(sum(tiers.values()) == begun[-1])
        if not self.tight.isdisjoint(tiers):
            copied.gone = [self._literal() for _ in begun]
        return copied

    def _add_copies(self, storage: Storage) -> None:
        """The copies of a storage: when they may start, and who waits for them."""
        copied, stretches = self.copies[storage], self.stretches[storage]
        self._add_copy_out(storage, copied, stretches)
        for before, stretch in zip([None, *stretches], stretches, strict=False):
            self._add_copy_back(storage, copied, before, stretch)
        last = stretches[-1]
        self.model.add_implication(last.is_fetched, self.runs[last.last])
        assert last.is_carried is not None
        self.model.add_implication(last.is_carried, self.runs[last.last])
        self.model.add_bool_or([stretch.is_fetched for stretch in stretches]).only_enforce_if(
            copied.begun[-1]
        )
        if copied.gone:
            self._add_leaving_tier(copied, stretches)

    def _add_copy_out(self, storage: Storage, copied: _Copied, stretches: Sequence[_Stretch]) -> None:
        """It begins while the storage is there, which is freed only when it has ended."""
        model = self.model
        for tier, chosen in copied.tiers.items():
            units = self._units(tier.copy_seconds(storage.nbytes, Direction.OUT))
            self._add_interval(tier, Direction.OUT, copied.start, units, chosen)
        makes = {t for t, step in enumerate(self.steps) if step.node is self.problem.producer[storage]}
        begun = self.no
        for stretch in stretches:
            there = stretch.there
            for t, kept in zip(stretch.steps(), stretch.kept, strict=True):
                now = copied.begun_at(t)
                if copied.gone or t - 1 in makes:
                    model.add_bool_or([there, begun, ~now])
                    model.add(copied.start >= self._reached(t)).only_enforce_if([~begun, copied.begun[-1]])
                else:  # nothing is won by beginning later, as a copy may start later than it is begun
                    model.add_implication(now, begun)
                model.add(self.freed[t] >= copied.end).only_enforce_if([there, ~kept, now])
                model.add_bool_or([~there, kept, self.active[t]])
                begun, there = now, kept

    def _add_copy_back(
        self, storage: Storage, copied: _Copied, before: _Stretch | None, stretch: _Stretch
    ) -> None:
        """It begins when there is memory, and has ended when the next step that reads the storage runs."""
        model = self.model
        assert stretch.start is not None and stretch.is_carried is not None
        for tier, chosen in copied.tiers.items():
            goes = self._literal()
            model.add_bool_and([chosen, stretch.is_fetched]).only_enforce_if(goes)
            model.add_bool_or([goes, ~chosen, ~stretch.is_fetched])
            units = self._units(tier.copy_seconds(storage.nbytes, Direction.IN))
            self._add_interval(tier, Direction.IN, stretch.start, units, goes)
        model.add(stretch.start >= copied.end).only_enforce_if(stretch.is_fetched)
        begun = self.no
        for t, now in zip(stretch.steps(), stretch.fetched, strict=True):
            model.add(stretch.start >= self.freed[t]).only_enforce_if([~begun, stretch.is_fetched])
            model.add_bool_or([~now, begun, self.active[t]])
            if self.steps[t].is_pause:
                begins = self._literal()
                model.add_bool_and([now, ~begun]).only_enforce_if(begins)
                self.returning[t].append(begins)
            begun = now
        carried = stretch.is_carried
        if before is None:
            model.add(carried == 0)
        else:
            assert before.start is not None and before.is_carried is not None
            runs = self.runs[before.last]
            for unread in (before.is_fetched, before.is_carried):
                model.add_bool_or([~unread, runs, carried])
            model.add_bool_or([before.is_fetched, before.is_carried, ~carried])
            model.add_implication(carried, ~runs)
            model.add_implication(carried, stretch.kept[-1])
            model.add(stretch.start >= before.start).only_enforce_if(carried)
        runs, arrived = self.runs[stretch.last], self.starts[stretch.last]
        for unread in (stretch.is_fetched, carried):
            if self.problem.producer[storage] is self.steps[stretch.last].node:
                model.add_bool_or([~unread, ~runs])
            else:
                model.add(arrived >= stretch.start + copied.back).only_enforce_if([unread, runs])

    def _add_interval(
        self, tier: Tier, direction: Direction, start: cp_model.IntVar, units: int, chosen: cp_model.IntVar
    ) -> None:
        interval = self.model.new_optional_fixed_size_interval_var(start, units, chosen, "")
        self.channels.setdefault(tier.channel(direction), []).append(interval)

    def _add_leaving_tier(self, copied: _Copied, stretches: Sequence[_Stretch]) -> None:
        """The tier has room again once the last copy back has ended and was waited for."""
        model = self.model
        for before, after in pairwise(copied.gone):
            model.add_implication(before, after)
        for stretch in stretches:
            assert stretch.start is not None and stretch.is_carried is not None
            begun = self.no
            for t, now in zip(stretch.steps(), stretch.fetched, strict=True):
                gone = copied.gone_at(t)
                model.add_implication(gone, copied.begun_at(t))
                model.add_bool_or([~gone, ~stretch.is_fetched, begun])
                for unread in (stretch.is_fetched, stretch.is_carried):
                    ended = self._reached(t) >= stretch.start + copied.back
                    model.add(ended).only_enforce_if([gone, unread])
                begun = now

    def _add_order(self) -> None:
        """Of schedules that differ in nothing that matters, leaves those where things happen late.

        Nothing is freed or copied back before what does not run. A pause follows the begin of a copy back,
        or, where a tier may be full, it may also be there to wait for one.
        """
        for t, step in enumerate(self.steps):
            if step.is_pause:
                self.model.add_implication(self.active[t], self.active[t + 1])
                if not self.tight:
                    self.model.add_bool_or([~self.active[t], *self.returning[t]])

    # ------------------------------------------------------------------ memory

    def _add_memory(self) -> None:
        """The bytes at each step."""
        terms: list[list[tuple[int, cp_model.IntVar]]] = [[] for _ in self.steps]
        for storage, stretches in self.stretches.items():
            for stretch in stretches:
                for t, kept in zip(stretch.steps(), stretch.kept, strict=True):
                    terms[t].append((storage.nbytes, kept))
                for t, fetched in zip(stretch.steps(), stretch.fetched, strict=False):
                    terms[t].append((storage.nbytes, fetched))
        at_loss = next(t for t, step in enumerate(self.steps) if step.is_loss)
        split = len(self.problem.forward)
        for t, step in enumerate(self.steps):
            own = [*terms[t], (step.running_bytes, self.runs[t])]
            for case in self.problem.others_at(split if step.is_past_loss else 0):
                row = [*own, *((case.waiting * nbytes, there) for nbytes, there in terms[at_loss])]
                self._add_at_most(row, self.budget_bytes - step.held_bytes - case.bytes_at(0))

    def _add_at_most(self, row: Sequence[tuple[int, cp_model.IntVar]], limit_bytes: int) -> None:
        total = cp_model.LinearExpr.weighted_sum([there for _, there in row], [nbytes for nbytes, _ in row])
        self.model.add(total <= limit_bytes)

    def _add_capacity(self) -> None:
        """The bytes in each tier that cannot hold all."""
        for tier in self.tight:
            rows: list[list[tuple[int, cp_model.IntVar]]] = [[] for _ in self.steps]
            for storage, copied in self.copies.items():
                if tier not in copied.tiers:
                    continue
                for t, (begun, gone) in enumerate(zip(copied.begun, copied.gone, strict=True), copied.first):
                    held = self._literal()
                    self.model.add_bool_or([~begun, gone, ~copied.tiers[tier], held])
                    rows[t].append((storage.nbytes, held))
            for row in rows:
                self._add_at_most(row, tier.capacity_bytes)

    # ------------------------------------------------------------------ solving

    def solve(self, seconds: float, *, any_will_do: bool = False, effort: float = math.inf) -> Solved:
        """Solves; only what is below the time given is looked for.

        Args:
            seconds: Time limit.
            any_will_do: Whether any choice within the rows is good enough.
            effort: The most, in the solver's deterministic seconds.
        """
        if not any_will_do:
            self.model.minimize(self.ends[-1])
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        solver.parameters.linearization_level = 2
        solver.parameters.max_time_in_seconds = max(seconds, 0.1)
        solver.parameters.max_deterministic_time = effort
        solver.parameters.relative_gap_limit = _GAP
        status = solver.solve(self.model)
        assert status != cp_model.MODEL_INVALID, self.model.validate()
        if status == cp_model.INFEASIBLE:
            return Solved(None, self.below * self.unit_seconds, False, True)
        bound = 0.0 if any_will_do else max(solver.best_objective_bound * self.unit_seconds, 0.0)
        if status == cp_model.UNKNOWN:
            return Solved(None, bound, False, False)
        is_best = status == cp_model.OPTIMAL and not any_will_do
        return Solved(self._choice(solver), bound, is_best, False)

    def _choice(self, solver: cp_model.CpSolver) -> Choice:
        """What the solver's values say."""
        count = len(self.steps) + 1
        found = Choice(
            runs=tuple(solver.boolean_value(runs) for runs in self.runs),
            retained=tuple(set[Storage]() for _ in range(count)),
            freed=tuple(list[tuple[int, Storage]]() for _ in range(count)),
            gone=tuple(list[Storage]() for _ in range(count)),
            begins=tuple(self._begins(solver)),
        )
        for storage, touches in self._touches().items():
            self._read_residency(solver, storage, found)
            found.freed[touches[-1][0] + 1].append((0, storage))
        return found

    def _read_residency(self, solver: cp_model.CpSolver, storage: Storage, found: Choice) -> None:
        """Adds where a storage is there, and where it goes."""
        holds = solver.boolean_value
        copied = self.copies.get(storage)
        for stretch in self.stretches[storage]:
            there = holds(stretch.there)
            for t, kept in zip(stretch.steps(), map(holds, stretch.kept), strict=True):
                begun = copied is not None and holds(copied.begun_at(t))
                if kept or (there and begun):
                    found.retained[t].add(storage)
                if there and not kept:
                    end = solver.value(copied.end) if copied and begun else 0
                    found.freed[t].append((end, storage))
                there = kept
            if copied is not None and copied.gone:
                before = stretch.first > copied.first and holds(copied.gone_at(stretch.first - 1))
                for t in stretch.steps():
                    gone = holds(copied.gone_at(t))
                    if gone and not before:
                        found.gone[t].append(storage)
                    before = gone

    def _begins(self, solver: cp_model.CpSolver) -> Iterator[Begin]:
        """The copies."""
        holds, value = solver.boolean_value, solver.value
        for storage, copied in self.copies.items():
            tier = next((tier for tier, chosen in copied.tiers.items() if holds(chosen)), None)
            if tier is None:
                continue
            step = copied.first + next(i for i, begun in enumerate(copied.begun) if holds(begun))
            out, back = (tier.channel(direction) for direction in (Direction.OUT, Direction.IN))
            offload = Offload(storage, tier.name)
            yield Begin(offload, out, value(copied.start), value(copied.end), (step, 0))
            for stretch in self.stretches[storage]:
                if not holds(stretch.is_fetched):
                    continue
                assert stretch.start is not None
                step = stretch.first + next(i for i, now in enumerate(stretch.fetched) if holds(now))
                start, end = value(stretch.start), value(stretch.start + copied.back)
                yield Begin(Fetch(storage, tier.name), back, start, end, (step, 1))
