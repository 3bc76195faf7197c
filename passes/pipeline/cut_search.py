"""Searches for the cuts of a model with the shortest step whose stages fit on their devices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from ...ir import BudgetError, TimeLimitError, UsageError, format_bytes
from ...ir.pipeline.schedule import PipelineSchedule
from ..program import Program
from .baselines import baseline_cuts
from .cut_planner import Cut, CutPlanner, DeviceRefusal
from .device_order import device_order
from .ideal_order import ideal_order
from .linear_order import LinearOrder
from .linear_partition import LinearPartition
from .planned_pipeline import PipelineOptions, PlannedPipeline

__all__ = ["CutSearch"]

_FITTING_SECONDS = 0.2
"""The least time for the plan of a stage that has only to fit."""

_TRYING = 0.3
"""The part of the time left that may go into one of several partitions."""

_LEAST_TIGHTENING = 0.99
"""The largest factor of a device's budget in estimates, if these were too low."""

_ORDERING = 0.2
"""The part of the time that may go into an order of devices, and that of the rest into one of forward."""

_ROUNDS = 8
"""The most rounds of estimates that learn from refusals, and of budgets that are raised until a plan fits."""


class CutSearch:
    """Searches among the cuts of a linear order; remembers which were tried, and the best of them.

    Args:
        linear_order: The operations of forward.
        schedule: Says how many stages there are, and which device has which stage.
        options: The options of the pipeline.
        cost: Finds the costs of a stage's operations.
        started: `time.thread_time()` at which planning began.

    Raises:
        UsageError: IRC485 for more stages than operations.
    """

    def __init__(
        self,
        linear_order: LinearOrder,
        schedule: PipelineSchedule,
        options: PipelineOptions,
        cost: Callable[[Program], Program],
        started: float,
    ) -> None:
        segments = len(linear_order.cut_points) - 1
        if segments < schedule.stages:
            raise UsageError(
                "IRC485",
                f"{schedule.stages} stages, and the model has {segments} places to put them",
                help="ask for fewer stages (--stages, --chunks)",
            )
        self.linear_order = linear_order
        self.schedule = schedule
        self.options = options
        self.deadline = started + options.time_limit
        given = LinearPartition(linear_order, schedule, options.devices, options.optimizer_steps)
        order = device_order(given, started + options.time_limit * _ORDERING)
        self.devices = options.devices.ordered(order)
        self.partition = given.on(self.devices)
        self.planner = CutPlanner(linear_order, schedule, self.devices, order, options, cost, self.deadline)
        self.refusals: dict[Cut, DeviceRefusal | None] = {}
        """The cuts that were tried, the latest one last, with the refusals of those that do not fit."""
        self.best: tuple[Cut, PlannedPipeline] | None = None
        self.late: TimeLimitError | None = None

    def run(self) -> PlannedPipeline:
        """The pipeline with the shortest step that was found.

        Raises:
            BudgetError: IRC486 when no partition was found whose stages fit.
            TimeLimitError: When the time ended before the stages of any partition were planned.
        """
        if self.options.cuts is not None:
            return self.planner.plan(Cut(self.linear_order, self.options.cuts))
        if self.options.partition == "best":
            self._try_partitions()
        else:
            points = baseline_cuts(
                self.options.partition, self.linear_order, self.schedule.stages, self.devices
            )
            self._try(Cut(self.linear_order, points))
        if self.best is None:
            raise self._failure()
        return self._improved(*self.best) if self.options.partition == "best" else self.best[1]

    @property
    def _is_over(self) -> bool:
        return time.thread_time() >= self.deadline

    # ------------------------------------------------------------------ cuts to try

    def _try_partitions(self) -> None:
        """Tries the best cuts by estimates, with memory enough and without, and those that need least."""
        partitions = self._partitions()
        for partition in partitions:
            self._try_best(partition, anywhere=True)
        for partition in partitions:
            self._tighten(partition)
        for cut in self._smallest():
            if self.best is None or not self._is_over:
                self._try(cut)

    def _partitions(self) -> list[LinearPartition]:
        """The partitions of the linear order, and of the order that the best chain of ideals gives."""
        found = [self.partition]
        left = (self.deadline - time.thread_time()) * _ORDERING
        operations = ideal_order(self.linear_order, self.schedule, self.devices, left)
        if operations is not None:
            other = self.linear_order.in_order(operations)
            found.append(LinearPartition(other, self.schedule, self.devices, self.options.optimizer_steps))
        return found

    def _tighten(self, partition: LinearPartition) -> None:
        """Tries the best cuts by estimates, which learn from each device that does not hold what they say."""
        for _ in range(_ROUNDS):
            refusal = self._try_best(partition, anywhere=False)
            if refusal is None or self._is_over:
                return
            budgets = list(partition.devices.budget_bytes)
            part = self.devices.budget_bytes[refusal.device] / refusal.minimum_bytes
            budgets[refusal.device] = math.floor(budgets[refusal.device] * min(part, _LEAST_TIGHTENING))
            partition = partition.on(replace(partition.devices, budget_bytes=tuple(budgets)))

    def _smallest(self) -> list[Cut]:
        """The cuts that need least memory: as a part of the budgets, and of equal ones."""
        equal_bytes = (1 << 30,) * len(self.devices.budget_bytes)
        equal = self.partition.on(replace(self.devices, budget_bytes=equal_bytes))
        return [Cut(self.linear_order, partition.smallest()) for partition in (self.partition, equal)]

    # ------------------------------------------------------------------ trying

    def _try_best(self, partition: LinearPartition, *, anywhere: bool) -> DeviceRefusal | None:
        """Tries the best cuts by estimates; returns the refusal if they do not fit."""
        points = partition.best(anywhere=anywhere)
        return None if points is None else self._try(Cut(partition.linear_order, points))

    def _try(self, cut: Cut) -> DeviceRefusal | None:
        """Plans a cut, unless it was tried before; returns the refusal if it does not fit."""
        if cut in self.refusals:
            self.refusals[cut] = known = self.refusals.pop(cut)
            return known
        self.refusals[cut] = None
        left = self.deadline - time.thread_time()
        try:
            pipeline = self.planner.plan(cut, time.thread_time() + left * _TRYING)
        except DeviceRefusal as error:
            self.refusals[cut] = error
        except TimeLimitError as error:
            self.late = error
        else:
            if self.best is None or pipeline.step_seconds < self.best[1].step_seconds:
                self.best = cut, pipeline
        return self.refusals[cut]

    def _improved(self, cut: Cut, best: PlannedPipeline) -> PlannedPipeline:
        """Moves single cut points to the next one as long as the step becomes shorter."""
        tried = {best.cuts}
        is_better = True
        while is_better and time.thread_time() < self.deadline:
            is_better = False
            for points in _neighbours(best.cuts, cut.linear_order.cut_points):
                if points in tried or time.thread_time() >= self.deadline:
                    continue
                tried.add(points)
                candidate = Cut(cut.linear_order, points)
                if self.planner.least_seconds(candidate) >= best.step_seconds:
                    continue
                try:
                    pipeline = self.planner.plan(candidate)
                except (BudgetError, TimeLimitError):
                    continue
                if pipeline.step_seconds < best.step_seconds * (1 - 1e-9):
                    best, is_better = pipeline, True
        return best

    # ------------------------------------------------------------------ failing

    def _failure(self) -> BudgetError | TimeLimitError:
        """The error to raise if no cut was planned."""
        refusals = [error for error in self.refusals.values() if error is not None]
        if not refusals:
            assert self.late is not None
            return self.late
        last = next(reversed(self.refusals))  # it is tried with any budgets, and the same with any equal ones
        return self._with_enough(min(refusals, key=lambda error: error.minimum_bytes), last)

    def _with_enough(self, refusal: BudgetError, cut: Cut) -> BudgetError:
        """The refusal with a budget for each device at which a plan was found."""
        budget_bytes = refusal.minimum_bytes
        for _ in range(_ROUNDS):
            budgets = (budget_bytes,) * len(self.devices.budget_bytes)
            try:
                self.planner.with_budgets(budgets, _FITTING_SECONDS).plan(cut)
            except BudgetError as error:
                budget_bytes = max(error.minimum_bytes, round(budget_bytes * 1.03))
            except TimeLimitError:
                break
            else:
                refusal.minimum_bytes = budget_bytes
                enough = f"{format_bytes(budget_bytes)} ({budget_bytes:,} bytes)"
                refusal.add_note(f"a plan was found for {enough} on each device")
                break
        return refusal


def _neighbours(points: tuple[int, ...], cut_points: Sequence[int]) -> list[tuple[int, ...]]:
    """The same cuts with one of them moved to the next cut point, either way."""
    index = {point: k for k, point in enumerate(cut_points)}
    found: list[tuple[int, ...]] = []
    for k, point in enumerate(points):
        for move in (-1, 1):
            moved = cut_points[index[point] + move] if point in index else point
            candidate = (*points[:k], moved, *points[k + 1 :])
            bounds = (0, *candidate, cut_points[-1])
            if all(a < b for a, b in pairwise(bounds)):
                found.append(candidate)
    return found
