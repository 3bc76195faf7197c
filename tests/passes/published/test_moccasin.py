"""MOCCASIN's constraint programme against exhaustive search over its class."""

import math
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.calls import several
from support.examples import examples
from support.exhaustive import chains, cheapest_in_order, problem_of
from support.solutions import budget_between, verify
from support.strategies import Sample, graphs, with_annotations

from irc.ir import UsageError
from irc.passes import CheckpointProblem
from irc.passes.published import moccasin as module
from irc.passes.published.moccasin import moccasin
from irc.passes.remat.exact import Exact

SMALL = examples(25)
MANY_SECONDS = 60.0
samples = chains(max_forward=7, max_kept=6) | graphs(max_forward=6)


def later() -> float:
    return time.thread_time() + MANY_SECONDS


def check(problem: CheckpointProblem, exact: Exact, budget_bytes: int) -> float:
    """The schedule does what is claimed; returns its seconds."""
    if exact.best is None:
        return math.inf
    verify(problem, exact.best, budget_bytes)
    return exact.best.seconds


def check_against_all(sample: Sample, percent: int) -> None:
    """With enough intervals it finds the best of all, and with two none better."""
    problem = problem_of(sample)
    assume(len(problem.producer) <= 6)
    budget = budget_between(problem, percent)
    expected = cheapest_in_order(problem, budget)
    many = moccasin(problem, budget, intervals=problem.time_steps, deadline=later())
    assert many.is_proved
    assert check(problem, many, budget) == pytest.approx(expected)
    twice = moccasin(problem, budget, deadline=later())
    assert twice.is_proved
    assert check(problem, twice, budget) >= expected * (1 - 1e-9)
    if twice.best is not None:
        assert all(twice.best.order.count(node) <= 2 for node in problem.forward)


@given(samples, st.integers(0, 100))
@SMALL
def test_it_is_as_good_as_exhaustive_search(sample: Sample, percent: int) -> None:
    check_against_all(sample, percent)


@given(with_annotations(samples), st.integers(0, 100))
@SMALL
def test_it_is_so_with_annotations(sample: Sample, percent: int) -> None:
    check_against_all(sample, percent)


@given(several(chains(max_forward=5, max_kept=5)), st.integers(0, 100))
@examples(15)
def test_it_is_so_with_several_forwards_in_flight(sample: Sample, percent: int) -> None:
    check_against_all(sample, percent)


@given(samples, st.integers(0, 100))
@SMALL
def test_one_interval_computes_nothing_twice(sample: Sample, percent: int) -> None:
    problem = problem_of(sample)
    budget = budget_between(problem, percent)
    exact = moccasin(problem, budget, intervals=1, deadline=later())
    fits = problem.eager.peak_bytes <= budget
    assert check(problem, exact, budget) == (problem.step_seconds if fits else math.inf)


@given(samples, st.integers(0, 100))
@examples(15)
def test_sizes_that_are_rounded_up_keep_to_the_budget(sample: Sample, percent: int) -> None:
    problem = problem_of(sample)
    budget = budget_between(problem, percent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_UNITS", 50)
        rounded = moccasin(problem, budget, deadline=later())
    exact = moccasin(problem, budget, deadline=later())
    assert check(problem, rounded, budget) >= check(problem, exact, budget) * (1 - 1e-9)
    assert exact.is_proved and not (rounded.is_proved and rounded.best is None and exact.best is not None)


@given(samples)
@examples(10)
def test_nothing_is_proved_after_the_deadline(sample: Sample) -> None:
    problem = problem_of(sample)
    exact = moccasin(problem, problem.floor_bytes, deadline=time.thread_time() - 1)
    assert exact.best is None and not exact.is_proved


@given(samples)
@examples(4)
def test_a_large_graph_is_refused(sample: Sample) -> None:
    problem = problem_of(sample)
    count = len(problem.base)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UsageError) as caught:
        patch.setattr(module, "MOST_OPERATIONS", count - 1)
        moccasin(problem, problem.floor_bytes, deadline=later())
    assert caught.value.code == "IRC403" and caught.value.help is not None
    assert f"moccasin holds {count - 1} operations, and this graph has {count}" in str(caught.value)
    assert "strategy auto" in caught.value.help
