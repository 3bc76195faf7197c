"""A search stops within its gap, and goes on where a programme over cuts chooses what no schedule can do."""

import time
from collections.abc import Mapping

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import chains, cheapest_in_class, cheapest_of_all, problem_of
from support.strategies import Sample, graphs

from irc.ir import Storage, parse_graph
from irc.passes import CheckpointProblem, Costs
from irc.passes.remat import cut_ilp, search
from irc.passes.remat.candidates import find_candidates
from irc.passes.remat.cut_ilp import Solved
from irc.passes.remat.cut_search import bound_by_cuts

samples = chains() | graphs()

MASKED = """\
graph loss_bytes=0 {
  storage @x 8 cpu
  storage @w 8 cpu
  storage @t 8 cpu
  storage @r 80 cpu
  storage @a 80 cpu
  storage @c 80 cpu
  storage @d 80 cpu
  storage @y 8 cpu
  storage @g 8 cpu
  storage @h 8 cpu
  input %x: float32[2]{1} @x input "0"
  input %w: float32[2]{1} @w parameter "w" requires_grad
  input %t: float32[2]{1} @t tangent "0"
forward:
  r = mask(%x) -> %r: float32[20]{1} @r traits(random)
  a = op(%r, %w) -> %a: float32[20]{1} @a
  c = op(%a) -> %c: float32[20]{1} @c
  d = op(%c) -> %d: float32[20]{1} @d
  y = op(%d) -> %y: float32[2]{1} @y
backward:
  g = op(%t, %c) -> %g: float32[2]{1} @g
  h = op(%g, %a) -> %h: float32[2]{1} @h
  output %y "0"
  gradient %h "parameter:w"
}
"""


def _chain_text(count: int) -> str:
    """A chain of operations, each read by its own operation of backward."""
    names = [f"a{i}" for i in range(count)]
    grads = [f"g{i}" for i in range(count)]
    storages = [f"  storage @{n} 80 cpu" for n in (*names, *grads)]
    forward = [
        f"  {n} = op(%{names[i - 1] if i else 'x'}) -> %{n}: float32[20]{{1}} @{n}"
        for i, n in enumerate(names)
    ]
    backward = [
        f"  {grads[i]} = op(%{grads[i + 1] if i + 1 < count else 't'}, %{names[i - 1] if i else 'x'})"
        f" -> %{grads[i]}: float32[20]{{1}} @{grads[i]}"
        for i in reversed(range(count))
    ]
    return "\n".join(
        (
            "graph loss_bytes=0 {",
            "  storage @x 80 cpu",
            "  storage @t 80 cpu",
            *storages,
            '  input %x: float32[20]{1} @x parameter "x" requires_grad',
            '  input %t: float32[20]{1} @t tangent "0"',
            "forward:",
            *forward,
            "backward:",
            *backward,
            f'  output %{names[-1]} "0"',
            '  gradient %g0 "parameter:x"',
            "}",
            "",
        )
    )


def test_a_choice_that_runs_something_between_forward_and_the_loss_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mask stays until the last operation of forward, and what is made of it is there at the loss."""
    graph = parse_graph(MASKED)
    costs = Costs(dict.fromkeys(graph.nodes, 1.0), dict.fromkeys(graph.nodes, 0), "analytic:test")
    problem = CheckpointProblem(graph, costs)
    mask, made = (next(s for s in problem.producer if s.name == name) for name in "ra")
    resident: Mapping[int, frozenset[Storage]] = {4: frozenset({mask}), 5: frozenset({made})}
    for eager in (True, False):
        with pytest.raises(ValueError, match="r may run only once"):
            problem.repeats_between(resident, eager=eager)
    asked: list[object] = []

    class Relaxation:
        def __init__(self, *args: object, **options: object) -> None:
            asked.append(args[2])

        def relaxed_bound_seconds(self, **options: object) -> float:
            return 0.0

        def solve(self, **options: object) -> Solved:
            return Solved(resident, 0.0, False, True)

    monkeypatch.setattr(search, "Relaxation", Relaxation)
    monkeypatch.setattr(search, "is_small", lambda problem: False)
    candidates = find_candidates(problem)
    budget = problem.keep_all.peak_bytes - 1
    found = search.search(problem, budget, candidates, deadline=time.thread_time() + 20)
    assert found is not None and found.best.peak_bytes <= budget
    assert asked[0] == [5] and len(asked) > 1, "more cuts are asked for"


@given(samples, st.integers(0, 10))
@examples(20)
def test_the_search_stops_within_the_gap_or_at_the_best(sample: Sample, tenths: int) -> None:
    problem = problem_of(sample)
    assume(len(problem.wanted) <= 7)
    for choice in cheapest_in_class(problem):
        candidates = find_candidates(problem)
        found = search.search(
            problem, choice.peak_bytes, candidates, deadline=time.thread_time() + 60, gap=tenths / 10
        )
        assert found is not None and found.best.peak_bytes <= choice.peak_bytes
        left = found.best.seconds - problem.step_seconds - found.bound_seconds
        assert left <= tenths / 10 * problem.step_seconds or found.best.seconds <= choice.seconds * (1 + 1e-9)


@given(samples, st.integers(0, 9))
@examples(20)
def test_what_is_found_fits_and_is_not_below_its_bound(sample: Sample, tenths: int) -> None:
    """Of no schedule's time, with dives between; and it is no slower than what was known."""
    problem = problem_of(sample)
    assume(problem.backward and len(problem.wanted) <= 5)
    room = problem.keep_all.peak_bytes - problem.floor_bytes
    budget = problem.floor_bytes + room * tenths // 10
    candidates = find_candidates(problem)
    found = search.search(problem, budget, candidates, deadline=time.thread_time() + 60.0, gap=0.005)
    if found is None:
        return
    assert found.best.peak_bytes <= budget
    assert all(found.best.seconds <= known.seconds for _, known in candidates.fitting(budget))
    assert problem.step_seconds + found.bound_seconds <= cheapest_of_all(problem, budget) * (1 + 1e-6)
    by_cuts = bound_by_cuts(problem, budget)
    assert found.bound_seconds >= min(by_cuts, found.best.seconds - problem.step_seconds) - 1e-6


def test_a_deep_chain_is_planned_to_the_optimum() -> None:
    """Programmes over cuts stay a fifth below the best schedule of such a chain, however long they take."""
    graph = parse_graph(_chain_text(16))
    nodes = graph.nodes
    costs = Costs(dict.fromkeys(nodes, 1.0), dict.fromkeys(nodes, 0), "analytic:test")
    problem = CheckpointProblem(graph, costs)
    budget = problem.floor_bytes + 2 * 80
    found = search.search(
        problem, budget, find_candidates(problem), deadline=time.thread_time() + 60.0, gap=0.005
    )
    assert found is not None and found.best.peak_bytes <= budget
    assert found.is_proved(problem, 1e-6)


@given(samples)
@examples(20)
def test_the_relaxed_bound_is_below_the_bound(sample: Sample) -> None:
    problem = problem_of(sample)
    assume(problem.backward)
    for choice in cheapest_in_class(problem):
        cuts = sorted({len(problem.forward), problem.time_steps - 1})
        relaxation = cut_ilp.Relaxation(problem, choice.peak_bytes, cuts)
        relaxed_seconds = relaxation.relaxed_bound_seconds(seconds=60.0)
        solved = relaxation.solve(seconds=60.0, gap=0.0)
        assert relaxed_seconds <= solved.bound_seconds + 1e-6 * problem.step_seconds
        assert problem.step_seconds + solved.bound_seconds <= choice.seconds * (1 + 1e-6)


@given(samples, st.integers(0, 20))
@examples(20)
def test_a_choice_below_a_limit_is_found_or_the_limit_is_a_bound(sample: Sample, tenths: int) -> None:
    problem = problem_of(sample)
    assume(problem.backward)
    for choice in cheapest_in_class(problem):
        cuts = sorted({len(problem.forward), problem.time_steps - 1})
        relaxation = cut_ilp.Relaxation(problem, choice.peak_bytes, cuts)
        free = relaxation.solve(seconds=60.0, gap=0.0)
        limit_seconds = free.bound_seconds * tenths / 10
        limited = relaxation.solve(seconds=60.0, gap=0.0, below_seconds=limit_seconds)
        assert not limited.is_infeasible and limited.bound_seconds <= free.bound_seconds * (1 + 1e-6) + 1e-9
        if tenths < 10 and free.bound_seconds > 1e-3 * problem.step_seconds:
            assert limited.resident is None and limited.bound_seconds == limit_seconds
        if tenths > 10:
            assert limited.resident is not None
            assert limited.bound_seconds == pytest.approx(free.bound_seconds, rel=1e-4, abs=1e-9)
        again = relaxation.solve(seconds=60.0, gap=0.0)
        assert again.bound_seconds == pytest.approx(free.bound_seconds, rel=1e-6, abs=1e-12), "no row stays"


@given(samples)
@examples(10)
def test_where_everything_fits_nothing_is_searched(sample: Sample) -> None:
    problem = problem_of(sample)
    assume(search.fits_without_search(problem, problem.keep_all.peak_bytes))
    candidates = find_candidates(problem)
    with pytest.MonkeyPatch.context() as patched:
        for name in ("evict_greedily", "best_of_class", "lower_bound", "Relaxation"):
            patched.delattr(search, name)
        found = search.search(
            problem, problem.keep_all.peak_bytes, candidates, deadline=time.thread_time() + 60
        )
    assert found is not None and found.best.seconds == problem.step_seconds
