"""Pictures of simulated steps of pipelines."""

from hypothesis import given
from support.examples import examples
from support.pipelining import Sample, pipelines

from irc.compiler.report.pipeline_picture import DrawnStep, draw_pipelines
from irc.ir.pipeline.timing import simulate_pipeline
from irc.tools.schedule_report import EqualStages, simulate_known


def test_a_picture_shows_every_device_and_micro_batch() -> None:
    step = simulate_known("1f1b", EqualStages(3, 5))
    text = draw_pipelines([step.drawn()], "svg").decode()
    assert step.title in text
    for device in range(3):
        assert text.count(f">device {device}</text>") == 2  # at its row, and at its memory
    for micro_batch in range(5):
        assert text.count(f'">{micro_batch}</text>') >= 6  # forward and backward on each device
    assert "forward (F)" in text and "backward (B)" in text and "weight gradients" not in text


def test_numbers_that_do_not_fit_are_left_out() -> None:
    step = simulate_known("gpipe", EqualStages(2, 400))
    assert ">399</text>" not in draw_pipelines([step.drawn()], "svg").decode()


@examples(8)
@given(pipelines())
def test_any_step_can_be_drawn(sample: Sample) -> None:
    timeline = simulate_pipeline(sample.schedule, sample.costs, sample.transfers)
    drawn = DrawnStep("any", sample.schedule, timeline, 1.0, "bytes")
    assert draw_pipelines([drawn], "svg").count(b">any</text>") == 1


def test_a_step_without_time_can_be_drawn() -> None:
    nothing = EqualStages(2, 2, forward_seconds=0, input_gradient_seconds=0, weight_gradient_seconds=0)
    assert b"0 s, bubble 0.0%" in draw_pipelines([simulate_known("gpipe", nothing).drawn()], "svg")
