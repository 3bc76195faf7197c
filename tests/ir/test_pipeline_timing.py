"""The simulator of pipelines against a slow one, and what must hold of any pipeline."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.pipelining import Sample, pipelines, slow_bytes, slow_times

from irc.ir import UsageError, VerificationError
from irc.ir.pipeline.schedule import Action, PipelineSchedule, Work
from irc.ir.pipeline.timing import PipelineTimeline, StageCost, Transfer, simulate_pipeline

TWO = PipelineSchedule.parse(
    """\
pipeline 1f1b: 2 micro-batches, stages on devices 0 1
device 0: 0F0 0F1 0B0 0B1
device 1: 1F0 1B0 1F1 1B1"""
)


def test_a_small_step_by_hand() -> None:
    """Forward 1 s, backward 2 s; activations take 1 s and gradients 3 s on their way."""
    costs = [StageCost(1, 1, 1, static_bytes=100, held_bytes=10, working_bytes={Work.BACKWARD: 5})] * 2
    transfers = [Transfer(0, 1, 4, 1), Transfer(1, 0, 3, 3)]
    timeline = simulate_pipeline(TWO, costs, transfers)
    first, second = (
        [(str(t.action), t.start_seconds, t.end_seconds) for t in line] for line in timeline.lines
    )
    assert first == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 8, 10), ("0B1", 11, 13)]
    assert second == [("1F0", 2, 3), ("1B0", 3, 5), ("1F1", 5, 6), ("1B1", 6, 8)]
    sent = [
        (t.transfer.source_stage, t.micro_batch, t.start_seconds, t.end_seconds) for t in timeline.transfers
    ]
    assert sorted(sent) == [(0, 0, 1, 2), (0, 1, 2, 3), (1, 0, 5, 8), (1, 1, 8, 11)]
    assert timeline.step_seconds == 13 and timeline.busy_seconds == (6, 6)
    assert timeline.bubble_fraction == pytest.approx(7 / 13)
    # device 0 has 2 buffers of 3, two micro-batches and a backward; device 1 has 2 buffers of 4, one
    # micro-batch, a backward, and a gradient that is on its way
    assert timeline.peak_bytes == (100 + 6 + 20 + 5, 100 + 8 + 10 + 5 + 3)
    lean = simulate_pipeline(TWO, costs, transfers, keeps_received=False)
    # the second gradient comes to device 0 during the first backward; so do activations to device 1
    assert lean.peak_bytes == (100 + 20 + 5 + 3 + 3, 100 + 10 + 5 + 4)


def test_a_link_carries_one_transfer_at_a_time() -> None:
    costs = [StageCost(1, 1, 1)] * 2
    forwards = simulate_pipeline(TWO, costs, [Transfer(0, 1, 0, 5)]).transfers
    assert [(t.start_seconds, t.end_seconds) for t in forwards] == [(1, 6), (6, 11)]


def test_the_last_of_several_transfers_counts() -> None:
    """Stage 2 reads what stage 0 makes: 7 s on its way, while stage 1 takes 1 s and 1 s to send."""
    lines = tuple((Action(s, Work.FORWARD, 0), Action(s, Work.BACKWARD, 0)) for s in range(3))
    three = PipelineSchedule("skip", (0, 1, 2), 1, lines)
    transfers = [Transfer(0, 1, 0, 1), Transfer(1, 2, 0, 1), Transfer(0, 2, 0, 7), Transfer(2, 0, 0, 9)]
    timeline = simulate_pipeline(three, [StageCost(1, 1, 0)] * 3, transfers)
    times = {str(t.action): (t.start_seconds, t.end_seconds) for line in timeline.lines for t in line}
    assert times["1F0"] == (2, 3) and times["2F0"] == (8, 9)
    assert times["2B0"] == (9, 10) and times["1B0"] == (10, 11) and times["0B0"] == (19, 20)


def test_an_overlapped_forward_leaves_with_its_backward() -> None:
    text = str(TWO).replace("2 micro", "3 micro").replace("0F1 0B0 0B1", "0F1 0F2+0B0 0B1 0B2")
    three = PipelineSchedule.parse(text.replace("1F1 1B1", "1F1 1B1 1F2 1B2"))
    costs = [StageCost(1, 5, 5), StageCost(1, 0.5, 0.5)]

    def start(schedule: PipelineSchedule) -> float:
        line = simulate_pipeline(schedule, costs, [Transfer(0, 1, 0, 1)]).lines[1]
        return next(timed.start_seconds for timed in line if str(timed.action) == "1F2")

    # forward 2 of stage 0 ends at 3, backward 0 runs from 4 to 14; stage 1 is done with what came before at 6
    assert (start(three), start(replace(three, overlapped=frozenset()))) == (15, 6)


@pytest.mark.slow
@examples(300)
@given(pipelines())
def test_times_are_those_of_the_slow_simulator(sample: Sample) -> None:
    timeline = simulate_pipeline(sample.schedule, sample.costs, sample.transfers)
    slow = slow_times(sample)
    fast = {t.action: (t.start_seconds, t.end_seconds) for line in timeline.lines for t in line}
    sent = {(t.transfer, t.micro_batch): (t.start_seconds, t.end_seconds) for t in timeline.transfers}
    assert {**fast, **sent} == slow
    assert timeline.step_seconds == max(end for node, (_, end) in slow.items() if isinstance(node, Action))
    assert tuple(tuple(t.action for t in line) for line in timeline.lines) == sample.schedule.lines


@given(pipelines(), st.booleans(), st.booleans())
def test_bytes_are_a_replay(sample: Sample, keeps_received: bool, keeps_sent: bool) -> None:
    timeline = simulate_pipeline(
        sample.schedule,
        sample.costs,
        sample.transfers,
        keeps_received=keeps_received,
        keeps_sent=keeps_sent,
    )
    times = slow_times(sample)
    for device, points in enumerate(timeline.memory):
        replayed = slow_bytes(sample, times, device, keeps_received=keeps_received, keeps_sent=keeps_sent)
        for left, right, nbytes in replayed:
            middle = (left + right) / 2
            assert [p.nbytes for p in points if p.seconds <= middle][-1] == nbytes
        most = max((nbytes for _, _, nbytes in replayed), default=0)
        peak_bytes = timeline.peak_bytes[device]
        assert peak_bytes >= most
        if keeps_received and keeps_sent:
            assert peak_bytes == max(most, points[-1].nbytes)  # the step may end with the most
        left_bytes = sum(sample.costs[stage].static_bytes for stage in sample.schedule.stages_on(device))
        assert points[-1].nbytes >= left_bytes
        if not keeps_received and not keeps_sent:
            assert points[-1].nbytes == left_bytes


@given(pipelines(), st.data())
def test_bytes_follow_from_the_order_alone(sample: Sample, data: st.DataObject) -> None:
    """With buffers for the whole step, another speed of anything changes no peak."""
    seconds = st.integers(0, 9).map(float)
    other = [
        replace(
            cost,
            forward_seconds=data.draw(seconds),
            input_gradient_seconds=data.draw(seconds),
            weight_gradient_seconds=data.draw(seconds),
        )
        for cost in sample.costs
    ]
    transfers = [replace(transfer, seconds=data.draw(seconds)) for transfer in sample.transfers]
    before = simulate_pipeline(sample.schedule, sample.costs, sample.transfers, keeps_sent=True)
    after = simulate_pipeline(sample.schedule, other, transfers, keeps_sent=True)
    assert before.peak_bytes == after.peak_bytes


@given(pipelines())
def test_no_step_is_shorter_than_its_bounds(sample: Sample) -> None:
    timeline = simulate_pipeline(sample.schedule, sample.costs, sample.transfers)
    assert timeline.step_seconds >= max(timeline.busy_seconds)
    assert timeline.step_seconds >= _path_seconds(sample)
    for bubble, line in zip(timeline.bubble_fractions, timeline.lines, strict=True):
        assert 0 <= bubble < 1 if line else bubble == 1
    _check_nothing_overlaps(timeline)


def _path_seconds(sample: Sample) -> float:
    """One micro-batch through all stages and back, with nothing else to do: no transfer waits for another."""
    costs = sample.costs
    back = [
        min(c.input_gradient_seconds, c.seconds(Work.BACKWARD)) for c in costs
    ]  # the shorter way to the stage before
    between = {
        (t.source_stage, t.target_stage): t.seconds
        for t in sample.transfers
        if sample.schedule.device_of[t.source_stage] != sample.schedule.device_of[t.target_stage]
    }
    steps = len(costs) - 1
    way = sum(between.get((s, s + 1), 0.0) + between.get((s + 1, s), 0.0) for s in range(steps))
    return sum(c.forward_seconds for c in costs) + sum(back) + way


def _check_nothing_overlaps(timeline: PipelineTimeline) -> None:
    links: dict[tuple[int, int], float] = {}
    for transfer in timeline.transfers:
        link = transfer.source_device, transfer.target_device
        assert transfer.source_device != transfer.target_device
        assert transfer.start_seconds >= links.get(link, 0.0)
        links[link] = transfer.end_seconds
    for line in timeline.lines:
        for before, after in itertools.pairwise(line):
            assert before.end_seconds <= after.start_seconds


@given(pipelines(), st.data())
def test_nothing_gets_faster_where_something_gets_slower(sample: Sample, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, sample.schedule.stages - 1))
    slower = list(sample.costs)
    slower[stage] = replace(slower[stage], forward_seconds=slower[stage].forward_seconds + 1)
    before = simulate_pipeline(sample.schedule, sample.costs, sample.transfers)
    after = simulate_pipeline(sample.schedule, slower, sample.transfers)
    without = simulate_pipeline(sample.schedule, sample.costs)
    assert without.step_seconds <= before.step_seconds <= after.step_seconds


ONE = StageCost(1, 1, 1)


@pytest.mark.parametrize(
    ("costs", "transfers", "says"),
    [
        ([ONE], [], "1 costs for 2 stages"),
        ([ONE, StageCost(1, -1, 1)], [], "INPUT_GRADIENT of stage 1 takes -1 seconds"),
        ([ONE, StageCost(float("nan"), 1, 1)], [], "FORWARD of stage 1 takes nan seconds"),
        ([ONE, ONE], [Transfer(0, 2, 1, 1)], "from stage 0 to stage 2 of 2 stages"),
        ([ONE, ONE], [Transfer(1, 1, 1, 1)], "from stage 1 to stage 1"),
        ([ONE, ONE], [Transfer(0, 1, 1, 1), Transfer(0, 1, 2, 1)], "from stage 0 to stage 1 is there twice"),
        ([ONE, ONE], [Transfer(0, 1, 1, -1)], "takes -1 seconds and 1 bytes"),
    ],
)
def test_costs_that_make_no_sense_are_refused(
    costs: list[StageCost], transfers: list[Transfer], says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        simulate_pipeline(TWO, costs, transfers)
    assert caught.value.code == "IRC466" and caught.value.help


def test_a_schedule_that_waits_forever_is_refused() -> None:
    stuck = replace(TWO, lines=(TWO.lines[0][::-1], TWO.lines[1]))
    with pytest.raises(VerificationError, match="IRC464"):
        simulate_pipeline(stuck, [ONE, ONE])
