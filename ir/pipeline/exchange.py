"""Plans what the devices of a pipeline exchange: when they post receives, and wait for sends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from ..errors import VerificationError
from ..graph import RECEIVE, SEND, Graph, Region
from ..types import Value
from .schedule import Action, PipelineSchedule, Work, needed_before

__all__ = [
    "Expect",
    "reading_work",
    "received_values",
    "receives_of",
    "send_lag",
    "sent_values",
    "verify_exchanges",
    "with_expectations",
]


@dataclass(frozen=True, slots=True)
class Expect:
    """A device posts the receives of an action: memory is there for them from here on.

    Args:
        stage: The stage that receives.
        is_forward: Whether it receives activations; else gradients.
        micro_batch: The micro-batch.
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
    expected = [receives_of(schedule, action) for action in line]
    found: list[Action | Expect] = []
    for place, action in enumerate(line):
        ahead = expected[place : place + 2] if place == 0 else expected[place + 1 : place + 2]
        found.extend(expect for expect in ahead if expect is not None)
        found.append(action)
    return found


def receives_of(schedule: PipelineSchedule, action: Action) -> Expect | None:
    """Returns the receive that an action waits for; None if it needs nothing from another device."""
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
                taken.setdefault((action.stage, reading_work(action.work)), []).append(action.micro_batch)
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
    order: TopologicalSorter[tuple[str, int, int]] = TopologicalSorter()
    place: dict[Action, tuple[int, int]] = {}
    made: dict[tuple[int, Work, int], Action] = {}
    for device, line in enumerate(schedule.lines):
        for index, action in enumerate(line):
            place[action] = device, index
            if action.work is not Work.WEIGHT_GRADIENT:
                made[action.stage, reading_work(action.work), action.micro_batch] = action
            order.add(("wait", device, index), ("act", device, index))
            order.add(("act", device, index + 1), ("wait", device, index))
    posted_before: dict[tuple[int, Work], tuple[int, int]] = {}
    for reader, (device, index) in place.items():
        for key in needed_before(reader, schedule.stages):
            order.add(("act", device, index), ("act", *place[made[key]]))
        if receives_of(schedule, reader) is None:
            continue
        sender = place[made[needed_before(reader, schedule.stages)[-1]]]
        channel = reader.stage, reading_work(reader.work)
        if channel in posted_before and posted_before[channel][1] >= 0:
            order.add(("act", *sender), ("wait", *posted_before[channel]))
        posted_before[channel] = device, index - 2
        if index >= 2:
            order.add(("wait", sender[0], sender[1] + lag), ("wait", device, index - 2))
    try:
        order.prepare()
    except CycleError:
        return False
    return True


def sent_values(graph: Graph, region: Region) -> tuple[Value, ...]:
    """Returns the values that a stage sends in forward or backward, in order."""
    return tuple(n.operands[0] for n in graph.operations if n.op == SEND and n.region is region)


def received_values(graph: Graph, region: Region) -> tuple[Value, ...]:
    """Returns the values that a stage receives in forward or backward, in the order of their sends."""
    return tuple(n.values[0] for n in graph.operations if n.op == RECEIVE and n.region is region)


def verify_exchanges(graphs: Sequence[Graph]) -> None:
    """Raises unless each stage receives what its neighbours send, in the same order and layout.

    Args:
        graphs: The graphs of all stages.

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


def reading_work(work: Work) -> Work:
    """Forward, or what reads the gradients that a stage sends: named as one, split or not."""
    return Work.FORWARD if work is Work.FORWARD else Work.INPUT_GRADIENT
