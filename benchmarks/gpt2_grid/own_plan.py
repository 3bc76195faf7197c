"""Plans of our own for the grid's model, and a run of one on ranks of this machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from irc.compiler.optimizers import parse_optimizer
from irc.compiler.pipeline.api import Pipeline
from irc.compiler.pipeline.micro_batches import micro_batches_of
from irc.compiler.pipeline.plan import captured_micro_batch, optimizer_steps_of, plan_stages
from irc.compiler.pipeline.request import CHECKPOINT_MODES, PipelineRequest
from irc.compiler.pipeline.summary import plan_of
from irc.compiler.source import Source
from irc.frontends.torch import Captured
from irc.ir import BudgetError, Compute
from irc.ir.pipeline.plan import PipelinePlan
from irc.passes import Cost, Program
from irc.passes.pipeline import Devices, PipelineOptions, pipeline_schedule, plan_pipeline
from irc.passes.pipeline.placement import Dataflow

from ..models.gpt2_grid import trained
from ..pipeline_runs import trained_under_torchrun
from .published import PLANS

__all__ = ["OwnPlan", "Planning", "RankRun", "run_on_ranks"]

_FREE_BYTES = 2**50
_OPTIMIZER = "sgd:lr=0.01,momentum=0.9,nesterov=true,weight_decay=0.0001"
"""That of the published runs: momentum makes 12 bytes a parameter."""


@dataclass(frozen=True)
class OwnPlan:
    """A plan that was asked for, or why there is none.

    Args:
        schedule: The order of work.
        partition: How the model is divided, in words.
        budget_bytes: Of each device; None for as much as it takes.
        plan: Its certificate; None where none was found.
        pipeline: What can run; None for plans that are made to compare with.
        minimum_bytes: The budget that a plan was found for, where there is none for `budget_bytes`.
    """

    schedule: str
    partition: str
    budget_bytes: int | None
    plan: PipelinePlan | None
    pipeline: Pipeline | None = None
    minimum_bytes: int = 0

    @property
    def draws_again(self) -> bool:
        """Whether masks of dropout are drawn again in backward."""
        schedules = () if self.pipeline is None else self.pipeline.stages.schedules
        runs = Counter(i.node for s in schedules for i in s.instructions if isinstance(i, Compute))
        return any(count > 1 and node.generator_state is not None for node, count in runs.items())


@dataclass(frozen=True)
class RankRun:
    """A plan that ran on ranks of this machine.

    Args:
        schedule: The order of work.
        predicted_bytes: The peak of each rank.
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
        self.costs = "measured" if is_measured else "analytic"
        self.model, self.args = trained()
        self.captured: Captured = captured_micro_batch(
            self.model, micro_batches_of(self.args, micro_batches)[0], None
        )

    def plan(self, schedule: str, budget_bytes: int) -> OwnPlan:
        """The shortest step found within a budget for each device, optimizer included."""
        request = PipelineRequest(
            self.devices,
            self.micro_batches,
            budget_bytes,
            schedule,
            time_limit=self.time_limit,
            costs=self.costs,
            optimizer=parse_optimizer(_OPTIMIZER),
        )
        try:
            pipeline = Pipeline(self.model, self.captured, plan_stages(self.captured, request))
        except BudgetError as error:
            return OwnPlan(schedule, "planned", budget_bytes, None, minimum_bytes=error.minimum_bytes)
        return OwnPlan(schedule, "planned", budget_bytes, pipeline.plan, pipeline)

    def even(self, schedule: str, mode: str) -> OwnPlan:
        """Divided as the published runs are, without a budget.

        Args:
            schedule: The order of work.
            mode: Of `CHECKPOINT_MODES`.
        """
        cost = Cost(profile="cpu") if self.costs == "analytic" else Cost(repeats=3)
        program = cost.run(Program(self.captured.graph))
        planned = plan_pipeline(
            program,
            pipeline_schedule(schedule, self.devices, self.micro_batches, None),
            PipelineOptions(
                Devices((_FREE_BYTES,) * self.devices, (1.0,) * self.devices, 10e9, 20e-6),
                checkpoint=CHECKPOINT_MODES[mode],
                optimizer_steps=optimizer_steps_of(program.graph, parse_optimizer(_OPTIMIZER)),
                cuts=self._even_cuts(),
            ),
            cost.run,
        )
        plan = plan_of(planned, [""] * self.devices, _OPTIMIZER)
        return OwnPlan(schedule, f"even, checkpoint {mode}", None, plan)

    def least(self, schedule: str) -> OwnPlan:
        """A plan for the budget that is named where a budget is refused that nothing fits into."""
        found = self.plan(schedule, self.plan(schedule, 1).minimum_bytes)
        return replace(found, partition="planned, least budget")

    def _even_cuts(self) -> tuple[int, ...]:
        """Where the line of operations is cut by modules, as the published runs do."""
        places: dict[int, int] = {}
        for place, node in enumerate(Dataflow(self.captured.graph).forward):
            parts = (node.at.module if node.at is not None and node.at.module else "").split(".")
            if parts[0] == "model" and len(parts) > 1:
                places.setdefault(int(parts[1]), place)
        plan = PLANS[self.devices]
        return tuple(places[sum(plan[: stage + 1])] for stage in range(self.devices - 1))


def run_on_ranks(planning: Planning, own: OwnPlan) -> RankRun:
    """Two steps of a plan under torchrun on this machine.

    Raises:
        IrcError: IRC489 when the ranks end without a report.
    """
    assert own.pipeline is not None
    source = Source("benchmarks.models.gpt2_grid:trained")
    report = trained_under_torchrun(own.pipeline, source, planning.args, planning.devices)
    return RankRun(
        own.schedule,
        own.pipeline.plan.peak_bytes,
        tuple(rank["measured_bytes"] for rank in report["ranks"]),
        tuple(report["losses"]),
    )
