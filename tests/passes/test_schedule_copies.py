"""Copies beside a given order of computations: what trying other rules gains, and what it must not lose."""

import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.exact_offload.solve import best_with_swaps
from support.examples import examples
from support.exhaustive import at_random, chains, problem_of
from support.strategies import Sample, graphs
from support.swapping import chain, works

from irc.ir import Region, Tier, Trait, parse_graph, step_times, verify_schedule
from irc.passes import CheckpointProblem, Costs
from irc.passes.offload.offload_problem import OffloadProblem
from irc.passes.offload.schedule_copies import Copies, Order, schedule_copies

SMALL = examples(40)


def checked(work: OffloadProblem, order: Order, effort: int) -> Copies | None:
    """What is found with an effort, and whether it keeps what it promises."""
    problem = work.problem
    found = schedule_copies(order, problem.producer, work.tiers, work.budget_bytes, effort=effort)
    if found is not None:
        schedule = order.schedule(found.swaps)
        workspaces = problem.costs.workspace_bytes
        verify_schedule(schedule, workspaces, budget_bytes=work.budget_bytes, tiers=work.tiers)
        times = step_times(schedule, problem.costs.seconds, work.tiers)
        assert found.step_seconds == pytest.approx(times.step_seconds)
    return found


@SMALL
@given(works(), st.integers(0, 1 << 20), st.sampled_from((100, 1000, 10_000)))
def test_effort_keeps_the_budget_and_makes_nothing_slower(
    work: OffloadProblem, seed: int, effort: int
) -> None:
    order = work.order(at_random(work.problem, Random(seed)))
    plain, improved = checked(work, order, 0), checked(work, order, effort)
    assert (plain is None) == (improved is None)
    if plain is not None and improved is not None:
        assert sum(order.event_seconds) * (1 - 1e-12) <= improved.step_seconds <= plain.step_seconds


def pinned(sample: Sample) -> Sample:
    """The sample with a forward of which nothing can run again."""
    made = {
        node: replace(node, traits=node.traits | {Trait.PINNED})
        if node.region is Region.FORWARD and not node.is_view
        else node
        for node in sample.graph.nodes
    }
    return Sample(
        replace(sample.graph, nodes=tuple(made.values())),
        {made[node]: seconds for node, seconds in sample.seconds.items()},
        {made[node]: nbytes for node, nbytes in sample.workspace_bytes.items()},
    )


@SMALL
@given(st.data(), (chains(max_forward=5, max_kept=4) | graphs(max_forward=5, max_elements=16)).map(pinned))
def test_no_copies_are_faster_than_the_best_there_are(data: st.DataObject, sample: Sample) -> None:
    assume(sample.graph.operations)
    problem = problem_of(sample)
    assume(len(problem.producer) <= 6)
    speed = max(sum(s.nbytes for s in problem.producer), 1) / problem.step_seconds
    tier = Tier("host", 1 << 60, speed * data.draw(st.sampled_from((0.5, 2.0))), speed)
    budget = data.draw(st.integers(problem.floor_bytes, problem.keep_all.peak_bytes))
    work = OffloadProblem(problem, (tier,), budget)
    found = checked(work, work.order(problem.keep_all), 1000)
    assume(found is not None)
    assert found is not None
    best = best_with_swaps(problem, [tier], budget, deadline=time.thread_time() + 60)
    assert best.bound_seconds <= found.step_seconds * (1 + 1e-9)


# ---------------------------------------------------------------------- by hand


def seconds(work: OffloadProblem) -> tuple[float, float]:
    """Time of the step by the rules that are tried first, and of the best."""
    order = work.order(work.problem.keep_all)
    plain, improved = checked(work, order, 0), checked(work, order, 10_000)
    assert plain is not None and improved is not None
    return plain.step_seconds, improved.step_seconds


def work_on(sizes: Sequence[int], over_bytes: int, *tiers: Tier) -> OffloadProblem:
    """A chain of values of these sizes, with so many bytes less than what keeps all takes."""
    program = chain(len(sizes), sizes)
    assert program.costs is not None
    problem = CheckpointProblem(program.graph, program.costs)
    return OffloadProblem(problem, tiers, problem.keep_all.peak_bytes - over_bytes)


def test_what_would_be_waited_for_stays() -> None:
    """The first value is read last, but the copy of the second, which is enough, takes half as long."""
    work = work_on([200, 100, 200, 200, 100], 100, Tier("host", 1 << 20, 50.0, 400.0))
    assert seconds(work) == (11.0, 10.0)


def test_what_comes_back_late_goes_to_another_tier() -> None:
    host, disk = Tier("host", 1 << 20, 1e6, 20.0), Tier("disk", 1 << 20, 200.0, 200.0)
    plain, improved = seconds(work_on([100, 200, 200, 200, 100], 100, host, disk))
    assert improved == 10.0 < plain


def test_a_copy_back_that_fits_goes_before_one_that_does_not() -> None:
    work = work_on([300, 400, 200, 100, 200, 400, 100], 400, Tier("host", 1 << 20, 400.0, 100.0))
    assert seconds(work) == (17.0, 14.0)


def test_a_copy_of_what_is_made_twice_begins_in_the_life_that_leaves() -> None:
    """The first value may leave in both of its lives, and has to in the second, as soon as it is made."""
    program = chain(4, [100, 10, 10, 10])
    assert program.costs is not None
    graph, seconds = program.graph, program.costs.seconds
    f0, f1, f2, f3 = (node for node in graph.operations if node.region is Region.FORWARD)
    b3, b2, b1, b0 = (node for node in graph.operations if node.region is Region.BACKWARD)
    order = Order(graph, [f0, f1, f2, f3], [b3, f1, f0, b2, b1, b0], seconds, {b2: 200})
    tier = Tier("host", 1 << 20, 50.0, 100.0)
    v0 = next(gap.storage for gap in order.gaps if gap.made == 7)
    found = schedule_copies(order, [v0], [tier], int(order.event_bytes.max()) - 100)
    assert found is not None
    assert [swap.gap.made for swap in found.swaps] == [7]
    times = step_times(order.schedule(found.swaps), seconds, [tier])
    assert found.step_seconds == times.step_seconds == 13.0


MEMORY_IS_SHORT = """
graph loss_bytes=0 {
  storage @w 6 cpu
  storage @v0 8 cpu
  storage @u0 9 cpu
  storage @v1 8 cpu
  storage @v2 6 cpu
  storage @v3 1 cpu
  storage @v4 1 cpu
  storage @g4 3 cpu
  storage @g3 1 cpu
  storage @g2 3 cpu
  storage @g1 4 cpu
  storage @g0 4 cpu
  input %w: int8[6]{1} @w parameter "w" requires_grad
forward:
  f0 = test.op(%w) -> (%v0: int8[8]{1} @v0, %u0: int8[9]{1} @u0)
  f1 = test.op(%v0) -> %v1: int8[8]{1} @v1
  f2 = test.op(%v1) -> %v2: int8[6]{1} @v2
  f3 = test.op(%v2, %u0) -> %v3: int8[1]{1} @v3
  f4 = test.op(%v3, %v1) -> %v4: int8[1]{1} @v4
backward:
  b4 = test.grad() -> %g4: int8[3]{1} @g4
  b3 = test.grad(%g4, %v2, %u0) -> %g3: int8[1]{1} @g3
  b2 = test.grad(%g3, %v1, %v2) -> %g2: int8[3]{1} @g2
  b1 = test.grad(%g2, %v0, %v1) -> %g1: int8[4]{1} @g1
  b0 = test.grad(%g1, %v0) -> %g0: int8[4]{1} @g0
  output %v4 "0"
  gradient %g0 "parameter:w"
}
"""


def test_memory_given_back_early_lets_another_copy_back_begin() -> None:
    graph = parse_graph(MEMORY_IS_SHORT)
    taken = zip((9, 3, 5, 4, 4, 3, 8, 6, 3, 7), (0, 3, 0, 0, 8, 1, 1, 8, 0, 1), strict=True)
    pairs = dict(zip(graph.operations, taken, strict=True))
    costs = Costs({n: float(s) for n, (s, _) in pairs.items()}, {n: b for n, (_, b) in pairs.items()}, "test")
    problem = CheckpointProblem(graph, costs)
    work = OffloadProblem(problem, (Tier("host", 1 << 20, 1.0, 1.0),), problem.floor_bytes)
    assert seconds(work) == (95.0, 92.0)
