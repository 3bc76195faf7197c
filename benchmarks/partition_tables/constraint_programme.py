"""Which item goes to which device, as a constraint programme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ortools.sat.python import cp_model

from irc.passes.pipeline.coarsened_problem import CoarsenedProblem

from .bounds import least_load
from .partition_problem import PartitionProblem, evaluate
from .reduction import spread

__all__ = ["Solved", "solve"]

_UNITS = 100_000_000
"""Into how many whole units of time the lower bound is divided, where times are not whole microseconds."""

_MICROSECOND = 1e-6
_ROUNDING = 1e-6
"""What part of a unit may be missing to the next one for a time to count as that."""

_GAP = 5e-5
"""Relative gap at which the search ends: half of what counts as proved."""


@dataclass(frozen=True, slots=True)
class Solved:
    """What one solve says.

    Args:
        devices: Of each item, in the best partition found; None without one.
        bound_seconds: No partition has a smaller largest load.
        is_infeasible: There is none.
    """

    devices: list[int] | None
    bound_seconds: float
    is_infeasible: bool


def solve(
    problem: PartitionProblem,
    coarsened: CoarsenedProblem,
    *,
    is_contiguous: bool,
    start: Sequence[int] | None,
    seconds: float,
    workers: int,
) -> Solved:
    """Looks for the partition of items with the smallest largest load; never worse than the one given.

    Args:
        problem: The devices.
        coarsened: The items.
        is_contiguous: Whether devices are stages, in their order; they have to be of one class then.
        start: The device of each item in a partition to begin with; None begins with nothing.
        seconds: Time limit.
        workers: Threads of the solver.
    """
    programme = _Programme(problem, coarsened, is_contiguous=is_contiguous)
    if start is not None:
        programme.hint(start)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 1
    solver.parameters.max_time_in_seconds = max(seconds, 0.1)
    solver.parameters.relative_gap_limit = _GAP
    status = solver.solve(programme.model)
    if status == cp_model.INFEASIBLE:
        return Solved(None, math.inf, True)
    if status == cp_model.UNKNOWN:
        return Solved(None if start is None else list(start), programme.least_seconds, False)
    bound_seconds = max(solver.best_objective_bound * programme.unit_seconds, programme.least_seconds)
    found = (programme.chosen(solver), *([] if start is None else [list(start)]))
    loads = [
        evaluate(problem, spread(coarsened, each, len(problem.nodes))).max_load_seconds for each in found
    ]
    return Solved(found[loads.index(min(loads))], bound_seconds, False)


class _Programme:
    """Which item is on which device, so that the largest load is least.

    Times are rounded down to whole units, so that the solver's bound is one of the problem; a partition's
    own load is to be taken from `evaluate`. In a contiguous partition devices are stages, in their order.
    Else, of equal devices, the item that is `n`th in order of time is on one of the first `n`: devices are
    numbered as these items come to them.

    Args:
        problem: The devices.
        coarsened: The items.
        is_contiguous: Whether stages have to follow the edges.
    """

    def __init__(
        self, problem: PartitionProblem, coarsened: CoarsenedProblem, *, is_contiguous: bool
    ) -> None:
        self.problem = problem
        self.coarsened = coarsened
        self.is_contiguous = is_contiguous
        self.least_seconds = least_load(coarsened, problem.classes)
        self.unit_seconds = _unit(coarsened) or (self.least_seconds or 1.0) / _UNITS
        self.model = cp_model.CpModel()
        self.on = [[self.model.new_bool_var("") for _ in problem.devices] for _ in coarsened.members]
        for places in self.on:
            self.model.add_exactly_one(places)
        for device, kind in enumerate(problem.devices):
            self._bar(device, kind)
            self._fit(device, kind)
        if is_contiguous:
            self._follow_edges()
        self._minimise()

    def _units(self, seconds: float) -> int:
        return math.floor(seconds / self.unit_seconds + _ROUNDING)

    @cached_property
    def _order(self) -> list[int]:
        """The items, those that take longest first."""
        return sorted(range(len(self.on)), key=lambda item: -min(self.coarsened.seconds[item]))

    @cached_property
    def _number(self) -> list[int]:
        """Which one of its class each device is."""
        devices = self.problem.devices
        return [devices[:device].count(kind) for device, kind in enumerate(devices)]

    def _bar(self, device: int, kind: int) -> None:
        for rank, item in enumerate(self._order):
            is_spare = not self.is_contiguous and rank < self._number[device]
            if self.coarsened.seconds[item][kind] == math.inf or is_spare:
                self.model.add(self.on[item][device] == 0)

    def _fit(self, device: int, kind: int) -> None:
        capacity_bytes = self.problem.classes[kind].capacity_bytes
        if sum(self.coarsened.memory_bytes) > capacity_bytes:
            sizes = zip(self.coarsened.memory_bytes, self.on, strict=True)
            self.model.add(sum(size * on[device] for size, on in sizes) <= math.floor(capacity_bytes))

    def _follow_edges(self) -> None:
        done = [[self.model.new_bool_var("") for _ in places] for places in self.on]
        for by_stage, places in zip(done, self.on, strict=True):
            for (before, after), place in zip(pairwise(by_stage), places[1:], strict=True):
                self.model.add_implication(before, after)
                self.model.add_implication(place, before.negated())
            for by, place in zip(by_stage, places, strict=True):
                self.model.add_implication(place, by)
        for tail, head in self.coarsened.edges:
            for before, after in zip(done[tail], done[head], strict=True):
                self.model.add_implication(after, before)

    def _pay(self) -> list[list[cp_model.LinearExpr]]:
        """What each device that pays transfers pays: for nets that it has some items of, but not all."""
        paid: list[list[cp_model.LinearExpr]] = [[] for _ in self.problem.devices]
        for net, seconds in self.coarsened.nets.items():
            first, *others = sorted(net)
            pays = [self.model.new_bool_var("") for _ in self.problem.devices]
            is_cut = self.model.new_bool_var("")
            for device, kind in enumerate(self.problem.devices):
                for other in others:
                    one, two = self.on[first][device], self.on[other][device]
                    self.model.add_bool_or(one.negated(), two, pays[device])
                    self.model.add_bool_or(two.negated(), one, pays[device])
                self.model.add_implication(pays[device], is_cut)
                if self.problem.classes[kind].pays_transfers:
                    paid[device].append(self._units(seconds) * pays[device])
            self.model.add(sum(pays) >= 2 * is_cut)
        return paid

    def _minimise(self) -> None:
        most = sum(max(filter(math.isfinite, each)) for each in self.coarsened.seconds)
        ceiling = self._units(most + sum(self.coarsened.nets.values())) + 1
        largest = self.model.new_int_var(self._units(self.least_seconds), ceiling, "")
        for device, paid in enumerate(self._pay()):
            kind = self.problem.devices[device]
            taken = (
                self._units(seconds[kind]) * on[device]
                for seconds, on in zip(self.coarsened.seconds, self.on, strict=True)
                if seconds[kind] < math.inf
            )
            self.model.add(sum(taken) + sum(paid) <= largest)
        self.model.minimize(largest)

    def hint(self, devices: Sequence[int]) -> None:
        """Begins with a partition, its devices numbered as the programme has them.

        Args:
            devices: The device of each item.
        """
        numbered = {device: device for device in devices} if self.is_contiguous else dict[int, int]()
        for item in self._order:
            kind = self.problem.devices[devices[item]]
            if devices[item] not in numbered:
                taken = sum(self.problem.devices[device] == kind for device in numbered)
                numbered[devices[item]] = self.problem.devices.index(kind) + taken
        for item, places in enumerate(self.on):
            for device, place in enumerate(places):
                self.model.add_hint(place, numbered[devices[item]] == device)

    def chosen(self, solver: cp_model.CpSolver) -> list[int]:
        """The device of each item."""
        return [next(d for d, place in enumerate(on) if solver.boolean_value(place)) for on in self.on]


def _unit(coarsened: CoarsenedProblem) -> float | None:
    """A microsecond, if all times are whole ones, as in profiles: then there are few loads to tell apart."""
    times = [time for seconds in coarsened.seconds for time in seconds if time < math.inf]
    whole = (time / _MICROSECOND for time in (*times, *coarsened.nets.values()))
    return _MICROSECOND if all(abs(time - round(time)) < _ROUNDING for time in whole) else None
