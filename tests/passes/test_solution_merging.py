"""Schedules put together from schedules: they fit, they are never worse, and they are what they claim."""

import time
from random import Random
from unittest.mock import patch

from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import at_random, chains, cheapest_in_class, problem_of
from support.strategies import Sample, graphs

from irc.ir import verify_schedule
from irc.passes import CheckpointProblem
from irc.passes.remat import exact
from irc.passes.remat.candidates import find_candidates
from irc.passes.remat.eviction import evict_greedily
from irc.passes.remat.problem import Solution
from irc.passes.remat.search import search
from irc.passes.remat.solution_merging import SolutionMerger, complete, united, with_neighbours

FEW = examples(40)
samples = chains() | graphs()


def verified(problem: CheckpointProblem, solution: Solution, budget_bytes: int | None = None) -> None:
    verify_schedule(
        solution.schedule,
        problem.costs.workspace_bytes,
        budget_bytes=budget_bytes,
        peak_bytes=solution.peak_bytes,
    )


@given(samples, st.integers(0, 1 << 32))
@FEW
def test_what_runs_again_says_all_of_a_schedule(sample: Sample, seed: int) -> None:
    problem = problem_of(sample)
    solution = at_random(problem, Random(seed))
    again = problem.simulate_recomputations(problem.recomputations(solution))
    assert again.order == solution.order and again.peak_bytes == solution.peak_bytes
    peaks = problem.peaks(solution)
    assert max(peaks, default=0) == max(solution.during_bytes, default=0)
    assert len(peaks) == problem.time_steps and peaks[len(problem.forward)] == 0


@given(samples, st.integers(0, 1 << 32), st.integers(0, 100))
@FEW
def test_two_schedules_give_one_that_is_as_good_as_either(sample: Sample, seed: int, percent: int) -> None:
    problem = problem_of(sample)
    low, high = problem.floor_bytes, problem.keep_all.peak_bytes
    budget = low + (high - low) * percent // 100
    first = evict_greedily(problem, budget)
    assume(first is not None and problem.backward)
    assert first is not None
    work = SolutionMerger(problem, budget, first)
    work.add(at_random(problem, Random(seed)))
    assert work.best is not None
    assert work.best.seconds <= first.seconds
    verified(problem, work.best, budget)
    other = evict_greedily(problem, budget, distance_weight=0.0)
    if other is not None:
        work.add(other)
        assert work.best.seconds <= min(first.seconds, other.seconds) * (1 + 1e-3)


@given(samples, st.integers(0, 1 << 32))
@FEW
def test_without_a_budget_the_peak_falls(sample: Sample, seed: int) -> None:
    problem = problem_of(sample)
    assume(problem.backward)
    work = SolutionMerger(problem, None, problem.keep_all)
    work.add(at_random(problem, Random(seed)))
    work.look_around(range(len(problem.base)))
    assert work.best is not None
    assert problem.floor_bytes <= work.best.peak_bytes <= problem.keep_all.peak_bytes
    verified(problem, work.best)


@given(chains(max_forward=5))
@FEW
def test_everything_united_holds_the_best_of_the_class(sample: Sample) -> None:
    """A search from a bad schedule, with all that may run again, ends at the exhaustive optimum."""
    problem = problem_of(sample)
    assume(problem.backward and len(problem.wanted) <= 7)
    for choice in cheapest_in_class(problem):
        work = SolutionMerger(problem, choice.peak_bytes, None)
        assert work.choose(complete(problem)) and work.best is not None
        assert abs(work.best.seconds - choice.seconds) <= 2e-4 * problem.step_seconds
        assert work.best.peak_bytes <= choice.peak_bytes


@given(samples, st.integers(0, 1 << 32))
@FEW
def test_uniting_keeps_the_first_order_and_adds_each_operation_once(sample: Sample, seed: int) -> None:
    problem = problem_of(sample)
    one = problem.recomputations(at_random(problem, Random(seed)))
    two = problem.recomputations(at_random(problem, Random(seed + 1)))
    for mine, other, both in zip(one, two, united(problem, [one, two]), strict=True):
        assert [node for node in both if node in set(mine)] == mine
        assert set(both) == {*mine, *other} and len(both) == len(mine) + len(set(other) - set(mine))
    around = with_neighbours(problem, one, range(len(problem.base)))
    assert all(set(mine) <= set(more) for mine, more in zip(one, around, strict=True))
    assert all(
        node.is_recomputable for mine, more in zip(one, around, strict=True) for node in set(more) - set(mine)
    )


@given(chains(max_forward=9), st.integers(10, 90))
@examples(15)
def test_the_way_of_large_graphs_holds_on_small_ones(sample: Sample, percent: int) -> None:
    """Within the budget, no worse than its seeds, and the bound is below the exhaustive optimum."""
    problem = problem_of(sample)
    assume(problem.backward and len(problem.wanted) <= 7)
    budget = problem.floor_bytes + (problem.keep_all.peak_bytes - problem.floor_bytes) * percent // 100
    with patch.object(exact, "_SMALL_CHOICES", -1):
        candidates = find_candidates(problem, is_thorough=True)
        found = search(problem, budget, candidates, deadline=time.thread_time() + 60)
    fitting = candidates.fitting(budget)
    if found is None:
        assert not fitting
        return
    verified(problem, found.best, budget)
    assert problem.step_seconds + found.bound_seconds <= found.best.seconds * (1 + 1e-6)
    assert not fitting or found.best.seconds <= fitting[0][1].seconds
    for choice in cheapest_in_class(problem):
        if choice.peak_bytes <= budget:
            assert problem.step_seconds + found.bound_seconds <= choice.seconds * (1 + 1e-6)
