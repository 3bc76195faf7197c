"""Simulates a pipeline schedule: when each action and each transfer runs, and the bytes on each device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import UsageError
from .schedule import Action, PipelineSchedule, Work, execution_order, needed_before, result_of

__all__ = [
    "MemoryPoint",
    "PipelineTimeline",
    "StageCost",
    "TimedAction",
    "TimedTransfer",
    "Transfer",
    "simulate_pipeline",
]


@dataclass(frozen=True, slots=True)
class StageCost:
    """Holds the cost of a stage on its device, for one micro-batch unless a field says otherwise.

    Args:
        forward_seconds: Time of its forward.
        input_gradient_seconds: Time of the part of its backward for its inputs.
        weight_gradient_seconds: Time of the part for its parameters.
        backward_seconds: Time of its backward in one; None if it is the sum of both parts.
        static_bytes: The bytes that are there for the whole step: parameters, gradients, optimizer state.
        held_bytes: The bytes that a micro-batch holds from the start of its forward until the end of its
            backward, or of the part for the inputs. With its outputs, without buffers for what it receives.
        held_after_input_bytes: The bytes that it holds from there until the end of the part for the
            parameters.
        working_bytes: The bytes that each kind of work takes more while it runs; none if it is not named.
    """

    forward_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float
    backward_seconds: float | None = None
    static_bytes: int = 0
    held_bytes: int = 0
    held_after_input_bytes: int = 0
    working_bytes: Mapping[Work, int] = field(default_factory=dict[Work, int])

    def seconds(self, work: Work) -> float:
        """Time of one action."""
        match work:
            case Work.FORWARD:
                return self.forward_seconds
            case Work.INPUT_GRADIENT:
                return self.input_gradient_seconds
            case Work.WEIGHT_GRADIENT:
                return self.weight_gradient_seconds
            case Work.BACKWARD:
                both = self.input_gradient_seconds + self.weight_gradient_seconds
                return both if self.backward_seconds is None else self.backward_seconds

    def at_speed(self, speed: float) -> StageCost:
        """The same on a device that is so many times as fast."""
        whole = self.backward_seconds
        return replace(
            self,
            forward_seconds=self.forward_seconds / speed,
            input_gradient_seconds=self.input_gradient_seconds / speed,
            weight_gradient_seconds=self.weight_gradient_seconds / speed,
            backward_seconds=None if whole is None else whole / speed,
        )


@dataclass(frozen=True, slots=True)
class Transfer:
    """Describes a transfer from one stage to another for each micro-batch.

    To a later stage it is activations, sent after forward; to an earlier one gradients, sent after the
    gradients of the inputs. Between stages of one device it takes no time.

    Args:
        source_stage: Who sends.
        target_stage: Who waits for it.
        nbytes: Its size.
        seconds: Time on the link from device to device, which carries one transfer at a time.
    """

    source_stage: int
    target_stage: int
    nbytes: int
    seconds: float

    @property
    def is_forward(self) -> bool:
        """Whether it carries activations."""
        return self.source_stage < self.target_stage


@dataclass(frozen=True, slots=True)
class TimedAction:
    """Says when a device runs an action."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """Says when a transfer between two devices runs."""

    transfer: Transfer
    micro_batch: int
    source_device: int
    target_device: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Holds the bytes of a device from one time until the next change."""

    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class PipelineTimeline:
    """A step of a pipeline.

    Args:
        lines: The actions of each device, in order.
        transfers: Those between devices; of each link in the order in which they go.
        memory: The bytes of each device, from the start of the step; the last number holds until its end.
            Changes at one time are one point after the other.
    """

    lines: tuple[tuple[TimedAction, ...], ...]
    transfers: tuple[TimedTransfer, ...]
    memory: tuple[tuple[MemoryPoint, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """The step as JSON-ready data."""
        return {
            "lines": [[[str(t.action), t.start_seconds, t.end_seconds] for t in line] for line in self.lines],
            "transfers": [
                [
                    sent.transfer.source_stage,
                    sent.transfer.target_stage,
                    sent.transfer.nbytes,
                    sent.micro_batch,
                    sent.source_device,
                    sent.target_device,
                    sent.start_seconds,
                    sent.end_seconds,
                ]
                for sent in self.transfers
            ],
            "memory": [[[point.seconds, point.nbytes] for point in points] for points in self.memory],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PipelineTimeline:
        """Reads what `to_json` gives.

        Raises:
            ValueError: For a row that is none.
            LookupError: When something is missing.
        """
        return PipelineTimeline(
            tuple(
                tuple(TimedAction(Action.parse(str(text)), float(a), float(b)) for text, a, b in line)
                for line in data["lines"]
            ),
            tuple(
                TimedTransfer(
                    Transfer(int(source), int(target), int(nbytes), float(end) - float(start)),
                    int(micro_batch),
                    int(from_device),
                    int(to_device),
                    float(start),
                    float(end),
                )
                for source, target, nbytes, micro_batch, from_device, to_device, start, end in data[
                    "transfers"
                ]
            ),
            tuple(
                tuple(MemoryPoint(float(seconds), int(nbytes)) for seconds, nbytes in points)
                for points in data["memory"]
            ),
        )

    @property
    def step_seconds(self) -> float:
        """Time until the last action has ended."""
        return max((line[-1].end_seconds for line in self.lines if line), default=0.0)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Time that each device computes."""
        return tuple(sum(a.end_seconds - a.start_seconds for a in line) for line in self.lines)

    @property
    def bubble_fractions(self) -> tuple[float, ...]:
        """The part of the step in which each device does not compute."""
        step_seconds = self.step_seconds
        return tuple(1 - busy / step_seconds if step_seconds else 0.0 for busy in self.busy_seconds)

    @property
    def bubble_fraction(self) -> float:
        """The part of all devices' time in which they do not compute."""
        fractions = self.bubble_fractions
        return sum(fractions) / len(fractions) if fractions else 0.0

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes on each device."""
        return tuple(max(point.nbytes for point in points) for points in self.memory)


def simulate_pipeline(
    schedule: PipelineSchedule,
    costs: Sequence[StageCost],
    transfers: Sequence[Transfer] = (),
    *,
    last_costs: Sequence[StageCost] | None = None,
    keeps_received: bool = True,
    keeps_sent: bool = False,
) -> PipelineTimeline:
    """Simulates a step: each action runs as soon as its device is free and what it needs has arrived.

    The results of an overlapped forward leave with those of its backward.
    Transfers run beside computations, and on each link from one device to another one after the other, in the
    order in which what they carry is made. An action waits for the same work of the stage next to it even
    if no transfer is between the two.

    With `keeps_received` and `keeps_sent`, the bytes depend on the order of each device's actions alone, and
    not on times.

    Args:
        schedule: A valid schedule.
        costs: The cost of each stage.
        transfers: The transfers between stages, at most one for each pair and direction.
        last_costs: The costs of the last micro-batch, if they differ; their static bytes do not count.
        keeps_received: Whether there is a buffer for each micro-batch of each transfer during the whole step,
            as torch.distributed.pipelining has them, even if both stages are on one device; else there is
            one from the start of a transfer until the work that reads it has ended.
        keeps_sent: Whether what was sent stays until the step ends, as under all schedules of torch but
            Schedule1F1B; else gradients stay until their transfer has ended, activations while they are held.

    Returns:
        Times in seconds from the start of the step. If a transfer begins or ends at the very time of
        something else, the larger number of bytes is counted.

    Raises:
        UsageError: IRC466 for another number of costs than stages, a time below 0, a transfer from a stage
            to itself, to a stage that is not there, or twice between the same two.
        VerificationError: IRC464 or IRC465 for a schedule whose devices wait forever.
    """
    every = _Costs(costs, costs if last_costs is None else last_costs, schedule.micro_batches - 1)
    _check(schedule, costs, transfers)
    _check(schedule, every.last, transfers)
    times = _times(schedule, every, transfers)
    memory = _memory(schedule, every, transfers, times, keeps_received, keeps_sent)
    return PipelineTimeline(times.lines, tuple(times.transfers), memory)


@dataclass(frozen=True, slots=True)
class _Costs:
    """Holds the cost of each action."""

    first: Sequence[StageCost]
    last: Sequence[StageCost]
    last_micro_batch: int

    def of(self, action: Action) -> StageCost:
        costs = self.last if action.micro_batch == self.last_micro_batch else self.first
        return costs[action.stage]


def _check(schedule: PipelineSchedule, costs: Sequence[StageCost], transfers: Sequence[Transfer]) -> None:
    if len(costs) != schedule.stages:
        raise UsageError(
            "IRC466", f"{len(costs)} costs for {schedule.stages} stages", help="give one cost for each stage"
        )
    for stage, cost in enumerate(costs):
        for work in Work:
            if not 0 <= cost.seconds(work) < math.inf:
                raise UsageError(
                    "IRC466",
                    f"{work.name} of stage {stage} takes {cost.seconds(work)} seconds",
                    help="give a number of seconds that is 0 or more",
                )
    pairs: set[tuple[int, int]] = set()
    for transfer in transfers:
        source, target = transfer.source_stage, transfer.target_stage
        if source == target or not all(0 <= stage < schedule.stages for stage in (source, target)):
            raise UsageError(
                "IRC466",
                f"there is no transfer from stage {source} to stage {target} of {schedule.stages} stages",
                help="give transfers between different stages, counted from 0",
            )
        if (source, target) in pairs:
            raise UsageError(
                "IRC466",
                f"the transfer from stage {source} to stage {target} is there twice",
                help="give one transfer with the bytes and seconds of both",
            )
        if not 0 <= transfer.seconds < math.inf or transfer.nbytes < 0:
            raise UsageError(
                "IRC466",
                f"the transfer from stage {source} to stage {target} takes {transfer.seconds} seconds and "
                f"{transfer.nbytes} bytes",
                help="give numbers that are 0 or more",
            )
        pairs.add((source, target))


# ---------------------------------------------------------------------- times


@dataclass(frozen=True, slots=True)
class _Times:
    lines: tuple[tuple[TimedAction, ...], ...]
    transfers: list[TimedTransfer]
    of: dict[Action, TimedAction]


def _times(schedule: PipelineSchedule, costs: _Costs, transfers: Sequence[Transfer]) -> _Times:
    outgoing: defaultdict[tuple[int, Work], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        if schedule.device_of[transfer.source_stage] != schedule.device_of[transfer.target_stage]:
            for work in (Work.FORWARD,) if transfer.is_forward else (Work.INPUT_GRADIENT, Work.BACKWARD):
                outgoing[transfer.source_stage, work].append(transfer)
    lines: list[list[TimedAction]] = [[] for _ in range(schedule.devices)]
    sent: list[TimedTransfer] = []
    of: dict[Action, TimedAction] = {}
    made: dict[object, float] = {}
    arrived: defaultdict[tuple[int, bool, int], float] = defaultdict(float)
    link_free: defaultdict[tuple[int, int], float] = defaultdict(float)
    for action, leaving in execution_order(schedule):
        stage, micro_batch = action.stage, action.micro_batch
        device = schedule.device_of[stage]
        start = lines[device][-1].end_seconds if lines[device] else 0.0
        for needed in needed_before(action, schedule.stages):
            start = max(start, made[needed])
        if action.work is not Work.WEIGHT_GRADIENT:
            start = max(start, arrived[stage, action.work is Work.FORWARD, micro_batch])
        end = start + costs.of(action).seconds(action.work)
        of[action] = timed = TimedAction(action, start, end)
        lines[device].append(timed)
        for source in leaving:
            made[result_of(source)] = end
            for transfer in outgoing[source.stage, source.work]:
                target = schedule.device_of[transfer.target_stage]
                begin = max(end, link_free[device, target])
                link_free[device, target] = finish = begin + transfer.seconds
                key = transfer.target_stage, transfer.is_forward, source.micro_batch
                arrived[key] = max(arrived[key], finish)
                sent.append(TimedTransfer(transfer, source.micro_batch, device, target, begin, finish))
    return _Times(tuple(tuple(line) for line in lines), sent, of)


# ---------------------------------------------------------------------- memory


_BEFORE, _AFTER = -1, 1 << 60
"""The order of a link's work before and after a device's actions that begin or end at the same time."""


def _memory(
    schedule: PipelineSchedule,
    costs: _Costs,
    transfers: Sequence[Transfer],
    times: _Times,
    keeps_received: bool,
    keeps_sent: bool,
) -> tuple[tuple[MemoryPoint, ...], ...]:
    """The bytes of each device over time."""
    changes = [_own_changes(costs, line) for line in times.lines]
    static = [0] * schedule.devices
    for stage, cost in enumerate(costs.first):
        static[schedule.device_of[stage]] += cost.static_bytes
    ends = {timed.action: place for line in times.lines for place, timed in enumerate(line)}
    for sent in times.transfers:
        reader = _reader(sent, times.of)
        if not keeps_received:
            place = 2 * ends[reader.action] + 1
            changes[sent.target_device] += [
                (sent.start_seconds, _BEFORE, sent.transfer.nbytes),
                (reader.end_seconds, place, -sent.transfer.nbytes),
            ]
        changes[sent.source_device] += _sent_changes(sent, times.of, ends, keeps_sent)
    if keeps_received:
        for transfer in transfers:
            static[schedule.device_of[transfer.target_stage]] += transfer.nbytes * schedule.micro_batches
    return tuple(_points(static[device], changes[device]) for device in range(schedule.devices))


_Change = tuple[float, int, int]
"""A time, the order among events of that time, and the bytes that are allocated or freed."""


def _own_changes(costs: _Costs, line: Sequence[TimedAction]) -> list[_Change]:
    """Returns the bytes that a device's own actions allocate and free."""
    changes: list[_Change] = []
    for place, timed in enumerate(line):
        cost, work = costs.of(timed.action), timed.action.work
        working_bytes = cost.working_bytes.get(work, 0)
        match work:
            case Work.FORWARD:
                taken, given = working_bytes + cost.held_bytes, working_bytes
            case Work.BACKWARD:
                taken, given = working_bytes, working_bytes + cost.held_bytes
            case Work.INPUT_GRADIENT:
                taken = working_bytes
                given = working_bytes + cost.held_bytes - cost.held_after_input_bytes
            case Work.WEIGHT_GRADIENT:
                taken, given = working_bytes, working_bytes + cost.held_after_input_bytes
        changes.append((timed.start_seconds, 2 * place, taken))
        changes.append((timed.end_seconds, 2 * place + 1, -given))
    return changes


def _reader(sent: TimedTransfer, of: Mapping[Action, TimedAction]) -> TimedAction:
    """The action that a transfer is for."""
    stage = sent.transfer.target_stage
    works = (Work.FORWARD,) if sent.transfer.is_forward else (Work.INPUT_GRADIENT, Work.BACKWARD)
    return next(of[a] for a in (Action(stage, work, sent.micro_batch) for work in works) if a in of)


def _sent_changes(
    sent: TimedTransfer, of: Mapping[Action, TimedAction], ends: Mapping[Action, int], keeps_sent: bool
) -> list[_Change]:
    """Returns the bytes that a sender holds of a tensor once the stage that made it has freed it."""
    stage, nbytes = sent.transfer.source_stage, sent.transfer.nbytes
    if sent.transfer.is_forward and not keeps_sent:
        return []
    works = (Work.INPUT_GRADIENT, Work.BACKWARD)
    last = next(of[a] for a in (Action(stage, work, sent.micro_batch) for work in works) if a in of)
    held = (last.end_seconds, 2 * ends[last.action] + 1, nbytes)
    return [held] if keeps_sent else [held, (sent.end_seconds, _AFTER, -nbytes)]


def _points(static_bytes: int, changes: list[_Change]) -> tuple[MemoryPoint, ...]:
    points = [MemoryPoint(0.0, static_bytes)]
    nbytes = static_bytes
    for seconds, _, change in sorted(changes):
        nbytes += change
        points.append(MemoryPoint(seconds, nbytes))
    return tuple(points)
