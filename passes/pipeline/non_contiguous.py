"""Partitions whose devices may take turns: a constraint programme, with a bound."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cached_property

from ortools.sat.python import cp_model

from ...ir import TimeLimitError
from .bounds import least_load
from .coarse import Coarse, coarsen, contract
from .partition_problem import Partition, PartitionProblem, evaluate, no_room

__all__ = ["best_non_contiguous"]

_UNITS = 100_000_000
"""Into how many whole units of time the lower bound is divided."""


def best_non_contiguous(
    problem: PartitionProblem, *, seconds: float, start: Sequence[int] | None = None, workers: int = 1
) -> Partition:
    """The partition with the smallest largest load, whatever the order of the nodes.

    A device with nodes before and behind those of another one is visited twice by each micro-batch. The
    step of a pipeline that is full takes as long for each of them as its slowest device, all the same.

    Args:
        problem: The graph and the devices.
        seconds: Time limit.
        start: A partition to begin with, such as the best contiguous one.
        workers: Threads of the solver.

    Raises:
        UsageError: IRC473 when no partition fits the devices.
        TimeLimitError: IRC475 when the time ends before one is found.
    """
    started = time.monotonic()
    by_colour: dict[int, list[int]] = {}
    for position, node in enumerate(problem.nodes):
        by_colour.setdefault(node.colour, []).append(position)
    coarse = coarsen(problem, list(by_colour.values()), ())
    is_free = all(sum(coarse.memory_bytes) <= device.capacity_bytes for device in problem.classes)
    coarse = contract(coarse, is_contiguous=False, is_memory_free=is_free)
    if any(min(each) == math.inf for each in coarse.seconds):
        raise no_room(problem)
    programme = _Programme(problem, coarse)
    if start is not None:
        programme.hint([start[members[0]] for members in coarse.members])
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 1
    solver.parameters.max_time_in_seconds = max(seconds, 0.1)
    status = solver.solve(programme.model)
    if status == cp_model.INFEASIBLE:
        raise no_room(problem)
    if status == cp_model.UNKNOWN:
        raise TimeLimitError(
            "IRC475",
            f"no partition of {problem.name} was found in {seconds:g} s",
            help="give more time, or begin with a contiguous partition",
        )
    assignment = coarse.spread(programme.chosen(solver), len(problem.nodes))
    bound_seconds = max(solver.best_objective_bound * programme.unit_seconds, programme.least_seconds)
    max_load_seconds = evaluate(problem, assignment).max_load_seconds
    return Partition(assignment, max_load_seconds, bound_seconds, time.monotonic() - started)


class _Programme:
    """Which item is on which device, so that the largest load is least.

    Times are rounded down to whole units, so that the solver's bound is one of the problem; a partition's
    own load is then taken from `evaluate`. Of equal devices, the item that is `n`th in order of time is on
    one of the first `n`: devices are numbered as these items come to them.

    Args:
        problem: The devices.
        coarse: The items.
    """

    def __init__(self, problem: PartitionProblem, coarse: Coarse) -> None:
        self.problem = problem
        self.coarse = coarse
        self.least_seconds = least_load(coarse, problem.classes)
        self.unit_seconds = (self.least_seconds or 1.0) / _UNITS
        self.model = cp_model.CpModel()
        self.on = [[self.model.new_bool_var("") for _ in problem.devices] for _ in coarse.members]
        for places in self.on:
            self.model.add_exactly_one(places)
        for device, kind in enumerate(problem.devices):
            self._bar(device, kind)
            self._fit(device, kind)
        self._minimise()

    def _units(self, seconds: float) -> int:
        return math.floor(seconds / self.unit_seconds)

    @cached_property
    def _order(self) -> list[int]:
        """The items, those that take longest first."""
        return sorted(range(len(self.on)), key=lambda item: -min(self.coarse.seconds[item]))

    @cached_property
    def _number(self) -> list[int]:
        """Which one of its class each device is."""
        devices = self.problem.devices
        return [devices[:device].count(kind) for device, kind in enumerate(devices)]

    def _bar(self, device: int, kind: int) -> None:
        for rank, item in enumerate(self._order):
            if self.coarse.seconds[item][kind] == math.inf or rank < self._number[device]:
                self.model.add(self.on[item][device] == 0)

    def _fit(self, device: int, kind: int) -> None:
        capacity_bytes = self.problem.classes[kind].capacity_bytes
        if sum(self.coarse.memory_bytes) > capacity_bytes:
            sizes = zip(self.coarse.memory_bytes, self.on, strict=True)
            self.model.add(sum(size * on[device] for size, on in sizes) <= math.floor(capacity_bytes))

    def _pay(self) -> list[list[cp_model.LinearExpr]]:
        """What each device that pays transfers pays: for nets that it has some items of, but not all."""
        paid: list[list[cp_model.LinearExpr]] = [[] for _ in self.problem.devices]
        for net, seconds in self.coarse.nets.items():
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
        most = sum(max(filter(math.isfinite, each)) for each in self.coarse.seconds)
        ceiling = self._units(most + sum(self.coarse.nets.values())) + 1
        largest = self.model.new_int_var(self._units(self.least_seconds), ceiling, "")
        for device, paid in enumerate(self._pay()):
            kind = self.problem.devices[device]
            taken = (
                self._units(seconds[kind]) * on[device]
                for seconds, on in zip(self.coarse.seconds, self.on, strict=True)
                if seconds[kind] < math.inf
            )
            self.model.add(sum(taken) + sum(paid) <= largest)
        self.model.minimize(largest)

    def hint(self, devices: Sequence[int]) -> None:
        """Begins with a partition, its devices numbered as the programme has them.

        Args:
            devices: The device of each item.
        """
        numbered: dict[int, int] = {}
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
