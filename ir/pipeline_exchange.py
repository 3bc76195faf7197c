"""When the devices of a pipeline post their receives, and how much each of them holds then."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import networkx

from .errors import VerificationError
from .graph import PAUSE, RECEIVE, SEND, Graph, Node, Region
from .in_flight import loss_waiting_bytes
from .liveness import liveness
from .pipeline import Action, PipelineSchedule, Work, needed_before
from .schedule import Compute, Free, Loss, Schedule
from .types import Storage, Value

__all__ = [
    "Expect",
    "StageMemory",
    "device_peak_bytes",
    "received_values",
    "send_lag",
    "sent_values",
    "stage_memory",
    "verify_exchanges",
    "with_expectations",
]


@dataclass(frozen=True, slots=True)
class Expect:
    """A device posts the receives of an action: memory is there for them from here on.

    Args:
        stage: Which stage receives.
        is_forward: Whether it receives activations; else gradients.
        micro_batch: Of which micro-batch.
    """

    stage: int
    is_forward: bool
    micro_batch: int


def with_expectations(schedule: PipelineSchedule) -> tuple[tuple[Action | Expect, ...], ...]:
    """The lines of a schedule with receives: each is posted one action before the one that reads it.

    What comes from a stage of the same device is handed over, and not received.
    """
    return tuple(tuple(_line(schedule, line)) for line in schedule.lines)


def _line(schedule: PipelineSchedule, line: Sequence[Action]) -> list[Action | Expect]:
    expected = [_expected(schedule, action) for action in line]
    found: list[Action | Expect] = []
    for place, action in enumerate(line):
        ahead = expected[place : place + 2] if place == 0 else expected[place + 1 : place + 2]
        found.extend(expect for expect in ahead if expect is not None)
        found.append(action)
    return found


def _expected(schedule: PipelineSchedule, action: Action) -> Expect | None:
    """What an action needs to have received from another device."""
    source = _source(schedule, action)
    if source is None or schedule.device_of[source] == schedule.device_of[action.stage]:
        return None
    return Expect(action.stage, action.work is Work.FORWARD, action.micro_batch)


def _source(schedule: PipelineSchedule, action: Action) -> int | None:
    """The stage that an action waits for."""
    match action.work:
        case Work.FORWARD:
            return action.stage - 1 if action.stage else None
        case Work.WEIGHT_GRADIENT:
            return None
        case _:
            return action.stage + 1 if action.stage + 1 < schedule.stages else None


def send_lag(schedule: PipelineSchedule) -> int:
    """After how many more actions of a device what it sends in one action must have arrived.

    A device waits after each action until what it sent so long ago is being received, and it sends nothing
    across a boundary while what it sent there before is not being received. This is the least number from
    1 on with which devices never wait for each other.

    Raises:
        VerificationError: IRC143 for an order of work that has no such number, or in which what is sent
            across a boundary is read in another order: messages cannot pass each other.
    """
    _check_order(schedule)
    most = max(map(len, schedule.lines), default=0)
    for lag in range(1, max(most, 1) + 1):
        if _runs(schedule, lag):
            return lag
    raise VerificationError(
        "IRC143",
        f"devices of pipeline {schedule.name} wait for each other where the values of one micro-batch are on "
        "their way across a boundary at a time",
    )


def _check_order(schedule: PipelineSchedule) -> None:
    """Each stage takes micro-batches in the order in which its neighbours on other devices send them."""
    taken: dict[tuple[int, Work], list[int]] = {}
    for line in schedule.lines:
        for action in line:
            if action.work is not Work.WEIGHT_GRADIENT:
                taken.setdefault((action.stage, _reading(action.work)), []).append(action.micro_batch)
    for first in range(schedule.stages - 1):
        if schedule.device_of[first] != schedule.device_of[first + 1]:
            for work in (Work.FORWARD, Work.INPUT_GRADIENT):
                if taken.get((first, work)) != taken.get((first + 1, work)):
                    raise VerificationError(
                        "IRC143",
                        f"stages {first} and {first + 1} take micro-batches in different orders, and what "
                        "is sent cannot pass what was sent before",
                    )


def _runs(schedule: PipelineSchedule, lag: int) -> bool:
    """Whether nothing waits for what comes later.

    Between two actions a device waits for what it sent too long ago, and then posts receives: those of the
    action after the next one.
    """
    order: networkx.DiGraph[tuple[str, int, int]] = networkx.DiGraph()
    place: dict[Action, tuple[int, int]] = {}
    made: dict[tuple[int, Work, int], Action] = {}
    for device, line in enumerate(schedule.lines):
        for index, action in enumerate(line):
            place[action] = device, index
            if action.work is not Work.WEIGHT_GRADIENT:
                made[action.stage, _reading(action.work), action.micro_batch] = action
            order.add_edge(("act", device, index), ("wait", device, index))
            order.add_edge(("wait", device, index), ("act", device, index + 1))
    posted_before: dict[tuple[int, Work], tuple[int, int]] = {}
    for reader, (device, index) in place.items():
        for key in needed_before(reader, schedule.stages):
            order.add_edge(("act", *place[made[key]]), ("act", device, index))
        if _expected(schedule, reader) is None:
            continue
        sender = place[made[needed_before(reader, schedule.stages)[-1]]]
        channel = reader.stage, _reading(reader.work)
        if channel in posted_before and posted_before[channel][1] >= 0:
            order.add_edge(("wait", *posted_before[channel]), ("act", *sender))
        posted_before[channel] = device, index - 2
        if index >= 2:
            order.add_edge(("wait", device, index - 2), ("wait", sender[0], sender[1] + lag))
    return networkx.is_directed_acyclic_graph(order)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of a stage on its device. All but the static ones are of one micro-batch.

    Args:
        static_bytes: There for the whole step: parameters, gradients, buffers, the model's arguments of all
            micro-batches.
        forward_bytes: The most during forward, with the loss, where what is sent stays until it has ended.
        held_bytes: Between forward and backward.
        backward_bytes: The same during backward, or during its part up to the pause.
        paused_bytes: Between the two parts of backward; 0 where it has one.
        rest_bytes: The most during the second part; 0 where there is none.
        arriving: Bytes received for forward and for backward.
        passing: Bytes sent in forward and in backward that the stage itself does not keep then: they are
            there until they have arrived.
    """

    static_bytes: int
    forward_bytes: int
    held_bytes: int
    backward_bytes: int
    paused_bytes: int = 0
    rest_bytes: int = 0
    arriving: tuple[int, int] = (0, 0)
    passing: tuple[int, int] = (0, 0)

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
                return max(self.backward_bytes, self.rest_bytes)

    def after(self, work: Work) -> int:
        """What a micro-batch holds once some work has ended."""
        match work:
            case Work.FORWARD:
                return self.held_bytes
            case Work.INPUT_GRADIENT:
                return self.paused_bytes
            case _:
                return 0


def stage_memory(
    schedule: Schedule, workspace_bytes: Mapping[Node, int], micro_batches: int, kept_bytes: int = 0
) -> StageMemory:
    """The memory of a stage by its schedule, as `liveness` counts it.

    Args:
        schedule: Of the stage's graph, for one forward in flight.
        workspace_bytes: Of its operations.
        micro_batches: How many micro-batches' arguments are there.
        kept_bytes: What else is there for the whole step, such as the state of an optimizer.
    """
    graph = schedule.graph
    assert graph.forwards_in_flight == 1, "the pipeline's schedule says what else is in flight"
    timeline = liveness(schedule, workspace_bytes)
    static = graph.static_bytes
    steps = schedule.instructions
    loss = next(k for k, step in enumerate(steps) if isinstance(step, Loss))
    kept = timeline.after_bytes[loss - 1] - static if loss else 0
    pause = next((k for k, s in enumerate(steps) if isinstance(s, Compute) and s.node.op == PAUSE), None)
    end = len(steps) if pause is None else pause
    during = timeline.during_bytes
    inputs = sum(s.nbytes for s in graph.call_storages)
    most = _most_bytes(schedule, timeline.during_bytes)
    return StageMemory(
        static_bytes=static + inputs * (micro_batches - 1) + kept_bytes,
        forward_bytes=max(most[: loss + 1]) - static,
        held_bytes=kept + loss_waiting_bytes(graph),
        backward_bytes=max(most[loss:end]) - static,
        paused_bytes=0 if pause is None else timeline.after_bytes[pause] - static,
        rest_bytes=0 if pause is None else max(during[pause:]) - static,
        arriving=(_arriving_bytes(schedule, Region.FORWARD), _arriving_bytes(schedule, Region.BACKWARD)),
        passing=(_passing_bytes(schedule, 0, loss), _passing_bytes(schedule, loss, end)),
    )


def _most_bytes(schedule: Schedule, during_bytes: Sequence[int]) -> list[int]:
    """The bytes during each instruction, where what is sent stays until forward or backward has ended."""
    found: list[int] = []
    sent: set[Storage] = set()
    kept_bytes = 0
    for step, nbytes in zip(schedule.instructions, during_bytes, strict=True):
        if isinstance(step, Loss):
            sent, kept_bytes = set(), 0
        found.append(nbytes + kept_bytes)
        if isinstance(step, Compute) and step.node.op == SEND:
            sent.add(step.node.operands[0].storage)
        elif isinstance(step, Free) and step.storage in sent:
            kept_bytes += step.storage.nbytes
    return found


def sent_values(graph: Graph, region: Region) -> tuple[Value, ...]:
    """What a stage sends in forward or backward, in this order."""
    return tuple(n.operands[0] for n in graph.operations if n.op == SEND and n.region is region)


def received_values(graph: Graph, region: Region) -> tuple[Value, ...]:
    """What a stage receives in forward or backward, in the order in which it is sent."""
    return tuple(n.values[0] for n in graph.operations if n.op == RECEIVE and n.region is region)


def verify_exchanges(graphs: Sequence[Graph]) -> None:
    """Raises unless each stage receives what its neighbours send, in the same order and layout.

    Args:
        graphs: Of all stages.

    Raises:
        VerificationError: IRC142.
    """
    for stage, graph in enumerate(graphs):
        for neighbour, region in ((stage + 1, Region.FORWARD), (stage - 1, Region.BACKWARD)):
            sent = [(value.name, value.type) for value in sent_values(graph, region)]
            exists = 0 <= neighbour < len(graphs)
            arriving = received_values(graphs[neighbour], region) if exists else ()
            received = [(value.name, value.type) for value in arriving]
            if sent != received:
                wrong = next(a or b for a, b in itertools.zip_longest(sent, received) if a != b)
                raise VerificationError(
                    "IRC142",
                    f"stage {stage} and stage {neighbour} disagree about {wrong[0]}, which is exchanged",
                )
    for stage, region in ((0, Region.FORWARD), (len(graphs) - 1, Region.BACKWARD)):
        if received_values(graphs[stage], region):
            raise VerificationError("IRC142", f"stage {stage} receives what no stage sends")


def _arriving_bytes(schedule: Schedule, region: Region) -> int:
    return sum(value.storage.nbytes for value in received_values(schedule.graph, region))


def _passing_bytes(schedule: Schedule, begin: int, end: int) -> int:
    """What is sent within some instructions and freed within them too."""
    steps = schedule.instructions[begin:end]
    sent: set[Storage] = set()
    for step in steps:
        if isinstance(step, Compute) and step.node.op == SEND:
            (value,) = step.node.operands
            sent.add(value.storage)
    freed = {step.storage for step in steps if isinstance(step, Free)}
    return sum(storage.nbytes for storage in sent & freed)


def device_peak_bytes(
    schedule: PipelineSchedule, memory: Sequence[StageMemory], shared_bytes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The most bytes on each device during a step.

    While a device does something, each stage on it holds what its other micro-batches hold, what the next
    action needs may be arriving, what was sent may not have arrived, and what one stage of the device has
    handed to another waits there.

    Args:
        schedule: In which order devices work.
        memory: Of each stage.
        shared_bytes: For each device, what the static bytes of its stages count more than once.
    """
    lag = send_lag(schedule)
    shared = shared_bytes or [0] * schedule.devices
    return tuple(
        _device_peak(schedule, memory, device, lag) - shared[device] for device in range(schedule.devices)
    )


def _device_peak(schedule: PipelineSchedule, memory: Sequence[StageMemory], device: int, lag: int) -> int:
    line = schedule.lines[device]
    stages = schedule.stages_on(device)
    there = sum(memory[stage].static_bytes for stage in stages)
    peak = there
    held: dict[tuple[int, int], int] = {}
    handed: dict[Action, int] = {}
    """What a stage has sent to another one of this device, by the action that will receive it."""
    for place, action in enumerate(line):
        its = memory[action.stage]
        key = action.stage, action.micro_batch
        held.pop(key, None)
        if action.work is not Work.WEIGHT_GRADIENT:
            handed.pop(replace(action, work=_reading(action.work)), None)
        following = line[place + 1] if place + 1 < len(line) else None
        ahead = 0
        if following is not None and _expected(schedule, following) is not None:
            ahead = memory[following.stage].arriving[following.work is not Work.FORWARD]
        if action.work is Work.WEIGHT_GRADIENT:  # it lets go of what it kept of the gradients that it sent
            waiting = Action(action.stage - 1, Work.INPUT_GRADIENT, action.micro_batch)
            if waiting in handed:
                handed[waiting] = memory[waiting.stage].arriving[1]
        beside = sum(held.values()) + sum(handed.values())
        beside += _leaving_bytes(schedule, memory, line[max(place - lag, 0) : place + 1])
        peak = max(peak, there + beside + its.during(action.work) + ahead)
        held[key] = its.after(action.work)
        is_back = action.work is not Work.FORWARD
        neighbour = action.stage - 1 if is_back else action.stage + 1
        if action.work is not Work.WEIGHT_GRADIENT and neighbour in stages:
            handed[Action(neighbour, _reading(action.work), action.micro_batch)] = its.passing[is_back]
    return peak


def _reading(work: Work) -> Work:
    """Forward, or what reads the gradients that a stage sends: named as one, split or not."""
    return Work.FORWARD if work is Work.FORWARD else Work.INPUT_GRADIENT


def _leaving_bytes(
    schedule: PipelineSchedule, memory: Sequence[StageMemory], recent: Sequence[Action]
) -> int:
    """What the last actions sent to other devices and their stages do not keep: the last of each boundary.

    Args:
        schedule: In which order devices work.
        memory: Of each stage.
        recent: The last actions of a device, and the one that runs.
    """
    found: dict[tuple[int, bool], int] = {}
    let_go = {(a.stage, a.micro_batch) for a in recent if a.work is Work.WEIGHT_GRADIENT}
    for action in recent[:-1]:
        is_back = action.work is not Work.FORWARD
        neighbour = action.stage - 1 if is_back else action.stage + 1
        if action.work is Work.WEIGHT_GRADIENT or not 0 <= neighbour < schedule.stages:
            continue
        if schedule.device_of[neighbour] != schedule.device_of[action.stage]:
            is_let_go = is_back and (action.stage, action.micro_batch) in let_go
            sent_bytes = memory[neighbour].arriving[1] if is_let_go else memory[action.stage].passing[is_back]
            found[action.stage, is_back] = sent_bytes
    return sum(found.values())
