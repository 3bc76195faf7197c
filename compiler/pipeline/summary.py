"""The certificate of a planned pipeline, from its stages."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir import InputRole, Offload, Region, Reordered, Rounding
from ...ir.pipeline.plan import PipelinePlan, StageSummary
from ...ir.pipeline.schedule import in_flight
from ...passes.pipeline import PlannedPipeline, PlannedStage

__all__ = ["plan_of"]


def plan_of(
    planned: PlannedPipeline,
    names: Sequence[str],
    optimizer: str | None,
    roundings: Sequence[Rounding] = (),
    reached: Sequence[Reordered] = (),
) -> PipelinePlan:
    """The certificate of a planned pipeline.

    Args:
        planned: The pipeline.
        names: Of the devices, as they were given.
        optimizer: What the optimizer is called that was counted; None without one.
        roundings: The reasons why numbers may differ from the model's own.
        reached: The tensors that sums in another order reach.
    """
    order = planned.schedule
    flights = in_flight(order)
    costs = planned.stages[0].program.costs
    assert costs is not None
    return PipelinePlan(
        schedule=order.name,
        micro_batches=order.micro_batches,
        budget_bytes=planned.devices.budget_bytes,
        speeds=planned.devices.speeds,
        device_names=tuple(names[device] for device in planned.device_order),
        optimizer=optimizer,
        peak_bytes=planned.peak_bytes,
        step_seconds=planned.step_seconds,
        bound_seconds=planned.bound_seconds,
        single_seconds=planned.single_seconds,
        bubble=planned.bubble_fraction,
        stages=tuple(
            _summary(stage, order.device_of[k], planned.devices.speeds, flights[k].until_weight)
            for k, stage in enumerate(planned.stages)
        ),
        cuts=planned.cuts,
        costs=costs.source,
        planning_seconds=planned.seconds,
        roundings=tuple(roundings),
        reordered=tuple(reached),
        timeline=planned.timeline,
    )


def _summary(stage: PlannedStage, device: int, speeds: Sequence[float], in_flight: int) -> StageSummary:
    graph, costs = stage.schedule.graph, stage.program.costs
    assert costs is not None
    forward = [n for n in graph.operations if n.region is Region.FORWARD and not n.op.startswith("irc.")]
    once = sum(costs.seconds[node] for node in graph.operations)
    taken = sum(costs.seconds[node] for node in stage.schedule.computed)
    cost = stage.cost.at_speed(speeds[device])
    parameters = {i.value.storage for i in graph.inputs if i.role is InputRole.PARAMETER}
    return StageSummary(
        stage=stage.stage.index,
        device=device,
        first=next((str(node.at) for node in forward if node.at is not None), "the beginning"),
        operations=len(forward),
        parameter_bytes=sum(storage.nbytes for storage in parameters),
        forward_seconds=cost.forward_seconds,
        backward_seconds=cost.input_gradient_seconds + cost.weight_gradient_seconds,
        copied_bytes=sum(s.storage.nbytes for s in stage.schedule.instructions if isinstance(s, Offload)),
        again_seconds=max(taken - once, 0.0) / speeds[device],
        held_bytes=stage.memory.held_bytes,
        forward_bytes=stage.stage.after.forward_bytes,
        backward_bytes=stage.stage.before.backward_bytes,
        in_flight=in_flight,
    )
