"""Plans a pipeline: the cuts, what each stage keeps, and the proof of how long and how large a step is."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ...ir import (
    BudgetError,
    Input,
    InputRole,
    Storage,
    TimeLimitError,
    UsageError,
    format_bytes,
    verify_graph,
    verify_schedule,
)
from ...ir.pipeline.exchange import verify_exchanges
from ...ir.pipeline.memory import StageMemory, device_peak_bytes
from ...ir.pipeline.schedule import PipelineSchedule, in_flight
from ...ir.pipeline.timing import PipelineTimeline, Transfer, simulate_pipeline
from ..program import Program
from ..rewrites.release_gradients import ReleaseGradients
from .baselines import baseline_cuts
from .device_order import device_order
from .devices import Devices
from .ideal_order import ideal_order
from .linear_order import LinearOrder
from .linear_partition import LinearPartition, lower_bound_seconds
from .optimizer_steps import OptimizerSteps
from .stage_graphs import StageGraph, cut
from .stage_plan import PlannedStage, StagePlanner

__all__ = ["PipelineOptions", "PlannedPipeline", "linear_order_of", "plan_pipeline", "transfers_of"]


@dataclass(frozen=True)
class PipelineOptions:
    """How a pipeline is planned.

    Args:
        devices: What the stages run on.
        strategy: What stages compute again and copy, as `PlanMemory`.
        partition: Where the model is cut, of `PARTITIONS`: all but `best` are others' ways.
        checkpoint: Strategies of all micro-batches but the last, and of the last, that are taken whatever
            memory they need; None for plans within the budgets by `strategy`.
        time_limit: Seconds for all of it.
        optimizer_steps: What the steps of an optimizer take.
        cuts: Where to cut the line of forward operations, instead of looking for it.
    """

    devices: Devices
    strategy: str = "auto"
    partition: str = "best"
    checkpoint: tuple[str, str] | None = None
    time_limit: float = 60.0
    optimizer_steps: OptimizerSteps = field(default_factory=OptimizerSteps)
    cuts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PlannedPipeline:
    """Stages with their schedules, and what a step of all of them takes.

    Args:
        schedule: In which order each device works.
        devices: The devices, in the order in which the pipeline goes through them.
        device_order: Which of the given devices each of them is.
        stages: The stages.
        last_stages: The stages as they treat the last micro-batch, where that differs; else none.
        cuts: Where the operations of forward are cut, in an order in which stages follow each other.
        timeline: When everything happens.
        peak_bytes: The most that is alive on each device.
        bound_seconds: No partition of these devices takes less.
        single_seconds: Time of a step's operations, each once for each micro-batch, on one device of speed 1.
        seconds: How long planning took.
        update_seconds: Time of the optimizer's steps on each device, after its last micro-batch.
    """

    schedule: PipelineSchedule
    devices: Devices
    device_order: tuple[int, ...]
    stages: tuple[PlannedStage, ...]
    last_stages: tuple[PlannedStage, ...]
    cuts: tuple[int, ...]
    timeline: PipelineTimeline
    peak_bytes: tuple[int, ...]
    bound_seconds: float
    single_seconds: float
    seconds: float
    update_seconds: tuple[float, ...]

    @property
    def step_seconds(self) -> float:
        """Time of a step with the optimizer's."""
        ends = (actions[-1].end_seconds if actions else 0.0 for actions in self.timeline.lines)
        return max(end + more for end, more in zip(ends, self.update_seconds, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """The part of all devices' time in a step in which they do not compute."""
        busy = math.fsum((*self.timeline.busy_seconds, *self.update_seconds))
        return 1 - busy / (len(self.update_seconds) * self.step_seconds) if self.step_seconds else 0.0


def plan_pipeline(
    program: Program,
    schedule: PipelineSchedule,
    options: PipelineOptions,
    cost: Callable[[Program], Program],
    linear_order: LinearOrder | None = None,
) -> PlannedPipeline:
    """Cuts a training graph into the stages of a schedule, and plans each of them.

    Args:
        program: The graph of one micro-batch, as it was captured or with its convolutions split, with costs.
        schedule: Says how many stages and micro-batches there are.
        options: The rest.
        cost: Finds the costs of a stage's operations.
        linear_order: What `linear_order_of` finds for the program, where that is known.

    Raises:
        BudgetError: IRC486 when no partition was found whose stages fit.
        UsageError: IRC485 for more stages than operations.
    """
    started = time.monotonic()
    search = _Search(linear_order or linear_order_of(program, cost), schedule, options, cost, started)
    best = search.run()
    return replace(best, seconds=time.monotonic() - started)


@dataclass(frozen=True)
class _Cut:
    """Where a line is cut."""

    linear_order: LinearOrder
    places: tuple[int, ...]


class _DeviceRefusal(BudgetError):
    """Stages that do not fit on a device of the pipeline."""

    def __init__(self, device: int, error: BudgetError) -> None:
        super().__init__(error.code, error.message, help=error.help, minimum_bytes=error.minimum_bytes)
        self.device = device


class _Search:
    """The partitions that were tried, and the best of them."""

    def __init__(
        self,
        linear_order: LinearOrder,
        schedule: PipelineSchedule,
        options: PipelineOptions,
        cost: Callable[[Program], Program],
        started: float,
    ) -> None:
        self.schedule = schedule
        self.options = options
        self.cost = cost
        self.deadline = started + options.time_limit
        self.stage_seconds = _STAGE_SECONDS
        self.linear_order = linear_order
        if len(self.linear_order.cut_points) <= schedule.stages:
            raise UsageError(
                "IRC485",
                f"{schedule.stages} stages, and the model has {len(linear_order.cut_points) - 1} places to put them",
                help="ask for fewer stages (--stages, --chunks)",
            )
        given = LinearPartition(self.linear_order, schedule, options.devices, options.optimizer_steps)
        self.device_order = device_order(given, started + options.time_limit * _ORDERING)
        self.devices = options.devices.ordered(self.device_order)
        self.budgets = self.devices.budget_bytes
        self.partition = given.on(self.devices)
        self.split = schedule.splits_backward
        self.flights = in_flight(schedule)
        self.planners: dict[tuple[int, str], StagePlanner] = {}
        self.refusals: dict[_Cut, _DeviceRefusal | None] = {}
        """Cuts that were tried, the last one last, and why they do not fit."""
        self.best: tuple[_Cut, PlannedPipeline] | None = None
        self.late: TimeLimitError | None = None

    def run(self) -> PlannedPipeline:
        if self.options.cuts is not None:
            return self._planned(_Cut(self.linear_order, self.options.cuts))
        if self.options.partition != "best":
            stages, devices = self.schedule.stages, self.devices
            self._try(
                _Cut(
                    self.linear_order,
                    baseline_cuts(self.options.partition, self.linear_order, stages, devices),
                )
            )
        else:
            partitions = self._partitions()
            for partition in partitions:
                self._try_best(partition, anywhere=True)
            for partition in partitions:
                self._tighten(partition)
            for cut in self._smallest():
                if self.best is None or not self._is_over:
                    self._try(cut)
        if self.best is not None:
            return self._improved(*self.best) if self.options.partition == "best" else self.best[1]
        refusals = [error for error in self.refusals.values() if error is not None]
        if not refusals:
            assert self.late is not None
            raise self.late
        last = next(reversed(self.refusals))  # it is tried with any budgets, and the same with any equal ones
        raise self._with_enough(min(refusals, key=lambda error: error.minimum_bytes), last)

    def _smallest(self) -> list[_Cut]:
        """The cuts that ask for least: as a part of the budgets, and of equal ones."""
        equal = self.partition.on(replace(self.devices, budget_bytes=(1 << 30,) * len(self.budgets)))
        return [_Cut(self.linear_order, partition.smallest()) for partition in (self.partition, equal)]

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self.deadline

    def _partitions(self) -> list[LinearPartition]:
        """Of the line, and of the order in which the best chain of order ideals has its stages in turn."""
        found = [self.partition]
        left = (self.deadline - time.monotonic()) * _ORDERING
        order = ideal_order(self.linear_order, self.schedule, self.devices, left)
        if order is not None:
            linear_order = self.linear_order.in_order(order)
            found.append(
                LinearPartition(linear_order, self.schedule, self.devices, self.options.optimizer_steps)
            )
        return found

    def _tighten(self, partition: LinearPartition) -> None:
        """Tries the best cuts by estimates, which learn from each device that does not hold what they say."""
        for _ in range(_TRIES):
            refusal = self._try_best(partition, anywhere=False)
            if refusal is None or self._is_over:
                return
            budgets = list(partition.devices.budget_bytes)
            part = self.budgets[refusal.device] / refusal.minimum_bytes
            budgets[refusal.device] = math.floor(budgets[refusal.device] * min(part, _LEAST_TIGHTENING))
            partition = partition.on(replace(partition.devices, budget_bytes=tuple(budgets)))

    def _try_best(self, partition: LinearPartition, *, anywhere: bool) -> _DeviceRefusal | None:
        """Tries the best cuts by estimates; why they do not fit, if they do not."""
        cuts = partition.best(anywhere=anywhere)
        return None if cuts is None else self._try(_Cut(partition.linear_order, cuts))

    def _try(self, cut: _Cut) -> _DeviceRefusal | None:
        """Plans these cuts, unless that was done; why they do not fit, if they do not."""
        if cut in self.refusals:
            self.refusals[cut] = known = self.refusals.pop(cut)
            return known
        self.refusals[cut] = None
        left = self.deadline - time.monotonic()
        try:
            found = self._planned(cut, time.monotonic() + left * _TRYING)
        except _DeviceRefusal as error:
            self.refusals[cut] = error
        except TimeLimitError as error:
            self.late = error
        else:
            if self.best is None or found.step_seconds < self.best[1].step_seconds:
                self.best = cut, found
        return self.refusals[cut]

    def _with_enough(self, refusal: BudgetError, cut: _Cut) -> BudgetError:
        """The refusal with a budget that a plan was found for, if all devices have it."""
        asked = self.budgets
        self.stage_seconds = _FITTING_SECONDS
        budget_bytes = refusal.minimum_bytes
        try:
            for _ in range(_TRIES):
                self.budgets = (budget_bytes,) * len(asked)
                try:
                    self._planned(cut)
                except BudgetError as error:
                    budget_bytes = max(error.minimum_bytes, round(budget_bytes * 1.03))
                except TimeLimitError:
                    break
                else:
                    refusal.minimum_bytes = budget_bytes
                    found = f"{format_bytes(budget_bytes)} ({budget_bytes:,} bytes)"
                    refusal.add_note(f"a plan was found for {found} on each device")
                    break
        finally:
            self.budgets = asked
            self.stage_seconds = _STAGE_SECONDS
        return refusal

    def _improved(self, at: _Cut, best: PlannedPipeline) -> PlannedPipeline:
        """Moves single cuts to the next place, as long as the step becomes shorter."""
        linear_order = at.linear_order
        tried = {best.cuts}
        found = True
        while found and time.monotonic() < self.deadline:
            found = False
            for cuts in _neighbours(best.cuts, linear_order.cut_points):
                if cuts in tried or time.monotonic() >= self.deadline:
                    continue
                tried.add(cuts)
                cut = _Cut(linear_order, cuts)
                if self._least_seconds(cut) >= best.step_seconds:
                    continue
                try:
                    candidate = self._planned(cut)
                except (BudgetError, TimeLimitError):
                    continue
                if candidate.step_seconds < best.step_seconds * (1 - 1e-9):
                    best, found = candidate, True
        return best

    def _least_seconds(self, cut: _Cut) -> float:
        """What a step takes with these cuts if nothing is computed again: the slowest device's work."""
        busy = [0.0] * self.schedule.devices
        pairs = _pairs(cut.places, len(cut.linear_order.operations))
        for device, pair in zip(self.schedule.device_of, pairs, strict=True):
            busy[device] += cut.linear_order.seconds(*pair) / self.devices.speeds[device]
        return max(busy) * self.schedule.micro_batches

    def _planned(self, cut: _Cut, deadline: float | None = None) -> PlannedPipeline:
        """The stages of these cuts, each within what the others on its device leave.

        Args:
            cut: Where.
            deadline: By when; that of all if None.

        Raises:
            BudgetError: IRC486.
        """
        graphs = self._stages(cut)
        planners = [self._planner(graph) for graph in graphs]
        shared = self._shared_bytes(graphs)
        if self.options.checkpoint is not None:
            return self._checkpointed(cut.places, planners, shared, *self.options.checkpoint)
        room = [self.budgets[device] for device in self.schedule.device_of]
        over = [0]
        before: tuple[int, ...] = ()
        for _ in range(_TRIES):
            stages = [self._plan(planner, room, k, deadline) for k, planner in enumerate(planners)]
            peaks = self._peaks(stages, shared)
            over = self._over(peaks)
            if not any(over):
                return self._result(cut.places, tuple(stages), (), peaks)
            if peaks == before:
                break  # with less room they hold no less
            before = peaks
            for device, excess_bytes in enumerate(over):
                if excess_bytes:
                    self._lower(room, stages, planners, device, excess_bytes)
        raise self._refusal(over)

    def _checkpointed(
        self,
        cuts: tuple[int, ...],
        planners: Sequence[StagePlanner],
        shared: Sequence[int],
        strategy: str,
        last_strategy: str,
    ) -> PlannedPipeline:
        """The stages of these cuts by strategies that ask for no budget.

        Raises:
            BudgetError: IRC486.
        """
        stages = tuple(_verified(planner.by_strategy(strategy)) for planner in planners)
        last = ()
        if last_strategy != strategy:
            last = tuple(_verified(planner.by_strategy(last_strategy)) for planner in planners)
        peaks = self._peaks(stages, shared, last)
        if any(over := self._over(peaks)):
            raise self._refusal(over)
        return self._result(cuts, stages, last, peaks)

    def _peaks(
        self, stages: Sequence[PlannedStage], shared: Sequence[int], last: Sequence[PlannedStage] = ()
    ) -> tuple[int, ...]:
        """The most bytes on each device."""
        memory, last_memory = (self._memory(each) for each in (stages, last))
        alive = device_peak_bytes(self.schedule, memory, shared, last_memory or None)
        return tuple(peak + _STEP_BYTES * self.schedule.micro_batches for peak in alive)

    def _memory(self, stages: Sequence[PlannedStage]) -> list[StageMemory]:
        """That of each stage, where neighbours on one device share what one hands to the other."""
        found = [stage.memory for stage in stages]
        for first, second in itertools.pairwise(range(len(stages))):
            if self.schedule.device_of[first] == self.schedule.device_of[second]:
                found[second] = stages[second].after(stages[first])
        return found

    def _over(self, peaks: Sequence[int]) -> list[int]:
        return [max(peak - budget, 0) for peak, budget in zip(peaks, self.budgets, strict=True)]

    def _lower(
        self,
        room: list[int],
        stages: Sequence[PlannedStage],
        planners: Sequence[StagePlanner],
        device: int,
        excess_bytes: int,
    ) -> None:
        """Takes from the stages of a device what it is over, from each by what it holds beside statics."""
        mine = self.schedule.stages_on(device)
        taken = {k: self._taken(stages[k], planners[k]) for k in mine}
        moving = {k: max(taken[k] - stages[k].memory.static_bytes, 1) for k in mine}
        for k in mine:
            part = excess_bytes * moving[k] / sum(moving.values())
            room[k] = min(room[k], taken[k]) - math.ceil(part)

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
        """What a stage keeps for the whole step of a static input."""
        storage = entry.value.storage
        match entry.role:
            case InputRole.PARAMETER if entry.requires_grad:
                return self.options.optimizer_steps.kept_bytes(storage)
            case InputRole.INPUT:
                return storage.nbytes * self.schedule.micro_batches
            case _:
                return storage.nbytes

    def _stages(self, at: _Cut) -> tuple[StageGraph, ...]:
        forward = at.linear_order.stages(at.places)
        return cut(at.linear_order.graph, forward, self.schedule.stages, split_backward=self.split)

    def _planner(self, graph: StageGraph) -> StagePlanner:
        """What plans a stage; what it exchanges depends on the cuts of other stages too."""
        key = (graph.index, str(graph.graph))
        if key not in self.planners:
            self.planners[key] = StagePlanner(
                graph,
                self.cost,
                self.flights[graph.index].until_weight,
                self.schedule.micro_batches,
                self.options.optimizer_steps,
            )
        return self.planners[key]

    def _taken(self, stage: PlannedStage, planner: StagePlanner) -> int:
        """What a plan takes as `StagePlanner.planned` counts it."""
        waiting = planner.program.graph.forwards_in_flight - 1
        memory = stage.memory
        most = max(memory.forward_bytes, memory.backward_bytes, memory.rest_bytes)
        return memory.static_bytes + waiting * memory.held_bytes + most

    def _plan(
        self, planner: StagePlanner, room: list[int], stage: int, deadline: float | None
    ) -> PlannedStage:
        """A stage within its room; where that is less than it needs, the room becomes what it needs.

        Raises:
            BudgetError: IRC486 where that is more than its device has.
        """
        left = (deadline or self.deadline) - time.monotonic()
        time_limit = max(left / (2 * self.schedule.stages), self.stage_seconds)
        try:
            planned = planner.planned(room[stage], self.options.strategy, time_limit)
        except (BudgetError, TimeLimitError) as error:
            least_bytes = self._least_bytes(planner, time_limit, error)
            if least_bytes > self.budgets[self.schedule.device_of[stage]]:
                raise self._refusal_of(planner, least_bytes) from error
            room[stage] = least_bytes
            try:
                planned = planner.planned(least_bytes, self.options.strategy, time_limit)
            except BudgetError as still:
                raise self._refusal_of(planner, still.minimum_bytes + planner.beside_bytes) from still
        return _verified(planned)

    def _least_bytes(
        self, planner: StagePlanner, time_limit: float, error: BudgetError | TimeLimitError
    ) -> int:
        """The smallest room for a stage that was found, by the strategy that was asked for."""
        if self.options.strategy != "auto" and isinstance(error, BudgetError):
            return error.minimum_bytes + planner.beside_bytes
        return planner.minimum_bytes(time_limit)

    def _refusal(self, over_bytes: Sequence[int]) -> _DeviceRefusal:
        """What to tell the user of the device that is furthest over."""
        device = max(range(len(over_bytes)), key=over_bytes.__getitem__)
        stages = ", ".join(map(str, self.schedule.stages_on(device)))
        needed_bytes = self.budgets[device] + over_bytes[device]
        return self._needs(f"device {device} (stage {stages})", device, needed_bytes)

    def _refusal_of(self, planner: StagePlanner, needed_bytes: int) -> _DeviceRefusal:
        """What to tell the user of a stage that does not fit alone."""
        index = planner.stage.index
        device = self.schedule.device_of[index]
        return self._needs(f"stage {index} on device {device}", device, needed_bytes)

    def _needs(self, what: str, device: int, needed_bytes: int) -> _DeviceRefusal:
        held = ", ".join(str(self.flights[k].until_weight) for k in self.schedule.stages_on(device))
        error = BudgetError(
            "IRC486",
            f"{what} needs at least {format_bytes(needed_bytes)} ({needed_bytes:,} bytes), over the budget "
            f"of {format_bytes(self.budgets[device])}, with {held} micro-batches in flight",
            help="raise --budget, use more stages or smaller micro-batches, or a schedule that holds fewer "
            "of them (1f1b)",
            minimum_bytes=needed_bytes,
        )
        return _DeviceRefusal(device, error)

    def _result(
        self,
        cuts: tuple[int, ...],
        stages: tuple[PlannedStage, ...],
        last: tuple[PlannedStage, ...],
        peaks: tuple[int, ...],
    ) -> PlannedPipeline:
        verify_exchanges([stage.schedule.graph for stage in stages])
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
        once = self.linear_order.seconds(0, len(self.linear_order.operations))
        update = optimizer_steps.seconds([self.linear_order.graph])
        return PlannedPipeline(
            self.schedule,
            devices,
            self.device_order,
            stages,
            last,
            cuts,
            timeline,
            peaks,
            bound_seconds=lower_bound_seconds(self.linear_order, self.schedule, devices, update),
            single_seconds=once * self.schedule.micro_batches + update,
            seconds=0.0,
            update_seconds=tuple(
                optimizer_steps.seconds(stages[k].stage.graph for k in self.schedule.stages_on(device))
                / speed
                for device, speed in enumerate(devices.speeds)
            ),
        )


def linear_order_of(program: Program, cost: Callable[[Program], Program]) -> LinearOrder:
    """The line of a program with costs, with the time of adding gradients to those of other micro-batches."""
    assert program.costs is not None, "costs come first"
    released = cost(ReleaseGradients("accumulate").run(replace(program, costs=None)))
    assert released.costs is not None
    seconds = {node.operands[0].storage: released.costs.seconds[node] for node in released.graph.releases}
    return LinearOrder(program.graph, program.costs, seconds)


_STEP_BYTES = 64
"""What a step keeps for each micro-batch beside its stages: its number, its loss and the like."""

_STAGE_SECONDS = 1.0
"""The least time for a stage's plan, when there is little left for all."""

_FITTING_SECONDS = 0.2
"""The same where a plan has only to fit."""

_TRYING = 0.3
"""The part of the time left that may go into one of several partitions."""

_LEAST_TIGHTENING = 0.99
"""What a device's budget is multiplied with at the most, in estimates, when these were too low."""

_ORDERING = 0.2
"""The part of the time that may go into an order of devices, and that of the rest into one of forward."""

_TRIES = 8
"""So often the budgets of stages are lowered by what their device is over."""


def _verified(planned: PlannedStage) -> PlannedStage:
    """The same, found valid.

    Raises:
        VerificationError: When it is not.
    """
    costs = planned.program.costs
    assert costs is not None
    verify_graph(planned.schedule.graph)
    verify_schedule(planned.schedule, costs.workspace_bytes, tiers=planned.program.tiers)
    return planned


def _pairs(cuts: Sequence[int], end: int) -> list[tuple[int, int]]:
    return list(zip((0, *cuts), (*cuts, end), strict=True))


def _neighbours(cuts: tuple[int, ...], places: Sequence[int]) -> list[tuple[int, ...]]:
    """The same cuts with one of them at the next place, either way."""
    index = {place: k for k, place in enumerate(places)}
    found: list[tuple[int, ...]] = []
    for k, place in enumerate(cuts):
        for move in (-1, 1):
            moved = places[index[place] + move] if place in index else place
            candidate = (*cuts[:k], moved, *cuts[k + 1 :])
            if all(a < b for a, b in _pairs(candidate, places[-1])):
                found.append(candidate)
    return found


def transfers_of(stages: Sequence[StageGraph], devices: Devices) -> list[Transfer]:
    """What stages send each other for each micro-batch, with its time on the link."""
    found: list[Transfer] = []
    for stage in stages[:-1]:
        there, back = stage.after.forward_bytes, stage.after.backward_bytes
        following = stage.index + 1
        found.append(Transfer(stage.index, following, there, devices.transfer_seconds(there)))
        found.append(Transfer(following, stage.index, back, devices.transfer_seconds(back)))
    return found
