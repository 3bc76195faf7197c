"""Pipeline schedules: in which order each device works through the micro-batches of its stages."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from ..errors import UsageError, VerificationError

__all__ = ["Action", "InFlight", "PipelineSchedule", "Work", "in_flight", "in_flight_on_devices"]


class Work(Enum):
    """Names the work of a stage on a micro-batch."""

    FORWARD = "F"
    """Its outputs."""
    BACKWARD = "B"
    """The gradients of its inputs and of its parameters, in one."""
    INPUT_GRADIENT = "I"
    """The gradients of its inputs alone, which the stage before waits for."""
    WEIGHT_GRADIENT = "W"
    """The gradients of its parameters, which nobody waits for."""


_ACTION = re.compile(r"([0-9]+)([FBIW])([0-9]+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one micro-batch; its text form is `3F5`, as in torch.distributed.pipelining.

    Args:
        stage: From 0.
        work: The kind of work.
        micro_batch: From 0.
    """

    stage: int
    work: Work
    micro_batch: int

    @property
    def hands_back(self) -> bool:
        """Whether it makes the gradients that the stage before waits for."""
        return self.work in (Work.BACKWARD, Work.INPUT_GRADIENT)

    @property
    def ends(self) -> bool:
        """Whether it is the last work of the stage on the micro-batch."""
        return self.work in (Work.BACKWARD, Work.WEIGHT_GRADIENT)

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as `text`.

        Raises:
            UsageError: IRC460 when it is none.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise UsageError(
                "IRC460",
                f"{text!r} is not an action of a pipeline",
                help="write stage, F, B, I or W, and micro-batch, as 3F5",
            )
        return Action(int(match[1]), Work(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.work.value}{self.micro_batch}"


_HEADER = re.compile(r"pipeline (\S+): ([0-9]+) micro-batches, stages on devices ([0-9]+(?: [0-9]+)*)")
_LINE = re.compile(r"device ([0-9]+):((?: \S+)*)")


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """One line of actions for each device.

    A stage's forward waits for that of the stage before with the same micro-batch, its backward for that of
    the stage after it and for its own forward; a device takes its actions in order, one at a time.

    Args:
        name: The name on the command line.
        device_of: The device of each stage.
        micro_batches: The micro-batches of a step.
        lines: The actions of each device, in order.
        overlapped: Forwards that are one with the whole backward right after them: what both make leaves the
            device when both have run, as with torch's DualPipeV. In the text form a `+` joins the two.
    """

    name: str
    device_of: tuple[int, ...]
    micro_batches: int
    lines: tuple[tuple[Action, ...], ...]
    overlapped: frozenset[Action] = frozenset()

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.device_of)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.lines)

    @property
    def splits_backward(self) -> bool:
        """Whether backward comes in two parts."""
        return any(action.work is Work.WEIGHT_GRADIENT for line in self.lines for action in line)

    def stages_on(self, device: int) -> tuple[int, ...]:
        """The stages of a device, in order."""
        return tuple(stage for stage, its in enumerate(self.device_of) if its == device)

    def verify(self) -> None:
        """Checks that each device does all of its work once, and that none waits forever.

        Raises:
            VerificationError: IRC461 for an action that is there twice, is missing, or that no device has;
                IRC462 for one on the wrong device; IRC463 if a stage's backward on a micro-batch is
                both whole and split; IRC464 for a device that does things in an impossible order; IRC465
                for devices that wait for each other.
        """
        _check_places(self)
        _check_counts(self)
        _check_overlaps(self)
        execution_order(self)

    @staticmethod
    def parse(text: str) -> PipelineSchedule:
        """The schedule that prints as `text`; it need not be valid.

        Raises:
            UsageError: IRC460 if the text is not a schedule.
        """
        first, *rest = text.strip().splitlines() or [""]
        header = _HEADER.fullmatch(first.strip())
        if header is None:
            raise UsageError(
                "IRC460",
                f"{first!r} is not the first line of a pipeline schedule",
                help="write: pipeline NAME: 8 micro-batches, stages on devices 0 1 2 3",
            )
        lines = [_LINE.fullmatch(line.strip()) for line in rest]
        for place, line in enumerate(lines):
            if line is None or int(line[1]) != place:
                raise UsageError(
                    "IRC460",
                    f"line {place + 2} of a pipeline schedule is {rest[place]!r}",
                    help=f"write: device {place}: 0F0 0F1 0B0 0B1",
                )
        words = [[word.split("+") for word in line[2].split()] for line in lines if line]
        return PipelineSchedule(
            header[1],
            tuple(int(device) for device in header[3].split()),
            int(header[2]),
            tuple(tuple(Action.parse(part) for word in line for part in word) for line in words),
            frozenset(Action.parse(part) for line in words for word in line for part in word[:-1]),
        )

    def __str__(self) -> str:
        devices = " ".join(str(device) for device in self.device_of)
        lines = (
            f"device {device}: " + "".join(f"{a}+" if a in self.overlapped else f"{a} " for a in line)
            for device, line in enumerate(self.lines)
        )
        header = f"pipeline {self.name}: {self.micro_batches} micro-batches, stages on devices {devices}"
        return "\n".join([header, *(line.rstrip() for line in lines)])


def _check_places(schedule: PipelineSchedule) -> None:
    for device, line in enumerate(schedule.lines):
        for action in line:
            if action.stage >= schedule.stages or action.micro_batch >= schedule.micro_batches:
                raise VerificationError(
                    "IRC461",
                    f"{action} on device {device} is not among {schedule.stages} stages and "
                    f"{schedule.micro_batches} micro-batches",
                )
            if schedule.device_of[action.stage] != device:
                raise VerificationError(
                    "IRC462",
                    f"{action} is on device {device}; stage {action.stage} is on device "
                    f"{schedule.device_of[action.stage]}",
                )


def _check_counts(schedule: PipelineSchedule) -> None:
    counts = Counter(action for line in schedule.lines for action in line)
    for action, count in counts.items():
        if count > 1:
            raise VerificationError("IRC461", f"{action} is there {count} times")
    for stage in range(schedule.stages):
        for micro_batch in range(schedule.micro_batches):
            _check_works(stage, micro_batch, [w for w in Work if counts[Action(stage, w, micro_batch)]])


def _check_works(stage: int, micro_batch: int, works: Sequence[Work]) -> None:
    """Each micro-batch goes through a stage forward, and back whole or in two parts."""
    split = {Work.INPUT_GRADIENT, Work.WEIGHT_GRADIENT}
    if Work.BACKWARD in works and not split.isdisjoint(works):
        raise VerificationError(
            "IRC463",
            f"the backward of stage {stage} on micro-batch {micro_batch} is there whole, and in parts",
        )
    needed = {Work.FORWARD, Work.BACKWARD} if split.isdisjoint(works) else {Work.FORWARD, *split}
    missing = [str(Action(stage, work, micro_batch)) for work in Work if work in needed and work not in works]
    if missing:
        raise VerificationError("IRC461", f"missing: {', '.join(missing)}")


def _check_overlaps(schedule: PipelineSchedule) -> None:
    followed = {before: after for line in schedule.lines for before, after in itertools.pairwise(line)}
    for action in schedule.overlapped:
        after = followed.get(action)
        if action.work is not Work.FORWARD or after is None or after.work is not Work.BACKWARD:
            raise VerificationError(
                "IRC464",
                f"{action} and {after or 'nothing'} are not a forward and a whole backward that overlap",
            )
        if (after.stage, after.micro_batch) == (action.stage, action.micro_batch):
            raise VerificationError("IRC464", f"{action} cannot overlap with its own backward")


# ---------------------------------------------------------------------- order


_Result = tuple[int, Work, int]


def result_of(action: Action) -> _Result:
    """Returns the work that others wait for: a whole backward counts as its part for the inputs."""
    return action.stage, Work.INPUT_GRADIENT if action.hands_back else action.work, action.micro_batch


def needed_before(action: Action, stages: int) -> tuple[_Result, ...]:
    """The results that must be there before an action, on whichever device they are made."""
    stage, micro_batch = action.stage, action.micro_batch
    match action.work:
        case Work.FORWARD:
            return ((stage - 1, Work.FORWARD, micro_batch),) if stage else ()
        case Work.WEIGHT_GRADIENT:
            return ((stage, Work.INPUT_GRADIENT, micro_batch),)
        case _:
            own = (stage, Work.FORWARD, micro_batch)
            after = (stage + 1, Work.INPUT_GRADIENT, micro_batch)
            return (own, after) if stage + 1 < stages else (own,)


def execution_order(schedule: PipelineSchedule) -> list[tuple[Action, tuple[Action, ...]]]:
    """All actions, each after those of its device that come before it and after what it needs.

    Returns:
        Each with the actions whose results leave the device when it ends: itself; of an overlapped forward
        none, as its result leaves with that of the backward after it.

    Raises:
        VerificationError: IRC464 if a device does something before what it needs of itself; IRC465 if
            devices wait for each other.
    """
    done: set[_Result] = set()
    waiting: defaultdict[_Result, list[int]] = defaultdict(list)
    reached = [0] * schedule.devices
    order: list[tuple[Action, tuple[Action, ...]]] = []
    ready = list(reversed(range(schedule.devices)))
    while ready:
        device = ready.pop()
        line = schedule.lines[device]
        while reached[device] < len(line):
            action = line[reached[device]]
            missing = next((n for n in needed_before(action, schedule.stages) if n not in done), None)
            if missing is not None:
                waiting[missing].append(device)
                break
            before = line[reached[device] - 1 : reached[device]]
            leaving = tuple(a for a in (*before, action) if a is action or a in schedule.overlapped)
            order.append((action, () if action in schedule.overlapped else leaving))
            reached[device] += 1
            for result in map(result_of, order[-1][1]):
                done.add(result)
                ready += waiting.pop(result, ())
    _check_end(schedule, reached, done)
    return order


def _check_end(schedule: PipelineSchedule, reached: Sequence[int], done: set[_Result]) -> None:
    stuck = [device for device, line in enumerate(schedule.lines) if reached[device] < len(line)]
    waits: list[str] = []
    for device in stuck:
        action = schedule.lines[device][reached[device]]
        for stage, work, micro_batch in needed_before(action, schedule.stages):
            if (stage, work, micro_batch) in done:
                continue
            text = f"{action} of device {device} waits for {Action(stage, work, micro_batch)}"
            if schedule.device_of[stage] == device:
                raise VerificationError("IRC464", f"{text}, which does not come before it on the same device")
            waits.append(text)
    if waits:
        raise VerificationError("IRC465", f"devices wait for each other: {', '.join(waits)}")


# ---------------------------------------------------------------------- in flight


@dataclass(frozen=True, slots=True)
class InFlight:
    """The most micro-batches, of one stage or of all stages of a device, that wait at the same time.

    Args:
        until_input: The most between forward and the gradient of the inputs.
        until_weight: The most between forward and the last work on them; the same if no backward is split.
    """

    until_input: int
    until_weight: int


def in_flight(schedule: PipelineSchedule) -> tuple[InFlight, ...]:
    """The most micro-batches that wait for their backward, for each stage.

    Args:
        schedule: A valid one.
    """
    return tuple(
        _most([action for action in schedule.lines[device] if action.stage == stage])
        for stage, device in enumerate(schedule.device_of)
    )


def in_flight_on_devices(schedule: PipelineSchedule) -> tuple[InFlight, ...]:
    """The same for each device: of the sum over its stages the most."""
    return tuple(_most(line) for line in schedule.lines)


def _most(actions: Iterable[Action]) -> InFlight:
    to_input = to_weight = most_to_input = most_to_weight = 0
    for action in actions:
        forward = action.work is Work.FORWARD
        to_input += forward - action.hands_back
        to_weight += forward - action.ends
        most_to_input = max(most_to_input, to_input)
        most_to_weight = max(most_to_weight, to_weight)
    return InFlight(most_to_input, most_to_weight)
