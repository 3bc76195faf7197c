"""The integer programme against exhaustive search, and both against what they claim."""

import math
import time
from collections.abc import Iterable, Sequence
from itertools import product
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import (
    Choice,
    at_random,
    chains,
    cheapest_in_class,
    cheapest_of_all,
    problem_of,
    subsets,
)
from support.strategies import Sample, graphs

from irc.ir import Node, parse_graph, verify_schedule
from irc.passes import CheckpointProblem, Costs
from irc.passes.remat.cut_ilp import Relaxation
from irc.passes.remat.eviction import evict_greedily
from irc.passes.remat.exact import best_of_class, lower_bound
from irc.passes.remat.problem import Solution

SMALL = examples(20)
MANY_SECONDS = 60.0
samples = chains() | graphs()


def problems(sample: Sample, most_kept: int = 7) -> CheckpointProblem:
    problem = problem_of(sample)
    assume(len(problem.wanted) <= most_kept)
    return problem


def run(problem: CheckpointProblem, again: Sequence[Iterable[Node]]) -> Solution:
    """The schedule that runs `again[j]` before backward operation j."""
    pairs = zip(again, problem.backward, strict=True)
    return problem.simulate_order(problem.forward, [n for before, node in pairs for n in (*before, node)])


def budgets(front: tuple[Choice, ...]) -> list[int]:
    """Every budget at which the best choice changes, and one byte less."""
    peaks = {choice.peak_bytes for choice in front}
    return sorted(peaks | {peak - 1 for peak in peaks})


def within(front: tuple[Choice, ...], budget_bytes: int) -> Choice | None:
    """The fastest choice within the budget, of equally fast ones that with the smallest peak."""
    fitting = (choice for choice in front if choice.peak_bytes <= budget_bytes)
    return min(fitting, key=lambda choice: (choice.seconds, choice.peak_bytes), default=None)


def later() -> float:
    return time.thread_time() + MANY_SECONDS


# ------------------------------------------------------------------------------ the reference itself


@given(samples)
@SMALL
def test_the_reference_promises_what_its_schedules_do(sample: Sample) -> None:
    problem = problems(sample)
    front = cheapest_in_class(problem)
    assert (front[0].seconds, front[0].peak_bytes) == (problem.step_seconds, problem.keep_all.peak_bytes)
    for choice in front:
        solution = run(problem, choice.again)
        verify_schedule(
            solution.schedule,
            sample.workspace_bytes,
            budget_bytes=choice.peak_bytes,
            peak_bytes=solution.peak_bytes,
        )
        assert solution.seconds == choice.seconds


@given(chains(max_forward=4))
@SMALL
def test_the_reference_is_the_best_of_all_ways_to_run_forward_operations_again(sample: Sample) -> None:
    problem = problems(sample)
    repeatable = [node for node in problem.forward if node.is_recomputable]
    places = len(problem.backward) - 1
    assume(places * len(repeatable) <= 9)
    runs = [[node for node in repeatable if node in chosen] for chosen in map(set, _subsets(repeatable))]
    front = cheapest_in_class(problem)
    fastest: dict[int, float] = {}
    for again in product(runs, repeat=places):
        solution = run(problem, ((), *again))
        fastest[solution.peak_bytes] = min(fastest.get(solution.peak_bytes, math.inf), solution.seconds)
    for budget in budgets(front):
        best = min((seconds for peak, seconds in fastest.items() if peak <= budget), default=None)
        chosen = within(front, budget)
        assert best == (chosen and chosen.seconds)


def _subsets(nodes: list[Node]) -> list[tuple[Node, ...]]:
    return [
        tuple(n for n, bit in zip(nodes, bits, strict=True) if bit)
        for bits in product((0, 1), repeat=len(nodes))
    ]


# ------------------------------------------------------------------------------ the integer programme


NOTHING_RUNS = """
graph loss_bytes=5 {
  storage @w 10 cpu
  storage @t 10 cpu
  input %w: int8[10]{1} @w parameter "w" requires_grad
  input %t: int8[10]{1} @t tangent "0"
forward:
backward:
  output %w "0"
  gradient %t "parameter:w"
}
"""


def test_where_nothing_runs_the_loss_decides() -> None:
    problem = CheckpointProblem(parse_graph(NOTHING_RUNS), Costs({}, {}, "analytic:test"))
    fits, not_so = (best_of_class(problem, nbytes, deadline=later()) for nbytes in (25, 24))
    assert fits.is_proved and fits.best is not None and fits.best.peak_bytes == 25
    assert not_so.is_proved and not_so.best is None


@given(samples)
@SMALL
def test_the_programme_is_as_good_as_exhaustive_search(sample: Sample) -> None:
    problem = problems(sample)
    front = cheapest_in_class(problem)
    for budget in budgets(front):
        expected = within(front, budget)
        exact = best_of_class(problem, budget, deadline=later())
        assert exact.is_proved
        if expected is None:
            assert exact.best is None
            continue
        assert exact.best is not None
        assert (exact.best.seconds, exact.best.peak_bytes) == (expected.seconds, expected.peak_bytes)
        verify_schedule(exact.best.schedule, sample.workspace_bytes, budget_bytes=budget)


@given(samples)
@SMALL
def test_the_bound_is_below_every_schedule(sample: Sample) -> None:
    problem = problems(sample, most_kept=5)
    front = cheapest_in_class(problem)
    for budget in budgets(front):
        bound = lower_bound(problem, budget, deadline=later())
        best = cheapest_of_all(problem, budget)
        assert problem.step_seconds + bound <= best * (1 + 1e-6)
        chosen = within(front, budget)
        assert chosen is None or best <= chosen.seconds
        evicted = evict_greedily(problem, budget)
        assert evicted is None or best <= evicted.seconds


READ_LATE = """
graph loss_bytes=0 {
  storage @s_x 1 cpu
  storage @s_w 1 cpu
  storage @s_t 1 cpu
  storage @s_s 5 cpu
  storage @s_u 1 cpu
  storage @s_p 6 cpu
  storage @s_h1 8 cpu
  storage @s_h2 1 cpu
  storage @s_y 1 cpu
  storage @s_g 1 cpu
  input %x: float8_e5m2[1]{1} @s_x input "0"
  input %w: float8_e5m2[1]{1} @s_w parameter "w" requires_grad
  input %t: float8_e5m2[1]{1} @s_t tangent "0"
forward:
  f0 = test.op(%x) -> (%s: float8_e5m2[5]{1} @s_s, %u: float8_e5m2[1]{1} @s_u)
  f1 = test.op(%s) -> %p: float8_e5m2[6]{1} @s_p
  f2 = test.op(%u) -> %h1: float8_e5m2[8]{1} @s_h1
  f3 = test.op(%h1) -> %h2: float8_e5m2[1]{1} @s_h2
  f4 = test.op(%p, %h2) -> %y: float8_e5m2[1]{1} @s_y
backward:
  b0 = test.grad(%t, %u) -> %g: float8_e5m2[1]{1} @s_g
  output %y "0"
  gradient %g "parameter:w"
}
"""


def test_what_forward_alone_makes_again_may_stay_for_it() -> None:
    """In 17 bytes `p` goes after it was made, and is made again of `s`, of which backward reads nothing."""
    graph = parse_graph(READ_LATE)
    seconds = {node: 9.0 if node.name == "f0" else 1.0 for node in graph.nodes}
    problem = CheckpointProblem(graph, Costs(seconds, dict.fromkeys(graph.nodes, 0), "analytic:test"))
    for budget_bytes, again in ((18, 0.0), (17, 1.0), (16, 10.0)):
        assert cheapest_of_all(problem, budget_bytes) - problem.step_seconds == again
        assert lower_bound(problem, budget_bytes, deadline=later()) == pytest.approx(again)


@given(chains(), st.integers(0, 1 << 32))
@SMALL
def test_the_bound_is_below_random_schedules(sample: Sample, seed: int) -> None:
    problem = problem_of(sample)
    solution = at_random(problem, Random(seed))
    verify_schedule(solution.schedule, sample.workspace_bytes)
    bound = lower_bound(problem, solution.peak_bytes, deadline=later())
    assert problem.step_seconds + bound <= solution.seconds * (1 + 1e-6)


@given(samples)
@SMALL
def test_what_is_refused_is_impossible(sample: Sample) -> None:
    """An infeasible relaxation means that no schedule fits at all."""
    problem = problems(sample, most_kept=5)
    assume(problem.backward)
    budget = problem.floor_bytes
    relaxation = Relaxation(problem, budget, range(problem.time_steps), small_bytes=-1)
    if relaxation.solve(seconds=MANY_SECONDS, gap=0.0).is_infeasible:
        assert cheapest_of_all(problem, budget) == math.inf


@given(chains())
@SMALL
def test_few_cuts_still_bound_and_still_fit(sample: Sample) -> None:
    """What large graphs rely on: cuts at a few positions, small storages kept."""
    problem = problems(sample)
    assume(problem.backward)
    front = cheapest_in_class(problem)
    largest = max(s.nbytes for s in problem.producer) if problem.producer else 0
    for choice in front:
        loss = len(problem.forward)
        relaxation = Relaxation(
            problem,
            choice.peak_bytes,
            sorted({loss // 2, loss, loss + 1 + len(problem.backward) // 2}),
            small_bytes=largest // 4,
        )
        solved = relaxation.solve(seconds=MANY_SECONDS, gap=0.0)
        assert not solved.is_infeasible
        assert problem.step_seconds + solved.bound_seconds <= choice.seconds * (1 + 1e-6)
        assert solved.resident is not None
        for eager in (True, False):
            solution = problem.simulate_recomputations(problem.repeats_between(solved.resident, eager=eager))
            verify_schedule(solution.schedule, sample.workspace_bytes, peak_bytes=solution.peak_bytes)


@given(samples, st.data())
@SMALL
def test_any_cuts_are_below_every_schedule(sample: Sample, data: st.DataObject) -> None:
    problem = problems(sample, most_kept=5)
    assume(problem.backward)
    cuts = data.draw(st.sets(st.integers(0, problem.time_steps - 1), min_size=1))
    for budget in budgets(cheapest_in_class(problem)):
        best = cheapest_of_all(problem, budget)
        relaxation = Relaxation(problem, budget, sorted(cuts), small_bytes=-1)
        in_parts = relaxation.relaxed_bound_seconds(seconds=MANY_SECONDS)
        whole = relaxation.solve(seconds=MANY_SECONDS, gap=0.0).bound_seconds
        assert in_parts <= whole * (1 + 1e-6) + 1e-6
        assert problem.step_seconds + whole <= best * (1 + 1e-6) or math.isinf(best)


@given(chains())
@SMALL
def test_more_cuts_are_a_better_bound(sample: Sample) -> None:
    """Spans hold what a programme of fewer cuts says, which the rows between cuts alone do not."""
    problem = problem_of(sample)
    assume(len(problem.backward) >= 2)
    loss, middle = len(problem.forward), len(problem.forward) + 1 + len(problem.backward) // 2
    budget = (problem.floor_bytes + problem.keep_all.peak_bytes) // 2
    few, more = (
        Relaxation(problem, budget, cuts, small_bytes=-1).relaxed_bound_seconds(seconds=MANY_SECONDS)
        for cuts in ([loss], [loss, middle])
    )
    assert few <= more * (1 + 1e-6) + 1e-6


@given(samples)
@SMALL
def test_every_staging_is_a_schedule(sample: Sample) -> None:
    """At a cut what is named is resident, and nothing else that backward did not just read."""
    problem = problems(sample, most_kept=4)
    once = {s for s in problem.wanted if not problem.producer[s].is_recomputable}
    for kept in subsets(problem.wanted):
        if once <= kept:
            solution = problem.keeping(kept)
            verify_schedule(solution.schedule, sample.workspace_bytes, peak_bytes=solution.peak_bytes)


@given(chains())
@SMALL
def test_the_same_question_has_the_same_answer(sample: Sample) -> None:
    problem = problem_of(sample)
    assume(problem.backward)
    budget = (problem.floor_bytes + problem.keep_all.peak_bytes) // 2
    orders: list[tuple[Node, ...]] = []
    for _ in range(2):
        fresh = CheckpointProblem(problem.graph, problem.costs)
        exact = best_of_class(fresh, budget, deadline=later())
        orders.append(exact.best.order if exact.best is not None else ())
    assert orders[0] == orders[1]
