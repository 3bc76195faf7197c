"""Cuts the linear order of forward into stages, for the shortest step in the devices' memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy
from numpy.typing import NDArray

from ...ir.pipeline.schedule import PipelineSchedule, in_flight
from ...ir.pipeline.timing import StageCost, simulate_pipeline
from .devices import Devices
from .linear_order import LinearOrder
from .optimizer_steps import OptimizerSteps

__all__ = ["LinearPartition", "lower_bound_seconds"]

_Table = NDArray[numpy.float64]


_SLACKS = (1.0, 1.01, 1.03, 1.06, 1.1, 1.2, 1.35, 1.6)
"""The factors of the least possible time that the slowest stage may take, for a smaller sum of all."""


class LinearPartition:
    """Cuts a linear order by dynamic programming over its cut points.

    The cost of a stage is an estimate: it keeps everything if that fits. Otherwise it computes a part of its
    forward again, which grows with the part of its saved bytes that has to go. Plans of stages are exact.

    Args:
        linear_order: The order to cut.
        schedule: Says how many stages there are, on which device, and how many micro-batches each holds.
        devices: The devices that the stages run on.
        optimizer_steps: The memory and time of the steps of an optimizer.
    """

    def __init__(
        self,
        linear_order: LinearOrder,
        schedule: PipelineSchedule,
        devices: Devices,
        optimizer_steps: OptimizerSteps,
    ) -> None:
        self.linear_order = linear_order
        self.schedule = schedule
        self.devices = devices
        self.optimizer_steps = optimizer_steps
        self.flights = [flight.until_weight for flight in in_flight(schedule)]
        self._forward, self._backward = self._seconds()
        self._static, self._saved, self._largest = self._bytes()

    def on(self, devices: Devices) -> LinearPartition:
        """Gives the same partition for other devices, or another order of them."""
        other = copy.copy(self)
        other.devices = devices
        return other

    def best(self, *, anywhere: bool = False) -> tuple[int, ...] | None:
        """The best cuts, as cut points of the order; None if no partition seems to fit.

        Args:
            anywhere: Whether to plan as if every device had memory enough.
        """
        found = self._shortest(anywhere)
        return None if found is None else tuple(self.linear_order.cut_points[index] for index in found[1])

    def seconds(self) -> float:
        """The estimated time of a step with the best cuts; infinite if no partition seems to fit."""
        found = self._shortest(anywhere=False)
        return math.inf if found is None else found[0]

    def simulated_seconds(self) -> float:
        """The simulated time of a step with the best cuts, without transfers; infinite if none seems to fit.

        If backward comes in two parts, each is taken as half of it.
        """
        cuts = self.best()
        if cuts is None:
            return math.inf
        index = {point: k for k, point in enumerate(self.linear_order.cut_points)}
        ends = (*(index[cut] for cut in cuts), self._end)
        is_split = self.schedule.splits_backward
        costs: list[StageCost] = []
        begin = 0
        for stage, end in enumerate(ends):
            speed = self.devices.speeds[self.schedule.device_of[stage]]
            forward, backward = self._forward[begin, end], self._backward[begin, end]
            again = self._stage_seconds(stage, anywhere=False)[begin, end] * speed - forward - backward
            back = max(float(backward + again), 0.0) / speed
            parts = (back / 2, back / 2) if is_split else (back, 0.0)
            costs.append(StageCost(float(forward) / speed, *parts))
            begin = end
        order = replace(self.schedule, overlapped=frozenset())
        return simulate_pipeline(order, costs).step_seconds

    def _shortest(self, anywhere: bool) -> tuple[float, list[int]] | None:
        """The shortest step, and the indices of the cut points that it is cut at."""
        tables = [self._stage_seconds(stage, anywhere) for stage in range(self.schedule.stages)]
        least = _smallest_largest(tables)
        if math.isinf(least):
            return None
        micro_batches, fill = self.schedule.micro_batches, self._fill_seconds()
        found: list[tuple[float, list[int]]] = []
        for slack in _SLACKS:
            limit = least * slack * (1 + 1e-12)
            cut = _least_sum([numpy.where(table <= limit, table + fill, math.inf) for table in tables])
            if cut is not None:
                total, cuts = cut
                times = [tables[s][b, e] for s, (b, e) in enumerate(_pairs(cuts, self._end))]
                found.append((total + (micro_batches - 1) * max(times), cuts))
        return min(found)

    def smallest(self) -> tuple[int, ...]:
        """The cuts that need least memory, by the least that each stage may hold."""
        tables = [self._least_bytes(stage) for stage in range(self.schedule.stages)]
        limit = _smallest_largest(tables)
        cut = _least_sum([numpy.where(table <= limit, table, math.inf) for table in tables])
        assert cut is not None, "a line has at least as many cut_points as stages"
        return tuple(self.linear_order.cut_points[index] for index in cut[1])

    @property
    def _end(self) -> int:
        return len(self.linear_order.cut_points) - 1

    def _between(self, prefix: Sequence[float]) -> _Table:
        at = numpy.array([prefix[point] for point in self.linear_order.cut_points])
        return at[None, :] - at[:, None]

    def _seconds(self) -> tuple[_Table, _Table]:
        order = self.linear_order
        return self._between(order.forward_prefix), self._between(order.backward_prefix)

    def _bytes(self) -> tuple[_Table, _Table, _Table]:
        """Static bytes, saved bytes, and the most at work, of each segment between two cut points."""
        cut_points = self.linear_order.cut_points
        count = len(cut_points)
        static = numpy.zeros((count, count))
        for storage, is_trained, positions in self.linear_order.statics:
            nbytes = self.optimizer_steps.kept_bytes(storage) if is_trained else storage.nbytes
            self._add_static(static, positions, nbytes)
        largest = numpy.zeros((count, count))
        for begin in range(count):
            most = 0
            for end in range(begin + 1, count):
                most = max(most, *self.linear_order.largest[cut_points[end - 1] : cut_points[end]])
                largest[begin, end] = most
        return static, self._between(self.linear_order.saved_prefix), largest

    def _add_static(self, table: _Table, positions: Sequence[int], nbytes: int) -> None:
        cut_points = numpy.array(self.linear_order.cut_points)
        following = numpy.searchsorted(positions, cut_points)
        for begin, index in enumerate(following):
            if index < len(positions):
                table[begin, cut_points > positions[index]] += nbytes

    def _arriving(self) -> _Table:
        crossing = self.linear_order.crossing_bytes
        there = [crossing[point][0] for point in self.linear_order.cut_points]
        return numpy.array(there, dtype=float)[:, None]

    def _leaving(self) -> _Table:
        crossing = self.linear_order.crossing_bytes
        there = [crossing[point][1] for point in self.linear_order.cut_points]
        return numpy.array(there, dtype=float)[:, None]

    def _fill_seconds(self) -> _Table:
        """The time that the first micro-batch waits for links before a segment, and on the way back."""
        return (self._arriving() + self._leaving()) / self.devices.link_bytes_per_second

    def _stage_seconds(self, stage: int, anywhere: bool) -> _Table:
        """The estimated time of each segment as a stage: that of its computations, or of a slower link."""
        device = self.schedule.device_of[stage]
        held = self.flights[stage]
        budget = self.devices.budget_bytes[device] / len(self.schedule.stages_on(device))
        arriving, leaving = self._arriving(), self._leaving()
        fixed = self._static + held * arriving + self._largest
        over = fixed + held * self._saved - budget
        over = numpy.full_like(over, -math.inf) if anywhere else over
        part = numpy.clip(over / numpy.maximum(held * self._saved, 1.0), 0.0, None)
        seconds = (self._forward * (1 + numpy.minimum(part, 1.0) ** 1.5) + self._backward) / (
            self.devices.speeds[device]
        )
        seconds = numpy.maximum(
            seconds, numpy.maximum(arriving, leaving) / self.devices.link_bytes_per_second
        )
        seconds = numpy.where(part <= 1, seconds, math.inf)
        return numpy.where(self._is_segment(), seconds, math.inf)

    def _least_bytes(self, stage: int) -> _Table:
        """The least that a segment takes of its device's budget as a stage, as a fraction."""
        device = self.schedule.device_of[stage]
        budget = self.devices.budget_bytes[device] / len(self.schedule.stages_on(device))
        least = self._static + self.flights[stage] * self._arriving() + self._largest
        return numpy.where(self._is_segment(), least / budget, math.inf)

    def _is_segment(self) -> NDArray[numpy.bool_]:
        count = self._end + 1
        return numpy.arange(count)[:, None] < numpy.arange(count)[None, :]


def _pairs(cuts: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
    return zip((0, *cuts), (*cuts, end), strict=True)


def _smallest_largest(tables: Sequence[_Table]) -> float:
    """The least that the largest entry of a path through the tables can be."""
    reached = tables[0][0]
    for table in tables[1:]:
        reached = numpy.min(numpy.maximum(reached[:, None], table), axis=0)
    return float(reached[-1])


def _least_sum(tables: Sequence[_Table]) -> tuple[float, list[int]] | None:
    """The path of the smallest sum, and the cut points it goes through."""
    reached = tables[0][0]
    behind: list[NDArray[numpy.intp]] = []
    for table in tables[1:]:
        sums = reached[:, None] + table
        behind.append(numpy.argmin(sums, axis=0))
        reached = numpy.min(sums, axis=0)
    if math.isinf(reached[-1]):
        return None
    point = len(reached) - 1
    cuts: list[int] = []
    for table in reversed(behind):
        point = int(table[point])
        cuts.append(point)
    return float(reached[-1]), cuts[::-1]


def lower_bound_seconds(
    linear_order: LinearOrder, schedule: PipelineSchedule, devices: Devices, update_seconds: float = 0.0
) -> float:
    """A lower bound of the step on these devices, for any partition and any order of work on one stage each.

    All operations run once for each micro-batch, and a device does one thing at a time. So the step takes at
    least (m W + U) / sum of speeds, where W is the time of all operations and U that of the optimizer's
    steps. If each device has one stage, and devices are equally fast, stage k begins only when the first
    micro-batch has gone through those before it; when it ends, the last one goes back through them. So the
    step takes at least t_1 + ... + t_(k-1) + m t_k. The largest of these is the least if all are equal: W /
    (1 - (1 - 1/m)^p). If backward is split, the stages before wait for less than all of it, and the first
    bound alone holds.
    """
    whole = linear_order.seconds(0, len(linear_order.operations))
    count = schedule.micro_batches
    bound = (count * whole + update_seconds) / sum(devices.speeds)
    is_equal = schedule.stages == schedule.devices and len(set(devices.speeds)) == 1
    if is_equal and not schedule.splits_backward:
        speed = devices.speeds[0]
        bound = max(bound, whole / speed / (1 - (1 - 1 / count) ** schedule.devices))
    return bound
