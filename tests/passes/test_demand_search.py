"""The search from the end of the step against exhaustive search over all schedules."""

import math
import time

from hypothesis import assume, given
from hypothesis import strategies as st
from support.calls import several
from support.examples import examples
from support.exhaustive import chains, cheapest_of_all, problem_of
from support.strategies import Sample, graphs, with_annotations

from irc.ir import parse_graph
from irc.passes import CheckpointProblem, Costs
from irc.passes.remat.demand_search import DemandSearch

samples = chains() | graphs()


def small_problem(sample: Sample) -> CheckpointProblem:
    problem = problem_of(sample)
    assume(problem.backward and len(problem.wanted) <= 5)
    return problem


def within(problem: CheckpointProblem, tenths: int) -> int:
    """A budget between the floor and what keeping all takes."""
    room = problem.keep_all.peak_bytes - problem.floor_bytes
    return problem.floor_bytes + room * tenths // 10


def search_of(problem: CheckpointProblem, budget_bytes: int, *, small_bytes: int = 0) -> DemandSearch:
    split = len(problem.forward)
    return DemandSearch(
        problem, budget_bytes, sorted({split, problem.time_steps - 2, split + 1}), small_bytes
    )


def later() -> float:
    return time.thread_time() + 60.0


@given(samples, st.integers(0, 9))
@examples(60)
def test_the_best_schedule_is_found_and_proved(sample: Sample, tenths: int) -> None:
    problem = small_problem(sample)
    budget = within(problem, tenths)
    limit_seconds = 3 * problem.step_seconds
    search = search_of(problem, budget)
    found = search.run(limit_seconds=limit_seconds, most_states=100_000, deadline=later())
    assert found.is_complete
    least_seconds = cheapest_of_all(problem, budget) - problem.step_seconds
    tolerance = 1e-6 * problem.step_seconds
    if found.solution is not None and found.solution.peak_bytes <= budget:
        assert abs(found.solution.seconds - problem.step_seconds - least_seconds) <= tolerance
    assert abs(found.bound_seconds - min(least_seconds, limit_seconds)) <= tolerance


@given(
    samples | with_annotations(samples) | several(chains(max_forward=5, max_kept=5)),
    st.integers(0, 9),
    st.integers(0, 20),
    st.integers(1, 20),
    st.sampled_from((0, 1, 1 << 10)),
)
@examples(120)
def test_no_bound_exceeds_the_best_schedule(
    sample: Sample, tenths: int, limit_tenths: int, most_states: int, small_bytes: int
) -> None:
    """With a limit, a search that gives up, and storages that count as free."""
    problem = small_problem(sample)
    budget = within(problem, tenths)
    search = search_of(problem, budget, small_bytes=small_bytes)
    limit_seconds = limit_tenths / 10 * problem.step_seconds
    least_seconds = cheapest_of_all(problem, budget) - problem.step_seconds
    assume(math.isfinite(least_seconds))
    for _ in range(2):  # the second time with the prices of the first
        found = search.run(limit_seconds=limit_seconds, most_states=most_states, deadline=later())
        assert found.bound_seconds <= min(least_seconds, limit_seconds) + 1e-6 * problem.step_seconds


USER_DOES_NOT_FIT_EARLIER = """
graph loss_bytes=3072 {
  storage @s_x0 512 cpu
  storage @s_w 512 cpu
  storage @s_t 1536 cpu
  storage @s_x 2048 cpu
  storage @s_s 512 cpu
  storage @s_m 512 cpu
  storage @s_out 512 cpu
  storage @s_G 2560 cpu
  storage @s_h 0 cpu
  storage @s_gr 0 cpu
  input %x0: float8_e5m2[512]{1} @s_x0 input "0"
  input %w: float8_e5m2[512]{1} @s_w parameter "w" requires_grad
  input %t: float8_e5m2[1536]{1} @s_t tangent "0"
forward:
  f = test.op(%x0, %w) -> %x: float8_e5m2[2048]{1} @s_x
  g = test.op(%x) -> %s: float8_e5m2[512]{1} @s_s
  u = test.op(%s) -> %m: float8_e5m2[512]{1} @s_m
  o = test.op(%w) -> %out: float8_e5m2[512]{1} @s_out
backward:
  b1 = test.grad(%x, %t) -> %G: float8_e5m2[2560]{1} @s_G
  b2 = test.grad(%G) -> %h: float8_e5m2[0]{1} @s_h
  b3 = test.grad(%m, %h) -> %gr: float8_e5m2[0]{1} @s_gr
  output %out "0"
  gradient %gr "parameter:w"
}
"""


def test_a_storage_may_stay_in_backward_if_its_only_user_does_not_fit_earlier() -> None:
    """`s` stays beside what `b1` and `b2` take: `u`, which makes `m` of it, takes too much aside before."""
    graph = parse_graph(USER_DOES_NOT_FIT_EARLIER)
    seconds = {node: 100.0 if node.name == "f" else 1.0 for node in graph.nodes}
    workspace_bytes = {node: {"u": 2560, "b2": 2048}.get(node.name, 0) for node in graph.nodes}
    problem = CheckpointProblem(graph, Costs(seconds, workspace_bytes, "analytic:test"))
    split = len(problem.forward)
    for steps in ([split], [split, split + 2]):
        search = DemandSearch(problem, 16 * 512, steps)
        found = search.run(limit_seconds=300.0, most_states=1000, deadline=time.thread_time() + 20.0)
        assert found.is_complete and found.solution is not None
        assert found.bound_seconds == 2.0 == cheapest_of_all(problem, 16 * 512) - problem.step_seconds
        assert found.solution.seconds - problem.step_seconds == 2.0
