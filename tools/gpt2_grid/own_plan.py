"""Plans of our own for the grid's model, and a run of one on ranks of this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...frontends.torch import Captured
from ...ir import BudgetError
from ...passes import Cost, Program, SplitDropout
from ...passes.pipeline import Devices, PipelineOptions, PlannedPipeline, pipeline_schedule, plan_pipeline
from ...passes.pipeline.placement import Dataflow
from ..loading import Source
from ..pipeline import Pipeline, Stages, captured_micro_batch, micro_batches_of
from ..pipeline_runs import trained_under_torchrun
from ..pipeline_summary import plan_of
from .model import trained
from .published import PLANS

__all__ = ["OwnPlan", "Planning", "RankRun", "run_on_ranks"]

_FREE_BYTES = 2**50
_MIB = 2**20
_STEP = 29 / 30
_MOMENTUM = 1.0
"""SGD with momentum keeps as many bytes as there are of parameters: 12 bytes a parameter in all."""


@dataclass(frozen=True)
class OwnPlan:
    """A plan that was asked for, or why there is none.

    Args:
        schedule: The order of work.
        partition: How the model is divided, in words.
        budget_bytes: Of each device; None for as much as it takes.
        planned: The plan; None where none was found.
        minimum_bytes: The budget that a plan was found for, where there is none for `budget_bytes`.
        is_apart: Whether `SplitDropout` has taken dropout apart.
    """

    schedule: str
    partition: str
    budget_bytes: int | None
    planned: PlannedPipeline | None
    minimum_bytes: int = 0
    is_apart: bool = False


@dataclass(frozen=True)
class RankRun:
    """A plan that ran on ranks of this machine.

    Args:
        schedule: The order of work.
        predicted_bytes: The peak of each rank, without what the optimizer keeps.
        measured_bytes: The same from allocator events.
        losses: Of the steps.
    """

    schedule: str
    predicted_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]
    losses: tuple[float, ...]


class Planning:
    """Plans of the model that share one captured micro-batch.

    Args:
        devices: How many.
        micro_batches: In how many parts the batch of 64 is divided.
        time_limit: Seconds for each plan.
        is_measured: Measure what operations take, here; else it is estimated.
    """

    def __init__(
        self, devices: int, micro_batches: int, time_limit: float, *, is_measured: bool = True
    ) -> None:
        self.devices, self.micro_batches, self.time_limit = devices, micro_batches, time_limit
        self.model, self.args = trained()
        self.captured: Captured = captured_micro_batch(
            self.model, micro_batches_of(self.args, micro_batches)[0], None
        )
        self.cost = Cost(repeats=3) if is_measured else Cost(profile="cpu")
        self.whole = self.cost.run(Program(self.captured.graph))
        self.apart = self.cost.run(replace(SplitDropout().run(self.whole), original=None))

    def even(self, schedule: str, strategy: str) -> OwnPlan:
        """Divided as the published runs are, without a budget.

        Args:
            schedule: The order of work.
            strategy: As `SelectCheckpoints`; where it is `keep-all`, dropout stays whole.
        """
        is_kept = strategy == "keep-all"
        program = self.whole if is_kept else self.apart
        planned = self._planned(program, schedule, _FREE_BYTES, strategy, self._even_cuts(program))
        name = "even, all kept" if is_kept else "even, all computed again"
        return OwnPlan(schedule, name, None, planned, is_apart=not is_kept)

    def plan(self, schedule: str, budget_bytes: int) -> OwnPlan:
        """The shortest step found within a budget for each device, with the momentum in it.

        Dropout is taken apart where nothing is found with it whole.
        """
        least_bytes: list[int] = []
        for program in (self.whole, self.apart):
            try:
                planned = self._planned(program, schedule, budget_bytes)
            except BudgetError as error:
                least_bytes.append(error.minimum_bytes)
            else:
                is_apart = program is self.apart
                return OwnPlan(schedule, "planned", budget_bytes, planned, is_apart=is_apart)
        return OwnPlan(schedule, "planned", budget_bytes, None, min(least_bytes))

    def _planned(
        self,
        program: Program,
        schedule: str,
        budget_bytes: int,
        strategy: str = "auto",
        cuts: tuple[int, ...] | None = None,
    ) -> PlannedPipeline:
        order = pipeline_schedule(schedule, self.devices, self.micro_batches, None)
        options = PipelineOptions(
            Devices((budget_bytes,) * self.devices, (1.0,) * self.devices, 10e9, 20e-6),
            strategy,
            self.time_limit,
            _MOMENTUM,
            cuts,
        )
        return plan_pipeline(program, order, options, self.cost.run)

    def least(self, schedule: str) -> OwnPlan:
        """A plan for the smallest budget that one was found for, in steps of a thirtieth."""
        budget_bytes = self.plan(schedule, _MIB).minimum_bytes
        found = self.plan(schedule, budget_bytes)
        while found.planned is not None:
            tried = self.plan(schedule, round(budget_bytes * _STEP))
            if tried.planned is None:
                break
            budget_bytes, found = round(budget_bytes * _STEP), tried
        return replace(found, partition="planned, least budget")

    def _even_cuts(self, program: Program) -> tuple[int, ...]:
        """Where the line of operations is cut by modules, as the published runs do."""
        places: dict[int, int] = {}
        for place, node in enumerate(Dataflow(program.graph).forward):
            parts = (node.at.module if node.at is not None and node.at.module else "").split(".")
            if parts[0] == "model" and len(parts) > 1:
                places.setdefault(int(parts[1]), place)
        plan = PLANS[self.devices]
        return tuple(places[sum(plan[: stage + 1])] for stage in range(self.devices - 1))


def run_on_ranks(planning: Planning, own: OwnPlan) -> RankRun:
    """Two steps of a plan under torchrun on this machine; `irc run` trains without momentum.

    Raises:
        IrcError: IRC489 when the ranks end without a report.
    """
    assert own.planned is not None and own.budget_bytes is not None
    planned, captured = own.planned, planning.captured
    stages = Stages(
        planned.schedule,
        tuple(stage.schedule for stage in planned.stages),
        captured.signature.deliveries,
        captured.constants,
        plan_of(planned, (own.budget_bytes,) * planning.devices),
    )
    pipeline = Pipeline(planning.model, captured, stages)
    source = Source("irc.tools.gpt2_grid.model:trained")
    report = trained_under_torchrun(pipeline, source, planning.args, planning.devices)
    momentum = [round(_MOMENTUM * stage.parameter_bytes) for stage in stages.plan.stages]
    return RankRun(
        own.schedule,
        tuple(peak - kept for peak, kept in zip(planned.peak_bytes, momentum, strict=True)),
        tuple(rank["measured_bytes"] for rank in report["ranks"]),
        tuple(report["losses"]),
    )
