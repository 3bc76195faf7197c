"""Several forwards before their backwards: the formula against every order of every call."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls import Calls, several
from support.examples import examples
from support.exhaustive import at_random, chains, problem_of
from support.strategies import Sample, graphs

from irc.ir import (
    UsageError,
    VerificationError,
    liveness,
    parse_graph,
    parse_program,
    print_program,
    verify_graph,
    verify_schedule,
    with_frees,
)
from irc.passes import CheckpointProblem, Costs
from irc.passes.rewrites.release_gradients import release_gradients

SOME = examples(30)
seeds = st.integers(0, 1 << 32)
samples = several(chains() | graphs())


@given(samples, seeds)
@SOME
def test_the_peak_is_that_of_the_worst_order_of_all(sample: Sample, seed: int) -> None:
    problem, count = problem_of(sample), sample.graph.forwards_in_flight
    verify_graph(sample.graph)
    for simulated in (problem.keep_all, at_random(problem, Random(seed))):
        replayed = Calls(simulated.schedule, sample.workspace_bytes, count).peak_bytes()
        assert simulated.peak_bytes == replayed
        verify_schedule(simulated.schedule, sample.workspace_bytes, peak_bytes=replayed)


@pytest.mark.default
@given(samples, seeds)
@SOME
def test_the_peak_with_gradients_is_that_of_the_worst_order_of_more_calls(sample: Sample, seed: int) -> None:
    schedule = at_random(problem_of(sample), Random(seed)).schedule
    predicted = liveness(schedule, sample.workspace_bytes, with_gradients=True).peak_bytes
    calls = Calls(schedule, sample.workspace_bytes, sample.graph.forwards_in_flight, free_order=True)
    assert predicted == calls.peak_bytes()


LEAVES_MORE_THAN_IT_HOLDS = """\
graph loss_bytes=6 loss_held_bytes=1 loss_saved_bytes=3 forwards_in_flight=3 {
  storage @x 100 cpu
  storage @w 10 cpu
  storage @t 4 cpu
  storage @z 4 cpu
  storage @h 10 cpu
  storage @g 100 cpu
  input %x: float8_e5m2[100]{1} @x input "0" requires_grad
  input %w: float8_e5m2[10]{1} @w parameter "w" requires_grad
  input %t: float8_e5m2[4]{1} @t tangent "0"
forward:
  z = op(%x, %w) -> %z: float8_e5m2[4]{1} @z
backward:
  h = op(%t) -> %h: float8_e5m2[10]{1} @h
  g = op(%t) -> %g: float8_e5m2[100]{1} @g
  output %z "0"
  gradient %g "input:0"
  gradient %h "parameter:w"
}
schedule {
  compute z keep(@z)
  loss
  compute h keep(@h)
  compute g keep(@g)
}
"""


def test_a_call_that_leaves_more_than_it_held_is_worst_when_all_others_are_finished() -> None:
    schedule = parse_program(LEAVES_MORE_THAN_IT_HOLDS)
    verify_graph(schedule.graph)
    static, waits, left = 3 * 100 + 10, 4 + 4 + 1, 4 + 100 + 1
    timeline = verify_schedule(schedule, {})
    own = [4, 4 + 4 + 6, 4 + 4 + 1 + 10, 4 + 4 + 1 + 10 + 100]
    beside = [2 * waits, *[2 * left + 10] * 3]
    assert timeline.during_bytes == tuple(static + a + b for a, b in zip(own, beside, strict=True))
    assert timeline.peak_bytes == Calls(schedule, {}, 3).peak_bytes()
    with_gradients = liveness(schedule, {}, with_gradients=True)
    beside = [2 * left + 10, *[2 * left + 20] * 3]
    assert with_gradients.during_bytes == tuple(static + a + b for a, b in zip(own, beside, strict=True))
    assert with_gradients.peak_bytes == Calls(schedule, {}, 3, free_order=True).peak_bytes()


def test_one_forward_in_flight_has_no_others() -> None:
    schedule = parse_program(LEAVES_MORE_THAN_IT_HOLDS.replace(" forwards_in_flight=3", ""))
    assert verify_schedule(schedule, {}).peak_bytes == 110 + 4 + 4 + 1 + 10 + 100
    assert liveness(schedule, {}, with_gradients=True).peak_bytes == 110 + 119 + 10


def test_tied_parameters_have_one_gradient() -> None:
    tied = LEAVES_MORE_THAN_IT_HOLDS.replace(
        "  input %t", '  input %v: float8_e5m2[10]{1} @w parameter "v"\n  input %t'
    )
    tied = tied.replace('"v"\n', '"v" requires_grad\n').replace(
        '  gradient %h "p', '  gradient %g2 "parameter:v"\n  gradient %h "p'
    )
    tied = tied.replace("  output", "  i = op(%t) -> %g2: float8_e5m2[10]{1} @i\n  output")
    tied = tied.replace("  storage @h", "  storage @i 10 cpu\n  storage @h").replace(
        "keep(@g)\n", "keep(@g)\n  compute i keep(@i)\n"
    )
    schedule = parse_program(tied)
    verify_graph(schedule.graph)
    assert verify_schedule(schedule, {}).peak_bytes == 310 + 4 + 4 + 1 + 10 + 100 + 10 + 2 * 105 + 10


def test_released_gradients_are_no_second_set() -> None:
    graph = parse_program(LEAVES_MORE_THAN_IT_HOLDS).graph
    released = release_gradients(graph)
    verify_graph(released)
    problem = CheckpointProblem(released, Costs({}, dict.fromkeys(released.operations, 0), "analytic:test"))
    schedule = with_frees(released, problem.forward, problem.backward)
    peak = verify_schedule(schedule, {}).peak_bytes
    assert (
        peak == liveness(schedule, {}, with_gradients=True).peak_bytes == Calls(schedule, {}, 3).peak_bytes()
    )


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (0, "0 forwards are in flight; at least one must be"),
        (2, "2 forwards are in flight, and the first backward updates the parameters that the others read"),
    ],
)
def test_a_number_in_flight_that_cannot_be_is_refused(count: int, message: str) -> None:
    graph = parse_graph(APPLIES)
    verify_graph(graph)
    with pytest.raises(VerificationError) as caught:
        verify_graph(replace(graph, forwards_in_flight=count))
    assert (caught.value.code, caught.value.message) == ("IRC566", message)


APPLIES = """\
graph loss_bytes=0 reserved_bytes=4 {
  storage @w 8 cpu
  storage @z 8 cpu
  storage @t 8 cpu
  storage @g 8 cpu
  input %w: float32[2]{1} @w parameter "w" requires_grad
  input %t: float32[2]{1} @t tangent "0"
forward:
  z = op(%w) -> %z: float32[2]{1} @z
backward:
  g = op(%t) -> %g: float32[2]{1} @g
  r = irc.apply_gradient(%w, %g, state_bytes=4, workspace_bytes=0, seconds=0.0) traits(effect)
  output %z "0"
  gradient none "parameter:w"
}
"""


def test_the_text_of_a_graph_says_how_many_are_in_flight() -> None:
    schedule = parse_program(LEAVES_MORE_THAN_IT_HOLDS)
    assert (schedule.graph.forwards_in_flight, schedule.graph.loss_saved_bytes) == (3, 3)
    assert print_program(schedule) == LEAVES_MORE_THAN_IT_HOLDS
    assert parse_graph(APPLIES).forwards_in_flight == 1
    with pytest.raises(UsageError, match="line 1: expected a number, found `many`"):
        parse_program(LEAVES_MORE_THAN_IT_HOLDS.replace("flight=3", "flight=many"))
