"""Pipeline schedules: text form, verification and micro-batches in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.pipelining import Sample, pipelines

from irc.ir import IrcError, UsageError, VerificationError
from irc.ir.pipeline.memory import StageMemory, device_peak_bytes
from irc.ir.pipeline.schedule import Action, InFlight, PipelineSchedule, Work, in_flight, in_flight_on_devices
from irc.passes.pipeline import pipeline_schedule

TEXT = """\
pipeline 1f1b: 3 micro-batches, stages on devices 0 1
device 0: 0F0 0F1 0B0 0F2 0B1 0B2
device 1: 1F0 1B0 1F1 1B1 1F2 1B2"""


def test_text_form() -> None:
    schedule = PipelineSchedule.parse(TEXT)
    assert schedule.lines[0][2] == Action(0, Work.BACKWARD, 0)
    assert (schedule.name, schedule.device_of, schedule.micro_batches) == ("1f1b", (0, 1), 3)
    schedule.verify()
    assert str(schedule) == TEXT


def test_text_form_of_overlapped_actions() -> None:
    text = TEXT.replace("0F2 0B1", "0F2+0B1")
    schedule = PipelineSchedule.parse(text)
    schedule.verify()
    assert schedule.overlapped == {Action(0, Work.FORWARD, 2)}
    assert schedule.lines == PipelineSchedule.parse(TEXT).lines and str(schedule) == text


@given(pipelines())
def test_text_reads_back_and_what_is_possible_is_accepted(sample: Sample) -> None:
    sample.schedule.verify()
    assert PipelineSchedule.parse(str(sample.schedule)) == sample.schedule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1f1b: 3 micro-batches",
        TEXT.replace("0F1", "0X1"),
        TEXT.replace("0F1", "F1"),
        TEXT.replace("device 1", "device 2"),
        TEXT.replace("3 micro", "three micro"),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        PipelineSchedule.parse(text)
    assert caught.value.code == "IRC460" and "write" in (caught.value.help or "")


SPLIT = """\
pipeline zb-h1: 2 micro-batches, stages on devices 0 1
device 0: 0F0 0F1 0I0 0W0 0I1 0W1
device 1: 1F0 1I0 1F1 1W0 1I1 1W1"""


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (TEXT.replace("0B2", "0B1"), "IRC461", "0B1 is there 2 times"),
        (TEXT.replace(" 1B2", ""), "IRC461", "missing: 1B2$"),
        (TEXT.replace("1F0", "1F3"), "IRC461", "1F3 on device 1 is not among 2 stages and 3 micro-batches"),
        (TEXT.replace("1F0 ", ""), "IRC461", "missing: 1F0$"),
        (SPLIT.replace(" 0W1", ""), "IRC461", "missing: 0W1$"),
        (TEXT.replace("devices 0 1", "devices 0 1 1"), "IRC461", "missing: 2F0, 2B0$"),
        (TEXT.replace("1F0 1B0", "1F0 0B0"), "IRC462", "0B0 is on device 1; stage 0 is on device 0"),
        (SPLIT.replace("0W0", "0W0 0B0"), "IRC463", "stage 0 on micro-batch 0 is there whole, and in parts"),
        (SPLIT.replace("0I0 0W0", "0W0 0I0"), "IRC464", "0W0 of device 0 waits for 0I0"),
        (TEXT.replace("1F1 1B1", "1B1 1F1"), "IRC464", "1B1 of device 1 waits for 1F1"),
        (TEXT.replace("0F0 0F1", "0F0+0F1"), "IRC464", "0F0 and 0F1 are not a forward and a whole backward"),
        (TEXT.replace("0B0 0F2", "0B0+0F2"), "IRC464", "0B0 and 0F2 are not a forward and a whole backward"),
        (TEXT.replace("1F0 1B0", "1F0+1B0"), "IRC464", "1F0 cannot overlap with its own backward"),
        (
            TEXT.replace("0F0 0F1 0B0", "0F0 0F1+0B0").replace("1F0 1B0 1F1 1B1", "1F0 1F1 1B0 1B1"),
            "IRC465",
            "0B0 of device 0 waits for 1I0, 1F1 of device 1 waits for 0F1",
        ),
        (
            TEXT.replace("0F0 0F1 0B0", "0F0 0B0 0F1").replace("1F0 1B0 1F1", "1F0 1F1 1B0"),
            "IRC465",
            "0B0 of device 0 waits for 1I0, 1F1 of device 1 waits for 0F1",
        ),
    ],
)
def test_what_cannot_run_is_refused(text: str, code: str, says: str) -> None:
    with pytest.raises(VerificationError, match=says) as caught:
        PipelineSchedule.parse(text).verify()
    assert caught.value.code == code


@given(pipelines(), st.data())
def test_a_moved_action_is_accepted_only_where_it_may_be(sample: Sample, data: st.DataObject) -> None:
    """Each refusal has a reason: a dependency within the line, or a circle of dependencies between lines."""
    schedule = sample.schedule
    device = data.draw(st.sampled_from([d for d, line in enumerate(schedule.lines) if line]))
    line = list(schedule.lines[device])
    assume(len(line) > 1)
    action = line.pop(data.draw(st.integers(0, len(line) - 1)))
    line.insert(data.draw(st.integers(0, len(line))), action)
    lines = (*schedule.lines[:device], tuple(line), *schedule.lines[device + 1 :])
    changed = replace(schedule, lines=lines, overlapped=frozenset())
    try:
        changed.verify()
    except IrcError as error:
        assert error.code in ("IRC464", "IRC465")
        assert not _runs(changed)
    else:
        assert _runs(changed)


def _runs(schedule: PipelineSchedule) -> bool:
    """Whether all comes to its end where each device does the next thing as soon as it can: by trying."""
    left = [list(line) for line in schedule.lines]
    done: set[Action] = set()

    def back(stage: int, micro_batch: int) -> bool:
        parts = (Work.BACKWARD, Work.INPUT_GRADIENT)
        return stage == schedule.stages or any(Action(stage, w, micro_batch) in done for w in parts)

    def may(action: Action) -> bool:
        stage, micro_batch = action.stage, action.micro_batch
        if action.work is Work.FORWARD:
            return stage == 0 or Action(stage - 1, Work.FORWARD, micro_batch) in done
        if action.work is Work.WEIGHT_GRADIENT:
            return Action(stage, Work.INPUT_GRADIENT, micro_batch) in done
        return Action(stage, Work.FORWARD, micro_batch) in done and back(stage + 1, micro_batch)

    while firsts := [line for line in left if line and may(line[0])]:
        done |= {line.pop(0) for line in firsts}
    return not any(left)


def test_in_flight() -> None:
    assert in_flight(PipelineSchedule.parse(TEXT)) == (InFlight(2, 2), InFlight(1, 1))
    assert in_flight(PipelineSchedule.parse(SPLIT)) == (InFlight(2, 2), InFlight(1, 2))


@given(pipelines())
def test_in_flight_is_the_most_at_any_place_of_the_line(sample: Sample) -> None:
    schedule = sample.schedule

    def waiting(line: tuple[Action, ...], stages: tuple[int, ...], ends: tuple[Work, ...]) -> int:
        most = 0
        for place in range(len(line) + 1):
            begun = {(a.stage, a.micro_batch) for a in line[:place] if a.work is Work.FORWARD}
            ended = {(a.stage, a.micro_batch) for a in line[:place] if a.work in ends}
            most = max(most, len([pair for pair in begun - ended if pair[0] in stages]))
        return most

    to_input, to_weight = (Work.BACKWARD, Work.INPUT_GRADIENT), (Work.BACKWARD, Work.WEIGHT_GRADIENT)
    for stage, found in enumerate(in_flight(schedule)):
        line = schedule.lines[schedule.device_of[stage]]
        assert found == InFlight(waiting(line, (stage,), to_input), waiting(line, (stage,), to_weight))
    for device, found in enumerate(in_flight_on_devices(schedule)):
        line, stages = schedule.lines[device], schedule.stages_on(device)
        assert found == InFlight(waiting(line, stages, to_input), waiting(line, stages, to_weight))


def test_what_waits_for_a_stage_of_the_same_device_counts() -> None:
    order = pipeline_schedule("zbv", 1, 4)
    first = StageMemory(0, forward_bytes=10, held_bytes=0, backward_bytes=100, passing=(10, 0))
    second = StageMemory(0, forward_bytes=10, held_bytes=0, backward_bytes=0, arriving=(10, 0))
    assert device_peak_bytes(order, [first, second]) == (110,)
    first = StageMemory(0, forward_bytes=0, held_bytes=0, backward_bytes=7, arriving=(0, 7))
    second = StageMemory(0, 0, 0, 0, rest_bytes=50, is_paused=True, passing=(0, 3))
    assert device_peak_bytes(order, [first, second]) == (53,), "it keeps 4 of the 7 bytes that it sends"
