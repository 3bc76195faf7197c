"""Devices that wait for what they sent never wait for each other, and hold what is predicted."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pipelining import Sample, pipelines

from irc.ir import UsageError, VerificationError
from irc.ir.pipeline.exchange import Expect, send_lag, with_expectations
from irc.ir.pipeline.memory import StageMemory, device_peak_bytes
from irc.ir.pipeline.schedule import Action, PipelineSchedule, Work
from irc.passes.pipeline import SCHEDULES, pipeline_schedule

_BACK = (Work.BACKWARD, Work.INPUT_GRADIENT)

Message = tuple[int, bool, int]
"""Who receives it, whether it is of forward, and of which micro-batch."""


def read_by(schedule: PipelineSchedule, action: Action) -> Message | None:
    """What an action reads from another stage."""
    if action.work is Work.FORWARD and action.stage:
        return action.stage, True, action.micro_batch
    if action.work in _BACK and action.stage + 1 < schedule.stages:
        return action.stage, False, action.micro_batch
    return None


def sent_by(schedule: PipelineSchedule, action: Action) -> Message | None:
    """What an action makes for another stage."""
    if action.work is Work.FORWARD and action.stage + 1 < schedule.stages:
        return action.stage + 1, True, action.micro_batch
    if action.work in _BACK and action.stage:
        return action.stage - 1, False, action.micro_batch
    return None


@dataclass
class Ranks:
    """A slow stand-in for the ranks: each goes on with its line as far as it can."""

    schedule: PipelineSchedule
    lag: int
    memory: tuple[StageMemory, ...] = ()
    last_memory: tuple[StageMemory, ...] = ()
    sent: set[Message] = field(default_factory=set[Message])
    posted: set[Message] = field(default_factory=set[Message])
    done: set[Action] = field(default_factory=set[Action])

    def __post_init__(self) -> None:
        count = self.schedule.devices
        self.at = [0] * count
        self.acted = [False] * count
        self.kept: list[dict[Message, int]] = [{} for _ in range(count)]
        """What each device has sent and not seen arrive, with the place of the action that sent it."""
        self.held: list[dict[tuple[int, int], Action]] = [{} for _ in range(count)]
        self.local: list[set[Message]] = [set() for _ in range(count)]
        self.static = [0] * count
        self.peaks = [0] * count
        if self.memory:
            for device in range(count):
                mine = [self.memory[stage] for stage in self.schedule.stages_on(device)]
                self.static[device] = sum(memory.static_bytes for memory in mine)
                self.peaks[device] = self.static[device] + max(memory.update_bytes for memory in mine)

    def device_of(self, message: Message) -> int:
        return self.schedule.device_of[message[0]]

    def memory_of(self, stage: int, micro_batch: int) -> StageMemory:
        is_last = micro_batch == self.schedule.micro_batches - 1
        return (self.last_memory if is_last else self.memory)[stage]

    def sender_of(self, message: Message) -> int:
        stage, is_forward, _ = message
        return stage - 1 if is_forward else stage + 1

    def is_local(self, message: Message) -> bool:
        return self.device_of(message) == self.schedule.device_of[self.sender_of(message)]

    def run(self) -> bool:
        """Whether all of them come to their end."""
        for device in range(self.schedule.devices):
            self.post(device, 0)
            self.post(device, 1)
        moved = True
        while moved:
            moved = any([self.go_on(device) for device in range(self.schedule.devices)])
        return all(at == len(line) for at, line in zip(self.at, self.schedule.lines, strict=True))

    def post(self, device: int, place: int) -> None:
        line = self.schedule.lines[device]
        message = read_by(self.schedule, line[place]) if place < len(line) else None
        if message is not None and not self.is_local(message):
            self.posted.add(message)

    def go_on(self, device: int) -> bool:
        line = self.schedule.lines[device]
        if self.at[device] == len(line):
            return False
        place = self.at[device]
        if not self.acted[device]:
            if not self.act(device, place, line[place]):
                return False
            self.acted[device] = True
            return True
        late = [m for m, at in self.kept[device].items() if at <= place - self.lag]
        if not all(message in self.posted for message in late):
            return False
        for message in late:
            del self.kept[device][message]
        self.at[device], self.acted[device] = place + 1, False
        self.post(device, place + 2)
        return True

    def act(self, device: int, place: int, action: Action) -> bool:
        reads, sends = read_by(self.schedule, action), sent_by(self.schedule, action)
        if reads is not None and reads not in self.sent:
            return False
        if sends is not None and not self.is_local(sends):
            earlier = [m for m in self.kept[device] if m[:2] == sends[:2]]
            if not all(message in self.posted for message in earlier):
                return False
        else:
            earlier = []
        if self.memory:
            self.look(device, place, action, reads, earlier)
        for message in earlier:
            del self.kept[device][message]
        if reads is not None:
            self.local[device].discard(reads)
        if sends is not None:
            self.sent.add(sends)
            if self.is_local(sends):
                self.local[device].add(sends)
            else:
                self.kept[device][sends] = place
        self.done.add(action)
        return True

    def look(
        self, device: int, place: int, action: Action, reads: Message | None, earlier: list[Message]
    ) -> None:
        """The bytes of a device during an action, before and after it begins to send."""
        line = self.schedule.lines[device]
        mine = action.stage, action.micro_batch
        self.held[device].pop(mine, None)
        following = read_by(self.schedule, line[place + 1]) if place + 1 < len(line) else None
        arriving = [following] if following is not None and not self.is_local(following) else []
        its = self.counted(device, action)
        held = self.held[device].values()
        nbytes = self.static[device] + sum(self.counted(device, last).after(last.work) for last in held)
        nbytes += sum(self.memory[stage].arriving[not forth] for stage, forth, _ in arriving)
        kept = [message for message in self.kept[device] if message not in earlier]
        waiting = [*kept, *(m for m in self.local[device] if m != reads)]
        nbytes += sum(self.passing(message) for message in waiting)
        before = sum(self.passing(message) for message in earlier)
        if action.work is not Work.WEIGHT_GRADIENT:
            before += its.until_sending[action.work is not Work.FORWARD]
        self.peaks[device] = max(self.peaks[device], nbytes + max(before, its.during(action.work)))
        self.held[device][mine] = action

    def counted(self, device: int, action: Action) -> StageMemory:
        """The memory of an action, less what the stage before holds for its own backward."""
        its = self.memory_of(action.stage, action.micro_batch)
        waits = self.held[device].get((action.stage - 1, action.micro_batch))
        holds = waits is not None and waits.work is Work.FORWARD
        return its.borrowing if holds and its.borrowing is not None else its

    def passing(self, message: Message) -> int:
        """What a message takes beside what its sender keeps."""
        stage, is_forward, micro_batch = message
        sender = self.sender_of(message)
        its = self.memory_of(sender, micro_batch)
        whole, rest = (Action(sender, work, micro_batch) for work in (Work.BACKWARD, Work.WEIGHT_GRADIENT))
        if not is_forward and (rest in self.done or (whole in self.done and its.is_paused)):
            return self.memory[stage].arriving[1]
        return its.passing[not is_forward]


def named() -> list[PipelineSchedule]:
    """Known schedules, for as many devices and micro-batches as they take."""
    found: list[PipelineSchedule] = []
    for name in SCHEDULES:
        for devices, micro_batches in ((1, 3), (2, 1), (2, 4), (3, 8), (4, 2), (4, 8)):
            try:
                found.append(pipeline_schedule(name, devices, micro_batches))
            except UsageError as error:
                assert error.code.startswith("IRC46")
    return found


@st.composite
def memories(draw: st.DrawFn, stages: int) -> tuple[StageMemory, ...]:
    """Bytes of stages: what arrives is what the neighbour sends, of which it keeps a part."""
    size = st.integers(0, 40)
    back = [draw(size) for _ in range(stages + 1)]
    forth = [draw(size) for _ in range(stages + 1)]
    found = tuple(
        StageMemory(
            *(draw(size) for _ in range(6)),
            is_paused=draw(st.booleans()),
            update_bytes=draw(st.integers(0, 200)),
            until_sending=(draw(size), draw(size)),
            arriving=(forth[stage] if stage else 0, back[stage] if stage + 1 < stages else 0),
            passing=(
                draw(st.integers(0, forth[stage + 1])) if stage + 1 < stages else 0,
                draw(st.integers(0, back[stage - 1])) if stage else 0,
            ),
        )
        for stage in range(stages)
    )
    lent = (draw(st.none() | st.tuples(*[size] * 5)) for _ in found)
    return tuple(
        memory if sizes is None else replace(memory, borrowing=_with_sizes(memory, *sizes))
        for memory, sizes in zip(found, lent, strict=True)
    )


def _with_sizes(
    memory: StageMemory, forward: int, held: int, backward: int, paused: int, rest: int
) -> StageMemory:
    return replace(
        memory,
        forward_bytes=forward,
        held_bytes=held,
        backward_bytes=backward,
        paused_bytes=paused,
        rest_bytes=rest,
    )


@pytest.mark.parametrize("schedule", named(), ids=lambda s: f"{s.name}-{s.devices}-{s.micro_batches}")
def test_ranks_of_known_schedules_come_to_their_end(schedule: PipelineSchedule) -> None:
    lag = send_lag(schedule)
    assert Ranks(schedule, lag).run()
    assert lag == 1 or not Ranks(schedule, lag - 1).run()


@given(pipelines())
def test_ranks_come_to_their_end_in_any_order_of_work_or_it_is_refused(sample: Sample) -> None:
    schedule = sample.schedule
    most = max(map(len, schedule.lines))
    try:
        lag = send_lag(schedule)
    except VerificationError as error:
        assert error.code == "IRC143"
        assert "different orders" in error.message or not Ranks(schedule, most).run()
        return
    assert Ranks(schedule, lag).run()
    assert lag == 1 or not Ranks(schedule, lag - 1).run()


def test_messages_that_would_pass_each_other_are_refused() -> None:
    text = "pipeline x: 2 micro-batches, stages on devices 0 1\ndevice 0: 0F0 0F1 0B0 0B1\n"
    schedule = PipelineSchedule.parse(text + "device 1: 1F1 1F0 1B0 1B1")
    schedule.verify()
    with pytest.raises(VerificationError, match=r"IRC143.*stages 0 and 1 take micro-batches in different"):
        send_lag(schedule)


@given(st.sampled_from(named()), st.data())
def test_devices_hold_what_is_predicted(schedule: PipelineSchedule, data: st.DataObject) -> None:
    memory = data.draw(memories(schedule.stages))
    others = data.draw(memories(schedule.stages))
    last = tuple(
        replace(other, static_bytes=one.static_bytes, arriving=one.arriving)
        for one, other in zip(memory, others, strict=True)
    )
    ranks = Ranks(schedule, send_lag(schedule), memory, last)
    assert ranks.run()
    assert tuple(ranks.peaks) == device_peak_bytes(schedule, memory, last_memory=last)


@given(pipelines())
def test_each_receive_is_posted_once_before_it_is_read(sample: Sample) -> None:
    schedule = sample.schedule
    for device, line in enumerate(with_expectations(schedule)):
        there: defaultdict[Message, int] = defaultdict(int)
        for item in line:
            if isinstance(item, Expect):
                there[item.stage, item.is_forward, item.micro_batch] += 1
                continue
            message = read_by(schedule, item)
            if message is not None and schedule.device_of[Ranks(schedule, 1).sender_of(message)] != device:
                assert there[message] == 1
        assert set(there.values()) <= {1}
