"""A report of a pipeline as one page: what each device does when, its memory, its stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...ir import format_bytes, printable
from ...ir.pipeline.plan import PipelinePlan
from ...ir.pipeline.timing import PipelineTimeline
from .filled import filled

__all__ = ["pipeline_page"]


def pipeline_page(title: str, plan: PipelinePlan, timeline: PipelineTimeline) -> str:
    """Returns the report as HTML.

    Args:
        title: The name of the model.
        plan: The plan.
        timeline: Its simulated step.
    """
    actions = [timed for line in timeline.lines for timed in line]
    kinds = dict.fromkeys(timed.action.work.name for timed in actions)
    return filled(
        "pipeline.html",
        {
            "title": printable(f"{title} on {plan.devices} devices"),
            "seconds": max(plan.step_seconds, timeline.step_seconds),
            "kinds": [*kinds, *(["transfer"] if timeline.transfers else [])],
            "tiles": [
                ["step", f"{plan.step_seconds:.4g} s", f"none is below {plan.bound_seconds:.4g} s"],
                ["speed", f"{plan.speedup:.2f} x", "that of one device with enough memory"],
                ["devices wait", f"{plan.bubble:.1%}", "of their time"],
                ["schedule", plan.schedule, f"{len(plan.stages)} stages, {plan.micro_batches} micro-batches"],
            ],
            "devices": [_device(index, plan, timeline) for index in range(plan.devices)],
            "links": list(_links(timeline)),
            "stages": [
                [
                    stage.stage,
                    f"device {stage.device}",
                    printable(stage.first),
                    stage.operations,
                    stage.parameter_bytes,
                    stage.forward_seconds,
                    stage.backward_seconds,
                    stage.again_seconds,
                    stage.in_flight,
                    stage.held_bytes,
                    stage.copied_bytes,
                ]
                for stage in plan.stages
            ],
            "certificate": list(_certificate(plan)),
        },
    )


def _device(index: int, plan: PipelinePlan, timeline: PipelineTimeline) -> dict[str, Any]:
    name = plan.device_names[index] if index < len(plan.device_names) else ""
    return {
        "name": printable(f"device {index}" + (f" ({name})" if name else "")),
        "peak": plan.peak_bytes[index],
        "budget": plan.budget_bytes[index],
        "memory": [[point.seconds, point.nbytes] for point in timeline.memory[index]],
        "actions": [
            [
                timed.action.work.name,
                timed.start_seconds,
                timed.end_seconds,
                timed.action.stage,
                timed.action.micro_batch,
                str(timed.action),
            ]
            for timed in timeline.lines[index]
        ],
    }


def _links(timeline: PipelineTimeline) -> Iterator[dict[str, Any]]:
    """Yields the transfers of each link between two devices."""
    for link in sorted({(sent.source_device, sent.target_device) for sent in timeline.transfers}):
        mine = (sent for sent in timeline.transfers if (sent.source_device, sent.target_device) == link)
        rows = [
            [
                sent.start_seconds,
                sent.end_seconds,
                sent.transfer.nbytes,
                "activations" if sent.transfer.is_forward else "gradients",
                sent.micro_batch,
            ]
            for sent in mine
        ]
        yield {"name": f"{link[0]} to {link[1]}", "transfers": rows}


def _certificate(plan: PipelinePlan) -> Iterator[str]:
    yield (
        f"A step is predicted to take {plan.step_seconds:.4g} s. No partition of the model over these "
        f"devices takes less than {plan.bound_seconds:.4g} s: the plan is at most {plan.gap:.2%} from the "
        "fastest."
    )
    for device, (peak, budget) in enumerate(zip(plan.peak_bytes, plan.budget_bytes, strict=True)):
        yield (
            f"Device {device} holds at most {peak:,} bytes ({format_bytes(peak)}), within {budget:,}. This "
            "counts whatever order transfers and work come in, and what an operation needs while it runs."
        )
    if plan.reordered:
        yield "Some gradients are sums in another order: " + ", ".join(map(str, plan.reordered[:4])) + "."
    else:
        yield "Losses and gradients are those of the micro-batches one after the other, bit for bit."
