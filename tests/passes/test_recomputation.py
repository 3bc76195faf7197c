"""The pass as a whole: what every plan promises, and what it refuses."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import chains, cheapest_in_class, cheapest_of_all, problem_of
from support.strategies import Sample, graphs

from irc.ir import BudgetError, Plan, TimeLimitError, UsageError, parse_graph, print_schedule, verify_schedule
from irc.passes import Costs, PlanMemory, Planner, Program, smallest_budget

FEW = examples(15)
samples = chains() | graphs()


def program_of(sample: Sample) -> Program:
    return Program(sample.graph, Costs(sample.seconds, sample.workspace_bytes, "analytic:test"))


def plan_of(program: Program, budget: int | str, strategy: str = "auto", *, time_limit: float = 60.0) -> Plan:
    """The plan, once its schedule has been checked against all that the plan says."""
    result = PlanMemory(budget, strategy, time_limit, gap=0.0).run(program)
    assert result.plan is not None and result.schedule is not None and program.costs is not None
    plan, costs = result.plan, program.costs
    verify_schedule(
        result.schedule, costs.workspace_bytes, budget_bytes=plan.budget_bytes, peak_bytes=plan.peak_bytes
    )
    seconds = math.fsum(costs.seconds[node] for node in result.schedule.computed)
    assert plan.step_seconds is not None
    assert plan.step_seconds * (1 + plan.overhead) == pytest.approx(seconds)
    assert 0 <= plan.lower_bound_overhead <= plan.overhead
    assert plan.floor_bytes <= plan.minimum_budget_bytes <= plan.peak_bytes <= plan.budget_bytes
    assert plan.peak_bytes <= plan.baseline_peak_bytes or strategy not in ("auto", "ilp")
    return plan


# ------------------------------------------------------------------------------------- what plans promise


@given(samples, st.data())
@FEW
def test_a_smaller_budget_never_has_a_larger_peak_nor_a_lower_cost(
    sample: Sample, data: st.DataObject
) -> None:
    program, problem = program_of(sample), problem_of(sample)
    least, most = smallest_budget(Planner(program)), problem.keep_all.peak_bytes
    amounts = sorted(data.draw(st.lists(st.integers(least, most), min_size=2, max_size=3)))
    plans = [plan_of(program, amount) for amount in amounts]
    for smaller, larger in pairwise(plans):
        assert smaller.peak_bytes <= larger.peak_bytes
        assert smaller.overhead >= larger.overhead


@given(samples, st.data())
@FEW
def test_no_schedule_of_the_class_is_better_and_none_at_all_is_below_the_bound(
    sample: Sample, data: st.DataObject
) -> None:
    program = program_of(sample)
    problem = Planner(program).problem  # backward in the order that is planned
    assume(len(problem.wanted) <= 5)
    front = cheapest_in_class(problem)
    chosen = data.draw(st.sampled_from(front))
    plan = plan_of(program, chosen.peak_bytes)
    assert plan.step_seconds is not None
    seconds = plan.step_seconds * (1 + plan.overhead)
    assert seconds <= chosen.seconds * (1 + 1e-9)
    best = cheapest_of_all(problem, chosen.peak_bytes)
    assert plan.step_seconds * (1 + plan.lower_bound_overhead) <= best * (1 + 1e-6)
    assert seconds >= best * (1 - 1e-9)
    if plan.proven_optimal:
        assert seconds <= best * (1 + 2e-4)
    assert plan.minimum_budget_bytes <= front[-1].peak_bytes


@given(samples)
@FEW
def test_the_smallest_budget_fits_and_a_byte_less_does_not(sample: Sample) -> None:
    program = program_of(sample)
    planner = Planner(program)
    least, floor = smallest_budget(planner), planner.problem.floor_bytes
    plan = plan_of(program, least)
    assert (plan.peak_bytes, plan.minimum_budget_bytes, plan.floor_bytes) == (least, least, floor)
    with pytest.raises(BudgetError) as caught:
        PlanMemory(least - 1).run(program)
    assert (caught.value.code, caught.value.minimum_bytes) == ("IRC204", least)
    assert caught.value.help is not None and f"{least} bytes" in caught.value.help


@given(samples, st.integers(0, 100))
@FEW
def test_a_budget_of_the_baseline_changes_nothing(sample: Sample, more: int) -> None:
    program, problem = program_of(sample), problem_of(sample)
    for budget in (problem.keep_all.peak_bytes + more, "100%"):
        plan = plan_of(program, budget)
        assert (plan.overhead, plan.proven_optimal) == (0.0, True)
        assert plan.peak_bytes <= plan.baseline_peak_bytes == problem.keep_all.peak_bytes
        assert not any(decision.runs_again for decision in plan.decisions)


@given(samples, st.integers(0, 100))
@FEW
def test_the_same_question_has_the_same_answer(sample: Sample, percent: int) -> None:
    program, problem = program_of(sample), problem_of(sample)
    least, most = smallest_budget(Planner(program)), problem.keep_all.peak_bytes
    step = PlanMemory(least + (most - least) * percent // 100)
    first, second = step.run(program), step.run(program)
    assert first.plan is not None and second.plan is not None
    assert first.schedule is not None and second.schedule is not None
    assert first.schedule.instructions == second.schedule.instructions
    assert replace(first.plan, seconds_to_plan=0.0) == replace(second.plan, seconds_to_plan=0.0)


@given(samples)
@FEW
def test_without_time_the_best_so_far_is_returned(sample: Sample) -> None:
    program, problem = program_of(sample), problem_of(sample)
    most = problem.keep_all.peak_bytes
    assert plan_of(program, most, time_limit=0).overhead == 0.0
    if smallest_budget(Planner(program)) == most:
        return
    try:
        plan_of(program, most - 1, time_limit=0)
    except TimeLimitError as error:
        assert error.code == "IRC205"


@given(
    samples,
    st.sampled_from(
        ("keep-all", "keep-none", "sqrt-n", "every-1", "every-2", "every-100", "eviction", "ilp")
    ),
)
@FEW
def test_named_strategies_keep_the_budget_or_say_what_they_need(sample: Sample, strategy: str) -> None:
    program = program_of(sample)
    most = problem_of(sample).keep_all.peak_bytes
    for budget in (most, most - 1, smallest_budget(Planner(program))):
        try:
            plan = plan_of(program, budget, strategy)
        except BudgetError as error:
            assert error.minimum_bytes > budget
            if strategy != "ilp":
                assert f"by strategy {strategy}" in error.message
                plan_of(program, error.minimum_bytes, strategy)
        else:
            assert strategy in ("ilp", plan.strategy)


@given(samples)
@FEW
def test_decisions_tell_what_the_schedule_does(sample: Sample) -> None:
    program, problem = program_of(sample), problem_of(sample)
    plan = plan_of(program, smallest_budget(Planner(program)))
    assert [d.storage for d in plan.decisions] == [s.name for s in problem.producer]
    total = sum(problem.costs.seconds[n] for n in problem.graph.operations)
    again = {d.operation: d.seconds for d in plan.decisions}
    assert sum(again.values()) <= total * plan.overhead * (1 + 1e-9) + 1e-9
    for decision in plan.decisions:
        assert decision.action in ("keep", "recompute", "free")
        assert (decision.action == "recompute") <= (decision.runs_again > 0)


# ------------------------------------------------------------------------------------- in words

CHAIN = """\
graph loss_bytes=0 {
  storage @x 100 cpu
  storage @w 100 cpu
  storage @t 10 cpu
  storage @a 100 cpu
  storage @b 400 cpu
  storage @c 100 cpu
  storage @y 10 cpu
  storage @gc 100 cpu
  storage @gb 300 cpu
  storage @gw 100 cpu
  input %x: float8_e5m2[100]{1} @x input "0"
  input %w: float8_e5m2[100]{1} @w parameter "w" requires_grad
  input %t: float8_e5m2[10]{1} @t tangent "0"
forward:
  a = op(%x, %w) -> %a: float8_e5m2[100]{1} @a loc(source="m.py:1")
  b = op(%a) -> %b: float8_e5m2[400]{1} @b loc(source="m.py:2")
  c = op(%b) -> %c: float8_e5m2[100]{1} @c loc(source="m.py:3")
  y = op(%c) -> %y: float8_e5m2[10]{1} @y loc(source="m.py:4")
backward:
  gc = op(%t, %c) -> %gc: float8_e5m2[100]{1} @gc
  gb = op(%gc, %a) -> %gb: float8_e5m2[300]{1} @gb
  gw = op(%gb, %b, %x) -> %gw: float8_e5m2[100]{1} @gw
  output %y "0"
  gradient %gw "parameter:w"
}
"""


def chain() -> Program:
    graph = parse_graph(CHAIN)
    seconds = {"a": 5.0, "b": 1.0, "c": 9.0}
    costs = {node: seconds.get(node.name, 2.0) for node in graph.operations}
    return Program(graph, Costs(costs, dict.fromkeys(graph.operations, 0), "analytic:test"))


def test_the_large_and_cheap_value_is_recomputed() -> None:
    result = PlanMemory(1040).run(chain())
    assert result.schedule is not None and result.plan is not None
    assert (
        print_schedule(result.schedule)
        == """\
schedule {
  compute a keep(@a)
  compute b keep(@b)
  compute c keep(@c)
  free @b
  compute y keep(@y)
  loss
  compute gc keep(@gc)
  free @c
  compute gb keep(@gb)
  free @gc
  compute b keep(@b)
  free @a
  compute gw keep(@gw)
  free @gb
  free @b
}
"""
    )
    assert (
        replace(result.plan, seconds_to_plan=0.0).summary()
        == """\
          budget  1.02 KiB (1,040 bytes)
  predicted peak  1020 B (1,020 bytes, 91.1% of baseline)
   baseline peak  1.09 KiB, modelled: the graph as it was captured, with everything kept
          static  200 B (parameters, buffers, inputs)
       in flight  1 forward: its backward comes before the next forward
  with gradients  1.09 KiB (1,120 bytes) of a step that finds .grad there and adds to it; to accumulate \
within the budget, plan with accumulate_gradients=True
        overhead  4.35% of the step's time, bound 4.35%: proved optimal
 smallest budget  1020 B (1,020 bytes)
        strategy  min-cut, costs analytic:test (bounds, not measured), planned in 0.0 s"""
    )
    header, row, last = result.plan.explain().splitlines()
    assert header.split() == ["storage", "made", "by", "size", "action", "reason", "where"]
    assert row == (
        "b        b (op)   400 B  recompute  backward reads it once; its operation runs again once "
        "(1,000 ms) and 400 B are free in between  m.py:2"
    )
    assert last == "2 storages are kept until backward reads them (200 B)"
    assert [d.reason for d in result.plan.decisions] == [
        "backward reads it once; its operation takes 5,000 ms",
        "backward reads it once; its operation runs again once (1,000 ms) and 400 B are free in between",
        "backward reads it once; its operation takes 9,000 ms",
    ]


def test_what_does_not_fit_is_refused_with_the_smallest_budget_that_would() -> None:
    with pytest.raises(BudgetError) as caught:
        PlanMemory("900B").run(chain())
    assert str(caught.value) == (
        "error[IRC204]: a training step needs 1020 B (1020 bytes) at least, over the budget of 900 B "
        "(900 bytes); every schedule holds 400 B of op (m.py:2), 300 B of op, 100 B parameters, 100 B "
        "inputs, 100 B gradients, 10 B outputs that the caller holds, 10 B gradients of outputs\n"
        "  help: raise the budget to 1020 bytes, or lower the batch size; take the optimizer's steps in "
        "backward (optimizer_in_backward=; its state then counts); return less than all that forward computes"
    )
    with pytest.raises(BudgetError, match="by strategy keep-all") as caught:
        PlanMemory(1100, "keep-all").run(chain())
    assert caught.value.minimum_bytes == 1120
    assert caught.value.help is not None and caught.value.help.startswith(
        "raise the budget to 1120 bytes, or lower the batch size, or use strategy auto"
    )


def test_a_percentage_is_one_of_the_baseline() -> None:
    plan = plan_of(chain(), "92.5%")
    assert (plan.budget_bytes, plan.baseline_peak_bytes) == (1036, 1120)
    with pytest.raises(BudgetError, match=r"over the budget of 11 B \(11 bytes\)"):
        PlanMemory("1%").run(chain())


@pytest.mark.parametrize(
    ("step", "code", "message"),
    [
        (PlanMemory("4Gb"), "IRC401", "'4Gb': there is no unit 'Gb' (a small b is for bits)"),
        (PlanMemory(0), "IRC401", "the budget is 0 bytes; it must be positive"),
        (PlanMemory(strategy="best"), "IRC403", "there is no strategy 'best'"),
        (PlanMemory(strategy="every-0"), "IRC403", "there is no strategy 'every-0'"),
        (PlanMemory(strategy="every-"), "IRC403", "there is no strategy 'every-'"),
        (PlanMemory(strategy="every-<k>"), "IRC403", "there is no strategy 'every-<k>'"),
        (PlanMemory(strategy="every-\u00b2"), "IRC403", "there is no strategy 'every-\u00b2'"),
        (PlanMemory(time_limit=-1), "IRC403", "the time limit is -1 seconds"),
        (PlanMemory(time_limit=math.nan), "IRC403", "the time limit is nan seconds"),
        (PlanMemory(gap=1), "IRC403", "the gap is 1 of the step's time"),
    ],
)
def test_malformed_options_are_refused(step: PlanMemory, code: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        step.run(chain())
    assert (caught.value.code, caught.value.message) == (code, message)
    assert caught.value.help


def test_a_graph_of_views_alone_has_a_plan() -> None:
    graph = parse_graph("""\
graph loss_bytes=0 {
  storage @x 8 cpu
  storage @t 8 cpu
  input %x: float8_e5m2[8]{1} @x input "0" requires_grad
  input %t: float8_e5m2[2,4]{4,1} @t tangent "0"
forward:
  v = view(%x) -> %v: float8_e5m2[2,4]{4,1} @x traits(view)
backward:
  g = view(%t) -> %g: float8_e5m2[8]{1} @t traits(view)
  output %v "0"
  gradient %g "input:0"
}
""")
    plan = plan_of(Program(graph, Costs({}, {}, "analytic:test")), 16)
    assert (plan.peak_bytes, plan.overhead, plan.step_seconds, plan.proven_optimal) == (16, 0.0, 0.0, True)
    with pytest.raises(BudgetError) as caught:
        PlanMemory(15).run(Program(graph, Costs({}, {}, "analytic:test")))
    assert (caught.value.minimum_bytes, caught.value.at) == (16, None)


def test_a_graph_without_backward_has_a_plan() -> None:
    text = "\n".join(
        line
        for line in CHAIN.splitlines()
        if not any(part in line for part in ("gc", "gb", "gw", "@t", "requires_grad"))
    ).replace("(%x, %w)", "(%x)")
    graph = parse_graph(text.replace("  storage @w 100 cpu\n", ""))
    program = Program(
        graph,
        Costs(dict.fromkeys(graph.operations, 1.0), dict.fromkeys(graph.operations, 0), "analytic:test"),
    )
    plan = plan_of(program, "100%")
    assert (plan.peak_bytes, plan.floor_bytes, plan.overhead) == (600, 600, 0.0)
    with pytest.raises(BudgetError) as caught:
        PlanMemory(599).run(program)
    assert caught.value.minimum_bytes == 600 and str(caught.value.at) == "m.py:2"


def test_a_named_strategy_is_the_one_that_is_used_also_where_all_fits() -> None:
    """A budget that the captured graph alone meets is no reason to take another strategy."""
    program = chain()
    planner = Planner(program)
    planner.problem = replace(planner.problem, costs=heavier(planner.problem.costs))
    budget = planner.baseline_bytes
    assert planner.problem.keep_all.peak_bytes > budget
    for strategy in ("auto", "keep-all"):
        kept = PlanMemory(budget, strategy).choose(planner).plan
        assert kept is not None and (kept.strategy, kept.overhead) == ("keep-all", 0)
    with pytest.raises(BudgetError, match="by strategy sqrt-n"):
        PlanMemory(budget, "sqrt-n").choose(planner)


def heavier(costs: Costs) -> Costs:
    more = {node: nbytes + 10_000 for node, nbytes in costs.workspace_bytes.items()}
    return replace(costs, workspace_bytes=more)


def test_blocks_that_are_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match="finds no blocks") as caught:
        PlanMemory("100%", "per-block").run(chain())
    assert caught.value.code == "IRC403" and caught.value.help is not None


def test_a_strategy_that_finds_nothing_says_so() -> None:
    with pytest.raises(BudgetError, match=r"IRC206.*strategy h-dtr finds no schedule within 1 B") as caught:
        PlanMemory(1, "h-dtr").run(chain())
    assert caught.value.minimum_bytes is not None and caught.value.minimum_bytes > 1
    with pytest.raises(TimeLimitError, match="IRC205"):
        PlanMemory(1, "h-dtr", time_limit=0.0).run(chain())
