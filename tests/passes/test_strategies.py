"""The known rules: valid on every graph, and what they keep on a small one."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import chains, problem_of, subsets
from support.solutions import verify
from support.strategies import Sample, graphs

from irc.ir import Compute, Free, Location, Loss, Schedule, Storage, parse_graph
from irc.passes import CheckpointProblem, Costs
from irc.passes.published.gradient_checkpointing import checkpoints
from irc.passes.remat.problem import Solution
from irc.passes.remat.strategies import (
    block_borders,
    every_k,
    known_strategies,
    min_cut,
    min_cut_candidates,
    per_block,
    priced_cuts,
    sqrt_n,
)

SOME = examples(80)
samples = chains() | graphs()


@given(samples)
@SOME
def test_keeping_all_computes_nothing_twice(sample: Sample) -> None:
    problem = problem_of(sample)
    solution = problem.keep_all
    verify(problem, solution)
    assert solution.order == sample.graph.operations
    assert solution.seconds == problem.step_seconds


@given(samples, st.integers(1, 12))
@SOME
def test_every_k_is_valid_and_computes_nothing_more_than_twice(sample: Sample, k: int) -> None:
    problem = problem_of(sample)
    solution = every_k(problem, k)
    verify(problem, solution)
    assert all(solution.order.count(node) <= 2 for node in problem.forward)
    assert all(solution.order.count(node) == 1 for node in problem.backward)


@given(samples)
@SOME
def test_sqrt_n_is_valid(sample: Sample) -> None:
    problem = problem_of(sample)
    verify(problem, sqrt_n(problem))


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


PLACES = (
    None,
    Location(),
    Location(module="head"),
    Location(module="layers.0"),
    Location(module="layers.0.mlp.1"),
    Location(module="layers.1.mlp.1"),
    Location(onnx_node="/layer1/layer1.2/conv1/Conv"),
    Location(onnx_node="Conv_17"),
)


def placed(problem: CheckpointProblem, places: Sequence[Location | None]) -> CheckpointProblem:
    """The same problem, with a place for each of its nodes."""
    graph, costs = problem.graph, problem.costs
    nodes = {node: replace(node, at=place) for node, place in zip(graph.nodes, places, strict=True)}
    seconds = {nodes[node]: value for node, value in costs.seconds.items()}
    workspace_bytes = {nodes[node]: value for node, value in costs.workspace_bytes.items()}
    moved = replace(graph, nodes=tuple(nodes.values()))
    return CheckpointProblem(moved, Costs(seconds, workspace_bytes, costs.source))


@given(samples, st.data())
@SOME
def test_blocks_are_valid_and_compute_nothing_more_than_twice(sample: Sample, data: st.DataObject) -> None:
    count = len(sample.graph.nodes)
    places = data.draw(st.lists(st.sampled_from(PLACES), min_size=count, max_size=count))
    problem = placed(problem_of(sample), places)
    found = list(per_block(problem))
    assert bool(found) == any(
        place not in (None, Location(), PLACES[2], PLACES[-1])
        for node, place in zip(problem.graph.nodes, places, strict=True)
        if node in problem.forward
    )
    for solution in found:
        verify(problem, solution)
        assert all(solution.order.count(node) <= 2 for node in problem.forward)
    for borders in block_borders(problem):
        for solution in priced_cuts(problem, kept=borders, limit=4):
            verify(problem, solution)


@given(samples, st.floats(0, 1))
@SOME
def test_known_strategies_are_valid_and_compute_nothing_more_than_twice(
    sample: Sample, fraction: float
) -> None:
    count = len(sample.graph.nodes)
    problem = placed(problem_of(sample), [PLACES[3 + 3 * i // count] for i in range(count)])
    verify(problem, min_cut(problem, fraction))
    names: set[str] = set()
    for name, solution in known_strategies(problem):
        names.add(re.sub(r"-\d+", "-k", name))
        verify(problem, solution)
        assert all(solution.order.count(node) <= 2 for node in problem.forward)
    always = {"keep-all", "sqrt-n", "per-block", "min-cut", "priced-cut", "cut-in-blocks"}
    assert "keep-all" in names and names - {"every-k"} <= always
    assert ("every-k" in names) == (len(problem.forward) > 2)


def saved_bytes(problem: CheckpointProblem, solution: Solution) -> int:
    """What lies between forward and backward, without what the first operation of backward reads."""
    alive: set[Storage] = set()
    for instruction in solution.schedule.instructions:
        match instruction:
            case Compute(_, retained):
                alive |= retained
            case Free(storage):
                alive.discard(storage)
            case Loss():
                break
            case _:
                raise AssertionError("no strategy copies")
    free = {s for node in problem.backward[:1] for s in problem.forward_reads[node]}
    return sum(storage.nbytes for storage in alive - free if storage in problem.producer)


def all_trades(problem: CheckpointProblem) -> Iterator[tuple[int, float]]:
    """Bytes and seconds of recomputation of everything that could be saved."""
    free = {s for node in problem.backward[:1] for s in problem.forward_reads[node]}
    for kept in subsets(s for s in problem.wanted if s not in free):
        try:
            again = problem.closure(problem.read_positions, set(kept | free))
        except ValueError:
            continue
        yield sum(s.nbytes for s in kept), sum(problem.costs.seconds[node] for node in again)


@given(chains() | graphs(max_forward=6), st.floats(-6, 6))
@SOME
def test_cuts_are_the_best_of_all_that_could_be_saved(sample: Sample, exponent: float) -> None:
    problem = problem_of(sample)
    assume(len(problem.wanted) <= 9)
    trades = list(all_trades(problem))
    least = min(nbytes for nbytes, _ in trades)
    assert saved_bytes(problem, min_cut(problem, 0.0)) == least
    found = [(saved_bytes(problem, s), s.seconds - problem.step_seconds) for s in priced_cuts(problem)]
    assert min(nbytes for nbytes, _ in found) == least
    assert min(seconds for _, seconds in found) == 0
    # At no price of a second is anything better than the best of them.
    unit = 10**exponent * max(storage.nbytes for storage in problem.graph.storages)

    def worth(trade: tuple[int, float]) -> float:
        return trade[0] + unit * trade[1]

    assert min(map(worth, found)) == pytest.approx(min(map(worth, trades)), rel=1e-6, abs=0.5)


@given(samples, st.floats(0, 1))
@SOME
def test_fractions_save_no_more_and_no_less_than_the_ends(sample: Sample, fraction: float) -> None:
    problem = problem_of(sample)
    least, between, most = (saved_bytes(problem, min_cut(problem, f)) for f in (0.0, fraction, 1.0))
    assert least <= between <= most


def chain(
    length: int, random: int | None = None, seconds: Sequence[float] = (), modules: Sequence[str] = ()
) -> CheckpointProblem:
    """A chain in which each backward operation reads what its forward operation read and wrote.

    Args:
        length: Forward operations, each of which takes a second and makes 8 bytes.
        random: The operation that draws random numbers.
        seconds: Of the forward operations, where it is not one.
        modules: Where they are.
    """
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
    problem = CheckpointProblem(
        graph, Costs(ones | dict(zip(graph.nodes, seconds, strict=False)), zeros, "analytic:test")
    )
    places = [Location(module=module) for module in modules]
    return placed(problem, [*places, *[None] * (len(graph.nodes) - len(places))])


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
    assert words(chain(4).keep_all.schedule) == "f0 f1 f2 f3 | b3 b2 -d3 -s3 b1 -d2 -s2 b0 -d1 -s1"


def test_every_2_in_words() -> None:
    problem = chain(6)
    # s2 and s4 cross from one segment to the next; s5 is what the first backward operation reads.
    assert words(every_k(problem, 2).schedule) == (
        "f0 f1 -s1 f2 f3 -s3 f4 f5 | b5 b4 -d5 -s5 f2 b3 -d4 -s4 b2 -d3 -s3 f0 b1 -d2 -s2 b0 -d1 -s1"
    )
    assert (every_k(problem, 2).peak_bytes, problem.keep_all.peak_bytes) == (64, 80)


def test_sqrt_n_in_words() -> None:
    problem = chain(9)
    # Three segments of three operations: s3 and s6 cross.
    assert words(sqrt_n(problem).schedule) == (
        "f0 f1 -s1 f2 -s2 f3 f4 -s4 f5 -s5 f6 f7 -s7 f8 | b8 f6 b7 -d8 -s8 b6 -d7 -s7 "
        "f3 f4 b5 -d6 -s6 b4 -d5 -s5 b3 -d4 -s4 f0 f1 b2 -d3 -s3 b1 -d2 -s2 b0 -d1 -s1"
    )
    assert (sqrt_n(problem).peak_bytes, problem.keep_all.peak_bytes) == (72, 104)


def test_one_checkpoint_in_words() -> None:
    # s3 is kept. s4 is made again for b4 and b3, and s1 and s2 for b2, b1 and b0.
    solution = checkpoints(chain(6), 1)
    assert solution is not None and words(solution.schedule) == (
        "f0 f1 -s1 f2 -s2 f3 f4 -s4 f5 | b5 f3 b4 -d5 -s5 b3 -d4 -s4 f0 f1 b2 -d3 -s3 b1 -d2 -s2 b0 -d1 -s1"
    )


@pytest.mark.parametrize("length", [8, 30])
def test_more_checkpoints_take_more_memory_and_less_time(length: int) -> None:
    problem = chain(length)
    rungs = [checkpoints(problem, count) for count in (0, 1, 3, length)]
    peaks = [rung.peak_bytes for rung in rungs if rung is not None]
    times = [rung.seconds for rung in rungs if rung is not None]
    assert peaks == sorted(peaks) and times == sorted(set(times), reverse=True)
    assert times[-1] == problem.step_seconds and peaks[-1] == problem.keep_all.peak_bytes
    # Without checkpoints every second operation of backward has all before its own made again.
    assert times[0] - problem.step_seconds == sum(range(0, length - 1, 2))
    assert peaks[0] == 64 and len(peaks) == 4
    assert checkpoints(problem, 0, deadline=0.0) is None


def test_what_may_run_only_once_is_kept() -> None:
    # f2 draws random numbers: s3 is kept, and s1 and s2 are made again for the operations that read them.
    assert words(every_k(chain(5, random=2), 100).schedule) == (
        "f0 f1 -s1 f2 -s2 f3 f4 | b4 b3 -d4 -s4 f0 f1 b2 -d3 -s3 b1 -d2 -s2 b0 -d1 -s1"
    )


def test_blocks_in_words() -> None:
    modules = ("stem", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "head")
    problem = chain(6, modules=modules)
    # s1 is made outside of blocks; s3 and s5 cross; f2 and f4 are each the inside of a block.
    found = list(per_block(problem))
    assert [words(solution.schedule) for solution in found] == [
        "f0 f1 f2 -s2 f3 f4 -s4 f5 | b5 f3 b4 -d5 -s5 b3 -d4 -s4 f1 b2 -d3 -s3 b1 -d2 -s2 b0 -d1 -s1"
    ]


def names(kept: frozenset[Storage]) -> set[str]:
    return {storage.name for storage in kept}


def test_blocks_inside_blocks_are_a_level_of_their_own() -> None:
    modules = ("m.0.norm", "m.0.e.0", "m.0.e.0", "m.0.e.1", "m.0.e.1", "m.1.norm", "m.1.e.0", "loss")
    outer, inner = block_borders(chain(8, modules=modules))
    assert names(outer) == {"s5", "s7"}
    assert names(inner) == {"s1", "s3", "s5", "s6", "s7"}


def test_names_of_onnx_nodes_say_where_blocks_are() -> None:
    problem = chain(5)
    places = [Location(onnx_node=f"/layer1/layer1.{i}/relu/Relu") for i in (0, 0, 1, 1)]
    named = placed(problem, [*places, *[Location(onnx_node="Gemm_5")] * 6])
    # The first level is all of layer1, whose result s4 the last operation reads.
    assert [names(kept) for kept in block_borders(named)] == [{"s4"}, {"s2", "s4"}]
    assert list(block_borders(placed(problem, [Location(onnx_node="Relu_1")] * 10))) == []
    assert list(per_block(problem)) == []


def test_minimum_cuts_in_words() -> None:
    problem = chain(6, seconds=(4.0, 1.0, 3.0, 1.0, 3.0, 1.0))
    # The slow operations make s1, s3 and s5, and s5 is what the first backward operation reads.
    found = [words(min_cut(problem, fraction).schedule) for fraction in (1.0, 0.5, 0.0)]
    assert found == [
        "f0 f1 f2 -s2 f3 f4 -s4 f5 | b5 f3 b4 -d5 -s5 b3 -d4 -s4 f1 b2 -d3 -s3 b1 -d2 -s2 b0 -d1 -s1",
        "f0 f1 f2 -s2 f3 -s3 f4 -s4 f5 | b5 f1 f2 f3 b4 -d5 -s5 b3 -d4 -s4 b2 -d3 -s3 b1 -d2 -s2 b0 -d1 -s1",
        "f0 f1 -s1 f2 -s2 f3 -s3 f4 -s4 f5 | b5 f0 f1 f2 f3 b4 -d5 -s5 b3 -d4 -s4 b2 -d3 -s3 b1 -d2 -s2 b0 "
        "-d1 -s1",
    ]
    assert [words(s.schedule) for s in min_cut_candidates(problem)] == found


def test_prices_save_what_is_slowest_for_its_bytes() -> None:
    problem = chain(6, seconds=(5.0, 1.0, 4.0, 2.0, 3.0, 1.0))
    found = {solution.seconds - problem.step_seconds for solution in priced_cuts(problem)}
    # Saved in turn: all, all but s2, without s4 too, without s3, nothing; s5 costs nothing.
    assert found == {0.0, 1.0, 3.0, 7.0, 12.0}
    assert len(list(priced_cuts(problem, limit=2))) == 2
    borders = next(block_borders(chain(6, modules=("m.0", "m.1", "m.1", "m.2", "m.2", "m.3"))))
    assert names(borders) == {"s1", "s3", "s5"}
