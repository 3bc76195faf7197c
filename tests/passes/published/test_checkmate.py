"""Checkmate's programme against exhaustive search over its class."""

import math
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.calls import several
from support.examples import examples
from support.exhaustive import chains, cheapest_in_class, cheapest_in_order, cheapest_of_all, problem_of
from support.solutions import budget_between, verify
from support.strategies import Sample, graphs, with_annotations

from irc.ir import UsageError
from irc.passes import CheckpointProblem
from irc.passes.published import checkmate as module
from irc.passes.published.checkmate import checkmate

SMALL = examples(30)
MANY_SECONDS = 60.0
samples = chains(max_forward=7, max_kept=6) | graphs(max_forward=6)


def later() -> float:
    return time.thread_time() + MANY_SECONDS


def check(sample: Sample, percent: int) -> None:
    """The programme finds the best of its class, and a schedule that does what is claimed."""
    problem = problem_of(sample)
    assume(len(problem.producer) <= 7)
    budget_bytes = budget_between(problem, percent)
    exact = checkmate(problem, budget_bytes, deadline=later())
    assert exact.is_proved
    expected = cheapest_in_order(problem, budget_bytes)
    if exact.best is None:
        assert expected == math.inf
        return
    assert exact.best.seconds == pytest.approx(expected)
    verify(problem, exact.best, budget_bytes)


@given(samples, st.integers(0, 100))
@SMALL
def test_it_is_as_good_as_exhaustive_search(sample: Sample, percent: int) -> None:
    check(sample, percent)


@given(with_annotations(samples), st.integers(0, 100))
@SMALL
def test_it_is_so_with_annotations(sample: Sample, percent: int) -> None:
    check(sample, percent)


@given(several(chains(max_forward=5, max_kept=5)), st.integers(0, 100))
@examples(15)
def test_it_is_so_with_several_forwards_in_flight(sample: Sample, percent: int) -> None:
    check(sample, percent)


@given(samples, st.integers(0, 100))
@SMALL
def test_its_class_lies_between_the_two_others(sample: Sample, percent: int) -> None:
    problem = problem_of(sample)
    assume(len(problem.producer) <= 6)
    budget = budget_between(problem, percent)
    front = cheapest_in_class(problem)
    once = min((choice.seconds for choice in front if choice.peak_bytes <= budget), default=math.inf)
    assert cheapest_of_all(problem, budget) <= cheapest_in_order(problem, budget) <= once


@given(samples)
@SMALL
def test_nothing_fits_below_the_floor(sample: Sample) -> None:
    problem = problem_of(sample)
    exact = checkmate(problem, problem.floor_bytes - 1, deadline=later())
    assert exact.best is None and exact.is_proved


@given(samples)
@examples(10)
def test_nothing_is_proved_after_the_deadline(sample: Sample) -> None:
    problem = problem_of(sample)
    exact = checkmate(problem, problem.floor_bytes, deadline=time.thread_time() - 1)
    assert exact.best is None and not exact.is_proved


@given(samples)
@examples(10)
def test_a_choice_over_the_budget_is_excluded_alone(sample: Sample) -> None:
    """Rows of memory a little too wide, as a solver's tolerance may make them, change no outcome."""
    problem = problem_of(sample)
    assume(len(problem.producer) <= 5)
    budget = budget_between(problem, 30)
    expected = checkmate(problem, budget, deadline=later())
    with pytest.MonkeyPatch.context() as patch:
        rows = CheckpointProblem.held_between
        patch.setattr(CheckpointProblem, "held_between", lambda p, t: rows(p, t) - budget // 50)
        found = checkmate(problem, budget, deadline=later())
    assert found.is_proved
    assert (found.best and found.best.seconds) == (expected.best and expected.best.seconds)


@given(samples)
@examples(4)
def test_a_large_graph_is_refused(sample: Sample) -> None:
    problem = problem_of(sample)
    count = len(problem.base)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UsageError) as caught:
        patch.setattr(module, "MOST_OPERATIONS", count - 1)
        checkmate(problem, problem.floor_bytes, deadline=later())
    assert caught.value.code == "IRC403" and caught.value.help is not None
    assert f"checkmate holds {count - 1} operations, and this graph has {count}" in str(caught.value)
    assert "strategy auto" in caught.value.help
