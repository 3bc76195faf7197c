"""Recomputation and copies chosen together: promises hold, and neither alone is faster."""

import json
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import at_random
from support.strategies import Sample
from support.swapping import chain, program_of, samples, works

from irc.ir import (
    BudgetError,
    Direction,
    Plan,
    Region,
    Tier,
    Trait,
    UsageError,
    format_bytes,
    print_program,
    step_times,
    stored_bytes,
    verify_schedule,
)
from irc.passes import (
    CheckpointProblem,
    Costs,
    OfferTiers,
    PassManager,
    PlanMemory,
    Planner,
    Program,
    machine_named,
    parse_passes,
)
from irc.passes.offload import remat_and_offload as joint
from irc.passes.offload.cut_ilp import OffloadRelaxation
from irc.passes.offload.local_search import improve
from irc.passes.offload.offload_problem import OffloadProblem
from irc.passes.offload.remat_and_offload import least_budget, search_with_copies
from irc.passes.offload.schedule_copies import Order, schedule_copies
from irc.passes.offload.strategies import known_offload_solutions
from irc.passes.remat.candidates import Candidates, find_candidates
from irc.passes.remat.cut_ilp import Relaxation
from irc.passes.remat.search import Incumbent, search

FAST = Tier("host", 1 << 60, 1e12, 1e12)
SMALL = examples(20)


def later(seconds: float = 20.0) -> float:
    return time.thread_time() + seconds


# ---------------------------------------------------------------------------- copies for given computations


@SMALL
@given(works(), st.integers(0, 1 << 20))
def test_copies_for_a_random_order_keep_what_they_promise(work: OffloadProblem, seed: int) -> None:
    problem = work.problem
    order_of = at_random(problem, Random(seed))
    fitted = work.with_copies(order_of)
    assume(fitted is not None)
    assert fitted is not None
    verify_schedule(
        fitted.schedule,
        problem.costs.workspace_bytes,
        budget_bytes=work.budget_bytes,
        peak_bytes=fitted.peak_bytes,
        tiers=work.tiers,
    )
    assert fitted.order == order_of.order
    times = step_times(fitted.schedule, problem.costs.seconds, work.tiers)
    assert fitted.seconds == pytest.approx(times.step_seconds)
    assert fitted.seconds >= order_of.seconds * (1 - 1e-12)
    capacities = {tier.name: tier.capacity_bytes for tier in work.tiers}
    for name, held in stored_bytes(fitted.schedule).items():
        assert max(held) <= capacities[name]


@SMALL
@given(works())
def test_times_that_the_scheduler_claims_are_those_of_its_schedule(work: OffloadProblem) -> None:
    problem = work.problem
    costs = problem.costs
    order = Order(problem.graph, problem.forward, problem.backward, costs.seconds, costs.workspace_bytes)
    copies = schedule_copies(order, problem.producer, work.tiers, work.budget_bytes)
    assume(copies is not None)
    assert copies is not None
    times = step_times(order.schedule(copies.swaps), costs.seconds, work.tiers)
    assert copies.step_seconds == pytest.approx(times.step_seconds)


@SMALL
@given(works())
def test_nothing_is_copied_where_all_can_be_kept(work: OffloadProblem) -> None:
    kept = work.problem.keep_all
    roomy = OffloadProblem(work.problem, work.tiers, kept.peak_bytes)
    assert roomy.with_copies(kept) is kept


# ------------------------------------------------------------------------------------------------ the bound


@pytest.mark.default
@SMALL
@given(works(), st.data())
def test_the_bound_over_cuts_is_below_every_schedule_with_copies(
    work: OffloadProblem, data: st.DataObject
) -> None:
    problem = work.problem
    assume(problem.backward)
    time_steps = data.draw(st.sets(st.integers(0, problem.time_steps - 1), min_size=1, max_size=4))
    relaxation = OffloadRelaxation(
        problem, work.budget_bytes, sorted(time_steps | {len(problem.forward)}), tiers=work.tiers
    )
    solved = relaxation.solve(seconds=20.0, gap=1e-9)
    seen = [problem.keep_all]
    seen += [at_random(problem, Random(data.draw(st.integers(0, 1 << 20)))) for _ in range(6)]
    found = [fitted for fitted in map(work.with_copies, seen) if fitted is not None]
    best = search_with_copies(work, known(problem), deadline=later())
    found += [best.best] if best is not None else []
    for fitted in found:
        assert not solved.is_infeasible
        assert problem.step_seconds + solved.bound_seconds <= fitted.seconds * (1 + 1e-6)


def known(problem: CheckpointProblem) -> Candidates:
    return find_candidates(problem, deadline=later())


@SMALL
@given(works())
def test_without_tiers_the_bound_is_that_of_recomputation(work: OffloadProblem) -> None:
    problem = work.problem
    assume(problem.backward)
    time_steps = [len(problem.forward)]
    alone = Relaxation(problem, work.budget_bytes, time_steps).solve(seconds=20.0, gap=1e-9)
    none = OffloadRelaxation(problem, work.budget_bytes, time_steps, tiers=()).solve(seconds=20.0, gap=1e-9)
    assert none.is_infeasible == alone.is_infeasible
    if not alone.is_infeasible:
        assert none.bound_seconds == pytest.approx(alone.bound_seconds, abs=1e-6 * problem.step_seconds)


# ------------------------------------------------------------------------------------------------ the search


@SMALL
@given(works())
def test_the_joint_plan_is_no_slower_than_recomputation_or_copies_alone(work: OffloadProblem) -> None:
    problem = work.problem
    candidates = known(problem)
    joint = search_with_copies(work, candidates, deadline=later())
    alone = search(problem, work.budget_bytes, candidates, deadline=later())
    swapped = work.with_copies(problem.keep_all)
    for other in (alone and alone.best, swapped):
        if other is not None:
            assert joint is not None and joint.best.seconds <= other.seconds * (1 + 1e-9)
    if joint is not None:
        verify_schedule(
            joint.best.schedule,
            problem.costs.workspace_bytes,
            budget_bytes=work.budget_bytes,
            peak_bytes=joint.best.peak_bytes,
            tiers=work.tiers,
        )
        assert problem.step_seconds + joint.bound_seconds <= joint.best.seconds * (1 + 1e-6)
        assert least_budget(work, candidates) <= max(work.budget_bytes, problem.keep_all.peak_bytes)


@SMALL
@given(works())
def test_improving_makes_nothing_slower_and_keeps_the_budget(work: OffloadProblem) -> None:
    problem = work.problem
    fitted = work.with_copies(problem.keep_all)
    assume(fitted is not None)
    assert fitted is not None
    incumbent = Incumbent("swap", fitted)
    improve(work, incumbent, deadline=later(2.0))
    assert incumbent.best.seconds <= fitted.seconds
    verify_schedule(
        incumbent.best.schedule,
        problem.costs.workspace_bytes,
        budget_bytes=work.budget_bytes,
        tiers=work.tiers,
    )


def test_improving_ends_where_a_step_takes_no_time() -> None:
    program = chain()
    assert program.costs is not None
    idle = replace(program.costs, seconds=dict.fromkeys(program.graph.operations, 0.0))
    problem = CheckpointProblem(program.graph, idle)
    work = OffloadProblem(problem, (FAST,), problem.keep_all.peak_bytes)
    fitted = work.with_copies(work.problem.keep_all)
    assert fitted is not None
    incumbent = Incumbent("swap", fitted)
    improve(work, incumbent, deadline=later(2.0))
    assert incumbent.best is fitted


# ------------------------------------------------------------------------------------------------ the passes


@SMALL
@given(samples)
def test_the_plan_tells_what_is_copied(sample: Sample) -> None:
    program = program_of(sample, (FAST,))
    planner = Planner(program)
    problem = planner.problem
    budget = least_budget(
        OffloadProblem(problem, (FAST,), problem.keep_all.peak_bytes), planner.candidates(later())
    )
    made = PlanMemory(budget, time_limit=5).choose(planner)
    plan = made.plan
    assert plan is not None and made.schedule is not None
    assert plan.peak_bytes <= plan.budget_bytes == budget
    copied = {d.storage: d for d in plan.decisions if d.action == "swap"}
    out = [
        i for i in step_times(made.schedule, sample.seconds, (FAST,)).copies if i.direction is Direction.OUT
    ]
    assert set(copied) == {copy.storage.name for copy in out}
    assert sum(use.out_bytes for use in plan.tiers) == sum(copy.storage.nbytes for copy in out)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    for use in plan.tiers:
        assert f"{format_bytes(use.out_bytes)} to host" in plan.summary()
        assert use.held_bytes <= use.out_bytes <= use.in_bytes
    for decision in copied.values():
        assert decision.reason.startswith("copied to host (")
    assert plan.step_seconds is not None
    assert 0 <= plan.exposed_seconds <= plan.overhead * plan.step_seconds + 1e-9


def test_a_chain_whose_copies_keep_pace_costs_nothing() -> None:
    """Copies of half a second each: only what is being copied and what is needed next stays."""
    program = chain()
    baseline = Planner(program).baseline_bytes
    pipeline = PassManager([OfferTiers(tiers=(Tier("host", 1 << 20, 1200.0, 1200.0),)), PlanMemory("70%")])
    made = pipeline.run(program)
    assert made.plan is not None and made.plan.overhead == 0 and made.plan.proven_optimal
    assert made.plan.peak_bytes <= 0.7 * baseline
    assert {d.action for d in made.plan.decisions} >= {"swap", "keep"}
    assert "f0" in made.plan.explain() and "copied to host (500 ms out" in made.plan.explain()
    alone = PlanMemory("70%", "recompute").run(program)
    assert alone.plan is not None and alone.plan.overhead > 0


def test_a_chain_whose_copies_are_slow_recomputes() -> None:
    program = chain()
    offered = OfferTiers(tiers=(Tier("disk", 1 << 20, 1.0, 1.0),)).run(program)
    made = PlanMemory("70%").run(offered)
    assert made.plan is not None and made.plan.tiers == () and made.plan.exposed_seconds == 0
    alone = PlanMemory("70%", "recompute").run(program)
    assert alone.plan is not None and made.plan.overhead == pytest.approx(alone.plan.overhead)


@pytest.mark.default
def test_both_are_mixed_where_the_channel_is_the_limit() -> None:
    """A copy takes three operations: the best plan copies some values and makes others again."""
    program = chain(8)
    offered = OfferTiers(tiers=(Tier("host", 1 << 20, 200.0, 200.0),)).run(program)
    made = PlanMemory("50%").run(offered)
    alone = PlanMemory("50%", "recompute").run(program)
    swapped = OffloadProblem(
        Planner(offered).problem, offered.tiers, Planner(offered).baseline_bytes // 2
    ).with_copies(Planner(offered).problem.keep_all)
    assert made.plan is not None and alone.plan is not None
    actions = {d.action for d in made.plan.decisions}
    assert {"swap", "recompute"} <= actions
    assert made.plan.overhead < alone.plan.overhead
    assert swapped is None or made.plan.overhead < swapped.seconds / 16 - 1


def test_the_passes_as_text() -> None:
    text = "offer-tiers{swap=host:1GiB,machine=a100},plan-memory{budget=70%,time-limit=5.0}"
    manager = PassManager(parse_passes(text))
    made = manager.run(chain())
    assert made.plan is not None and made.plan.peak_bytes <= made.plan.budget_bytes
    assert made.tiers[0].capacity_bytes == 1 << 30
    assert parse_passes(str(manager)) == tuple(manager.passes)
    assert made.schedule is not None and made.plan.tiers
    assert "offload @" in print_program(made.schedule)


def test_what_cannot_be_planned_is_refused_by_name() -> None:
    tier = Tier("host", 1 << 20, 1200.0, 1200.0)
    program = OfferTiers(tiers=(tier,)).run(chain())
    with pytest.raises(BudgetError, match="with copies to host, over the budget") as caught:
        PlanMemory(100).run(program)
    minimum = caught.value.minimum_bytes
    assert minimum < Planner(program).minimum_bytes()
    made = PlanMemory(minimum).run(program)
    assert made.plan is not None and made.plan.peak_bytes <= minimum
    with pytest.raises(UsageError, match="nobody has measured the tiers disk") as usage:
        OfferTiers("disk").run(program)
    assert usage.value.code == "IRC409"


def test_a_machine_without_the_tier_is_refused(tmp_path: Path) -> None:
    bare = replace(machine_named("a100"), tiers=())
    path = tmp_path / "bare.json"
    path.write_text(json.dumps(bare.to_json()))
    with pytest.raises(UsageError, match="has no tier host") as caught:
        OfferTiers("host", str(path)).check()
    assert caught.value.code == "IRC408"


def test_a_search_without_time_still_finds_what_copies_reach() -> None:
    program = OfferTiers(tiers=(Tier("host", 1 << 20, 1200.0, 1200.0),)).run(chain())
    with pytest.raises(BudgetError) as caught:
        PlanMemory(100, time_limit=5).run(program)
    made = PlanMemory(caught.value.minimum_bytes, time_limit=0).run(program)
    assert made.plan is not None and made.plan.peak_bytes <= caught.value.minimum_bytes


def test_a_refusal_without_time_names_a_budget_that_is_found_without_time() -> None:
    program = OfferTiers(tiers=(Tier("host", 1 << 20, 1200.0, 1200.0),)).run(chain())
    for strategy in ("auto", "lms", "ome", "pofo", "swap"):
        with pytest.raises(BudgetError, match="by what was found within the time limit") as caught:
            PlanMemory(100, strategy, time_limit=0).run(program)
        made = PlanMemory(caught.value.minimum_bytes, strategy, time_limit=0).run(program)
        assert made.plan is not None and made.plan.minimum_budget_bytes <= caught.value.minimum_bytes


@SMALL
@given(works(), st.integers(0, 12))
def test_the_smallest_budget_of_any_deadline_is_found(work: OffloadProblem, ticks: int) -> None:
    """Each look at the clock takes a second."""
    candidates = known(work.problem)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(joint, "time", SimpleNamespace(thread_time=count().__next__))
        least_bytes = least_budget(work, candidates, deadline=ticks)
    assert least_budget(work, candidates) <= least_bytes <= candidates.minimum_bytes
    there = replace(work, budget_bytes=least_bytes)
    found = [there.with_copies(solution) for _, solution in candidates.candidates]
    assert any(fitted is not None and fitted.peak_bytes <= least_bytes for fitted in found)


@SMALL
@given(works())
def test_known_strategies_end_at_their_deadline(work: OffloadProblem) -> None:
    assert not list(known_offload_solutions(work, deadline=time.thread_time()))


def test_what_only_one_run_can_make_may_be_away_while_other_forwards_run() -> None:
    """Three forwards in flight, whose dropout masks wait: in a tier they take nothing on the device."""
    alone = chain()
    nodes = tuple(
        replace(n, traits=n.traits | {Trait.PINNED}) if n.region is Region.FORWARD else n
        for n in alone.graph.nodes
    )
    graph = replace(alone.graph, nodes=nodes, forwards_in_flight=3)
    costs = Costs(dict.fromkeys(graph.operations, 1.0), dict.fromkeys(graph.operations, 0), "test")
    program = Program(graph, costs, tiers=(Tier("host", 1 << 20, 1e6, 1e6),))
    with pytest.raises(BudgetError) as caught:
        PlanMemory(20, time_limit=5).run(program)
    least_bytes = caught.value.minimum_bytes
    assert least_bytes < Planner(program).problem.floor_bytes
    made = PlanMemory(least_bytes, time_limit=5).run(program)
    assert made.plan is not None and made.schedule is not None
    assert made.plan.floor_bytes <= made.plan.peak_bytes <= least_bytes
    assert 0 <= made.plan.lower_bound_overhead <= made.plan.overhead
    verify_schedule(
        made.schedule, costs.workspace_bytes, peak_bytes=made.plan.peak_bytes, tiers=program.tiers
    )
