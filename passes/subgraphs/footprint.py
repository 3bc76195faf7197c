"""The memory of one graph's schedule in a step that has several graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...ir import Compute, Graph, Loss, Node, OutputRole, Schedule, Storage, liveness

__all__ = ["Footprint", "footprint", "outputs_bytes", "saved_by", "tangents_bytes"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a schedule on top of its graph's static bytes, on one device.

    Args:
        forward_bytes: The most that is alive while forward runs.
        saved_bytes: The bytes that stay for backward once forward is over, without the graph's outputs.
        backward_bytes: The most that is alive while backward runs, with outputs and tangents, without what
            the loss holds.
    """

    forward_bytes: int
    saved_bytes: int
    backward_bytes: int


def footprint(schedule: Schedule, workspace_bytes: Mapping[Node, int]) -> Footprint:
    """Measures a schedule while it runs forward, between forward and backward, and while it runs backward.

    Args:
        schedule: A schedule of one graph.
        workspace_bytes: The workspaces, as of `liveness`.
    """
    bare = replace(schedule.graph, loss_bytes=0, loss_held_bytes=0)
    timeline = liveness(Schedule(bare, schedule.instructions), workspace_bytes)
    split = next(k for k, instruction in enumerate(schedule.instructions) if isinstance(instruction, Loss))
    static_bytes = bare.static_bytes
    held_bytes = timeline.after_bytes[split - 1] if split else static_bytes
    return Footprint(
        forward_bytes=max(timeline.during_bytes[:split], default=static_bytes) - static_bytes,
        saved_bytes=held_bytes - static_bytes - outputs_bytes(bare),
        backward_bytes=max(timeline.during_bytes[split:]) - static_bytes,
    )


def outputs_bytes(graph: Graph) -> int:
    """Bytes of the outputs of forward, each storage once; inputs that are handed back do not count."""
    delivered = {
        o.value.storage for o in graph.outputs if o.role is OutputRole.OUTPUT and o.value is not None
    }
    return sum(storage.nbytes for storage in delivered - graph.static_storages)


def tangents_bytes(graph: Graph) -> int:
    """Bytes of the gradients of the outputs."""
    return sum(storage.nbytes for storage in graph.tangent_storages)


def saved_by(schedule: Schedule) -> frozenset[Storage]:
    """The storages that a schedule holds between forward and backward, without the outputs."""
    alive: set[Storage] = set()
    for instruction in schedule.instructions:
        if isinstance(instruction, Loss):
            break
        if isinstance(instruction, Compute):
            alive |= instruction.retained
        else:
            alive.discard(instruction.storage)
    return frozenset(alive) - schedule.graph.output_storages
