"""Bounds the bytes that each device of a pipeline holds during a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..graph import PAUSE, RECEIVE, SEND, Graph, Node, Region
from ..liveness import Timeline, liveness
from ..schedule import Compute, Free, Loss, Schedule
from ..types import Storage
from .exchange import reading_work, received_values, receives_of, send_lag, sent_values
from .schedule import Action, PipelineSchedule, Work

__all__ = ["StageMemory", "borrowed_storages", "device_peak_bytes", "stage_memory"]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a stage on its device. All but the static ones are of one micro-batch.

    Args:
        static_bytes: There for the whole step: parameters, gradients, buffers, the model's arguments of all
            micro-batches.
        forward_bytes: The most during forward, with the loss, if what is sent stays until it has ended.
        held_bytes: Between forward and backward.
        backward_bytes: The same during backward, or during its part up to the pause.
        paused_bytes: Between the two parts of backward; 0 if it has one.
        rest_bytes: The most during the second part, if what was sent in the first and kept stays until the
            second has ended; 0 if there is none.
        is_paused: Whether backward has two parts.
        arriving: Bytes received for forward and for backward.
        passing: Bytes sent in forward and in backward that the stage itself does not keep then: they are
            there until they have arrived.
        until_sending: The most of forward and of backward before it sends something: what was sent across the
            same boundary before may still be there.
        update_bytes: The most that an optimizer's step for a parameter takes, after all micro-batches.
        borrowing: The same without what the stage before it, on the same device, has handed over and holds
            itself from the end of its forward to its backward; None if there is nothing of the kind.
    """

    static_bytes: int
    forward_bytes: int
    held_bytes: int
    backward_bytes: int
    paused_bytes: int = 0
    rest_bytes: int = 0
    is_paused: bool = False
    arriving: tuple[int, int] = (0, 0)
    passing: tuple[int, int] = (0, 0)
    until_sending: tuple[int, int] = (0, 0)
    update_bytes: int = 0
    borrowing: StageMemory | None = None

    def during(self, work: Work) -> int:
        """The most that a micro-batch takes during some work."""
        match work:
            case Work.FORWARD:
                return self.forward_bytes
            case Work.WEIGHT_GRADIENT:
                return self.rest_bytes
            case Work.INPUT_GRADIENT:
                return self.backward_bytes
            case Work.BACKWARD:
                rest_bytes = self.rest_bytes + self.passing[1] if self.is_paused else 0
                return max(self.backward_bytes, rest_bytes)

    def after(self, work: Work) -> int:
        """Returns the bytes that a micro-batch holds once some work has ended."""
        match work:
            case Work.FORWARD:
                return self.held_bytes
            case Work.INPUT_GRADIENT:
                return self.paused_bytes
            case _:
                return 0


def stage_memory(
    schedule: Schedule,
    workspace_bytes: Mapping[Node, int],
    micro_batches: int,
    kept_bytes: int = 0,
    *,
    borrowed: Collection[Storage] = (),
) -> StageMemory:
    """The memory of a stage by its schedule, as `liveness` counts it.

    Args:
        schedule: A schedule of the stage's graph, for one forward in flight.
        workspace_bytes: The workspaces of its operations.
        micro_batches: The number of micro-batches whose arguments are there.
        kept_bytes: Other bytes that are there for the whole step, such as the state of an optimizer.
        borrowed: The received storages that do not count.
    """
    graph = schedule.graph
    assert graph.forwards_in_flight == 1, "the pipeline's schedule says what else is in flight"
    timeline = liveness(schedule, workspace_bytes)
    static = graph.static_bytes
    steps = schedule.instructions
    loss = next(k for k, step in enumerate(steps) if isinstance(step, Loss))
    during, after = _without(schedule, timeline, borrowed)
    kept = after[loss - 1] - static if loss else 0
    pause = next((k for k, s in enumerate(steps) if isinstance(s, Compute) and s.node.op == PAUSE), None)
    end = len(steps) if pause is None else pause
    after_loss = _let_go_bytes(schedule, loss, graph.output_storages)
    results = graph.output_storages | graph.tangent_storages
    after_pause = 0 if pause is None else _let_go_bytes(schedule, pause, results)
    inputs = sum(s.nbytes for s in graph.call_storages)
    most = _most_bytes(schedule, during, loss)
    rest = [] if pause is None else _most_bytes(schedule, during, pause, sent_after=loss)
    backward = [nbytes - after_loss for nbytes in most[loss + 1 : end]]
    return StageMemory(
        static_bytes=static + inputs * (micro_batches - 1) + kept_bytes,
        forward_bytes=max(most[: loss + 1]) - static,
        held_bytes=kept + graph.loss_saved_bytes,  # gradients of results come when their backward begins
        backward_bytes=max([most[loss], *backward]) - static,
        paused_bytes=0 if pause is None else after[pause] - static - after_pause,
        rest_bytes=0 if pause is None else max(rest[pause:]) - static - after_pause,
        is_paused=pause is not None,
        arriving=(_arriving_bytes(schedule, Region.FORWARD), _arriving_bytes(schedule, Region.BACKWARD)),
        passing=(_passing_bytes(schedule, 0, loss), _passing_bytes(schedule, loss, end)),
        until_sending=(
            max(most[: _first_send(schedule, 0, loss + 1)], default=static) - static,
            max([most[loss], *backward[: _first_send(schedule, loss + 1, end) - loss - 1]]) - static,
        ),
    )


def borrowed_storages(lender: Schedule, schedule: Schedule) -> frozenset[Storage]:
    """Returns the storages received in forward that the sending stage holds until its own backward.

    Args:
        lender: The schedule of the stage that sends.
        schedule: The schedule of the next stage, on the same device.
    """
    loss = next(k for k, step in enumerate(lender.instructions) if isinstance(step, Loss))
    freed = {step.storage for step in lender.instructions[:loss] if isinstance(step, Free)}
    held = {value.name for value in sent_values(lender.graph, Region.FORWARD) if value.storage not in freed}
    received = received_values(schedule.graph, Region.FORWARD)
    return frozenset(v.storage for v in received if v.name in held) - schedule.graph.output_storages


def _without(
    schedule: Schedule, timeline: Timeline, storages: Collection[Storage]
) -> tuple[list[int], list[int]]:
    """Bytes during and after each instruction without what was received, as long as that was not freed."""
    during, after = list(timeline.during_bytes), list(timeline.after_bytes)
    there: set[Storage] = set()
    for place, step in enumerate(schedule.instructions):
        if isinstance(step, Compute) and step.node.op == RECEIVE:
            there |= {value.storage for value in step.node.values if value.storage in storages}
        elif isinstance(step, Free):
            there.discard(step.storage)
        nbytes = sum(storage.nbytes for storage in there)
        during[place] -= nbytes
        after[place] -= nbytes
    return during, after


def _let_go_bytes(schedule: Schedule, place: int, storages: Collection[Storage]) -> int:
    """Returns the bytes that a pipeline has freed, though the caller of the graph would still hold them.

    A micro-batch's results are there until their gradients are made, and these until backward returns, at its
    pause too. What backward reads of either stays counted.

    Args:
        schedule: The schedule of a stage.
        place: The place of the loss, or of the pause.
        storages: Results, and their gradients.
    """
    graph = schedule.graph
    later = (step.node for step in schedule.instructions[place + 1 :] if isinstance(step, Compute))
    read = {storage for node in later for storage in graph.reads(node)}
    gone = (s for s in storages if s in graph.tangent_storages or _is_forward(graph, s))
    return sum(s.nbytes for s in gone if s not in read and s not in graph.static_storages)


def _is_forward(graph: Graph, storage: Storage) -> bool:
    maker = graph.producers.get(storage)
    return maker is not None and maker.region is Region.FORWARD


def _most_bytes(
    schedule: Schedule, during_bytes: Sequence[int], border: int, *, sent_after: int | None = None
) -> list[int]:
    """The bytes during each instruction if what is sent stays, up to a border and from there to the end.

    Args:
        schedule: The schedule of a stage.
        during_bytes: The bytes if it goes when it is freed.
        border: An instruction from which on nothing stays that was freed before.
        sent_after: The instruction from which on it matters for the part behind the border what is sent;
            None for the border itself.
    """
    found: list[int] = []
    sent: set[Storage] = set()
    kept_bytes = 0
    for place, (step, nbytes) in enumerate(zip(schedule.instructions, during_bytes, strict=True)):
        if place == (border if sent_after is None else sent_after):
            sent = set()
        if place == border:
            kept_bytes = 0
        found.append(nbytes + kept_bytes)
        if isinstance(step, Compute) and step.node.op == SEND:
            sent.add(step.node.operands[0].storage)
        elif isinstance(step, Free) and step.storage in sent:
            kept_bytes += step.storage.nbytes
    return found


def _arriving_bytes(schedule: Schedule, region: Region) -> int:
    return sum(value.storage.nbytes for value in received_values(schedule.graph, region))


def _first_send(schedule: Schedule, begin: int, end: int) -> int:
    """The first of some instructions that sends; the end if none does."""
    steps = enumerate(schedule.instructions[begin:end], begin)
    sending = (place for place, step in steps if isinstance(step, Compute) and step.node.op == SEND)
    return next(sending, end)


def _passing_bytes(schedule: Schedule, begin: int, end: int) -> int:
    """Returns the bytes that are both sent and freed within some instructions."""
    steps = schedule.instructions[begin:end]
    sent: set[Storage] = set()
    for step in steps:
        if isinstance(step, Compute) and step.node.op == SEND:
            (value,) = step.node.operands
            sent.add(value.storage)
    freed = {step.storage for step in steps if isinstance(step, Free)}
    return sum(storage.nbytes for storage in sent & freed)


def device_peak_bytes(
    schedule: PipelineSchedule,
    memory: Sequence[StageMemory],
    shared_bytes: Sequence[int] | None = None,
    last_memory: Sequence[StageMemory] | None = None,
) -> tuple[int, ...]:
    """The most bytes on each device during a step.

    While a device does something, each stage on it holds what its other micro-batches hold, what the next
    action needs may be arriving, what was sent may not have arrived, and what one stage of the device has
    handed to another waits there.

    Args:
        schedule: The order in which devices work.
        memory: The memory of each stage.
        shared_bytes: For each device, what the static bytes of its stages count more than once.
        last_memory: The memory for the last micro-batch, if that differs; static bytes count as before.
    """
    lag = send_lag(schedule)
    shared = shared_bytes or [0] * schedule.devices
    every = _Memory(memory, last_memory or memory, schedule.micro_batches - 1)
    return tuple(
        _device_peak(schedule, every, device, lag) - shared[device] for device in range(schedule.devices)
    )


@dataclass(frozen=True, slots=True)
class _Memory:
    """Holds the memory of each action."""

    first: Sequence[StageMemory]
    last: Sequence[StageMemory]
    last_micro_batch: int

    def of(self, action: Action) -> StageMemory:
        memory = self.last if action.micro_batch == self.last_micro_batch else self.first
        return memory[action.stage]


def _device_peak(schedule: PipelineSchedule, memory: _Memory, device: int, lag: int) -> int:
    line = schedule.lines[device]
    stages = schedule.stages_on(device)
    there = sum(memory.first[stage].static_bytes for stage in stages)
    peak = there + max(memory.first[stage].update_bytes for stage in stages)
    held: dict[tuple[int, int], Action] = {}
    """The last work of each micro-batch in flight in each stage."""
    handed: dict[Action, int] = {}
    """The bytes sent from a stage to another one of this device, by the action that will receive them."""
    for place, action in enumerate(line):
        key = action.stage, action.micro_batch
        held.pop(key, None)
        its = _counted(memory, held, action)
        if action.work is not Work.WEIGHT_GRADIENT:
            handed.pop(replace(action, work=reading_work(action.work)), None)
        following = line[place + 1] if place + 1 < len(line) else None
        ahead = 0
        if following is not None and receives_of(schedule, following) is not None:
            ahead = memory.of(following).arriving[following.work is not Work.FORWARD]
        beside = sum(_counted(memory, held, last).after(last.work) for last in held.values())
        beside += sum(handed.values())
        leaving = _leaving_bytes(schedule, memory, line[max(place - lag, 0) : place + 1])
        is_back = action.work is not Work.FORWARD
        sends = action.work is not Work.WEIGHT_GRADIENT
        during = its.during(action.work)
        if sends:
            earlier_bytes = leaving.pop((action.stage, is_back), 0)
            during = max(during, its.until_sending[is_back] + earlier_bytes)
        peak = max(peak, there + beside + sum(leaving.values()) + during + ahead)
        held[key] = action
        neighbour = action.stage - 1 if is_back else action.stage + 1
        if neighbour not in stages:
            continue
        reader = Action(neighbour, reading_work(action.work), action.micro_batch)
        if sends:
            handed[reader] = its.passing[is_back]
        if reader in handed and _lets_go(action, its):
            handed[reader] = memory.of(reader).arriving[1]
    return peak


def _counted(memory: _Memory, held: Mapping[tuple[int, int], Action], action: Action) -> StageMemory:
    """Returns the memory of an action, without the values that a stage on this device holds already."""
    its = memory.of(action)
    lender = held.get((action.stage - 1, action.micro_batch))
    if its.borrowing is None or lender is None or lender.work is not Work.FORWARD:
        return its
    return its.borrowing


def _leaving_bytes(
    schedule: PipelineSchedule, memory: _Memory, recent: Sequence[Action]
) -> dict[tuple[int, bool], int]:
    """Returns the bytes that the last actions sent to other devices and do not keep, for each boundary.

    Args:
        schedule: The order in which devices work.
        memory: The memory of each stage.
        recent: The last actions of a device, and the one that runs.

    Returns:
        Bytes by the stage that sent them, and whether they are gradients.
    """
    found: dict[tuple[int, bool], int] = {}
    ended = recent[:-1]
    let_go = {(a.stage, a.micro_batch) for a in ended if _lets_go(a, memory.of(a))}
    for action in ended:
        is_back = action.work is not Work.FORWARD
        neighbour = action.stage - 1 if is_back else action.stage + 1
        if action.work is Work.WEIGHT_GRADIENT or not 0 <= neighbour < schedule.stages:
            continue
        if schedule.device_of[neighbour] != schedule.device_of[action.stage]:
            is_let_go = is_back and (action.stage, action.micro_batch) in let_go
            arriving_bytes = memory.first[neighbour].arriving[1]
            found[action.stage, is_back] = arriving_bytes if is_let_go else memory.of(action).passing[is_back]
    return found


def _lets_go(action: Action, memory: StageMemory) -> bool:
    """Whether an action ends with those gradients let go that its stage has sent and kept for a while."""
    return action.work is Work.WEIGHT_GRADIENT or (action.work is Work.BACKWARD and memory.is_paused)
