"""Bytes alive after each instruction: the one place that knows what memory a schedule takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .fused import overwritten
from .graph import Node
from .live_forwards import Others, loss_waiting_bytes, others_after, others_before
from .schedule import Compute, Fetch, Free, Instruction, Loss, Offload, Schedule, Wait
from .types import Storage

__all__ = ["Timeline", "liveness", "resident_before", "stored_bytes"]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory of a schedule, instruction by instruction. Static bytes are included.

    Args:
        during_bytes: The most that is alive while the instruction runs, its workspace included.
        after_bytes: The bytes alive once it has run.
    """

    during_bytes: tuple[int, ...]
    after_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The most memory alive at once, in bytes."""
        return max(self.during_bytes, default=0)

    @property
    def peak_index(self) -> int:
        """The instruction at which the peak is first reached."""
        return self.during_bytes.index(self.peak_bytes)


def liveness(
    schedule: Schedule,
    workspace_bytes: Mapping[Node, int],
    *,
    with_gradients: bool = False,
    without_unused: bool = False,
) -> Timeline:
    """Bytes alive during and after each instruction of `schedule`, in the worst call of those in flight.

    Args:
        schedule: Need not be valid: a storage that is freed twice is counted as freed once.
        workspace_bytes: The bytes that each node takes from the allocator while it runs, beyond the storages
            of its results and less those that it overwrites; a missing node takes nothing.
        with_gradients: Whether `.grad` is there already, and the gradients that are delivered are added to
            it. Else a step starts without gradients, or with those that `reserved_bytes` counts.
        without_unused: Whether the caller drops the outputs that the loss does not use before backward.

    Returns:
        Bytes on the device, with static bytes and what other forwards in flight hold (see `in_flight`),
        rounded as the device's allocator rounds.
    """
    own = _one_call(schedule, workspace_bytes, _dropped(schedule) if without_unused else {})
    graph = schedule.graph
    split = next((i for i, item in enumerate(schedule.instructions) if isinstance(item, Loss)), 0)
    kept_bytes = own.after_bytes[split - 1] - graph.static_bytes if split else 0
    held_bytes = kept_bytes + loss_waiting_bytes(graph)

    def most(cases: tuple[Others, ...]) -> int:
        return max(case.bytes_at(held_bytes) for case in cases)

    before = most(others_before(graph, with_gradients=with_gradients))
    after = most(others_after(graph, with_gradients=with_gradients))
    if not before and not after:
        return own
    beside = [before if index < split else after for index in range(len(schedule.instructions))]
    return Timeline(
        tuple(nbytes + more for nbytes, more in zip(own.during_bytes, beside, strict=True)),
        tuple(nbytes + more for nbytes, more in zip(own.after_bytes, beside, strict=True)),
    )


def _dropped(schedule: Schedule) -> dict[int, list[Storage]]:
    """Maps the loss, or a later last read of one, to the outputs that the loss does not use."""
    unused, graph = schedule.graph.unused_outputs, schedule.graph
    last: dict[Storage, int] = {}
    for index, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, Loss):
            last.update(dict.fromkeys(unused, index))
        elif isinstance(instruction, Compute):
            last.update(dict.fromkeys(unused.intersection(graph.reads(instruction.node)), index))
    dropped: dict[int, list[Storage]] = {}
    for storage, index in last.items():
        dropped.setdefault(index, []).append(storage)
    return dropped


def _one_call(
    schedule: Schedule, workspace_bytes: Mapping[Node, int], dropped: Mapping[int, list[Storage]]
) -> Timeline:
    """The memory of one call, beside the static bytes of all."""
    graph = schedule.graph
    resident: dict[Storage, int] = {}
    alive = graph.static_bytes
    during: list[int] = []
    after: list[int] = []
    for index, instruction in enumerate(schedule.instructions):
        extra, arriving = _demand(instruction, schedule, workspace_bytes)
        during.append(alive + extra)
        for storage in arriving:
            if storage not in resident:
                resident[storage] = storage.nbytes
                alive += storage.nbytes
        if isinstance(instruction, Compute):
            for value in overwritten(instruction.node):  # its memory is a result's now
                alive -= resident.get(value.storage, 0)
                resident[value.storage] = 0
        if isinstance(instruction, Loss):
            alive += graph.loss_held_bytes
        if isinstance(instruction, Free):
            alive -= resident.pop(instruction.storage, 0)
        for storage in dropped.get(index, ()):
            alive -= resident.pop(storage, 0)
        after.append(alive)
    return Timeline(tuple(during), tuple(after))


def _demand(
    instruction: Instruction, schedule: Schedule, workspace_bytes: Mapping[Node, int]
) -> tuple[int, frozenset[Storage]]:
    """Bytes that an instruction adds while it runs, and the storages that stay after it."""
    graph = schedule.graph
    match instruction:
        case Compute(node, retained):
            return graph.allocated_bytes(node) + workspace_bytes.get(node, 0), retained
        case Loss():
            tangents = graph.tangent_storages
            return sum(storage.nbytes for storage in tangents) + graph.loss_bytes, tangents
        case Fetch(storage):
            return storage.nbytes, frozenset((storage,))
        case Free() | Offload() | Wait():
            return 0, frozenset()


def resident_before(schedule: Schedule, index: int) -> set[Storage]:
    """The storages that are on the device when an instruction begins, but for the static ones."""
    resident: set[Storage] = set()
    for instruction in schedule.instructions[:index]:
        resident |= _demand(instruction, schedule, {})[1]
        if isinstance(instruction, Free):
            resident.discard(instruction.storage)
    return resident


def stored_bytes(schedule: Schedule) -> dict[str, tuple[int, ...]]:
    """Returns the bytes that each tier of a schedule holds after each instruction.

    A storage lies in its tier from the `Offload` on, until the `Wait` for the last copy of it; an offloaded
    parameter lies there all the time.
    """
    offloaded_parameters = schedule.graph.offloaded_of
    last: dict[Storage, int] = {}
    pending: dict[Storage, bool] = {}
    for step, instruction in enumerate(schedule.instructions):
        match instruction:
            case Offload(storage) | Fetch(storage):
                pending[storage] = True
            case Wait(storage) if pending.pop(storage, False):
                last[storage] = step
            case _:
                pass
    held: dict[Storage, str] = {}
    now = {i.tier: 0 for i in schedule.instructions if isinstance(i, Offload | Fetch)}
    for storage, offloaded in offloaded_parameters.items():
        held[storage] = offloaded.tier
        now[offloaded.tier] = now.get(offloaded.tier, 0) + storage.nbytes
    found: dict[str, list[int]] = {tier: [] for tier in now}
    for step, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, Offload) and instruction.storage not in held:
            held[instruction.storage] = instruction.tier
            now[instruction.tier] += instruction.storage.nbytes
        elif isinstance(instruction, Wait) and last.get(instruction.storage) == step:
            tier = (
                None if instruction.storage in offloaded_parameters else held.pop(instruction.storage, None)
            )
            if tier is not None:
                now[tier] -= instruction.storage.nbytes
        for tier, nbytes in now.items():
            found[tier].append(nbytes)
    return {tier: tuple(nbytes) for tier, nbytes in found.items()}
