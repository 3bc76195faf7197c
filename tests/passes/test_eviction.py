"""Greedy eviction: valid, within the budget, and as good as can be where little is to be chosen."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import chains, cheapest_of_all, problem_of
from support.strategies import Sample, graphs
from torch import nn

from irc.frontends.torch import capture
from irc.ir import Node, Storage, parse_graph, verify_schedule
from irc.passes import CheckpointProblem, Cost, Costs, PassManager, Program, ReplayDraws
from irc.passes.remat.eviction import _Run, evict_greedily  # pyright: ignore[reportPrivateUsage]
from irc.passes.remat.online_run import OverBudgetError

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


class _Checked(_Run):
    """A run that compares what it remembers with what it counts anew."""

    def _worst(self, worths: Mapping[Storage, float]) -> Storage:
        worst = super()._worst(worths)
        assert worst is min(worths, key=lambda s: self._seconds(s) / worths[s]), "the first of the best"
        for storage, seconds in self.walks.seconds.items():
            anew = self._seconds(storage)
            assert seconds == anew if storage in self.walks.exact else seconds <= anew * (1 + 1e-12)
        return worst

    def _drop_apart(self, worths: Mapping[Storage, float], wanted_bytes: int) -> None:
        self.trees.update()
        anew: dict[Node, float] = {}
        for node in self.problem.forward:
            missing = (s for s in self.problem.forward_reads[node] if s not in self.resident)
            seconds = self.problem.costs.seconds[node] + sum(anew[self.problem.producer[s]] for s in missing)
            anew[node] = min(seconds, self.problem.step_seconds)
        assert self.trees.seconds == anew
        super()._drop_apart(worths, wanted_bytes)

    def _seconds(self, storage: Storage) -> float:
        pending, found = [self.problem.producer[storage]], set[Node]()
        seconds = 0.0
        while pending:
            node = pending.pop()
            if node not in found:
                found.add(node)
                seconds += self.problem.costs.seconds[node]
                missing = (s for s in self.problem.forward_reads[node] if s not in self.resident)
                pending.extend(self.problem.producer[s] for s in missing)
        return seconds if found <= self.problem.recomputable else math.inf


@pytest.mark.parametrize("many", [2, 300])
@given(
    chains(max_forward=20, max_kept=20) | graphs(max_forward=20),
    st.sampled_from((0.0, 1 / 7)),
    weights,
    st.integers(0, 100),
)
@SOME
def test_seconds_that_are_remembered_are_those_that_are_counted_anew(
    many: int, sample: Sample, factor: float, weight: float, percent: int
) -> None:
    seconds = {node: seconds * factor for node, seconds in sample.seconds.items()}
    problem = problem_of(replace(sample, seconds=seconds))
    floor, top = problem.floor_bytes, problem.keep_all.peak_bytes
    budget = floor + (top - floor) * percent // 100
    run = _Checked(problem, budget, math.inf, budget, weight)
    with pytest.MonkeyPatch.context() as patch, suppress(OverBudgetError):
        patch.setattr("irc.passes.remat.eviction._MANY", many)
        run.step()


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
