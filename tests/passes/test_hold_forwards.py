"""Several forwards in flight: solvers against exhaustive search, and what the plans promise."""

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.calls import Calls, several
from support.examples import examples
from support.exhaustive import Choice, chains, cheapest_in_class, cheapest_of_all, problem_of
from support.strategies import Sample, graphs

from irc.ir import BudgetError, UsageError, VerificationError, parse_graph, print_graph, verify_schedule
from irc.passes import (
    CheckpointProblem,
    Costs,
    HoldForwards,
    PassManager,
    PlanMemory,
    Planner,
    Program,
    ReleaseGradients,
    parse_passes,
    smallest_budget,
)
from irc.passes.remat.cut_ilp import Relaxation
from irc.passes.remat.eviction import evict_greedily
from irc.passes.remat.exact import best_of_class, lower_bound
from irc.passes.remat.retention_ilp import RetentionProgramme
from irc.passes.remat.solution_merging import complete

SMALL = examples(15)
MANY_SECONDS = 60.0
samples = several(chains(max_forward=7) | graphs(max_forward=7))


def small(sample: Sample, most_kept: int) -> CheckpointProblem:
    problem = problem_of(sample)
    assume(problem.backward and len(problem.wanted) <= most_kept)
    return problem


def budgets(front: tuple[Choice, ...]) -> list[int]:
    """Every budget at which the best choice changes, and one byte less."""
    peaks = {choice.peak_bytes for choice in front}
    return sorted(peaks | {peak - 1 for peak in peaks})


@given(samples)
@SMALL
def test_the_reference_promises_what_its_schedules_do(sample: Sample) -> None:
    problem = small(sample, 7)
    front = cheapest_in_class(problem)
    assert (front[0].seconds, front[0].peak_bytes) == (problem.step_seconds, problem.keep_all.peak_bytes)
    for choice in front:
        again = [*([] for _ in problem.forward), *map(list, choice.again)]
        solution = problem.simulate_recomputations(again)
        assert (solution.seconds, solution.peak_bytes) <= (choice.seconds, choice.peak_bytes)
        verify_schedule(solution.schedule, sample.workspace_bytes, peak_bytes=solution.peak_bytes)


@given(samples)
@SMALL
def test_the_programme_is_as_good_as_exhaustive_search(sample: Sample) -> None:
    problem = small(sample, 7)
    front = cheapest_in_class(problem)
    for budget in budgets(front):
        fitting = (choice for choice in front if choice.peak_bytes <= budget)
        expected = min(fitting, key=lambda choice: (choice.seconds, choice.peak_bytes), default=None)
        exact = best_of_class(problem, budget, deadline=time.thread_time() + MANY_SECONDS)
        assert exact.is_proved
        if expected is None:
            assert exact.best is None
            continue
        assert exact.best is not None
        assert (exact.best.seconds, exact.best.peak_bytes) == (expected.seconds, expected.peak_bytes)


@given(chains(max_forward=6).flatmap(lambda sample: several(st.just(sample))))
@SMALL
def test_the_least_peak_is_that_of_exhaustive_search(sample: Sample) -> None:
    problem = small(sample, 6)
    least = cheapest_in_class(problem)[-1].peak_bytes
    chosen = RetentionProgramme(problem, complete(problem), None, {}).solve(seconds=MANY_SECONDS, gap=0.0)
    assert chosen.solution is not None and chosen.solution.peak_bytes >= least >= problem.floor_bytes


@given(samples)
@SMALL
def test_the_bound_is_below_every_schedule(sample: Sample) -> None:
    problem = small(sample, 4)
    front = cheapest_in_class(problem)
    for budget in budgets(front):
        bound = lower_bound(problem, budget, deadline=time.thread_time() + MANY_SECONDS)
        best = cheapest_of_all(problem, budget)
        assert problem.step_seconds + bound <= best * (1 + 1e-6)
        chosen = min((c.seconds for c in front if c.peak_bytes <= budget), default=math.inf)
        assert best <= chosen
        evicted = evict_greedily(problem, budget)
        assert evicted is None or (best <= evicted.seconds and evicted.peak_bytes <= budget)
    assert cheapest_of_all(problem, problem.floor_bytes - 1) == math.inf


@given(several(chains()))
@SMALL
def test_few_cuts_bound_too_and_none_needs_to_stand_at_the_loss(sample: Sample) -> None:
    problem = small(sample, 7)
    loss = len(problem.forward)
    for choice in cheapest_in_class(problem):
        for time_steps in ([loss // 2, loss], [loss // 2, loss + 1], [loss]):
            relaxation = Relaxation(problem, choice.peak_bytes, sorted(set(time_steps)), small_bytes=-1)
            solved = relaxation.solve(seconds=MANY_SECONDS, gap=0.0)
            assert not solved.is_infeasible
            assert problem.step_seconds + solved.bound_seconds <= choice.seconds * (1 + 1e-6)


def program_of(sample: Sample, count: int) -> Program:
    program = Program(sample.graph, Costs(sample.seconds, sample.workspace_bytes, "analytic:test"))
    return HoldForwards(count).run(program)


@given(samples, st.integers(1, 3), st.integers(0, 100))
@SMALL
def test_a_plan_holds_in_every_order(sample: Sample, count: int, percent: int) -> None:
    program = program_of(sample, count)
    planner = Planner(program)
    least, floor = smallest_budget(planner), planner.problem.floor_bytes
    most = CheckpointProblem(
        program.graph, Costs(sample.seconds, sample.workspace_bytes, "")
    ).keep_all.peak_bytes
    budget = least + (most - least) * percent // 100
    chosen = PlanMemory(budget).run(program)
    plan, schedule = chosen.plan, chosen.schedule
    assert plan is not None and schedule is not None and floor <= least <= plan.peak_bytes <= budget
    assert plan.forwards_in_flight == count and plan.baseline_peak_bytes == most
    assert Calls(schedule, sample.workspace_bytes, count).peak_bytes() == plan.peak_bytes
    free_order = Calls(schedule, sample.workspace_bytes, count, free_order=True)
    assert plan.peak_with_gradients_bytes == free_order.peak_bytes() >= plan.peak_bytes
    with pytest.raises(BudgetError) as caught:
        PlanMemory(least - 1).run(program)
    assert caught.value.minimum_bytes == least
    what = "a training step" if count == 1 else f"a training step with {count} forwards in flight"
    assert caught.value.message.startswith(f"{what} needs ")


@given(samples, st.integers(1, 3))
@SMALL
def test_more_in_flight_never_take_less_and_the_text_tells_them(sample: Sample, count: int) -> None:
    fewer, more = (program_of(sample, n).graph for n in (count, count + 1))
    problems = [
        CheckpointProblem(g, Costs(sample.seconds, sample.workspace_bytes, "")) for g in (fewer, more)
    ]
    assert problems[0].keep_all.peak_bytes <= problems[1].keep_all.peak_bytes
    assert problems[0].floor_bytes <= problems[1].floor_bytes
    assert parse_graph(print_graph(more)).forwards_in_flight == count + 1


CHAIN = """\
graph loss_bytes=4 {
  storage @x 4 cpu
  storage @w 4 cpu
  storage @t 4 cpu
  storage @a 40 cpu
  storage @b 40 cpu
  storage @y 4 cpu
  storage @gb 40 cpu
  storage @ga 40 cpu
  storage @gw 4 cpu
  input %x: float32[1]{1} @x input "0"
  input %w: float32[1]{1} @w parameter "w" requires_grad
  input %t: float32[1]{1} @t tangent "0"
forward:
  a = dear(%x, %w) -> %a: float32[10]{1} @a
  b = cheap(%a) -> %b: float32[10]{1} @b
  y = op(%b) -> %y: float32[1]{1} @y
backward:
  gb = op(%t, %b) -> %gb: float32[10]{1} @gb
  ga = op(%gb, %a) -> %ga: float32[10]{1} @ga
  gw = op(%ga, %x) -> %gw: float32[1]{1} @gw
  output %y "0"
  gradient %gw "parameter:w"
}
"""


def test_what_one_forward_may_keep_several_may_not() -> None:
    """The peak is where the gradient of b is made. The other call holds a and y, and b where it is kept."""
    graph = parse_graph(CHAIN)
    seconds = {node: 10.0 if node.name == "a" else 1.0 for node in graph.nodes}
    program = Program(graph, Costs(seconds, dict.fromkeys(graph.nodes, 0), "analytic:test"))
    here, beside = 40 + 40 + 4 + 4 + 40, 40 + 4 + 4
    for count, budget, again in ((1, 8 + here, "keep"), (2, 12 + here + beside, "recompute")):
        plan = PlanMemory(budget).run(HoldForwards(count).run(program)).plan
        assert plan is not None and plan.peak_bytes == budget and plan.proven_optimal
        assert {d.storage: d.action for d in plan.decisions} == {"a": "keep", "b": again}
    kept = PlanMemory("100%").run(HoldForwards(2).run(program)).plan
    assert kept is not None and kept.peak_bytes == 12 + here + beside + 40


# ------------------------------------------------------------------------------ what the pass refuses


def test_the_pass_is_text_and_changes_the_number_alone() -> None:
    (hold,) = parse_passes("hold-forwards{count=3}")
    assert hold == HoldForwards(3) and str(PassManager([hold])) == "hold-forwards{count=3}"
    graph = parse_graph(CHAIN)
    program = PassManager([hold]).run(Program(graph, original=replace(graph, loss_bytes=5)))
    assert program.original is not None
    assert (program.graph.forwards_in_flight, program.original.forwards_in_flight) == (3, 3)
    assert program.graph.nodes is graph.nodes and program.original.loss_bytes == 5
    assert program.graph.static_bytes == graph.static_bytes + 2 * 4


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2"])
def test_a_number_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(UsageError, match="whole number, 1 or more") as caught:
        HoldForwards(count).run(Program(parse_graph(CHAIN)))
    assert caught.value.code == "IRC565" and f"{count!r} forwards in flight" in caught.value.message


def test_the_pass_comes_before_the_choice() -> None:
    graph = parse_graph(CHAIN)
    costs = Costs(dict.fromkeys(graph.nodes, 1.0), dict.fromkeys(graph.nodes, 0), "analytic:test")
    chosen = PlanMemory("100%").run(Program(graph, costs))
    with pytest.raises(UsageError, match=r"IRC565.*after a schedule was chosen"):
        HoldForwards(2).run(chosen)


def test_several_forwards_beside_optimizers_in_backward_are_refused() -> None:
    release = ReleaseGradients("apply", lambda params: torch.optim.SGD(params, lr=0.1))
    applied = release.run(Program(parse_graph(CHAIN)))
    assert HoldForwards(1).run(applied).graph.forwards_in_flight == 1
    with pytest.raises(
        UsageError, match=r"IRC565\]: 2 forwards cannot be in flight .* updates the parameters"
    ):
        HoldForwards(2).run(applied)
    with pytest.raises(VerificationError, match="IRC566"):
        PassManager([HoldForwards(2), release]).run(Program(parse_graph(CHAIN)))
