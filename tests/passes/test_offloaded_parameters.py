"""Parameters and optimizer state that live in a tier: what can, what a plan of it promises, when it moves."""

import functools
import time
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import at_random
from support.offloaded_parameters import FAR, applied, offload_schedule, offloaded_names
from support.strategies import Sample
from torch import nn

import irc
from irc.backends.torch.offload.table import copy_table
from irc.frontends.torch import capture
from irc.ir import (
    BudgetError,
    Fetch,
    Plan,
    Tier,
    TimeLimitError,
    UsageError,
    format_bytes,
    liveness,
    parse_program,
    print_program,
    step_times,
    stored_bytes,
    verify_graph,
    verify_schedule,
)
from irc.passes import (
    OFFLOADABLE,
    CheckpointProblem,
    Cost,
    Costs,
    PassManager,
    PlanMemory,
    Planner,
    Program,
    ReleaseGradients,
    offloadable_in,
    parse_passes,
)
from irc.passes.offload.offload_search import OffloadSearch
from irc.passes.offload.prefetch import prefetch

SMALL = examples(40)


@SMALL
@given(applied(), st.integers(0, 1 << 20))
def test_a_schedule_that_brings_what_lives_in_a_tier_is_valid_and_its_text_is_read_back(
    sample: Sample, seed: int
) -> None:
    schedule = offload_schedule(sample.graph, seed)
    verify_graph(schedule.graph)
    timeline = verify_schedule(schedule, {}, tiers=[FAR])
    assert timeline == liveness(schedule, {})
    again = parse_program(print_program(schedule))
    assert print_program(again) == print_program(schedule)
    assert verify_schedule(again, {}, tiers=[FAR]) == timeline
    lives = sum(offloaded.storage.nbytes for offloaded in schedule.graph.offloaded_parameters)
    whole = replace(schedule.graph, offloaded_parameters=())
    mine = {h.storage for h in schedule.graph.offloaded_parameters if not h.is_state}
    assert schedule.graph.static_bytes + lives == whole.static_bytes
    assert mine.isdisjoint(schedule.graph.static_storages)
    if schedule.graph.offloaded_parameters:
        assert min(stored_bytes(schedule)[FAR.name]) == lives


@SMALL
@given(applied(), st.integers(0, 1 << 20), st.integers(0, 8))
def test_copies_that_run_ahead_stay_within_the_budget_and_cost_no_time(
    sample: Sample, seed: int, part: int
) -> None:
    loaded = offloaded_names(sample.graph, seed)
    assert loaded.seen.costs is not None
    seen = CheckpointProblem(loaded.seen.graph, loaded.seen.costs)
    chosen = at_random(seen, Random(seed))
    graph = loaded.problem(seen).graph
    at_once = loaded.schedule(graph, chosen.schedule)
    low = verify_schedule(at_once, {}, tiers=[FAR]).peak_bytes
    assert low <= chosen.peak_bytes
    high = replace(graph, offloaded_parameters=()).static_bytes + low
    budget_bytes = low + (high - low) * part // 8
    seconds = dict.fromkeys(graph.operations, 1.0)
    ahead = prefetch(at_once, seconds, {}, [FAR], budget_bytes)
    assert verify_schedule(ahead, {}, tiers=[FAR], budget_bytes=budget_bytes).peak_bytes <= budget_bytes
    assert ahead.computed == at_once.computed
    before, after = (step_times(s, seconds, [FAR]) for s in (at_once, ahead))
    assert after.step_seconds <= before.step_seconds
    assert after.compute_seconds == before.compute_seconds


@pytest.mark.slow
@pytest.mark.default
@examples(10)
@given(applied(), st.integers(0, 8), st.sampled_from((1.0, 30.0, 2.0**30)))
def test_what_is_chosen_fits_and_no_schedule_found_is_below_the_bound(
    sample: Sample, part: int, rate: float
) -> None:
    costs = Costs(sample.seconds, sample.workspace_bytes, "test")
    tier = Tier("far", 1 << 40, rate, rate, 0.25)
    planner = Planner(Program(sample.graph, costs, tiers=(tier,)))
    high = planner.problem.keep_all.peak_bytes
    search = OffloadSearch(planner, OFFLOADABLE, high, least_offloaded_bytes=1)
    assume(search.offloaded_parameters)
    low = search.floor_bytes
    search = OffloadSearch(planner, OFFLOADABLE, low + (high - low) * part // 8, least_offloaded_bytes=1)
    chosen = search.run(time.thread_time() + 5.0)
    if chosen is None:
        assert search.least_bytes() > search.budget_bytes
        return
    best = chosen.incumbent.best
    workspace_bytes = chosen.problem.costs.workspace_bytes
    verify_schedule(
        best.schedule,
        workspace_bytes,
        tiers=[tier],
        budget_bytes=search.budget_bytes,
        peak_bytes=best.peak_bytes,
    )
    step_seconds = chosen.problem.step_seconds
    assert best.seconds >= (step_seconds + chosen.incumbent.bound_seconds) * (1 - 1e-9)
    assert search.least_bytes() <= high
    for seed in range(4):  # other schedules that fit are not below the bound either
        loaded = offloaded_names(sample.graph, seed, tier)
        assert loaded.seen.costs is not None
        seen = CheckpointProblem(loaded.seen.graph, loaded.seen.costs)
        graph = loaded.problem(seen).graph
        at_once = loaded.schedule(graph, at_random(seen, Random(seed)).schedule)
        if liveness(at_once, workspace_bytes).peak_bytes <= search.budget_bytes:
            ahead = prefetch(at_once, costs.seconds, workspace_bytes, [tier], search.budget_bytes)
            taken = step_times(ahead, costs.seconds, [tier]).step_seconds
            assert taken >= (step_seconds + chosen.incumbent.bound_seconds) * (1 - 1e-9)


# ---------------------------------------------------------------------------- what can live in a tier


def program(model: nn.Module, *args: torch.Tensor, applies: bool = True) -> Program:
    captured = capture(model, args)
    release = [ReleaseGradients("apply", lambda p: torch.optim.AdamW(p, lr=1e-3))] if applies else []
    done = PassManager([*release, Cost(profile="cpu")]).run(Program(captured.graph))
    return replace(done, tiers=(Tier("disk", 1 << 34, 1e9, 1e9),))


@functools.cache
def trained(*, applies: bool = True) -> Program:
    """The program of `perceptron`, with AdamW or without an optimizer."""
    return program(perceptron(), torch.ones(4, 128), applies=applies)


def perceptron() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.ReLU())]
    return nn.Sequential(*layers)


def test_state_comes_first_and_small_parameters_stay() -> None:
    graph = trained().graph
    offloaded_parameters = offloadable_in("disk", graph, OFFLOADABLE)
    assert [offloaded.is_state for offloaded in offloaded_parameters] == [True] * 4 + [False] * 4
    assert {offloaded.storage.nbytes for offloaded in offloaded_parameters if offloaded.is_state} == {
        2 * 4 * 128 * 128
    }
    assert all(offloaded.parameter.endswith("weight") for offloaded in offloaded_parameters)
    assert [offloaded.is_state for offloaded in offloadable_in("disk", graph, ["params"])] == [False] * 4
    assert offloadable_in("disk", trained(applies=False).graph, ["optimizer"]) == ()


def test_what_shares_its_memory_stays() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(64, 64))
            self.whole = nn.Parameter(torch.ones(2, 64, 64))
            self.part = nn.Parameter(self.whole.detach()[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.own @ self.whole[1] @ self.part

    graph = program(Sharing(), torch.ones(4, 64), applies=False).graph
    assert [offloaded.parameter for offloaded in offloadable_in("disk", graph, OFFLOADABLE)] == ["own"]


def test_a_parameter_that_nothing_reads_lives_in_the_tier_and_never_comes() -> None:
    model = perceptron()
    model.register_parameter("idle", nn.Parameter(torch.ones(512, 512)))
    before = program(model, torch.ones(4, 128), applies=False)
    slow = replace(before, tiers=(Tier("disk", 1 << 34, 1e6, 1e6),))
    search = OffloadSearch(Planner(slow), ["params"], 1)
    assert search.offloaded_parameters[0].parameter == "idle" and search.least_bytes() < 512 * 512 * 4
    search = OffloadSearch(Planner(slow), ["params"], search.least_bytes())
    chosen = search.run(time.thread_time() + 5.0)
    assert chosen is not None and search.offloaded_parameters[0] in chosen.problem.graph.offloaded_parameters
    best = chosen.incumbent.best
    assert best.seconds >= chosen.problem.step_seconds + chosen.incumbent.bound_seconds
    table = copy_table(best.schedule)
    assert "idle" in [copied.offloaded.parameter for copied in table.tensors if copied.offloaded is not None]
    fetched = {i.storage for i in best.schedule.instructions if isinstance(i, Fetch)}
    assert fetched and search.offloaded_parameters[0].storage not in fetched


# ---------------------------------------------------------------------------- the pass


@pytest.mark.default
def test_a_budget_below_what_is_static_is_met_and_said_in_the_plan() -> None:
    before = trained()
    budget_bytes = before.graph.static_bytes * 2 // 3
    chosen = PlanMemory(budget=budget_bytes, time_limit=5, offload="params+optimizer").run(before)
    plan = chosen.plan
    assert plan is not None and plan.peak_bytes <= budget_bytes < plan.baseline_peak_bytes
    assert plan.offloaded_bytes + plan.static_bytes == before.graph.static_bytes
    assert plan.tiers[0].held_bytes >= plan.offloaded_bytes and plan.tiers[0].in_bytes >= plan.offloaded_bytes
    assert "of parameters and optimizer state live in a tier between steps" in plan.summary()
    reasons = [d for d in plan.decisions if d.reason.startswith("lives in disk")]
    assert sum(d.nbytes for d in reasons) == plan.offloaded_bytes
    assert any("copied to the device 2 times and" in d.reason for d in reasons)
    assert "optimizer state of" in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(BudgetError) as caught:
        PlanMemory(budget=plan.minimum_budget_bytes // 2, time_limit=5, offload="params+optimizer").run(
            before
        )
    assert caught.value.code == "IRC204" and caught.value.minimum_bytes == plan.minimum_budget_bytes
    (note,) = caught.value.__notes__
    assert "are on the device while the optimizer takes its step for" in note
    search = OffloadSearch(Planner(before), OFFLOADABLE, 1)
    lives = sum(offloaded.storage.nbytes for offloaded in search.offloaded_parameters)
    said = f"{format_bytes(before.graph.static_bytes - lives)} of it are parameters, buffers, inputs"
    assert said in str(caught.value)
    assert f"without {format_bytes(lives)} that live in disk" in str(caught.value)


def test_a_budget_that_holds_all_leaves_all_on_the_device() -> None:
    chosen = PlanMemory(budget="100%", time_limit=5, offload="params").run(trained())
    assert chosen.plan is not None and chosen.graph.offloaded_parameters == () and chosen.plan.tiers == ()
    assert chosen.plan.overhead == 0.0


@pytest.mark.default
def test_without_time_a_plan_or_the_time_limit_is_the_answer() -> None:
    before = trained()
    budget_bytes = before.graph.static_bytes * 2 // 3
    try:
        plan = PlanMemory(budget=budget_bytes, time_limit=0.0, offload="params+optimizer").run(before).plan
    except TimeLimitError as error:
        assert error.code == "IRC205"
    else:
        assert plan is not None and plan.peak_bytes <= budget_bytes and plan.lower_bound_overhead == 0.0


@pytest.mark.default
def test_annotations_are_honoured_beside_what_lives_in_a_tier() -> None:
    model = perceptron()
    irc.recompute(model.get_submodule("1"))
    irc.keep(model.get_submodule("3"))
    before = program(model, torch.ones(4, 128))
    budget_bytes = before.graph.static_bytes * 2 // 3
    plan = PlanMemory(budget=budget_bytes, time_limit=5, offload="params+optimizer").run(before).plan
    assert plan is not None and plan.offloaded_bytes > 0
    assert [(effect.by, effect.policy) for effect in plan.annotations] == [
        ("irc.recompute(1)", "recompute"),
        ("irc.keep(3)", "keep"),
    ]


def test_known_offloaded_parameters_are_taken() -> None:
    before = trained()
    names = ("parameter 2.weight", "optimizer state of 4.weight")
    chosen = PlanMemory(budget="100%", time_limit=5, offload="params+optimizer", offloaded_names=names).run(
        before
    )
    assert sorted(offloaded.name for offloaded in chosen.graph.offloaded_parameters) == sorted(names)


def test_a_tier_with_little_room_takes_what_it_can() -> None:
    before = trained()
    small = replace(before, tiers=(Tier("disk", 200_000, 1e9, 1e9),))
    search = OffloadSearch(Planner(small), OFFLOADABLE, 1 << 30)
    assert sum(offloaded.storage.nbytes for offloaded in search.offloaded_parameters) <= 200_000
    assert [offloaded.is_state for offloaded in search.offloaded_parameters] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("step", "code", "message"),
    [
        (
            PlanMemory(offload="buffers"),
            "IRC403",
            "'buffers' cannot live in a tier between steps",
        ),
        (
            PlanMemory(offload="params", strategy="lms"),
            "IRC403",
            "strategy lms leaves parameters and optimizer state on the device",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(step: PlanMemory, code: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        step.check()
    assert caught.value.code == code


def test_nothing_to_move_and_nowhere_to_go_are_refused() -> None:
    before = trained(applies=False)
    with pytest.raises(
        UsageError, match="nothing of this model can live in tier disk as optimizer"
    ) as caught:
        PlanMemory(offload="optimizer").run(before)
    assert caught.value.code == "IRC404"
    with pytest.raises(UsageError, match="params shall live in a tier, and there is none") as caught:
        PlanMemory(offload="params").run(replace(before, tiers=()))
    assert caught.value.code == "IRC403"


def test_the_text_of_the_pass_names_what_lives_in_a_tier() -> None:
    (step,) = parse_passes("plan-memory{budget=4GiB,offload=params+optimizer}")
    assert step == PlanMemory(budget="4GiB", offload="params+optimizer")
    assert "offload=params+optimizer" in str(PassManager([step]))


def test_what_no_operation_reads_raises_no_bound() -> None:
    model = perceptron()
    model.register_parameter("unread", nn.Parameter(torch.ones(512, 512)))
    slow = replace(program(model, torch.ones(4, 128)), tiers=(Tier("disk", 1 << 34, 1e3, 1e3),))
    search = OffloadSearch(Planner(slow), ["params"], slow.graph.static_bytes - (1 << 19))
    chosen = search.run(time.thread_time() + 2.0)
    assert chosen is not None
    assert chosen.incumbent.best.seconds >= chosen.problem.step_seconds + chosen.incumbent.bound_seconds
