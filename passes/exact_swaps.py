"""Small graphs with tiers: what to keep, make again and copy, and when, all in one programme."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from ortools.sat.python import cp_model

from ..ir import (
    Compute,
    Direction,
    Fetch,
    Free,
    Instruction,
    Node,
    Offload,
    Schedule,
    Storage,
    Tier,
    Wait,
    liveness,
    step_times,
    with_frees,
)
from .checkpointing import CheckpointProblem
from .recombination import complete

__all__ = ["Exact", "best_with_swaps"]

_Units = cp_model.LinearExpr | int
"""A time or a duration, in whole units."""

_UNITS = 10_000_000
"""Into how many whole units of time a step that computes nothing twice is divided."""

_SLACK = 500
"""Units by which a schedule has to be better than one that is known; rounding may lose as much."""

_EASY = 1.0
"""Effort for a schedule that only makes the search easier, in the solver's deterministic seconds."""

_GAP = 1e-6
"""Relative gap at which the search ends; less than what rounding to units may lose."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The outcome of an exact search.

    Args:
        schedule: The best schedule found, or None.
        step_seconds: Its time by `step_times`; infinite without one.
        bound_seconds: No schedule of the class within the budget takes less; infinite where there is none.
        is_proved: The schedule is the best of the class, up to 1e-4 of the step, or there is none.
    """

    schedule: Schedule | None
    step_seconds: float
    bound_seconds: float
    is_proved: bool

    @property
    def is_infeasible(self) -> bool:
        """Whether it is proved that no schedule of the class fits."""
        return self.schedule is None and self.is_proved


def best_with_swaps(
    problem: CheckpointProblem, tiers: Sequence[Tier], budget_bytes: int, *, deadline: float
) -> Exact:
    """The fastest schedule of the class of `CheckpointProblem`, with copies to tiers beside it.

    What forward makes may be copied to one tier once, begun at any time while it is there; freed at any
    time once the copy has ended; and copied back at any time and any number of times. What a wish keeps
    from staying for backward is not copied. Time is that of `step_times` and memory that of `liveness`.

    Args:
        problem: The recomputation problem of a small graph.
        tiers: Where storages may be copied to.
        budget_bytes: The most that may be alive on the device at once.
        deadline: `time.monotonic()` at which to stop.
    """
    task = _Task(problem, tuple(tiers), budget_bytes)
    nothing = Exact(None, math.inf, 0.0, False)
    now = time.monotonic()
    first_deadline = now + (deadline - now) / 2 if task.copyable else deadline
    best = _improve(task, [0] * problem.moments, nothing, first_deadline)
    if task.copyable:
        best = _improve(task, task.pauses, replace(best, is_proved=False), deadline)
    return replace(best, bound_seconds=max(best.bound_seconds, min(problem.step_seconds, best.step_seconds)))


def _improve(task: _Task, pauses: Sequence[int], best: Exact, deadline: float) -> Exact:
    """The best schedule over a line with these pauses, given one that is known.

    The times of a programme reach as far as the best schedule known, which makes it much easier: where none
    is known, any is found first.
    """
    if best.schedule is None:
        best = _Programme(task, pauses).solve(deadline - time.monotonic(), any_will_do=True)
        if best.schedule is None:
            return best
        best = _halve(task, pauses, best, deadline)
    found = _Programme(task, pauses, best.step_seconds).solve(deadline - time.monotonic())
    if found.step_seconds < best.step_seconds:
        return found
    bound_seconds = min(found.bound_seconds, best.step_seconds)
    return replace(best, bound_seconds=bound_seconds, is_proved=found.is_proved)


def _halve(task: _Task, pauses: Sequence[int], best: Exact, deadline: float) -> Exact:
    """A schedule that takes about half as much more than the least as `best`, as often as that is easy."""
    least = task.problem.step_seconds
    while best.step_seconds > least and (left := deadline - time.monotonic()) > 0:
        below = (least + best.step_seconds) / 2
        found = _Programme(task, pauses, below).solve(left, any_will_do=True, effort=_EASY)
        if found.step_seconds >= best.step_seconds:
            break
        best = found
    return best


@dataclass(frozen=True)
class _Task:
    """What is asked for; the arguments are those of `best_with_swaps`."""

    problem: CheckpointProblem
    tiers: tuple[Tier, ...]
    budget_bytes: int

    @cached_property
    def copyable(self) -> dict[Storage, list[Tier]]:
        """What may be copied, and where it has room."""
        problem = self.problem
        able = problem.graph.copyable_storages - problem.transient
        found = {
            s: [tier for tier in self.tiers if s.nbytes <= tier.capacity_bytes]
            for s in problem.producer
            if s in able
        }
        return {storage: room for storage, room in found.items() if room}

    @cached_property
    def tight(self) -> frozenset[Tier]:
        """The tiers that do not hold all that may be copied."""
        total_bytes = sum(storage.nbytes for storage in self.copyable)
        return frozenset(tier for tier in self.tiers if tier.capacity_bytes < total_bytes)

    @cached_property
    def longest_copy_seconds(self) -> float:
        """Time of the longest copy."""
        pairs = [(s.nbytes, tier) for s, room in self.copyable.items() for tier in room]
        times = (tier.copy_seconds(nbytes, way) for nbytes, tier in pairs for way in Direction)
        return max(times, default=0.0)

    @cached_property
    def pauses(self) -> list[int]:
        """How many pauses lose no schedule, before each step of the base order and before the loss.

        Between two computations a schedule first begins copies to the tier, then waits for copies that have
        to end before it frees, then begins copies back. It does so anew only if something is freed after a
        copy back was begun, or is copied to a tier after waiting for it to have room. What is freed is not
        copied back in the same place, and what is copied to a tier makes no room there in the same place:
        with k storages in question each of the two happens at most k/2 times.
        """
        problem = self.problem
        split = len(problem.forward)
        found: list[int] = []
        for moment in range(problem.moments):
            there = [s for s in self.copyable if problem.index[problem.producer[s]] < moment]
            count = sum(problem.is_useful(s, moment) for s in there)
            found.append(count // 2 * (2 if self.tight else 1))
        return [*found[:split], *found[split + 1 :], found[split]]


# ---------------------------------------------------------------------- the line of steps


@dataclass(frozen=True, slots=True)
class _Step:
    """A place of the line.

    Args:
        node: What runs there; None for the loss and for a pause.
        is_repeat: Whether it runs only if chosen.
        is_loss: Whether it is the loss.
        is_past_loss: Whether it is the loss, or comes after it.
        base: Index of the step of the base order that it is, or that comes next.
        held_bytes: Bytes there without what forward makes that comes and goes.
        running_bytes: What it takes more if it runs.
    """

    node: Node | None
    is_repeat: bool
    is_loss: bool
    is_past_loss: bool
    base: int
    held_bytes: int
    running_bytes: int = 0

    @property
    def is_pause(self) -> bool:
        """Whether nothing happens there."""
        return self.node is None and not self.is_loss


def _line(problem: CheckpointProblem, pauses: Sequence[int]) -> Iterator[_Step]:
    """All that may run, in order: the base order with all repeats, and pauses before each.

    Args:
        problem: The recomputation problem.
        pauses: Their number before each step of the base order and each repeat before it; the last is that
            before the loss.
    """
    graph, split = problem.graph, len(problem.forward)
    at_loss_bytes = problem.held_before[split] - graph.loss_held_bytes
    tangent_bytes = sum(storage.nbytes for storage in graph.tangent_storages)

    def loss() -> Iterator[_Step]:
        yield from [_Step(None, False, False, False, split, at_loss_bytes - tangent_bytes)] * pauses[-1]
        yield _Step(None, False, True, True, split, at_loss_bytes + graph.loss_bytes)

    for index, (node, before) in enumerate(zip(problem.base, complete(problem), strict=True)):
        if index == split:
            yield from loss()
        past = index >= split
        pause = _Step(None, False, False, past, index, problem.held_before[index])
        for again in before:
            made_bytes = sum(storage.nbytes for storage in graph.allocates(again))
            running = made_bytes + problem.costs.workspace_bytes[again]
            yield from [pause] * pauses[index]
            yield _Step(again, True, False, past, index, problem.held_before[index], running)
        yield from [pause] * pauses[index]
        made_bytes = sum(s.nbytes for s in graph.allocates(node) if s in problem.producer and not past)
        yield _Step(node, False, False, past, index, problem.held_at[index] + made_bytes)
    if not problem.backward:
        yield from loss()


# ---------------------------------------------------------------------- the programme


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


class _Programme:
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

    def __init__(self, task: _Task, pauses: Sequence[int], below_seconds: float = math.inf) -> None:
        self.problem = problem = task.problem
        self.budget_bytes = task.budget_bytes
        self.tiers = task.tiers
        self.copyable = task.copyable
        self.tight = task.tight
        self.steps = list(_line(problem, pauses))
        self.unit_seconds = max(problem.step_seconds, task.longest_copy_seconds / _UNITS, 1e-9) / _UNITS
        self.below = math.inf if math.isinf(below_seconds) else self.units(below_seconds) - _SLACK
        self.model = cp_model.CpModel()
        self.no, self.yes = self.model.new_constant(0), self.model.new_constant(1)
        self.runs = [
            self.literal() if s.is_repeat else (self.yes if s.node or s.is_loss else self.no)
            for s in self.steps
        ]
        self.active = [
            self.literal() if s.is_pause else runs for s, runs in zip(self.steps, self.runs, strict=True)
        ]
        """Whether something is freed or begun to be copied back right before each step."""
        self.returning: list[list[cp_model.IntVar]] = [[] for _ in self.steps]
        """The copies back begun before each pause."""
        self.channels: dict[object, list[cp_model.IntervalVar]] = {}
        self.stretches: dict[Storage, list[_Stretch]] = {}
        self.copies: dict[Storage, _Copied] = {}
        self.add_times()
        for storage, touches in self.touches().items():
            self.add_residency(storage, touches)
            if storage in self.copies:
                self.add_copies(storage)
        for intervals in self.channels.values():
            self.model.add_no_overlap(intervals)
        self.add_order()
        self.add_memory()
        self.add_capacity()
        self.model.add(self.ends[-1] <= self.horizon)

    def literal(self) -> cp_model.IntVar:
        return self.model.new_bool_var("")

    def units(self, seconds: float) -> int:
        return math.floor(seconds / self.unit_seconds * (1 - 1e-12))

    # ------------------------------------------------------------------ time

    def add_times(self) -> None:
        """When what is freed before each step is freed, when the step starts, and when it ends."""
        problem = self.problem
        seconds = [problem.costs.seconds[s.node] if s.node else 0.0 for s in self.steps]
        units = [self.units(s) for s in seconds]
        copies = 0
        for storage, tiers in self.copyable.items():
            out = max(tier.copy_seconds(storage.nbytes, Direction.OUT) for tier in tiers)
            back = max(tier.copy_seconds(storage.nbytes, Direction.IN) for tier in tiers)
            copies += self.units(out) + self.units(back) * len(self.steps)
        self.horizon = int(max(min(sum(units) + copies, self.below), 0))
        self.freed: list[_Units] = []
        self.starts: list[_Units] = []
        self.ends: list[_Units] = []
        before: _Units = 0
        for runs, duration in zip(self.runs, units, strict=True):
            freed = start = before
            if self.copyable:
                freed, start = self.moment(), self.moment()
                self.model.add(freed >= before)
                self.model.add(start >= freed)
            self.freed.append(freed)
            self.starts.append(start)
            before = start + duration * runs
            self.ends.append(before)

    def moment(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, "")

    def reached(self, step: int) -> _Units:
        """When the step before has ended."""
        return self.ends[step - 1] if step else 0

    # ------------------------------------------------------------------ what is where

    def touches(self) -> dict[Storage, list[tuple[int, bool]]]:
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

    def add_residency(self, storage: Storage, touches: Sequence[tuple[int, bool]]) -> None:
        """The stretches of a storage, and what its readers ask for."""
        model = self.model
        self.stretches[storage] = []
        copied = None
        if storage in self.copyable and len(touches) > 1:
            copied = self.copies[storage] = self.new_copied(storage, touches[0][0] + 1, touches[-1][0])
        here = self.no
        for index, (t, makes) in enumerate(touches):
            if not makes:
                model.add_implication(self.runs[t], here)
                there = here
            elif here is self.no or self.runs[t] is self.yes:
                there = self.runs[t]
            else:
                there = self.literal()
                model.add_max_equality(there, [self.runs[t], here])
            if index + 1 == len(touches):
                break
            here = self.add_stretch(storage, t + 1, touches[index + 1][0], there, copied)

    def add_stretch(
        self, storage: Storage, first: int, last: int, there: cp_model.IntVar, copied: _Copied | None
    ) -> cp_model.IntVar:
        """Adds a stretch; whether the storage is there at its end."""
        model = self.model
        if copied is None:
            crosses = storage in self.problem.transient and any(
                step.is_loss for step in self.steps[first : last + 1]
            )
            kept = self.no if crosses else self.literal()
            model.add_implication(kept, there)
            self.stretches[storage].append(_Stretch(first, last, there, [kept] * (last + 1 - first)))
            return kept
        stretch = _Stretch(first, last, there, [self.literal() for _ in range(first, last + 1)])
        stretch.fetched = [self.literal() for _ in stretch.kept]
        stretch.start, stretch.is_carried = self.moment(), self.literal()
        model.add_implication(stretch.kept[0], there)
        for before, after in pairwise(stretch.kept):
            model.add_implication(after, before)
        for before, after in pairwise(stretch.fetched):
            model.add_implication(before, after)
        for t, kept, fetched in zip(stretch.steps(), stretch.kept, stretch.fetched, strict=True):
            model.add_at_most_one(kept, fetched)
            model.add_implication(fetched, copied.begun_at(t))
        here = self.literal()
        model.add(here == stretch.kept[-1] + stretch.fetched[-1])
        self.stretches[storage].append(stretch)
        return here

    # ------------------------------------------------------------------ copies

    def new_copied(self, storage: Storage, first: int, last: int) -> _Copied:
        model = self.model
        tiers = {tier: self.literal() for tier in self.copyable[storage]}
        durations = {
            direction: [
                (chosen, self.units(tier.copy_seconds(storage.nbytes, direction)))
                for tier, chosen in tiers.items()
            ]
            for direction in Direction
        }
        out, back = (
            cp_model.LinearExpr.weighted_sum([c for c, _ in pairs], [units for _, units in pairs])
            for pairs in (durations[Direction.OUT], durations[Direction.IN])
        )
        begun = [self.literal() for _ in range(first, last + 1)]
        copied = _Copied(begun, first, tiers, self.moment(), out, back)
        for before, after in pairwise(begun):
            model.add_implication(before, after)
        model.add(sum(tiers.values()) == begun[-1])
        if not self.tight.isdisjoint(tiers):
            copied.gone = [self.literal() for _ in begun]
        return copied

    def add_copies(self, storage: Storage) -> None:
        """The copies of a storage: when they may start, and who waits for them."""
        copied, stretches = self.copies[storage], self.stretches[storage]
        self.add_copy_out(storage, copied, stretches)
        for before, stretch in zip([None, *stretches], stretches, strict=False):
            self.add_copy_back(storage, copied, before, stretch)
        last = stretches[-1]
        self.model.add_implication(last.is_fetched, self.runs[last.last])
        assert last.is_carried is not None
        self.model.add_implication(last.is_carried, self.runs[last.last])
        self.model.add_bool_or([stretch.is_fetched for stretch in stretches]).only_enforce_if(
            copied.begun[-1]
        )
        if copied.gone:
            self.add_leaving_tier(copied, stretches)

    def add_copy_out(self, storage: Storage, copied: _Copied, stretches: Sequence[_Stretch]) -> None:
        """It begins while the storage is there, which is freed only when it has ended."""
        model = self.model
        for tier, chosen in copied.tiers.items():
            units = self.units(tier.copy_seconds(storage.nbytes, Direction.OUT))
            self.add_interval(tier, Direction.OUT, copied.start, units, chosen)
        makes = {t for t, step in enumerate(self.steps) if step.node is self.problem.producer[storage]}
        begun = self.no
        for stretch in stretches:
            there = stretch.there
            for t, kept in zip(stretch.steps(), stretch.kept, strict=True):
                now = copied.begun_at(t)
                if copied.gone or t - 1 in makes:
                    model.add_bool_or([there, begun, ~now])
                    model.add(copied.start >= self.reached(t)).only_enforce_if([~begun, copied.begun[-1]])
                else:  # nothing is won by beginning later, as a copy may start later than it is begun
                    model.add_implication(now, begun)
                model.add(self.freed[t] >= copied.end).only_enforce_if([there, ~kept, now])
                model.add_bool_or([~there, kept, self.active[t]])
                begun, there = now, kept

    def add_copy_back(
        self, storage: Storage, copied: _Copied, before: _Stretch | None, stretch: _Stretch
    ) -> None:
        """It begins when there is memory, and has ended when the next step that reads the storage runs."""
        model = self.model
        assert stretch.start is not None and stretch.is_carried is not None
        for tier, chosen in copied.tiers.items():
            goes = self.literal()
            model.add_bool_and([chosen, stretch.is_fetched]).only_enforce_if(goes)
            model.add_bool_or([goes, ~chosen, ~stretch.is_fetched])
            units = self.units(tier.copy_seconds(storage.nbytes, Direction.IN))
            self.add_interval(tier, Direction.IN, stretch.start, units, goes)
        model.add(stretch.start >= copied.end).only_enforce_if(stretch.is_fetched)
        begun = self.no
        for t, now in zip(stretch.steps(), stretch.fetched, strict=True):
            model.add(stretch.start >= self.freed[t]).only_enforce_if([~begun, stretch.is_fetched])
            model.add_bool_or([~now, begun, self.active[t]])
            if self.steps[t].is_pause:
                begins = self.literal()
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

    def add_interval(
        self, tier: Tier, direction: Direction, start: cp_model.IntVar, units: int, chosen: cp_model.IntVar
    ) -> None:
        interval = self.model.new_optional_fixed_size_interval_var(start, units, chosen, "")
        self.channels.setdefault(tier.channel(direction), []).append(interval)

    def add_leaving_tier(self, copied: _Copied, stretches: Sequence[_Stretch]) -> None:
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
                    ended = self.reached(t) >= stretch.start + copied.back
                    model.add(ended).only_enforce_if([gone, unread])
                begun = now

    def add_order(self) -> None:
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

    def add_memory(self) -> None:
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
                self.add_at_most(row, self.budget_bytes - step.held_bytes - case.bytes_at(0))

    def add_at_most(self, row: Sequence[tuple[int, cp_model.IntVar]], limit_bytes: int) -> None:
        total = cp_model.LinearExpr.weighted_sum([there for _, there in row], [nbytes for nbytes, _ in row])
        self.model.add(total <= limit_bytes)

    def add_capacity(self) -> None:
        """The bytes in each tier that cannot hold all."""
        for tier in self.tight:
            rows: list[list[tuple[int, cp_model.IntVar]]] = [[] for _ in self.steps]
            for storage, copied in self.copies.items():
                if tier not in copied.tiers:
                    continue
                for t, (begun, gone) in enumerate(zip(copied.begun, copied.gone, strict=True), copied.first):
                    held = self.literal()
                    self.model.add_bool_or([~begun, gone, ~copied.tiers[tier], held])
                    rows[t].append((storage.nbytes, held))
            for row in rows:
                self.add_at_most(row, tier.capacity_bytes)

    # ------------------------------------------------------------------ solving

    def solve(self, seconds: float, *, any_will_do: bool = False, effort: float = math.inf) -> Exact:
        """Solves, and simulates what was found; only what is below the time given is looked for."""
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
            return Exact(None, math.inf, self.below * self.unit_seconds, True)
        bound = 0.0 if any_will_do else max(solver.best_objective_bound * self.unit_seconds, 0.0)
        if status == cp_model.UNKNOWN:
            return Exact(None, math.inf, bound, False)
        schedule = _Reader(self, solver).schedule()
        found = step_times(schedule, self.problem.costs.seconds, self.tiers).step_seconds
        peak_bytes = liveness(schedule, self.problem.costs.workspace_bytes).peak_bytes
        assert peak_bytes <= self.budget_bytes, "the rows of memory are not those of the schedule"
        is_best = status == cp_model.OPTIMAL and not any_will_do
        return Exact(schedule, found, min(bound, found), is_best)


# ---------------------------------------------------------------------- from a solution to a schedule


@dataclass(frozen=True, slots=True)
class _Begin:
    """A copy of the solution.

    Args:
        instruction: What begins it.
        channel: What carries it.
        start: In units.
        end: In units.
        place: The step before which it is begun, and 0 if at once, or 1 if after what is freed there.
    """

    instruction: Offload | Fetch
    channel: object
    start: int
    end: int
    place: tuple[int, int]


class _Reader:
    """Reads a schedule out of a solution."""

    def __init__(self, programme: _Programme, solver: cp_model.CpSolver) -> None:
        self.programme = programme
        self.steps = programme.steps
        self.solver = solver
        self.pending: dict[Storage, Offload | Fetch] = {}
        self.resident: set[Storage] = set()
        self.instructions: list[Instruction] = []
        self.retained: dict[int, set[Storage]] = {}
        """After each step, what the next one still has, or what is freed before it after a wait."""
        self.freed: dict[int, list[tuple[int, Storage]]] = {}
        """Before each step, what is freed, with the end of its copy out."""
        self.gone: dict[int, list[Storage]] = {}
        """Before each step, what leaves its tier."""
        for storage, touches in programme.touches().items():
            self.read_residency(storage, programme.stretches[storage])
            self.freed.setdefault(touches[-1][0] + 1, []).append((0, storage))

    def holds(self, literal: cp_model.IntVar) -> bool:
        return self.solver.boolean_value(literal)

    def read_residency(self, storage: Storage, stretches: Sequence[_Stretch]) -> None:
        copied = self.programme.copies.get(storage)
        for stretch in stretches:
            there = self.holds(stretch.there)
            for t, kept in zip(stretch.steps(), map(self.holds, stretch.kept), strict=True):
                begun = copied is not None and self.holds(copied.begun_at(t))
                if kept or (there and begun):
                    self.retained.setdefault(t, set()).add(storage)
                if there and not kept:
                    end = self.solver.value(copied.end) if copied and begun else 0
                    self.freed.setdefault(t, []).append((end, storage))
                there = kept
            if copied is not None and copied.gone:
                before = stretch.first > copied.first and self.holds(copied.gone_at(stretch.first - 1))
                for t in stretch.steps():
                    gone = self.holds(copied.gone_at(t))
                    if gone and not before:
                        self.gone.setdefault(t, []).append(storage)
                    before = gone

    def begins(self) -> list[_Begin]:
        """The copies, in the order in which they are begun: on each channel that in which they start."""
        found: list[_Begin] = []
        value = self.solver.value
        for storage, copied in self.programme.copies.items():
            tier = next((tier for tier, chosen in copied.tiers.items() if self.holds(chosen)), None)
            if tier is None:
                continue
            step = copied.first + next(i for i, begun in enumerate(copied.begun) if self.holds(begun))
            out, back = (tier.channel(direction) for direction in (Direction.OUT, Direction.IN))
            offload = Offload(storage, tier.name)
            found.append(_Begin(offload, out, value(copied.start), value(copied.end), (step, 0)))
            for stretch in self.programme.stretches[storage]:
                if not self.holds(stretch.is_fetched):
                    continue
                assert stretch.start is not None
                step = stretch.first + next(i for i, now in enumerate(stretch.fetched) if self.holds(now))
                start, end = value(stretch.start), value(stretch.start + copied.back)
                found.append(_Begin(Fetch(storage, tier.name), back, start, end, (step, 1)))
        return found

    def in_order(self) -> dict[tuple[int, int], list[_Begin]]:
        """The copies by the place where they are begun: not before those that their channel carries first."""
        latest: dict[object, tuple[int, int]] = {}
        found: dict[tuple[int, int], list[_Begin]] = {}
        for begin in sorted(self.begins(), key=lambda begin: (begin.start, begin.end, begin.place)):
            place = begin.place
            latest[begin.channel] = place
            found.setdefault(place, []).append(begin)
        return found

    def schedule(self) -> Schedule:
        """The instructions, with those of `with_frees` for what is no storage that comes and goes."""
        problem = self.programme.problem
        ran = [t for t, runs in enumerate(self.programme.runs) if self.holds(runs)]
        parts: tuple[list[Node], list[Node]] = ([], [])
        for t in ran:
            node = self.steps[t].node
            if node is not None:
                parts[self.steps[t].is_past_loss].append(node)
        rest: list[list[Instruction]] = []
        """What ran and the frees that follow it."""
        for instruction in with_frees(problem.graph, *parts).instructions:
            if isinstance(instruction, Free):
                rest[-1].append(instruction)
            else:
                rest.append([instruction])
        begins = self.in_order()
        following = iter(rest)
        for t, step in enumerate(self.steps):
            self.before(t, begins)
            if t in ran:
                self.run(t, step, next(following))
        self.before(len(self.steps), begins)
        return Schedule(problem.graph, tuple(self.instructions))

    def before(self, t: int, begins: dict[tuple[int, int], list[_Begin]]) -> None:
        """What stands before a step."""
        for storage in self.gone.get(t, ()):
            self.wait(storage)
        for begin in begins.get((t, 0), ()):
            self.begin(begin)
        for _, storage in sorted(self.freed.get(t, ()), key=lambda pair: (pair[0], pair[1].name)):
            self.free(storage)
        for begin in begins.get((t, 1), ()):
            self.begin(begin)

    def run(self, t: int, step: _Step, rest: Sequence[Instruction]) -> None:
        """A step that runs, and what is freed at once."""
        problem = self.programme.problem
        first, *frees = rest
        read = problem.forward_reads[step.node] if step.node is not None else ()
        for storage in read:
            if isinstance(self.pending.get(storage), Fetch):
                self.wait(storage)
        if isinstance(first, Compute):
            assert step.node is first.node
            wanted = self.retained.get(t + 1, set()) - self.resident
            made = {s for s in problem.graph.allocates(first.node) if s in problem.producer} & wanted
            self.resident |= made
            first = Compute(
                first.node, frozenset(s for s in first.retained if s not in problem.producer) | made
            )
        self.instructions.append(first)
        self.instructions += (i for i in frees if isinstance(i, Free) and i.storage not in problem.producer)

    def begin(self, begin: _Begin) -> None:
        storage = begin.instruction.storage
        self.instructions.append(begin.instruction)
        self.pending[storage] = begin.instruction
        self.resident.add(storage)

    def wait(self, storage: Storage) -> None:
        if self.pending.pop(storage, None) is not None:
            self.instructions.append(Wait(storage))

    def free(self, storage: Storage) -> None:
        if storage in self.resident:
            self.wait(storage)
            self.resident.remove(storage)
            self.instructions.append(Free(storage))
