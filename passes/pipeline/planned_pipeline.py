"""The options that a pipeline is planned with, and the planned pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...ir.pipeline.schedule import PipelineSchedule
from ...ir.pipeline.timing import PipelineTimeline, Transfer
from ..remat.choice import GAP
from .devices import Devices
from .optimizer_steps import OptimizerSteps
from .stage_graphs import StageGraph
from .stage_plan import PlannedStage

__all__ = ["PipelineOptions", "PlannedPipeline", "transfers_of"]


@dataclass(frozen=True)
class PipelineOptions:
    """The options that a pipeline is planned with.

    Args:
        devices: The devices that the stages run on.
        strategy: The strategy of each stage, as of `PlanMemory`.
        partition: The way to cut the model, one of `PARTITIONS`: all but `best` are others' ways.
        checkpoint: Strategies of all micro-batches but the last, and of the last, that are taken whatever
            memory they need; None for plans within the budgets by `strategy`.
        time_limit: Seconds for the whole plan.
        optimizer_steps: The memory and time of the steps of an optimizer.
        cuts: The positions at which to cut forward, instead of a search for them.
        gap: The distance from the best at which the search for the plan of a stage stops.
    """

    devices: Devices
    strategy: str = "auto"
    partition: str = "best"
    checkpoint: tuple[str, str] | None = None
    time_limit: float = 60.0
    optimizer_steps: OptimizerSteps = field(default_factory=OptimizerSteps)
    cuts: tuple[int, ...] | None = None
    gap: float = GAP


@dataclass(frozen=True)
class PlannedPipeline:
    """Stages with their schedules, and the time and memory of a step of all of them.

    Args:
        schedule: The order in which each device works.
        devices: The devices, in the order in which the pipeline goes through them.
        device_order: The number of each of them among the given devices.
        stages: The stages.
        last_stages: The stages as they treat the last micro-batch, if that differs; else none.
        cuts: The positions at which the operations of forward are cut, in the order of the stages.
        timeline: The times of all actions.
        peak_bytes: The most that is alive on each device.
        bound_seconds: A lower bound of the step of every partition over these devices.
        single_seconds: The time of a step's operations, each once for each micro-batch, on one device of
            speed 1.
        seconds: The time that planning took.
        update_seconds: The time of the optimizer's steps on each device, after its last micro-batch.
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
        """The time of a step, with the optimizer's steps."""
        ends = (actions[-1].end_seconds if actions else 0.0 for actions in self.timeline.lines)
        return max(end + more for end, more in zip(ends, self.update_seconds, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """The part of all devices' time in a step in which they do not compute."""
        busy = math.fsum((*self.timeline.busy_seconds, *self.update_seconds))
        return 1 - busy / (len(self.update_seconds) * self.step_seconds) if self.step_seconds else 0.0


def transfers_of(stages: Sequence[StageGraph], devices: Devices) -> list[Transfer]:
    """The transfers between stages for each micro-batch, with their times on the link."""
    found: list[Transfer] = []
    for stage in stages[:-1]:
        there, back = stage.after.forward_bytes, stage.after.backward_bytes
        following = stage.index + 1
        found.append(Transfer(stage.index, following, there, devices.transfer_seconds(there)))
        found.append(Transfer(following, stage.index, back, devices.transfer_seconds(back)))
    return found
