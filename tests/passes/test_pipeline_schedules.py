"""The known schedules: the orders that torch runs, and the closed formulae of their bubbles and peaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs

from irc.ir import UsageError
from irc.ir.pipeline.schedule import PipelineSchedule, Work, in_flight, in_flight_on_devices
from irc.ir.pipeline.timing import PipelineTimeline, StageCost, simulate_pipeline
from irc.passes.pipeline import SCHEDULES, pipeline_schedule

# ---------------------------------------------------------------------- the orders of torch


class _Recorder:
    """What torch takes for a stage, without a model, processes or tensors: it notes what it is to do."""

    def __init__(self, index: int, devices: int, stages: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = min(index % devices, index), devices
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, True
        self.submod, self.device = torch.nn.Identity(), torch.device("cpu")
        self.done: list[str] = []

    def _no_messages(self, micro_batch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_messages

    def forward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        self.done.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        self.done.append(f"{self.stage_index}B{micro_batch}")

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        pass

    def release_fwd_send_outputs(self, micro_batch: int) -> None:
        """As torch from 2.15 on asks for."""


def _their_text(name: str, devices: int, micro_batches: int, chunks: int) -> list[str]:
    """What torch runs on each device, in our text form; a ValueError for what it does not take."""
    if name in ("gpipe", "1f1b"):
        lines: list[str] = []
        for device in range(devices):
            stage = _Recorder(device, devices, devices)
            kind: Any = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}[name]
            single = kind(stage, micro_batches)
            single._initialize_stage = lambda *args, **kwargs: None
            single._step_microbatches([()] * micro_batches, [{}] * micro_batches)
            lines.append(f"device {device}: {' '.join(stage.done)}")
        return lines
    kind = {
        "interleaved": theirs.ScheduleInterleaved1F1B,
        "zb-h1": theirs.ScheduleInterleavedZeroBubble,
        "zbv": theirs.ScheduleZBVZeroBubble,
        "dualpipev": theirs.ScheduleDualPipeV,
    }[name]
    stages = devices * chunks
    first = [stage for stage in range(stages) if SCHEDULES[name].device_of(stage, devices) == 0]
    schedule: Any = kind([_Recorder(stage, devices, stages) for stage in first], micro_batches)
    assert schedule.pipeline_order_with_comms  # torch's own check: sends and receives can be put in
    order: dict[int, list[Any]] = schedule.pipeline_order
    words = [["+".join(map(str, a.sub_actions or (a,))) for a in order[d] if a] for d in range(devices)]
    return [f"device {device}: {' '.join(line)}" for device, line in enumerate(words)]


def _cases(name: str) -> list[tuple[int, int, int]]:
    chunks = SCHEDULES[name].chunks
    return [
        (p, m, v)
        for p in range(1, 6)
        for m in [*range(1, 9), 12, 15]
        for v in ((1, 2, 3) if chunks is None else (chunks,))
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_orders_are_those_that_torch_runs(name: str) -> None:
    compared = 0
    for p, m, v in _cases(name):
        try:
            lines = _their_text(name, p, m, v)
        except ValueError:
            assert (
                not _taken(name, p, m, v) or (name == "1f1b" and m < p) or (name == "zb-h1" and m % (m // p))
            )
            continue
        schedule = pipeline_schedule(name, p, m, v)
        schedule.verify()
        assert str(schedule).splitlines()[1:] == lines, (p, m, v)
        compared += 1
    assert compared > len(_cases(name)) / 2


def _taken(name: str, p: int, m: int, v: int | None = None) -> bool:
    try:
        pipeline_schedule(name, p, m, v)
    except UsageError as error:
        assert error.code == "IRC468" and error.help
        return False
    return True


# ---------------------------------------------------------------------- what they take


_DEVICES = st.integers(1, 8)
_MICRO_BATCHES = st.integers(1, 40)


@given(st.sampled_from(list(SCHEDULES)), _DEVICES, _MICRO_BATCHES, st.integers(1, 4))
def test_what_is_taken_is_valid(name: str, p: int, m: int, v: int) -> None:
    chunks = SCHEDULES[name].chunks
    takes = {"interleaved": m % max(m // p, 1) == 0, "dualpipev": m >= 2 * p}.get(name, True)
    assert _taken(name, p, m, v) is (takes and chunks in (None, v))
    if takes:
        schedule = pipeline_schedule(name, p, m, chunks or v)
        schedule.verify()
        assert (schedule.stages, schedule.devices) == (p * (chunks or v), p)
        for device in range(p):
            assert len(schedule.stages_on(device)) == (chunks or v)


@pytest.mark.parametrize(
    ("name", "numbers", "code", "says"),
    [
        ("1f2b", (2, 4), "IRC467", "there is no pipeline schedule '1f2b'"),
        ("gpipe", (0, 4), "IRC469", "0 devices"),
        ("gpipe", (2, 0), "IRC469", "0 micro-batches"),
        ("interleaved", (2, 4, 0), "IRC469", "0 chunks"),
        ("zbv", (2, 4, 3), "IRC468", "zbv has 2 stages on each device, not 3"),
        ("1f1b", (2, 4, 2), "IRC468", "1f1b has 1 stages on each device, not 2"),
        ("interleaved", (4, 9), "IRC468", "and 9 are not 2 times as many"),
        ("dualpipev", (4, 7), "IRC468", "dualpipev on 4 devices takes 8 micro-batches or more"),
    ],
)
def test_what_is_not_taken_is_refused_by_name(
    name: str, numbers: tuple[int, ...], code: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        pipeline_schedule(name, *numbers)
    assert caught.value.code == code and caught.value.help


@given(_DEVICES, _MICRO_BATCHES)
def test_the_help_of_a_refusal_is_right(p: int, m: int) -> None:
    if not _taken("interleaved", p, m):
        rounds = m // p
        assert _taken("interleaved", p, rounds * p) and _taken("interleaved", p, (rounds + 1) * p)
    assert _taken("dualpipev", p, 2 * p)


# ---------------------------------------------------------------------- closed formulae


@st.composite
def _parts(draw: st.DrawFn) -> StageCost:
    """Forward, input gradient and weight gradient, in whole seconds: sums are exact."""
    seconds = st.integers(1, 9)
    return StageCost(draw(seconds), draw(seconds), draw(seconds))


def _step(schedule: PipelineSchedule, cost: StageCost) -> PipelineTimeline:
    return simulate_pipeline(schedule, [cost] * schedule.stages)


def _bubble_seconds(name: str, p: int, m: int, cost: StageCost, v: int | None = None) -> float:
    """How much longer a step takes than the work of a device, which is the same for all."""
    timeline = _step(pipeline_schedule(name, p, m, v), cost)
    assert len(set(timeline.busy_seconds)) == 1
    return timeline.step_seconds - timeline.busy_seconds[0]


def _whole(cost: StageCost) -> float:
    return cost.forward_seconds + cost.seconds(Work.BACKWARD)


@given(st.sampled_from(["gpipe", "1f1b"]), _DEVICES, _MICRO_BATCHES, _parts())
def test_bubble_of_gpipe_and_1f1b(name: str, p: int, m: int, cost: StageCost) -> None:
    """(p - 1) / (m + p - 1), for all p and m, however long forward and backward are."""
    timeline = _step(pipeline_schedule(name, p, m), cost)
    assert timeline.step_seconds == (m + p - 1) * _whole(cost)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@given(_DEVICES, _MICRO_BATCHES, st.integers(1, 4), _parts())
def test_bubble_of_interleaved(p: int, m: int, v: int, cost: StageCost) -> None:
    """(p - 1) / (vm + p - 1) for all m >= p that are taken.

    With fewer than p each of v - 1 rounds waits for the last device, p - m steps.
    """
    if not _taken("interleaved", p, m, v):
        return
    extra = p - 1 + (v - 1) * max(p - m, 0)
    timeline = _step(pipeline_schedule("interleaved", p, m, v), cost)
    assert timeline.step_seconds == (v * m + extra) * _whole(cost)
    assert timeline.bubble_fraction == pytest.approx(extra / (v * m + extra))


@given(_DEVICES, _MICRO_BATCHES, _parts())
def test_bubble_of_zero_bubble_h1(p: int, m: int, cost: StageCost) -> None:
    """(p - 1)(F + I), less the shortest of F, I, W for each gap that a W can fill: min(m, p) - 1 times.

    For m >= p and W the shortest that is the (p - 1)(F + I - W) of Qi et al.
    """
    f, i, w = cost.forward_seconds, cost.input_gradient_seconds, cost.weight_gradient_seconds
    expected = (p - 1) * (f + i) - (min(m, p) - 1) * min(f, i, w)
    assert _bubble_seconds("zb-h1", p, m, cost) == expected


@given(_DEVICES, _MICRO_BATCHES)
def test_bubble_of_zero_bubble_v_where_all_parts_are_equal(p: int, m: int) -> None:
    """(p - 1) / (6m + p - 1) exactly where 2(m - 1) >= 3(p - 1); below, 2 more for each micro-batch less."""
    extra = max(p - 1, 4 * (p - 1) - 2 * (m - 1))
    timeline = _step(pipeline_schedule("zbv", p, m), StageCost(1, 1, 1))
    assert timeline.bubble_fraction == pytest.approx(extra / (6 * m + extra))
    assert (extra == p - 1) is (2 * (m - 1) >= 3 * (p - 1))


@given(_DEVICES, st.integers(0, 20))
def test_bubble_of_dual_pipe_v_where_all_parts_are_equal(p: int, more: int) -> None:
    """Twice that of ZBV, for all m that it takes; as much where no forward waits for a backward to leave."""
    m, cost = 2 * p + more, StageCost(1, 1, 1)
    schedule = pipeline_schedule("dualpipev", p, m)
    overlapped, apart = _step(schedule, cost), _step(replace(schedule, overlapped=frozenset()), cost)
    assert overlapped.step_seconds == 6 * m + 2 * (p - 1)
    assert apart.bubble_fraction == pytest.approx((p - 1) / (6 * m + p - 1))


@given(st.sampled_from(["zbv", "dualpipev"]), _DEVICES, st.integers(1, 20), _parts())
def test_bubble_of_v_schedules_where_parts_differ(name: str, p: int, more: int, cost: StageCost) -> None:
    """From 2p + 1 micro-batches on it does not depend on how many there are, and is at most twice 1F1B's."""
    bubble = _bubble_seconds(name, p, 2 * p + more, cost)
    assert bubble == _bubble_seconds(name, p, 2 * p + 1, cost)
    assert 0 <= bubble <= 2 * (p - 1) * _whole(cost)


@given(_DEVICES, _MICRO_BATCHES, st.integers(1, 4))
def test_micro_batches_in_flight(p: int, m: int, v: int) -> None:
    """On device r, in chunks where there are several: until the gradient of the inputs, of the weights."""
    devices = range(p)
    q = m // max(m // p, 1)
    expected = {
        "gpipe": [(m, m) for _ in devices],
        "1f1b": [(min(m, p - r),) * 2 for r in devices],
        "interleaved": [(min(m * v, 2 * (p - 1 - r) + (v - 1) * q + 1),) * 2 for r in devices],
        "zb-h1": [(min(m, p - r), min(m, p)) for r in devices],
        "zbv": [(min(2 * m, m + 1 + r, 2 * p),) * 2 for r in devices],
        "dualpipev": [(2 * p + 1,) * 2 for _ in devices],
    }
    for name, pairs in expected.items():
        if _taken(name, p, m, SCHEDULES[name].chunks or v):
            found = in_flight_on_devices(pipeline_schedule(name, p, m, SCHEDULES[name].chunks or v))
            assert [(each.until_input, each.until_weight) for each in found] == pairs, name


@given(st.sampled_from(list(SCHEDULES)), _DEVICES, _MICRO_BATCHES)
def test_peak_bytes_are_those_of_the_micro_batches_in_flight(name: str, p: int, m: int) -> None:
    if not _taken(name, p, m):
        return
    schedule = pipeline_schedule(name, p, m)
    cost = StageCost(1, 1, 1, static_bytes=1000, held_bytes=1, held_after_input_bytes=1)
    static_bytes = 1000 * schedule.stages // p
    most = in_flight_on_devices(schedule)
    assert _step(schedule, cost).peak_bytes == tuple(static_bytes + each.until_weight for each in most)
    of_stages = in_flight(schedule)
    for device, each in enumerate(most):
        stages = schedule.stages_on(device)
        assert max(of_stages[s].until_input for s in stages) <= each.until_input
        assert each.until_input <= sum(of_stages[s].until_input for s in stages)
