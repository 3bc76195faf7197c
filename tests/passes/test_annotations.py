"""Annotations: every strategy honours them, the searches are as good as exhaustive ones, and bounds hold."""

import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import chains, cheapest_in_class, cheapest_of_all, problem_of
from support.strategies import Sample, graphs, with_annotations

from irc.ir import BudgetError, Graph, Plan, Storage, parse_graph, same_graph, verify_graph, verify_schedule
from irc.passes import CheckpointProblem, Costs, PlanMemory, Program
from irc.passes.program import without_annotations
from irc.passes.remat import exact
from irc.passes.remat.candidates import find_candidates
from irc.passes.remat.cut_ilp import Relaxation
from irc.passes.remat.eviction import evict_greedily
from irc.passes.remat.exact import best_of_class, lower_bound
from irc.passes.remat.problem import Solution
from irc.passes.remat.search import search
from irc.passes.remat.strategies import known_strategies

SOME = examples(60)
FEW = examples(25)
VERY_FEW = examples(12)
samples = with_annotations(chains() | graphs())
small = with_annotations(chains(max_forward=6, max_kept=6))


def later() -> float:
    return time.thread_time() + 60.0


def honoured(problem: CheckpointProblem, solution: Solution, budget_bytes: int | None = None) -> None:
    """The verifier, which keeps its own books, finds nothing against an annotation."""
    verify_schedule(
        solution.schedule,
        problem.costs.workspace_bytes,
        budget_bytes=budget_bytes,
        peak_bytes=solution.peak_bytes,
    )


def budgets(problem: CheckpointProblem) -> Iterator[int]:
    low, high = problem.floor_bytes, problem.keep_all.peak_bytes
    return (low + (high - low) * quarter // 4 for quarter in range(5))


# ------------------------------------------------------------------------------ every way to a schedule


@given(samples)
@SOME
def test_every_known_strategy_honours_every_annotation(sample: Sample) -> None:
    verify_graph(sample.graph)
    problem = problem_of(sample)
    for _, solution in known_strategies(problem):
        honoured(problem, solution)


@given(samples, st.sampled_from((0.0, 0.5, 1.0)))
@SOME
def test_eviction_honours_every_annotation(sample: Sample, weight: float) -> None:
    problem = problem_of(sample)
    for budget in budgets(problem):
        evicted = evict_greedily(problem, budget, distance_weight=weight)
        if evicted is not None:
            honoured(problem, evicted, budget)


def test_eviction_holds_what_transient_values_are_made_from_until_then() -> None:
    problem = problem_on(MASKED)
    evicted = evict_greedily(problem, problem.keep_all.peak_bytes)
    assert evicted is not None
    assert [node.name for node in evicted.order] == ["m", "a", "b", "h", "a", "b", "gh"]
    honoured(problem, evicted)


@given(samples)
@SOME
def test_keeping_all_runs_again_only_what_a_annotation_keeps_from_staying(sample: Sample) -> None:
    problem = problem_of(sample)
    again = set(problem.keep_all.order)
    for node in again:
        if problem.keep_all.order.count(node) > 1:
            assert node.is_transient
    honoured(problem, problem.simulate_recomputations(problem.repeats_between({})))
    assert problem.eager.order == sample.graph.operations
    assert problem.eager.seconds == problem.step_seconds


# ------------------------------------------------------------------------------ optimality under annotations


@given(small)
@FEW
def test_the_exact_search_is_as_good_as_an_exhaustive_one(sample: Sample) -> None:
    problem = problem_of(sample)
    assume(problem.backward and len(problem.wanted) <= 6)
    front = cheapest_in_class(problem)
    for budget in sorted({c.peak_bytes for c in front} | {front[-1].peak_bytes - 1}):
        fitting = (choice for choice in front if choice.peak_bytes <= budget)
        expected = min(fitting, key=lambda c: (c.seconds, c.peak_bytes), default=None)
        found = best_of_class(problem, budget, deadline=later())
        assert found.is_proved
        if expected is None:
            assert found.best is None
            continue
        assert found.best is not None
        assert found.best.seconds == pytest.approx(expected.seconds, rel=1e-9)
        assert found.best.peak_bytes == expected.peak_bytes
        honoured(problem, found.best, budget)


def test_the_bound_counts_what_a_annotation_makes_run_again_and_no_more() -> None:
    """To make `b` again, `a` may stay, although `b` is all that is made of it."""
    problem = problem_on(MASKED.replace('@a annotation("irc.recompute(block)")', "@a"))
    budget = problem.keep_all.peak_bytes
    assert lower_bound(problem, budget, deadline=later()) == pytest.approx(1.0)
    exact_search = best_of_class(problem, budget, deadline=later())
    assert exact_search.best is not None and exact_search.best.seconds == problem.step_seconds + 1.0
    at_loss = Relaxation(problem, budget, [len(problem.forward)], small_bytes=1000)
    assert at_loss.solve(seconds=60, gap=0.0).bound_seconds == pytest.approx(1.0)


@given(small, st.integers(0, 100))
@FEW
def test_no_schedule_that_honours_the_annotations_is_below_the_bounds(sample: Sample, percent: int) -> None:
    problem = problem_of(sample)
    assume(problem.backward and len(problem.wanted) <= 5)
    low, high = problem.floor_bytes, problem.keep_all.peak_bytes
    budget = low + (high - low) * percent // 100
    best = cheapest_of_all(problem, budget)
    at_loss = Relaxation(problem, budget, [len(problem.forward)]).solve(seconds=60, gap=0.0)
    coarse = Relaxation(problem, budget, [len(problem.forward)], small_bytes=high // 9)
    for bound in (
        lower_bound(problem, budget, deadline=later()),
        0.0 if at_loss.is_infeasible else at_loss.bound_seconds,
        coarse.solve(seconds=60, gap=0.0).bound_seconds,
    ):
        assert problem.step_seconds + bound <= best * (1 + 1e-6)
    if at_loss.is_infeasible:
        assert best == float("inf")


@given(samples, st.integers(0, 100))
@VERY_FEW
def test_the_way_of_large_graphs_honours_every_annotation(sample: Sample, percent: int) -> None:
    problem = problem_of(sample)
    assume(problem.backward and len(problem.wanted) <= 5)
    budget = problem.floor_bytes + (problem.keep_all.peak_bytes - problem.floor_bytes) * percent // 100
    with patch.object(exact, "_SMALL_CHOICES", -1):
        candidates = find_candidates(problem, is_thorough=True)
        found = search(problem, budget, candidates, deadline=later())
    for _, solution in candidates.candidates:
        honoured(problem, solution)
    if found is None:
        assert not candidates.fitting(budget)
        return
    honoured(problem, found.best, budget)
    best = cheapest_of_all(problem, budget)
    assert problem.step_seconds + found.bound_seconds <= best * (1 + 1e-6)
    assert best <= found.best.seconds * (1 + 1e-9)


@pytest.mark.default
@given(samples, st.integers(0, 100))
@FEW
def test_a_plan_says_what_each_annotation_did(sample: Sample, percent: int) -> None:
    problem = problem_of(sample)
    low, high = problem.floor_bytes, problem.keep_all.peak_bytes
    program = Program(sample.graph, problem.costs)
    step = PlanMemory(low + (high - low) * percent // 100)
    try:
        plan = step.run(program).plan
    except BudgetError as error:
        assert "annotations are in force (irc.keep(a), irc.recompute(a)), and without them" in error.message
        return
    assert plan is not None
    assert [annotation.by for annotation in plan.annotations] == [
        annotation.by for annotation in sample.graph.annotations
    ]
    by_name: dict[str, Storage] = {storage.name: storage for storage in problem.producer}
    for decision in plan.decisions:
        node = problem.producer[by_name[decision.storage]]
        if decision.annotation:
            assert node.annotation is not None and decision.annotation == node.annotation.by
            assert decision.reason.startswith(decision.annotation)
        if node.is_transient:
            assert decision.action != "keep"


@given(samples)
@VERY_FEW
def test_all_but_the_annotations_is_the_same_without_them(sample: Sample) -> None:
    costs = problem_of(sample).costs
    free = without_annotations(Program(sample.graph, costs, original=sample.graph))
    assert free.costs is not None and free.original is not None
    assert not free.graph.annotations and not any(node.annotation for node in free.graph.nodes)
    assert free.original.nodes == free.graph.nodes
    nodes = tuple(replace(node, annotation=None) for node in sample.graph.nodes)
    assert same_graph(free.graph, replace(sample.graph, nodes=nodes, annotations=()))
    for node, seconds in costs.seconds.items():
        twin = next(n for n in free.graph.nodes if n.name == node.name)
        assert free.costs.seconds[twin] == seconds
        assert free.costs.workspace_bytes[twin] == costs.workspace_bytes[node]


# ------------------------------------------------------------------------------ in words

MASKED = """graph loss_bytes=0 {
  storage @x 8 cpu
  storage @m 8 cpu
  storage @a 8 cpu
  storage @b 8 cpu
  storage @h 8 cpu
  storage @t 8 cpu
  storage @g 8 cpu
  annotation recompute "irc.recompute(block)"
  annotation keep "irc.keep(head)"
  annotation prefer_recompute "torch.utils.checkpoint at model.py:7 in forward"
  input %x: float64[1]{1} @x parameter "w" requires_grad
  input %t: float64[1]{1} @t tangent "0"
forward:
  m = test.draw(%x) -> %m: float64[1]{1} @m traits(random) annotation("irc.recompute(block)")
  a = test.op(%m) -> %a: float64[1]{1} @a annotation("irc.recompute(block)")
  b = test.op(%a) -> %b: float64[1]{1} @b annotation("irc.recompute(block)")
  h = test.op(%b) -> %h: float64[1]{1} @h
backward:
  gh = test.grad(%t, %b) -> %g: float64[1]{1} @g
  output %h "0"
  gradient %g "parameter:w"
}
"""


def problem_on(text: str) -> CheckpointProblem:
    graph = parse_graph(text)
    return CheckpointProblem(graph, costs_of(graph))


def costs_of(graph: Graph) -> Costs:
    return Costs(dict.fromkeys(graph.operations, 1.0), dict.fromkeys(graph.operations, 0), "analytic:test")


def plan_on(text: str, budget: int | str = "200%") -> Plan:
    graph = parse_graph(text)
    plan = PlanMemory(budget).run(Program(graph, costs_of(graph))).plan
    assert plan is not None
    return plan


def test_explanations_name_the_annotation() -> None:
    plan = plan_on(MASKED)
    lines = plan.explain().splitlines()
    assert lines[1].split("  ")[-1].startswith("irc.recompute(block): ")
    assert lines[-4:] == [
        "1 storages are kept until backward reads them (8 B)",
        "irc.recompute(block): 2 storages (16 B) not kept for backward, and made again; "
        "1 storage (8 B) kept, as their operations may run only once",
        "irc.keep(head): no effect: nothing of it runs in forward, or other annotations decide",
        "torch.utils.checkpoint at model.py:7 in forward: no effect: nothing of it runs in forward, "
        "or other annotations decide",
    ]
    reasons = {decision.storage: decision.reason for decision in plan.decisions}
    assert reasons["m"] == "its operation may run only once (random), in spite of irc.recompute(block)"
    assert (
        "annotations  irc.recompute(block), irc.keep(head); bound and smallest budget are of schedules that "
        "honour them" in plan.summary()
    )


def test_what_is_kept_by_annotation_is_explained_and_hints_are_left_to_the_search() -> None:
    hinted = MASKED.replace(
        '@a annotation("irc.recompute(block)")',
        '@a annotation("torch.utils.checkpoint at model.py:7 in forward")',
    )
    kept = hinted.replace('@b annotation("irc.recompute(block)")', '@b annotation("irc.keep(head)")')
    plan = plan_on(kept)
    decisions = {decision.storage: decision for decision in plan.decisions}
    assert (decisions["b"].action, decisions["b"].annotation) == ("keep", "irc.keep(head)")
    assert decisions["b"].reason == "irc.keep(head): backward reads it once"
    assert decisions["a"].action == "free"
    assert decisions["a"].reason.endswith("; a hint: torch.utils.checkpoint at model.py:7 in forward")
    assert (
        "irc.keep(head): 1 storage (8 B) kept for backward; none of 1 operations runs again" in plan.explain()
    )
    assert "a hint, left to the search: 0 storages (0 B) kept, 0 storages (0 B) made again" in plan.explain()


WIDE = """graph loss_bytes=0 {
  storage @x 8 cpu
  storage @a 1000 cpu
  storage @b 1000 cpu
  storage @h 8 cpu
  storage @t 8 cpu
  storage @gb 1000 cpu
  storage @g 8 cpu
  annotation keep "irc.keep(wide)"
  input %x: float64[1]{1} @x parameter "w" requires_grad
  input %t: float64[1]{1} @t tangent "0"
forward:
  a = test.op(%x) -> %a: float64[125]{1} @a annotation("irc.keep(wide)")
  b = test.op(%a) -> %b: float64[125]{1} @b
  h = test.op(%b) -> %h: float64[1]{1} @h
backward:
  gb = test.grad(%t, %b) -> %gb: float64[125]{1} @gb
  ga = test.grad(%gb, %a) -> %g: float64[1]{1} @g
  output %h "0"
  gradient %g "parameter:w"
}
"""


def test_a_refusal_says_what_the_step_needs_without_the_annotations() -> None:
    graph = parse_graph(WIDE)
    program = Program(graph, costs_of(graph))
    assert PlanMemory(3024).run(program).schedule is not None
    with pytest.raises(BudgetError, match="IRC204") as caught:
        PlanMemory(3023).run(program)
    assert caught.value.minimum_bytes == 3024
    needs = "annotations are in force (irc.keep(wide)), and without them it needs 1.98 KiB (2032 bytes)"
    assert needs in caught.value.message
    with pytest.raises(BudgetError, match="IRC204") as caught:
        PlanMemory(3023, "keep-all").run(program)
    assert caught.value.message.endswith("; annotations are in force (irc.keep(wide))")
