"""The known rules: valid on every graph, and what they keep on a small one."""

import pytest
from exhaustive import chains, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Sample, graphs

from irc.ir import Compute, Free, Schedule, parse_graph, verify_schedule
from irc.passes import CheckpointProblem, Costs
from irc.passes.checkpointing import Simulated
from irc.passes.strategies import every_k, keep_all, sqrt_n

SOME = settings(max_examples=80)
samples = chains() | graphs()


def check(problem: CheckpointProblem, simulated: Simulated) -> None:
    """The schedule is valid, and takes the time and the memory that are claimed."""
    verify_schedule(simulated.schedule, problem.costs.workspace_bytes, peak_bytes=simulated.peak_bytes)
    assert simulated.schedule.computed == simulated.order
    assert simulated.seconds == pytest.approx(sum(problem.costs.seconds[n] for n in simulated.order))
    assert max(simulated.during_bytes, default=0) <= simulated.peak_bytes
    assert len(simulated.during_bytes) == len(simulated.order) == len(simulated.owners)
    assert simulated.peak_bytes >= problem.floor_bytes


@given(samples)
@SOME
def test_keeping_all_computes_nothing_twice(sample: Sample) -> None:
    problem = problem_of(sample)
    simulated = keep_all(problem)
    check(problem, simulated)
    assert simulated.order == sample.graph.operations
    assert simulated.seconds == problem.step_seconds


@given(samples, st.integers(1, 12))
@SOME
def test_every_k_is_valid_and_computes_nothing_more_than_twice(sample: Sample, k: int) -> None:
    problem = problem_of(sample)
    simulated = every_k(problem, k)
    check(problem, simulated)
    assert all(simulated.order.count(node) <= 2 for node in problem.forward)
    assert all(simulated.order.count(node) == 1 for node in problem.backward)


@given(samples)
@SOME
def test_sqrt_n_is_valid(sample: Sample) -> None:
    problem = problem_of(sample)
    check(problem, sqrt_n(problem))


@given(samples)
@SOME
def test_the_books_of_the_problem_agree_with_the_simulation(sample: Sample) -> None:
    """`held_during` plus what is kept is what the simulation counts during backward."""
    problem = problem_of(sample)
    during = problem.keep_all.during_bytes[len(problem.forward) :]
    for position, (held, nbytes) in enumerate(zip(problem.held_during, during, strict=True)):
        read = {s: p for s, p in problem.read_positions.items() if p[-1] >= position}
        assert held + sum(storage.nbytes for storage in read) == nbytes
    assert problem.floor_bytes <= problem.keep_all.peak_bytes


def chain(length: int, random: int | None = None) -> CheckpointProblem:
    """A chain in which each backward operation reads what its forward operation read and wrote."""
    lines = [f"  storage @s{i} 8 cpu" for i in range(length + 1)]
    lines += [f"  storage @d{i} 8 cpu" for i in range(length + 1)]
    lines.append('  input %s0: float8_e5m2[8]{1} @s0 input "0" requires_grad')
    lines.append(f'  input %d{length}: float8_e5m2[8]{{1}} @d{length} tangent "0"')
    lines.append("forward:")
    for i in range(length):
        traits = " traits(random)" if i == random else ""
        lines.append(f"  f{i} = op(%s{i}) -> %s{i + 1}: float8_e5m2[8]{{1}} @s{i + 1}{traits}")
    lines.append("backward:")
    for i in reversed(range(length)):
        lines.append(f"  b{i} = op(%d{i + 1}, %s{i}, %s{i + 1}) -> %d{i}: float8_e5m2[8]{{1}} @d{i}")
    lines += [f'  output %s{length} "0"', '  gradient %d0 "input:0"', "}"]
    graph = parse_graph("\n".join(["graph loss_bytes=0 {", *lines]) + "\n")
    zeros, ones = dict.fromkeys(graph.operations, 0), dict.fromkeys(graph.operations, 1.0)
    return CheckpointProblem(graph, Costs(ones, zeros, "analytic:test"))


def words(schedule: Schedule) -> str:
    """The schedule in one line: what runs, what is freed, `|` for the loss."""
    parts: list[str] = []
    for instruction in schedule.instructions:
        match instruction:
            case Compute(node, _):
                parts.append(node.name)
            case Free(storage):
                parts.append(f"-{storage.name}")
            case _:
                parts.append("|")
    return " ".join(parts)


def test_keep_all_in_words() -> None:
    assert words(keep_all(chain(4)).schedule) == "f0 f1 f2 f3 | b3 b2 -d3 -s3 b1 -d2 -s2 b0 -d1 -s1"


def test_every_2_in_words() -> None:
    problem = chain(6)
    # s2 and s4 cross from one segment to the next; s5 is what the first backward operation reads.
    assert words(every_k(problem, 2).schedule) == (
        "f0 f1 -s1 f2 f3 -s3 f4 f5 | b5 b4 -d5 -s5 f2 b3 -d4 -s4 b2 -d3 -s3 f0 b1 -d2 -s2 b0 -d1 -s1"
    )
    assert (every_k(problem, 2).peak_bytes, keep_all(problem).peak_bytes) == (64, 80)


def test_sqrt_n_in_words() -> None:
    problem = chain(9)
    # Three segments of three operations: s3 and s6 cross.
    assert words(sqrt_n(problem).schedule) == (
        "f0 f1 -s1 f2 -s2 f3 f4 -s4 f5 -s5 f6 f7 -s7 f8 | b8 f6 b7 -d8 -s8 b6 -d7 -s7 "
        "f3 f4 b5 -d6 -s6 b4 -d5 -s5 b3 -d4 -s4 f0 f1 b2 -d3 -s3 b1 -d2 -s2 b0 -d1 -s1"
    )
    assert (sqrt_n(problem).peak_bytes, keep_all(problem).peak_bytes) == (72, 104)


def test_what_may_run_only_once_is_kept() -> None:
    # f2 draws random numbers: s3 is kept, and s1 and s2 are made again for the operations that read them.
    assert words(every_k(chain(5, random=2), 100).schedule) == (
        "f0 f1 -s1 f2 -s2 f3 f4 | b4 b3 -d4 -s4 f0 f1 b2 -d3 -s3 b1 -d2 -s2 b0 -d1 -s1"
    )
