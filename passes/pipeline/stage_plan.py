"""Plans what one stage keeps, computes again or copies, within its part of a device's budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...ir import PAUSE, Compute, Graph, InputRole, Loss, Schedule
from ...ir.live_forwards import loss_waiting_bytes
from ...ir.pipeline.memory import StageMemory, borrowed_storages, stage_memory
from ...ir.pipeline.timing import StageCost
from ...ir.timing import step_times
from ..plan_memory import PlanMemory
from ..program import Program
from ..remat.choice import GAP
from ..remat.planner import Planner
from ..rewrites.hold_forwards import HoldForwards
from ..rewrites.release_gradients import ReleaseGradients
from .optimizer_steps import OptimizerSteps
from .stage_graphs import StageGraph

__all__ = ["PlannedStage", "StagePlanner"]


_ENOUGH_BYTES = 1 << 60
"""A budget that every schedule is within: a strategy's own schedule is asked for, without a search."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage with its schedule.

    Args:
        stage: The part of the model.
        program: The graph, costs, schedule and certificate of the stage.
        memory: The memory that the stage takes on its device.
        cost: The time that the stage takes.
    """

    stage: StageGraph
    program: Program
    memory: StageMemory
    cost: StageCost

    @property
    def schedule(self) -> Schedule:
        """The schedule of the stage."""
        assert self.program.schedule is not None
        return self.program.schedule

    def after(self, lender: PlannedStage) -> StageMemory:
        """The memory of this stage behind the one before it, on the same device."""
        borrowed = borrowed_storages(lender.schedule, self.schedule)
        if not borrowed:
            return self.memory
        assert self.program.costs is not None
        workspace_bytes = self.program.costs.workspace_bytes
        less = stage_memory(self.schedule, workspace_bytes, micro_batches=1, borrowed=borrowed)
        return replace(self.memory, borrowing=less)


class StagePlanner:
    """Plans one stage for several budgets.

    Args:
        stage: The part of the model.
        cost: Finds the costs of a program's operations.
        in_flight: The most micro-batches whose backward has not ended.
        micro_batches: The number of micro-batches in a step.
        optimizer_steps: The memory and time of the steps of an optimizer.
    """

    def __init__(
        self,
        stage: StageGraph,
        cost: Callable[[Program], Program],
        in_flight: int,
        micro_batches: int,
        optimizer_steps: OptimizerSteps,
    ) -> None:
        self.stage = stage
        self.micro_batches = micro_batches
        released = ReleaseGradients("accumulate").run(Program(stage.graph))
        self.program = cost(HoldForwards(in_flight).run(released))
        self.planner = Planner(self.program)
        graph = self.program.graph
        self.kept_bytes = _made_elsewhere_bytes(graph) + optimizer_steps.state_bytes(graph)
        self.update_bytes = optimizer_steps.workspace_bytes(graph)
        self._by_strategy: dict[str, PlannedStage] = {}

    def planned(self, budget_bytes: int, strategy: str, time_limit: float, gap: float = GAP) -> PlannedStage:
        """Plans the best schedule within a budget that covers all of the stage but what is on its way.

        Args:
            budget_bytes: The budget of the stage alone, with its static bytes, optimizer state included.
            strategy: A strategy of `PlanMemory`.
            time_limit: The time limit in seconds.
            gap: The distance from the best at which to stop, as a fraction of the stage's time.

        Raises:
            BudgetError: IRC204.
            TimeLimitError: IRC205.
        """
        room_bytes = max(budget_bytes - self.beside_bytes, 1)
        keep_all = self.planner.problem.keep_all
        if strategy == "auto" and keep_all.peak_bytes <= room_bytes:
            return self._measured(
                replace(self.program, graph=keep_all.schedule.graph, schedule=keep_all.schedule)
            )
        return self._measured(PlanMemory(room_bytes, strategy, time_limit, gap=gap).choose(self.planner))

    def by_strategy(self, strategy: str) -> PlannedStage:
        """Plans by a strategy that has one schedule, or by the fastest of several, whatever memory it needs.

        Args:
            strategy: A strategy of `PlanMemory`.
        """
        if strategy not in self._by_strategy:
            found = PlanMemory(_ENOUGH_BYTES, strategy, time_limit=0.0).choose(self.planner)
            self._by_strategy[strategy] = self._measured(found)
        return self._by_strategy[strategy]

    @property
    def beside_bytes(self) -> int:
        """Bytes beside those that a plan of the stage counts: optimizer state, and other arguments.

        Gradients of results are never there for micro-batches that wait: plans count them.
        """
        graph = self.program.graph
        inputs = sum(storage.nbytes for storage in graph.call_storages)
        waiting = graph.forwards_in_flight - 1
        never = waiting * (loss_waiting_bytes(graph) - graph.loss_saved_bytes)
        return self.kept_bytes + inputs * (self.micro_batches - graph.forwards_in_flight) - never

    def _measured(self, program: Program) -> PlannedStage:
        schedule, costs = program.schedule, program.costs
        assert schedule is not None and costs is not None
        one = replace(schedule.graph, forwards_in_flight=1)
        alone = Schedule(one, schedule.instructions)
        memory = replace(
            stage_memory(alone, costs.workspace_bytes, self.micro_batches, self.kept_bytes),
            update_bytes=self.update_bytes,
        )
        return PlannedStage(
            self.stage, replace(program, graph=one, schedule=alone), memory, _cost(alone, program, memory)
        )

    def minimum_bytes(self, time_limit: float) -> int:
        """The smallest budget, as `planned` counts it, that was found in `time_limit` seconds."""
        deadline = time.thread_time() + time_limit
        return self.planner.minimum_bytes(deadline, is_thorough=True) + self.beside_bytes


def _made_elsewhere_bytes(graph: Graph) -> int:
    """Bytes of the gradients of trained parameters that other stages make and this one has after a step."""
    mine = {node.operands[0].storage for node in graph.releases}
    trained = {i.value.storage for i in graph.inputs if i.role is InputRole.PARAMETER and i.requires_grad}
    return sum(storage.nbytes for storage in trained - mine)


def _cost(schedule: Schedule, program: Program, memory: StageMemory) -> StageCost:
    """The times of the parts of a schedule, and its bytes in the terms of the simulator."""
    assert program.costs is not None
    times = step_times(schedule, program.costs.seconds, program.tiers)
    loss_seconds = pause_seconds = times.step_seconds
    for step, start_seconds in zip(schedule.instructions, times.start_seconds, strict=True):
        if isinstance(step, Loss):
            loss_seconds = start_seconds
        elif isinstance(step, Compute) and step.node.op == PAUSE:
            pause_seconds = start_seconds
    return StageCost(
        loss_seconds,
        pause_seconds - loss_seconds,
        times.step_seconds - pause_seconds,
        static_bytes=memory.static_bytes,
        held_bytes=memory.held_bytes,
    )
