"""Greedy eviction: valid, within the budget, and as good as can be where little is to be chosen."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import chains, cheapest_of_all, problem_of
from support.strategies import Sample, graphs
from torch import nn

from irc.frontends.torch import capture
from irc.ir import parse_graph, verify_schedule
from irc.passes import CheckpointProblem, Cost, Costs, PassManager, Program, ReplayDraws
from irc.passes.remat.eviction import evict_greedily

SOME = examples(80)
samples = chains() | graphs()
weights = st.sampled_from((0.0, 0.25, 0.5, 1.0))


@given(samples, weights, st.integers(0, 100))
@SOME
def test_what_it_returns_is_valid_and_within_the_budget(sample: Sample, weight: float, percent: int) -> None:
    problem = problem_of(sample)
    floor, top = problem.floor_bytes, problem.keep_all.peak_bytes
    budget = floor + (top - floor) * percent // 100
    solution = evict_greedily(problem, budget, distance_weight=weight)
    if solution is None:
        assert budget < top
        return
    verify_schedule(
        solution.schedule, sample.workspace_bytes, budget_bytes=budget, peak_bytes=solution.peak_bytes
    )
    assert solution.seconds >= problem.step_seconds
    assert solution.seconds == pytest.approx(sum(sample.seconds[n] for n in solution.order))


@given(samples, weights, st.integers(0, 100))
@SOME
def test_it_is_valid_where_victims_are_so_many_that_several_go_at_once(
    sample: Sample, weight: float, percent: int
) -> None:
    problem = problem_of(sample)
    floor, top = problem.floor_bytes, problem.keep_all.peak_bytes
    budget = floor + (top - floor) * percent // 100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("irc.passes.remat.eviction._MANY", 1)
        solution = evict_greedily(problem, budget, distance_weight=weight)
    if solution is not None:
        verify_schedule(
            solution.schedule, sample.workspace_bytes, budget_bytes=budget, peak_bytes=solution.peak_bytes
        )


@given(samples, weights)
@SOME
def test_nothing_is_evicted_where_all_fits(sample: Sample, weight: float) -> None:
    problem = problem_of(sample)
    solution = evict_greedily(problem, problem.keep_all.peak_bytes, distance_weight=weight)
    assert solution is not None
    assert solution.order == sample.graph.operations
    verify_schedule(solution.schedule, sample.workspace_bytes, peak_bytes=solution.peak_bytes)


@given(samples)
@SOME
def test_nothing_fits_below_the_floor(sample: Sample) -> None:
    problem = problem_of(sample)
    assert evict_greedily(problem, problem.floor_bytes - 1) is None


@given(chains(), st.integers(0, 100))
@examples(40)
def test_it_is_never_better_than_the_best(sample: Sample, percent: int) -> None:
    problem = problem_of(sample)
    assume(len(problem.producer) <= 6)
    floor, top = problem.floor_bytes, problem.keep_all.peak_bytes
    budget = floor + (top - floor) * percent // 100
    solution = evict_greedily(problem, budget)
    best = cheapest_of_all(problem, budget)
    assert (math.inf if solution is None else solution.seconds) >= best * (1 - 1e-9)


@given(samples, st.integers(0, 100))
@SOME
def test_the_same_question_has_the_same_answer(sample: Sample, percent: int) -> None:
    floor, top = problem_of(sample).floor_bytes, problem_of(sample).keep_all.peak_bytes
    budget = floor + (top - floor) * percent // 100
    first, second = (evict_greedily(problem_of(sample), budget) for _ in range(2))
    assert (first and first.order) == (second and second.order)


def _least_extra_bytes(rate: float) -> int:
    """The bytes above the floor at which eviction first finds a schedule of six layers with dropout."""
    layers = (each for _ in range(6) for each in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(rate)))
    captured = capture(nn.Sequential(*layers), (torch.randn(1024, 32, requires_grad=True),))
    program = PassManager([ReplayDraws(), Cost(profile="cpu")]).run(Program(captured.graph))
    assert program.costs is not None
    problem = CheckpointProblem(program.graph, program.costs)
    budgets = range(problem.floor_bytes, problem.keep_all.peak_bytes, 4096)
    return next(b for b in budgets if evict_greedily(problem, b) is not None) - problem.floor_bytes


def test_draws_run_again_from_states_that_stay() -> None:
    assert _least_extra_bytes(0.1) <= _least_extra_bytes(0.0) + 6 * 8192


def test_without_backward_all_runs_before_the_loss() -> None:
    graph = parse_graph("""\
graph loss_bytes=0 {
  storage @x 8 cpu
  storage @y 8 cpu
  storage @t 8 cpu
  input %x: float8_e5m2[8]{1} @x input "0"
  input %t: float8_e5m2[8]{1} @t tangent "0"
forward:
  f = op(%x) -> %y: float8_e5m2[8]{1} @y
backward:
  output %y "0"
}
""")
    costs = Costs(dict.fromkeys(graph.operations, 1.0), dict.fromkeys(graph.operations, 0), "analytic:test")
    solution = evict_greedily(CheckpointProblem(graph, costs), 24)
    assert solution is not None
    verify_schedule(solution.schedule, costs.workspace_bytes, peak_bytes=24)
