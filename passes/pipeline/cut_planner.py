"""Plans the stages of a model that is cut at given points, each within the budget of its device."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...ir import BudgetError, Input, InputRole, Storage, TimeLimitError, format_bytes, print_graph
from ...ir.pipeline.memory import StageMemory, device_peak_bytes
from ...ir.pipeline.schedule import PipelineSchedule, in_flight
from ...ir.pipeline.timing import simulate_pipeline
from ..program import Program
from .devices import Devices
from .linear_order import LinearOrder
from .linear_partition import lower_bound_seconds
from .planned_pipeline import PipelineOptions, PlannedPipeline, transfers_of
from .stage_graphs import StageGraph, cut_graph
from .stage_plan import PlannedStage, StagePlanner

__all__ = ["Cut", "CutPlanner", "DeviceRefusal"]

_STEP_BYTES = 64
"""Bytes that a step keeps for each micro-batch beside its stages: its number, its loss and the like."""

_STAGE_SECONDS = 1.0
"""The least time for the plan of a stage when little time is left for all stages."""

_ROUNDS = 8
"""The most rounds in which the budgets of stages are lowered by the excess of their device."""


@dataclass(frozen=True)
class Cut:
    """Positions in a linear order before which a new stage begins."""

    linear_order: LinearOrder
    points: tuple[int, ...]

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The first position of each stage, and the position behind its last."""
        end = len(self.linear_order.operations)
        return list(zip((0, *self.points), (*self.points, end), strict=True))


class DeviceRefusal(BudgetError):
    """The refusal of stages that do not fit on a device of the pipeline."""

    def __init__(self, device: int, error: BudgetError) -> None:
        super().__init__(error.code, error.message, help=error.help, minimum_bytes=error.minimum_bytes)
        self.device = device


class CutPlanner:
    """Plans the stages of cuts, within the budgets of the devices.

    Args:
        linear_order: The operations of forward in the order of execution.
        schedule: Says how many stages and micro-batches there are, and which device has which stage.
        devices: The devices, in the order in which the pipeline goes through them.
        device_order: The numbers of these devices as the user gave them.
        options: The options of the pipeline.
        cost: Finds the costs of a stage's operations.
        deadline: `time.thread_time()` at which to stop.
    """

    def __init__(
        self,
        linear_order: LinearOrder,
        schedule: PipelineSchedule,
        devices: Devices,
        device_order: tuple[int, ...],
        options: PipelineOptions,
        cost: Callable[[Program], Program],
        deadline: float,
    ) -> None:
        self.linear_order = linear_order
        self.schedule = schedule
        self.devices = devices
        self.device_order = device_order
        self.options = options
        self.cost = cost
        self.deadline = deadline
        self.least_stage_seconds = _STAGE_SECONDS
        self._in_flight = [flight.until_weight for flight in in_flight(schedule)]
        self._planners: dict[tuple[int, str], StagePlanner] = {}

    def with_budgets(self, budget_bytes: Sequence[int], least_stage_seconds: float) -> CutPlanner:
        """The same planner for devices of other budgets, with another least time for each stage."""
        other = copy.copy(self)
        other.devices = replace(self.devices, budget_bytes=tuple(budget_bytes))
        other.least_stage_seconds = least_stage_seconds
        return other

    def plan(self, cut: Cut, deadline: float | None = None) -> PlannedPipeline:
        """Plans the stages of a cut, each within what the others on its device leave.

        Args:
            cut: The cut.
            deadline: `time.thread_time()` at which to stop; that of the planner if None.

        Raises:
            BudgetError: IRC486.
        """
        graphs = self._stage_graphs(cut)
        planners = [self._planner(graph) for graph in graphs]
        shared = self._shared_bytes(graphs)
        if self.options.checkpoint is not None:
            return self._checkpointed(cut, planners, shared, *self.options.checkpoint)
        room = [self.devices.budget_bytes[device] for device in self.schedule.device_of]
        over = [0]
        before: tuple[int, ...] = ()
        for _ in range(_ROUNDS):
            stages = [self._stage(planner, room, k, deadline) for k, planner in enumerate(planners)]
            peaks = self._peaks(stages, shared)
            over = self._over(peaks)
            if not any(over):
                return self._pipeline(cut, tuple(stages), (), peaks)
            if peaks == before:
                break  # with less room they hold no less
            before = peaks
            for device, excess_bytes in enumerate(over):
                if excess_bytes:
                    self._lower(room, stages, planners, device, excess_bytes)
        raise self._refusal(over)

    def least_seconds(self, cut: Cut) -> float:
        """The work of the slowest device in a step that computes nothing again."""
        busy = [0.0] * self.schedule.devices
        for device, segment in zip(self.schedule.device_of, cut.segments, strict=True):
            busy[device] += cut.linear_order.seconds(*segment) / self.devices.speeds[device]
        return max(busy) * self.schedule.micro_batches

    # ------------------------------------------------------------------ stages

    def _stage_graphs(self, cut: Cut) -> tuple[StageGraph, ...]:
        return cut_graph(
            cut.linear_order.graph,
            cut.linear_order.stages(cut.points),
            self.schedule.stages,
            split_backward=self.schedule.splits_backward,
        )

    def _planner(self, graph: StageGraph) -> StagePlanner:
        """The planner of a stage, known by its graph: what it exchanges depends on all cuts."""
        key = (graph.index, print_graph(graph.graph))
        if key not in self._planners:
            self._planners[key] = StagePlanner(
                graph,
                self.cost,
                self._in_flight[graph.index],
                self.schedule.micro_batches,
                self.options.optimizer_steps,
            )
        return self._planners[key]

    def _stage(
        self, planner: StagePlanner, room: list[int], stage: int, deadline: float | None
    ) -> PlannedStage:
        """Plans a stage within its room; if it needs more than that, the room becomes what it needs.

        Raises:
            BudgetError: IRC486 if it needs more than its device has.
        """
        left = (deadline or self.deadline) - time.thread_time()
        time_limit = max(left / (2 * self.schedule.stages), self.least_stage_seconds)
        try:
            return planner.planned(room[stage], self.options.strategy, time_limit, self.options.gap)
        except (BudgetError, TimeLimitError) as error:
            least_bytes = self._least_bytes(planner, time_limit, error)
            if least_bytes > self.devices.budget_bytes[self.schedule.device_of[stage]]:
                raise self._refusal_of(planner, least_bytes) from error
            room[stage] = least_bytes
            try:
                return planner.planned(least_bytes, self.options.strategy, time_limit, self.options.gap)
            except BudgetError as still:
                raise self._refusal_of(planner, still.minimum_bytes + planner.beside_bytes) from still

    def _least_bytes(
        self, planner: StagePlanner, time_limit: float, error: BudgetError | TimeLimitError
    ) -> int:
        """The smallest room for a stage that was found, by the strategy that was asked for."""
        if self.options.strategy != "auto" and isinstance(error, BudgetError):
            return error.minimum_bytes + planner.beside_bytes
        return planner.minimum_bytes(time_limit)

    def _checkpointed(
        self,
        cut: Cut,
        planners: Sequence[StagePlanner],
        shared: Sequence[int],
        strategy: str,
        last_strategy: str,
    ) -> PlannedPipeline:
        """Plans the stages of a cut by strategies that do not look at a budget.

        Raises:
            BudgetError: IRC486.
        """
        stages = tuple(planner.by_strategy(strategy) for planner in planners)
        last = ()
        if last_strategy != strategy:
            last = tuple(planner.by_strategy(last_strategy) for planner in planners)
        peaks = self._peaks(stages, shared, last)
        if any(over := self._over(peaks)):
            raise self._refusal(over)
        return self._pipeline(cut, stages, last, peaks)

    # ------------------------------------------------------------------ memory of devices

    def _peaks(
        self, stages: Sequence[PlannedStage], shared: Sequence[int], last: Sequence[PlannedStage] = ()
    ) -> tuple[int, ...]:
        """The most bytes on each device."""
        memory, last_memory = (self._memory(each) for each in (stages, last))
        alive = device_peak_bytes(self.schedule, memory, shared, last_memory or None)
        return tuple(peak + _STEP_BYTES * self.schedule.micro_batches for peak in alive)

    def _memory(self, stages: Sequence[PlannedStage]) -> list[StageMemory]:
        """The memory of each stage; neighbours on one device share what one hands to the other."""
        found = [stage.memory for stage in stages]
        for first, second in itertools.pairwise(range(len(stages))):
            if self.schedule.device_of[first] == self.schedule.device_of[second]:
                found[second] = stages[second].after(stages[first])
        return found

    def _over(self, peaks: Sequence[int]) -> list[int]:
        budgets = self.devices.budget_bytes
        return [max(peak - budget, 0) for peak, budget in zip(peaks, budgets, strict=True)]

    def _lower(
        self,
        room: list[int],
        stages: Sequence[PlannedStage],
        planners: Sequence[StagePlanner],
        device: int,
        excess_bytes: int,
    ) -> None:
        """Takes the excess of a device from its stages, from each by what it holds beside statics."""
        mine = self.schedule.stages_on(device)
        taken = {k: self._taken(stages[k], planners[k]) for k in mine}
        moving = {k: max(taken[k] - stages[k].memory.static_bytes, 1) for k in mine}
        for k in mine:
            part = excess_bytes * moving[k] / sum(moving.values())
            room[k] = min(room[k], taken[k]) - math.ceil(part)

    def _taken(self, stage: PlannedStage, planner: StagePlanner) -> int:
        """The bytes of a plan, as `StagePlanner.planned` counts them."""
        waiting = planner.program.graph.forwards_in_flight - 1
        memory = stage.memory
        most = max(memory.forward_bytes, memory.backward_bytes, memory.rest_bytes)
        return memory.static_bytes + waiting * memory.held_bytes + most

    def _shared_bytes(self, graphs: Sequence[StageGraph]) -> list[int]:
        """For each device, the bytes of what several of its stages have, with what belongs to parameters."""
        found = [0] * self.schedule.devices
        for device in range(self.schedule.devices):
            seen: set[Storage] = set()
            for stage in self.schedule.stages_on(device):
                graph = graphs[stage].graph
                mine = {
                    entry.value.storage: entry
                    for entry in graph.inputs
                    if entry.value.storage in graph.static_storages
                }
                for storage, entry in mine.items():
                    if storage in seen:
                        found[device] += self._kept_bytes(entry)
                seen.update(mine)
        return found

    def _kept_bytes(self, entry: Input) -> int:
        """The bytes that a stage keeps for the whole step for a static input."""
        storage = entry.value.storage
        match entry.role:
            case InputRole.PARAMETER if entry.requires_grad:
                return self.options.optimizer_steps.kept_bytes(storage)
            case InputRole.INPUT:
                return storage.nbytes * self.schedule.micro_batches
            case _:
                return storage.nbytes

    # ------------------------------------------------------------------ refusals

    def _refusal(self, over_bytes: Sequence[int]) -> DeviceRefusal:
        """The refusal of the device that is furthest over its budget."""
        device = max(range(len(over_bytes)), key=over_bytes.__getitem__)
        stages = ", ".join(map(str, self.schedule.stages_on(device)))
        needed_bytes = self.devices.budget_bytes[device] + over_bytes[device]
        return self._needs(f"device {device} (stage {stages})", device, needed_bytes)

    def _refusal_of(self, planner: StagePlanner, needed_bytes: int) -> DeviceRefusal:
        """The refusal of a stage that does not fit alone."""
        index = planner.stage.index
        device = self.schedule.device_of[index]
        return self._needs(f"stage {index} on device {device}", device, needed_bytes)

    def _needs(self, what: str, device: int, needed_bytes: int) -> DeviceRefusal:
        held = ", ".join(str(self._in_flight[k]) for k in self.schedule.stages_on(device))
        error = BudgetError(
            "IRC486",
            f"{what} needs at least {format_bytes(needed_bytes)} ({needed_bytes:,} bytes), over the budget "
            f"of {format_bytes(self.devices.budget_bytes[device])}, with {held} micro-batches in flight",
            help="raise --budget, use more stages or smaller micro-batches, or a schedule that holds fewer "
            "of them (1f1b)",
            minimum_bytes=needed_bytes,
        )
        return DeviceRefusal(device, error)

    # ------------------------------------------------------------------ the pipeline

    def _pipeline(
        self,
        cut: Cut,
        stages: tuple[PlannedStage, ...],
        last: tuple[PlannedStage, ...],
        peaks: tuple[int, ...],
    ) -> PlannedPipeline:
        """The pipeline of planned stages, with its time."""
        devices = self.devices
        speeds = [devices.speeds[device] for device in self.schedule.device_of]
        costs, last_costs = (
            [stage.cost.at_speed(speed) for stage, speed in zip(each, speeds, strict=False)]
            for each in (stages, last)
        )
        transfers = transfers_of([stage.stage for stage in stages], devices)
        order = replace(self.schedule, overlapped=frozenset())  # each sends as it goes
        timeline = simulate_pipeline(
            order, costs, transfers, last_costs=last_costs or None, keeps_received=False
        )
        optimizer_steps = self.options.optimizer_steps
        whole = self.linear_order
        once = whole.seconds(0, len(whole.operations))
        update = optimizer_steps.seconds([whole.graph])
        stages_on = [[stages[k].stage.graph for k in self.schedule.stages_on(d)] for d in range(len(peaks))]
        return PlannedPipeline(
            self.schedule,
            devices,
            self.device_order,
            stages,
            last,
            cut.points,
            timeline,
            peaks,
            bound_seconds=lower_bound_seconds(whole, self.schedule, devices, update),
            single_seconds=once * self.schedule.micro_batches + update,
            seconds=0.0,
            update_seconds=tuple(
                optimizer_steps.seconds(graphs) / speed
                for graphs, speed in zip(stages_on, devices.speeds, strict=True)
            ),
        )
