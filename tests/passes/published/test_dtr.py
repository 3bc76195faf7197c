"""Dynamic tensor rematerialisation: valid, within the budget, and blind to what follows."""

import math
import time
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.calls import several
from support.examples import examples
from support.exhaustive import chains, cheapest_of_all, problem_of
from support.solutions import budget_between, verify
from support.strategies import Sample, graphs, with_annotations

from irc.ir import Compute, Loss, Storage, parse_graph
from irc.passes import CheckpointProblem, Costs
from irc.passes.published.dtr import HEURISTICS, dtr
from irc.passes.remat import online_run
from irc.passes.remat.problem import Solution

SOME = examples(60)
samples = chains() | graphs()
heuristics = st.sampled_from(tuple(HEURISTICS))


def check(problem: CheckpointProblem, solution: Solution | None, budget_bytes: int) -> None:
    """It is valid and within the budget, or there is none below what keeps all."""
    if solution is None:
        assert budget_bytes < problem.keep_all.peak_bytes
        return
    verify(problem, solution, budget_bytes)
    assert solution.seconds >= problem.step_seconds


@given(samples | with_annotations(samples) | several(samples), heuristics, st.integers(0, 100))
@examples(120)
def test_what_it_returns_is_valid_and_within_the_budget(sample: Sample, heuristic: str, percent: int) -> None:
    problem = problem_of(sample)
    budget = budget_between(problem, percent)
    check(problem, dtr(problem, budget, heuristic), budget)


@given(samples, heuristics)
@SOME
def test_nothing_is_evicted_if_all_fits(sample: Sample, heuristic: str) -> None:
    problem = problem_of(sample)
    solution = dtr(problem, problem.keep_all.peak_bytes, heuristic)
    assert solution is not None and solution.order == sample.graph.operations
    assert dtr(problem, problem.floor_bytes - 1, heuristic) is None


@given(chains(max_forward=6, max_kept=6), heuristics, st.integers(0, 100))
@examples(30)
def test_it_is_never_better_than_the_best(sample: Sample, heuristic: str, percent: int) -> None:
    problem = problem_of(sample)
    budget = budget_between(problem, percent)
    solution = dtr(problem, budget, heuristic)
    best = cheapest_of_all(problem, budget)
    assert (math.inf if solution is None else solution.seconds) >= best * (1 - 1e-9)


@given(samples, heuristics, st.integers(0, 100))
@SOME
def test_the_same_question_has_the_same_answer(sample: Sample, heuristic: str, percent: int) -> None:
    budget = budget_between(problem_of(sample), percent)
    first, second = (dtr(problem_of(sample), budget, heuristic) for _ in range(2))
    assert (first and first.order) == (second and second.order)


def neighbourhood(problem: CheckpointProblem, storage: Storage, evicted: set[Storage]) -> set[Storage]:
    """e*, by its definition: what is reached up, and what is reached down, through evicted storages."""

    def up(each: Storage) -> set[Storage]:
        return {s for s in problem.forward_reads[problem.producer[each]] if s in evicted}

    def down(each: Storage) -> set[Storage]:
        users = problem.users.get(each, ())
        return {s for user in users for s in problem.graph.allocates(user) if s in evicted}

    found: set[Storage] = set()
    for step in (up, down):
        border = step(storage)
        while border - found:
            found |= border
            border = {s for each in border for s in step(each)}
    return found


@given(chains() | graphs(), st.randoms(use_true_random=False))
@SOME
def test_neighbourhoods_are_those_of_their_definition(sample: Sample, random: Random) -> None:
    problem = problem_of(sample)
    assume(len(problem.producer) > 2)
    exact, classes = (HEURISTICS[name](problem) for name in ("h-dtr", "h-dtr-eq"))
    evicted: set[Storage] = set()
    for _ in range(30):
        storage = random.choice(list(problem.producer))
        for each in (exact, classes):
            (each.restore if storage in evicted else each.evict)(storage)
        evicted ^= {storage}
        for other in set(problem.producer) - evicted:
            around = (other, *neighbourhood(problem, other, evicted))
            seconds = sum(problem.costs.seconds[problem.producer[s]] for s in around)
            assert exact.seconds(other) == pytest.approx(seconds)
            least = problem.costs.seconds[problem.producer[other]]
            assert classes.seconds(other) >= least * (1 - 1e-9)


def chain(seconds: tuple[float, ...], *, once: int | None = None) -> CheckpointProblem:
    """A chain of operations that make 8 bytes each, which backward reads in reverse order.

    Args:
        seconds: The seconds of each operation of forward.
        once: The operation that runs once.
    """
    length = len(seconds)
    lines = [f"  storage @{letter}{i} 8 cpu" for letter in "sd" for i in range(length + 1)]
    lines.append('  input %s0: float8_e5m2[8]{1} @s0 input "0" requires_grad')
    lines.append(f'  input %d{length}: float8_e5m2[8]{{1}} @d{length} tangent "0"')
    lines.append("forward:")
    for i in range(length):
        traits = " traits(random)" if i == once else ""
        lines.append(f"  f{i} = op(%s{i}) -> %s{i + 1}: float8_e5m2[8]{{1}} @s{i + 1}{traits}")
    lines.append("backward:")
    for i in reversed(range(length)):
        lines.append(f"  b{i} = op(%d{i + 1}, %s{i}) -> %d{i}: float8_e5m2[8]{{1}} @d{i}")
    lines += [f'  output %s{length} "0"', '  gradient %d0 "input:0"', "}"]
    graph = parse_graph("\n".join(["graph loss_bytes=0 {", *lines]) + "\n")
    costs = dict.fromkeys(graph.operations, 1.0) | dict(zip(graph.nodes, seconds, strict=False))
    return CheckpointProblem(graph, Costs(costs, dict.fromkeys(costs, 0), "analytic:test"))


def words(solution: Solution | None) -> str:
    """The names of the operations that run, with `|` for the loss."""
    assert solution is not None
    names = (i.node.name if isinstance(i, Compute) else "|" for i in solution.schedule.instructions)
    kept = (isinstance(i, Compute | Loss) for i in solution.schedule.instructions)
    return " ".join(name for name, is_kept in zip(names, kept, strict=True) if is_kept)


def test_the_cheapest_and_stalest_goes_first() -> None:
    problem = chain((9.0, 1.0, 5.0, 9.0, 9.0, 1.0))
    assert problem.keep_all.peak_bytes == 72
    # Of s1 to s4, s2 takes the least seconds to make again.
    assert words(dtr(problem, 64, "h-dtr-local")) == "f0 f1 f2 f3 f4 f5 | b5 b4 b3 f1 b2 b1 b0"


def test_evicted_neighbours_make_a_storage_dear() -> None:
    problem = chain((1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    budget = problem.floor_bytes + 16
    times = {name: found and found.seconds for name in HEURISTICS if (found := dtr(problem, budget, name))}
    assert times["h-dtr"] is not None and times["h-dtr-eq"] is not None
    assert times.get("h-dtr-local", math.inf) >= times["h-dtr"]


def test_what_runs_once_is_never_evicted() -> None:
    problem = chain((9.0, 1.0, 9.0, 9.0, 9.0, 1.0), once=1)
    solution = dtr(problem, 64)
    assert solution is not None and words(solution).split().count("f1") == 1


def test_thrashing_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chain((1.0,) * 9)
    budget = problem.keep_all.peak_bytes - 16
    assert dtr(problem, budget) is not None
    monkeypatch.setattr(online_run, "_STEPS_LIMIT", 0.1)
    assert dtr(problem, budget) is None


def test_the_deadline_ends_it() -> None:
    problem = chain((1.0,) * 9)
    assert dtr(problem, problem.keep_all.peak_bytes - 16, deadline=time.thread_time() - 1) is None
