"""Plans a pipeline: the cuts of the model, and what each stage keeps, computes again and copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ...ir import verify_graph, verify_schedule
from ...ir.pipeline.exchange import verify_exchanges
from ...ir.pipeline.schedule import PipelineSchedule
from ..program import Program
from ..rewrites.release_gradients import ReleaseGradients
from .cut_search import CutSearch
from .linear_order import LinearOrder
from .planned_pipeline import PipelineOptions, PlannedPipeline

__all__ = ["linear_order_of", "plan_pipeline"]


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
        options: The options.
        cost: Finds the costs of a stage's operations.
        linear_order: The result of `linear_order_of` for the program, if it is known.

    Raises:
        BudgetError: IRC486 when no partition was found whose stages fit.
        UsageError: IRC485 for more stages than operations.
    """
    started = time.thread_time()
    search = CutSearch(linear_order or linear_order_of(program, cost), schedule, options, cost, started)
    pipeline = search.run()
    _verify(pipeline)
    return replace(pipeline, seconds=time.thread_time() - started)


def _verify(pipeline: PlannedPipeline) -> None:
    """Verifies the graph and the schedule of each stage, and what stages exchange.

    Raises:
        VerificationError: When a stage is not valid, or sends what its neighbour does not receive.
    """
    verify_exchanges([stage.schedule.graph for stage in pipeline.stages])
    for stage in (*pipeline.stages, *pipeline.last_stages):
        costs = stage.program.costs
        assert costs is not None
        verify_graph(stage.schedule.graph)
        verify_schedule(stage.schedule, costs.workspace_bytes, tiers=stage.program.tiers)


def linear_order_of(program: Program, cost: Callable[[Program], Program]) -> LinearOrder:
    """The linear order of a program, with the time of adding gradients to those of other micro-batches."""
    assert program.costs is not None, "costs come first"
    released = cost(ReleaseGradients("accumulate").run(replace(program, costs=None)))
    assert released.costs is not None
    seconds = {node.operands[0].storage: released.costs.seconds[node] for node in released.graph.releases}
    return LinearOrder(program.graph, program.costs, seconds)
