"""Copies, repeats and frees in one programme: against a search without a solver, and what it claims."""

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.exact_offload.choice import schedule_of
from support.exact_offload.line import ExactProblem, line
from support.exact_offload.solve import Exact, best_with_swaps
from support.examples import examples
from support.exhaustive import chains, problem_of
from support.exhaustive_swaps import Fastest, fastest_with_swaps
from support.strategies import Sample, graphs, with_annotations

from irc.ir import (
    Compute,
    DType,
    Fetch,
    Graph,
    Input,
    InputRole,
    Loss,
    Node,
    Offload,
    Output,
    OutputRole,
    Region,
    Schedule,
    Storage,
    TensorType,
    Tier,
    Trait,
    Value,
    step_times,
    verify_schedule,
)
from irc.passes import CheckpointProblem
from irc.passes.offload.offload_problem import OffloadProblem
from irc.passes.offload.remat_and_offload import search_with_copies
from irc.passes.offload.strategies import known_offload_solutions
from irc.passes.remat.candidates import find_candidates
from irc.passes.remat.exact import best_of_class

ROUNDING = 1e-4
"""Of the step: what the programme may lose by counting in whole units of time."""
MOST_COPYABLE = 4
MANY_SECONDS = 60.0
MOST_STATES = 6_000


def running(graphs_: st.SearchStrategy[Sample]) -> st.SearchStrategy[Sample]:
    """The samples in which anything runs at all."""
    return graphs_.filter(lambda sample: bool(sample.graph.operations))


samples = chains(max_forward=5, max_kept=MOST_COPYABLE) | running(graphs(max_forward=5, max_elements=16))


@st.composite
def tiers(draw: st.DrawFn, problem: CheckpointProblem, name: str = "host", *, small: bool = False) -> Tier:
    """A tier whose copies take about as long as the computations, one way or both ways at once."""
    total_bytes = max(sum(storage.nbytes for storage in problem.producer), 1)
    speed = total_bytes / problem.step_seconds * draw(st.sampled_from((0.4, 1.0, 2.0, 5.0)))
    share = draw(st.sampled_from((0.3, 0.5, 0.8))) if small else 1.0
    return Tier(
        name,
        int(total_bytes * share),
        speed,
        speed * draw(st.sampled_from((1.0, 2.5))),
        draw(st.sampled_from((0.0, 0.0, 0.5))),
        draw(st.booleans()),
    )


def problems(sample: Sample) -> CheckpointProblem:
    problem = problem_of(sample)
    assume(len(problem.graph.copyable_storages & problem.producer.keys()) <= MOST_COPYABLE)
    assume(len(problem.producer) <= MOST_COPYABLE + 2)
    return problem


def budgets(problem: CheckpointProblem) -> st.SearchStrategy[int]:
    """From what no schedule can go below to what needs no copies and no repeats; low ones more often."""
    least, most = problem.floor_bytes, problem.keep_all.peak_bytes
    shares = st.sampled_from((0.0, 0.0, 0.1, 0.25, 0.5, 0.8, 1.0))
    return shares.map(lambda share: least + int((most - least) * share))


def exactly(problem: CheckpointProblem, places: Sequence[Tier], budget_bytes: int) -> Exact:
    """The exact search, and whether what it says of its schedule is so."""
    found = best_with_swaps(problem, places, budget_bytes, deadline=time.thread_time() + MANY_SECONDS)
    assert found.is_proved and found.is_infeasible == (found.schedule is None)
    if found.schedule is not None:
        workspaces = problem.costs.workspace_bytes
        verify_schedule(found.schedule, workspaces, budget_bytes=budget_bytes, tiers=places)
        assert step_times(found.schedule, problem.costs.seconds, places).step_seconds == found.step_seconds
        assert 0 <= found.step_seconds - found.bound_seconds <= ROUNDING * problem.step_seconds
    return found


def searched(problem: CheckpointProblem, places: Sequence[Tier], budget_bytes: int) -> Fastest | None:
    """The reference, which has to keep its word too; examples with too many states are left out."""
    try:
        found = fastest_with_swaps(problem, places, budget_bytes, most_states=MOST_STATES)
    except RuntimeError:
        assume(False)
        raise
    if found is not None:
        workspaces = problem.costs.workspace_bytes
        verify_schedule(found.schedule, workspaces, budget_bytes=budget_bytes, tiers=places)
        seconds = step_times(found.schedule, problem.costs.seconds, places).step_seconds
        assert seconds == pytest.approx(found.seconds)
    return found


def compare(problem: CheckpointProblem, places: Sequence[Tier], budget_bytes: int) -> None:
    """Both find the same time, and neither what the other says there is not."""
    reference = searched(problem, places, budget_bytes)
    found = exactly(problem, places, budget_bytes)
    if reference is None:
        assert found.is_infeasible
        return
    assert found.step_seconds == pytest.approx(reference.seconds, abs=ROUNDING * problem.step_seconds)
    assert found.bound_seconds <= reference.seconds * (1 + 1e-9)
    assert found.bound_seconds >= reference.seconds - ROUNDING * problem.step_seconds


@pytest.mark.slow
@pytest.mark.default
@examples(30)
@given(st.data(), samples)
def test_it_is_as_fast_as_exhaustive_search_finds(data: st.DataObject, sample: Sample) -> None:
    problem = problems(sample)
    compare(problem, [data.draw(tiers(problem))], data.draw(budgets(problem)))


@examples(25)
@given(st.data(), samples)
def test_a_small_tier_is_used_again_when_it_has_room(data: st.DataObject, sample: Sample) -> None:
    problem = problems(sample)
    compare(problem, [data.draw(tiers(problem, small=True))], data.draw(budgets(problem)))


@pytest.mark.slow
@pytest.mark.default
@examples(25)
@given(st.data(), samples)
def test_each_storage_goes_to_the_better_of_two_tiers(data: st.DataObject, sample: Sample) -> None:
    problem = problems(sample)
    places = [data.draw(tiers(problem, "host", small=True)), data.draw(tiers(problem, "disk"))]
    compare(problem, places, data.draw(budgets(problem)))


@examples(15)
@given(st.data(), with_annotations(samples))
def test_what_a_annotation_keeps_from_staying_does_not_stay_in_a_tier(
    data: st.DataObject, sample: Sample
) -> None:
    problem = problems(sample)
    places = [data.draw(tiers(problem))]
    budget = data.draw(budgets(problem))
    compare(problem, places, budget)
    found = exactly(problem, places, budget)
    copied = (
        [i.storage for i in found.schedule.instructions if isinstance(i, Offload)] if found.schedule else []
    )
    assert problem.transient.isdisjoint(copied)


@examples(8)
@given(st.data(), chains(max_forward=6) | running(graphs(max_forward=6)))
def test_without_tiers_it_recomputes_as_the_integer_programme_does(
    data: st.DataObject, sample: Sample
) -> None:
    problem = problem_of(sample)
    assume(len(problem.wanted) <= 7)
    budget = data.draw(budgets(problem))
    expected = best_of_class(problem, budget, deadline=time.thread_time() + MANY_SECONDS)
    found = exactly(problem, [], budget)
    assert expected.is_proved and found.is_infeasible == (expected.best is None)
    if expected.best is not None:
        assert found.step_seconds == pytest.approx(expected.best.seconds, abs=ROUNDING * problem.step_seconds)


@examples(15)
@given(st.data(), chains(max_forward=6))
def test_a_tier_never_makes_it_slower_and_one_of_no_use_not_faster(
    data: st.DataObject, sample: Sample
) -> None:
    problem = problem_of(sample)
    assume(len(problem.wanted) <= 6)
    budget = data.draw(budgets(problem))
    tier = data.draw(tiers(problem))
    alone, beside = exactly(problem, [], budget), exactly(problem, [tier], budget)
    rounding = ROUNDING * problem.step_seconds
    if not alone.is_infeasible:
        assert beside.step_seconds <= alone.step_seconds + rounding
    none = exactly(problem, [replace(tier, capacity_bytes=0)], budget)
    assert none.is_infeasible == alone.is_infeasible
    if not alone.is_infeasible:
        assert none.step_seconds == pytest.approx(alone.step_seconds, abs=rounding)


@pytest.mark.default
@examples(25)
@given(st.data(), chains(max_forward=4, max_kept=4))
def test_what_stays_for_other_forwards_in_flight_counts(data: st.DataObject, sample: Sample) -> None:
    graph = replace(sample.graph, forwards_in_flight=data.draw(st.integers(2, 3)))
    problem = problem_of(replace(sample, graph=graph))
    tier = data.draw(tiers(problem))
    budget = data.draw(budgets(problem))
    alone, beside = exactly(problem, [], budget), exactly(problem, [tier], budget)
    expected = best_of_class(problem, budget, deadline=time.thread_time() + MANY_SECONDS)
    assert alone.is_infeasible == (expected.best is None)
    if expected.best is not None:
        assert alone.step_seconds == pytest.approx(expected.best.seconds, abs=ROUNDING * problem.step_seconds)
    assert beside.step_seconds <= alone.step_seconds + ROUNDING * problem.step_seconds


# ---------------------------------------------------------------------- by hand


def value(name: str, nbytes: int) -> Value:
    return Value(name, TensorType.contiguous((nbytes,), DType.FLOAT8_E5M2), Storage(f"s_{name}", nbytes))


def one_way_chain(*, again: bool = False) -> CheckpointProblem:
    """Values of 6, 2 and 4 B that nothing makes twice: the last is read before the others.

    Args:
        again: Whether the last backward operation reads it once more.
    """
    x, w, y, t, g0, g1, g2, g3 = (value(name, 1) for name in ("x", "w", "y", "t", "g0", "g1", "g2", "g3"))
    a, b, c = value("a", 6), value("b", 2), value("c", 4)
    once = frozenset({Trait.RANDOM})
    nodes = [
        Node("make_c", "test.op", (x, w), (c,), traits=once),
        Node("make_a", "test.op", (x,), (a,), traits=once),
        Node("make_b", "test.op", (a,), (b,), traits=once),
        Node("make_y", "test.op", (a, b), (y,), traits=once),
        Node("read_none", "test.grad", (t,), (g0,), region=Region.BACKWARD),
        Node("read_c", "test.grad", (g0, c), (g1,), region=Region.BACKWARD),
        Node("read_ab", "test.grad", (g1, a, b), (g2,), region=Region.BACKWARD),
    ]
    if again:
        nodes.append(Node("read_c_again", "test.grad", (g2, c), (g3,), region=Region.BACKWARD))
    inputs = (
        Input(x, InputRole.INPUT, "0"),
        Input(w, InputRole.PARAMETER, "w", requires_grad=True),
        Input(t, InputRole.TANGENT, "0"),
    )
    gradient = g3 if again else g2
    outputs = (Output(y, OutputRole.OUTPUT, "0"), Output(gradient, OutputRole.GRADIENT, "parameter:w"))
    seconds, workspaces = dict.fromkeys(nodes, 1.0) | {nodes[4]: 5.0}, dict.fromkeys(nodes, 0) | {nodes[5]: 4}
    return problem_of(Sample(Graph(inputs, tuple(nodes), outputs), seconds, workspaces))


HOST = Tier("host", 12, 1.0, 1.0)


def shown(schedule: Schedule | None) -> list[str]:
    assert schedule is not None
    return [
        f"{type(i).__name__} {i.node.name if isinstance(i, Compute) else i.storage.name}"
        for i in schedule.instructions
        if not isinstance(i, Loss)
    ]


def test_a_copy_back_begins_between_two_waits() -> None:
    found = exactly(one_way_chain(), [HOST], 14)
    # Out: c until 5, a until 11, b until 13. Back: c from 11 to 15 beside b, then a and b from 16 to 24.
    assert found.step_seconds == 25.0
    lines = shown(found.schedule)
    assert lines[lines.index("Compute read_none") + 1 : lines.index("Compute read_c")] == [
        "Wait s_a",
        "Free s_a",
        "Fetch s_c",
        "Wait s_b",
        "Free s_b",
        "Wait s_c",
    ]
    assert exactly(one_way_chain(), [HOST], 13).is_infeasible


def test_a_value_leaves_a_tier_to_make_room_there() -> None:
    found = exactly(one_way_chain(), [replace(HOST, capacity_bytes=8)], 14)
    # Beside c there is room for b but not for a, which begins to leave only when c is back.
    assert found.step_seconds == 32.0
    lines = shown(found.schedule)
    assert lines.index("Wait s_c", lines.index("Fetch s_c")) < lines.index("Offload s_a")
    assert exactly(one_way_chain(), [replace(HOST, capacity_bytes=7)], 14).is_infeasible


def test_a_value_is_copied_out_once_and_back_as_often_as_it_is_read() -> None:
    lines = shown(exactly(one_way_chain(again=True), [HOST], 14).schedule)
    assert (lines.count("Offload s_c"), lines.count("Fetch s_c"), lines.count("Free s_c")) == (1, 2, 3)


def test_a_channel_carries_copies_in_the_order_in_which_they_start() -> None:
    """Wherever the solver says that they are begun, which may be long before."""
    exact = ExactProblem(one_way_chain(), (HOST,), 14)
    steps = tuple(line(exact.problem, exact.pauses))
    from support.exact_offload.programme import SwapProgramme

    choice = SwapProgramme(exact, steps).solve(MANY_SECONDS).choice
    assert choice is not None
    back = [begin for begin in choice.begins if isinstance(begin.instruction, Fetch)]
    latest = max(back, key=lambda begin: begin.start)
    earliest = min(begin.place for begin in back)
    early = replace(latest, place=(earliest[0] - 1, 1))
    begins = tuple(early if begin is latest else begin for begin in choice.begins)
    schedule = schedule_of(exact.problem, steps, replace(choice, begins=begins))
    fetched = [i.storage for i in schedule.instructions if isinstance(i, Fetch)]
    in_order = sorted(back, key=lambda begin: begin.start)
    assert fetched == [begin.instruction.storage for begin in in_order]


def test_the_loss_takes_its_bytes() -> None:
    problem = one_way_chain()
    heavy = replace(problem, graph=replace(problem.graph, loss_bytes=3))
    # At the loss there are a and b, 4 B of what is always there, and 3 B: a or b has to be away.
    compare(heavy, [HOST], 14)
    assert exactly(heavy, [HOST], 14).step_seconds > 25.0


def test_what_is_known_when_time_is_up_holds() -> None:
    problem = one_way_chain(again=True)
    proved = exactly(problem, [HOST], 14)
    found = best_with_swaps(problem, [HOST], 14, deadline=time.thread_time() - 1)
    assert problem.step_seconds <= found.bound_seconds <= proved.step_seconds <= found.step_seconds
    assert not found.is_infeasible


MOST_OPERATIONS = 14
"""Up to so many operations the reference is found in time."""

NEARLY = 0.05
"""The part of its time by which the plan of a tiny graph may be slower than the best there is."""


@examples(25)
@given(st.data(), samples)
def test_the_plan_of_a_tiny_graph_is_nearly_the_best_and_its_bound_is_below(
    data: st.DataObject, sample: Sample
) -> None:
    problem = problems(sample)
    assume(problem.backward and len(problem.base) <= MOST_OPERATIONS)
    places = (data.draw(tiers(problem)),)
    budget_bytes = data.draw(budgets(problem))
    reference = searched(problem, places, budget_bytes)
    work = OffloadProblem(problem, places, budget_bytes)
    deadline = time.thread_time() + MANY_SECONDS
    candidates = find_candidates(problem, deadline=deadline)
    seeds = known_offload_solutions(work, deadline=deadline)
    found = search_with_copies(work, candidates, deadline=deadline, seeds=seeds)
    if reference is None:
        assert found is None or found.best.peak_bytes <= budget_bytes  # some compute again in forward too
        return
    assert found is not None
    assert found.best.seconds <= reference.seconds * (1 + NEARLY)
    assert problem.step_seconds + found.bound_seconds <= reference.seconds * (1 + 1e-6)
