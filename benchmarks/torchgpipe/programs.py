"""Models of any size as programs on a described machine, and pipelines of them; nothing runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch._subclasses.fake_tensor import FakeTensorMode

from irc.compiler.pipeline.plan import captured_micro_batch
from irc.ir import InputRole
from irc.passes import Cost, Machine, Program, SplitConvolutions, machine_named
from irc.passes.costs.table import StepCost
from irc.passes.pipeline import (
    Devices,
    OptimizerSteps,
    PipelineOptions,
    PlannedPipeline,
    PlannedStage,
    pipeline_schedule,
    plan_pipeline,
)

from ..models.registry import Example

__all__ = ["MACHINE", "Simulation", "again_seconds", "model_bytes"]

MACHINE: Machine = machine_named("p40")
"""torchgpipe's benchmarks ran on eight of these."""

_LINK_BYTES_PER_SECOND = 10e9
_LINK_SECONDS = 20e-6
"""What is assumed of the link between two devices: PCIe with 16 lanes, generation 3."""


@dataclass(frozen=True)
class Simulation:
    """One micro-batch of a model as a graph with estimated costs.

    Args:
        program: The graph, with convolutions split, and its costs on `MACHINE`.
        capture_seconds: How long capturing took.
    """

    program: Program
    capture_seconds: float

    @staticmethod
    def of(make: Callable[[], Example]) -> Simulation:
        """Captures a model that is made of tensors without data: its parameters take no memory.

        Args:
            make: Makes the model with the arguments of one micro-batch.
        """
        started = time.monotonic()
        with FakeTensorMode(allow_non_fake_inputs=True):
            module, args = make()
        captured = captured_micro_batch(module, args, None)
        took = time.monotonic() - started
        program = replace(SplitConvolutions(transpose=False).run(Program(captured.graph)), original=None)
        return Simulation(Simulation._cost(program), took)

    @staticmethod
    def _cost(program: Program) -> Program:
        return Cost(profile=MACHINE.name).run(program)

    def planned(
        self,
        budget_bytes: Sequence[int],
        micro_batches: int,
        *,
        schedule: str = "1f1b",
        checkpoint: tuple[str, str] | None = None,
        optimizer_steps: OptimizerSteps | None = None,
        time_limit: float = 60.0,
    ) -> PlannedPipeline:
        """The pipeline of the model on as many equal devices as there are budgets.

        Args:
            budget_bytes: Of each device.
            micro_batches: How many there are in a step.
            schedule: As on the command line.
            checkpoint: As in `PipelineOptions`.
            optimizer_steps: What the steps of an optimizer take; nothing if None.
            time_limit: Seconds for planning.

        Raises:
            BudgetError: IRC486.
        """
        count = len(budget_bytes)
        order = pipeline_schedule(schedule, count, micro_batches, None)
        devices = Devices(tuple(budget_bytes), (1.0,) * count, _LINK_BYTES_PER_SECOND, _LINK_SECONDS)
        options = PipelineOptions(
            devices,
            checkpoint=checkpoint,
            time_limit=time_limit,
            optimizer_steps=optimizer_steps or OptimizerSteps(),
        )
        return plan_pipeline(self.program, order, options, self._cost)

    def rmsprop(self) -> OptimizerSteps:
        """What torch's RMSprop takes: a mean for each number, and as much again during a parameter's step.

        Its time is that of seven passes over the parameter's bytes: gradient, mean (twice), root (twice) and
        parameter (twice).
        """
        inputs = self.program.graph.inputs
        trained = {i.value.storage for i in inputs if i.role is InputRole.PARAMETER and i.requires_grad}
        return OptimizerSteps(
            {s: StepCost(s.nbytes, s.nbytes, MACHINE.seconds(0, 7 * s.nbytes)) for s in trained}
        )


def model_bytes(planned: PlannedPipeline) -> list[int]:
    """For each device 12 bytes for each of its parameters."""
    found = [0] * planned.schedule.devices
    for stage, device in zip(planned.stages, planned.schedule.device_of, strict=True):
        inputs = stage.schedule.graph.inputs
        found[device] += 3 * sum(
            s.nbytes for s in {i.value.storage for i in inputs if i.role is InputRole.PARAMETER}
        )
    return found


def again_seconds(planned: PlannedPipeline) -> float:
    """Time of what is computed a second time in a step, of all devices together."""
    every = sum(map(_again_seconds, planned.stages))
    last = sum(map(_again_seconds, planned.last_stages or planned.stages))
    return every * (planned.schedule.micro_batches - 1) + last


def _again_seconds(stage: PlannedStage) -> float:
    assert stage.program.costs is not None
    seconds = stage.program.costs.seconds
    once = sum(seconds[node] for node in stage.schedule.graph.operations)
    return max(sum(seconds[node] for node in stage.schedule.computed) - once, 0.0)
