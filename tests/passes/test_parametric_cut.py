"""Parametric cuts: below every schedule at every time step, and exact for layers that are equal."""

import itertools
import math
import time
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.calls import several
from support.examples import examples
from support.exhaustive import chains, cheapest_in_class, cheapest_of_all, problem_of
from support.strategies import Sample, graphs

from irc.ir import parse_graph
from irc.ir.verify import verify_schedule
from irc.passes import CheckpointProblem, Costs
from irc.passes.remat import search
from irc.passes.remat.candidates import find_candidates
from irc.passes.remat.cut_search import CutsFound, bound_by_cuts, search_cuts
from irc.passes.remat.parametric_cut import ParametricCut

samples = chains() | graphs()
LAYERS = 6
LAYER_BYTES = 1024


@dataclass(frozen=True)
class Block:
    """A layer of a chain: operations, each read by the next one and perhaps by backward.

    Args:
        nbytes: The bytes of each operation's result.
        seconds: The time of each operation.
        is_read: Whether backward reads each result.
    """

    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]
    is_read: tuple[bool, ...]


def repeated(block: Block, layers: int) -> CheckpointProblem:
    """A chain of equal layers; the last result of each is what the next one reads."""
    count = len(block.nbytes)
    names = [f"a{layer}_{i}" for layer in range(layers) for i in range(count)]
    sizes = {name: block.nbytes[k % count] for k, name in enumerate(names)}
    grads = {f"g{layer}": 16 for layer in range(layers)}
    sizes |= {"in": 16, "t": 16, **grads}
    lines = [f"  storage @{name} {nbytes} cpu" for name, nbytes in sizes.items()]

    def value(name: str) -> str:
        return f"%{name}: float32[{sizes[name] // 4}]{{1}} @{name}"

    lines += [
        f'  input {value("in")} input "0" requires_grad',
        f'  input {value("t")} tangent "0"',
        "forward:",
    ]
    for k, name in enumerate(names):
        lines.append(f"  {name} = op(%{names[k - 1] if k else 'in'}) -> {value(name)}")
    lines.append("backward:")
    for layer in reversed(range(layers)):
        made = names[layer * count : (layer + 1) * count]
        reads = [f"%{name}" for name, is_read in zip(made, block.is_read, strict=True) if is_read]
        above = "t" if layer == layers - 1 else f"g{layer + 1}"
        lines.append(f"  g{layer} = op({', '.join([f'%{above}', *reads])}) -> {value(f'g{layer}')}")
    lines += [f'  output %{names[-1]} "0"', '  gradient %g0 "input:0"']
    graph = parse_graph("\n".join(["graph loss_bytes=0 {", *lines, "}", ""]))
    times = {name: block.seconds[k % count] for k, name in enumerate(names)}
    seconds = {node: times.get(node.name, 1.0) for node in graph.nodes}
    return CheckpointProblem(graph, Costs(seconds, dict.fromkeys(graph.nodes, 0), "analytic:test"))


def layered(layers: int) -> CheckpointProblem:
    """Equal layers: each keeps a small result, and may make a large one again for backward."""
    return repeated(Block((LAYER_BYTES, 16), (2.0, 1.0), (True, False)), layers)


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    count = draw(st.integers(1, 3))
    nbytes = [16 * draw(st.integers(1, 64)) for _ in range(count)]
    seconds = [float(draw(st.integers(0, 8))) for _ in range(count)]
    is_read = [draw(st.booleans()) for _ in range(count - 1)]
    return Block(tuple(nbytes), tuple(seconds), (*is_read, True))


def within(problem: CheckpointProblem, tenths: int) -> int:
    top, floor = problem.keep_all.peak_bytes, problem.floor_bytes
    return floor + (top - floor) * tenths // 10


@given(blocks(), st.integers(2, 3), st.integers(0, 9))
@examples(40)
def test_the_bound_of_equal_layers_is_below_every_schedule(block: Block, layers: int, tenths: int) -> None:
    problem = repeated(block, layers)
    assume(len(problem.wanted) <= 6)
    budget = within(problem, tenths)
    best_seconds = cheapest_of_all(problem, budget)
    assert problem.step_seconds + bound_by_cuts(problem, budget) <= best_seconds * (1 + 1e-6)


@given(blocks(), st.integers(2, 8), st.integers(1, 9))
@examples(15)
def test_plans_of_equal_layers_are_no_slower_for_being_found_by_cuts(
    block: Block, layers: int, tenths: int
) -> None:
    problem = repeated(block, layers)
    budget, candidates = within(problem, tenths), find_candidates(problem)
    deadline = time.thread_time() + 60.0
    with_cuts = search.search(problem, budget, candidates, deadline=deadline, gap=0.005)
    without = search.search(problem, budget, candidates, deadline=deadline, gap=0.005, cuts=CutsFound())
    assert (with_cuts is None) == (without is None)
    if with_cuts is not None and without is not None:
        assert with_cuts.best.seconds <= without.best.seconds + 0.002 * problem.step_seconds
        assert with_cuts.bound_seconds <= without.best.seconds - problem.step_seconds + 1e-6


@given(samples | several(samples), st.data())
@examples(60)
def test_a_bound_at_any_time_step_is_below_every_schedule(sample: Sample, data: st.DataObject) -> None:
    problem = problem_of(sample)
    assume(problem.backward and len(problem.wanted) <= 5)
    time_step = data.draw(st.integers(1, problem.time_steps - 1))
    cut = ParametricCut(problem, time_step)
    for choice in cheapest_in_class(problem):
        best_seconds = cheapest_of_all(problem, choice.peak_bytes)
        room_bytes = cut.room_bytes(choice.peak_bytes)
        assert cut.within(room_bytes) is not None
        bound_seconds = cut.bound_seconds(room_bytes)
        assert problem.step_seconds + bound_seconds <= best_seconds * (1 + 1e-6)
        by_cuts = bound_by_cuts(problem, choice.peak_bytes)
        assert problem.step_seconds + by_cuts <= best_seconds * (1 + 1e-6)


@given(samples, st.integers(0, 8))
@examples(40)
def test_what_cuts_find_fits_and_is_not_below_their_bound(sample: Sample, eighths: int) -> None:
    problem = problem_of(sample)
    assume(problem.backward)
    top, floor = problem.keep_all.peak_bytes, problem.floor_bytes
    budget = floor + (top - floor) * eighths // 8
    found = search_cuts(problem, budget)
    if found.best is None:
        return
    assert found.best.peak_bytes <= budget
    assert found.best.seconds >= (problem.step_seconds + found.bound_seconds) * (1 - 1e-9)
    verify_schedule(found.best.schedule, sample.workspace_bytes, peak_bytes=found.best.peak_bytes)


@given(samples, st.data())
@examples(40)
def test_choices_are_a_convex_hull(sample: Sample, data: st.DataObject) -> None:
    problem = problem_of(sample)
    assume(problem.backward)
    cut = ParametricCut(problem, data.draw(st.integers(1, problem.time_steps - 1)))
    rooms = data.draw(st.lists(st.integers(0, problem.keep_all.peak_bytes), min_size=1, max_size=5))
    choices = [choice for room in rooms if (choice := cut.within(room)) is not None]
    ordered = sorted(choices, key=lambda choice: choice.counted_bytes)
    for less, more in itertools.pairwise(ordered):
        assert less.seconds >= more.seconds or less.kept == more.kept
    for room, choice in zip(rooms, (cut.within(room) for room in rooms), strict=True):
        assert choice is None or choice.nbytes <= room
        assert choice is None or cut.bound_seconds(room) <= choice.seconds + 1e-9


@pytest.mark.parametrize("kept", range(1, LAYERS))
def test_of_equal_layers_as_many_are_kept_as_fit(kept: int) -> None:
    problem = layered(LAYERS)
    cut = ParametricCut(problem, len(problem.forward))
    small_bytes = 16 * LAYERS
    choice = cut.within(small_bytes + kept * LAYER_BYTES)
    assert choice is not None
    assert choice.seconds == 2.0 * (LAYERS - kept)
    names = {storage.name for storage in choice.kept if storage.nbytes == LAYER_BYTES}
    assert names == {f"a{i}_0" for i in range(LAYERS - kept, LAYERS)}, "the first layers live longest"
    exact = cut.bound_seconds(small_bytes + kept * LAYER_BYTES)
    assert exact == pytest.approx(choice.seconds, abs=2.0 * (LAYERS - kept) * 0.2)


def test_a_bound_grows_as_room_shrinks_and_is_infinite_below_the_least() -> None:
    problem = layered(LAYERS)
    cut = ParametricCut(problem, len(problem.forward))
    rooms = [LAYER_BYTES * n for n in range(LAYERS, 0, -1)]
    for room in rooms:
        cut.within(room)
    bounds = [cut.bound_seconds(room) for room in rooms]
    assert bounds == sorted(bounds)
    assert cut.within(-1) is None and math.isinf(cut.bound_seconds(-1))


def test_a_schedule_of_cuts_fills_what_is_left_free() -> None:
    problem = layered(64)
    top, floor = problem.keep_all.peak_bytes, problem.floor_bytes
    for tenths in range(2, 10):
        budget = floor + (top - floor) * tenths // 10
        found = search_cuts(problem, budget)
        assert found.best is not None
        assert budget - found.best.peak_bytes < 2 * LAYER_BYTES
        assert found.best.seconds - problem.step_seconds - found.bound_seconds <= 2 * 2.0


def test_a_schedule_of_cuts_keeps_small_results_where_no_large_one_fits() -> None:
    small_bytes = LAYER_BYTES // 2
    block = Block((LAYER_BYTES, 16, small_bytes, 16), (10.0, 1.0, 4.0, 1.0), (True, False, True, False))
    problem = repeated(block, LAYERS)
    for tenths in range(1, 10):
        budget = within(problem, tenths)
        best = search_cuts(problem, budget).best
        assert best is not None and budget - best.peak_bytes < small_bytes


@pytest.mark.parametrize("exponent", [45, 54])
def test_storages_of_any_size_are_cut_and_bounded(exponent: int) -> None:
    """Networks count with 64 bits: parts of a byte, and all bytes several times over."""
    layers = 60
    problem = repeated(Block((1 << exponent, 16), (2.0, 1.0), (True, False)), layers)
    for tenths in (2, 5, 8):
        budget = within(problem, tenths)
        found = search_cuts(problem, budget)
        assert found.best is not None and found.best.peak_bytes <= budget
        verify_schedule(found.best.schedule, problem.costs.workspace_bytes, peak_bytes=found.best.peak_bytes)
        more_seconds = found.best.seconds - problem.step_seconds
        assert found.bound_seconds <= more_seconds <= found.bound_seconds + 4.0


# ---------------------------------------------------------------------- several forwards in flight


@pytest.mark.parametrize("forwards", [1, 2, 4])
@pytest.mark.parametrize("is_at_loss", [True, False])
def test_room_is_what_a_schedule_keeps_where_it_peaks(forwards: int, is_at_loss: bool) -> None:
    """The other forwards hold as much at the loss, and of what every schedule keeps their losses later."""
    chain = layered(LAYERS)
    loss_bytes, workspace_bytes = (1 << 20, 0) if is_at_loss else (1 << 10, 1 << 20)
    graph = replace(chain.graph, forwards_in_flight=forwards, loss_bytes=loss_bytes, loss_saved_bytes=1 << 10)
    workspaces = {**chain.costs.workspace_bytes, chain.backward[0]: workspace_bytes}
    problem = CheckpointProblem(graph, replace(chain.costs, workspace_bytes=workspaces))
    loss = len(problem.forward)
    kept = [storage for storage in problem.wanted if is_at_loss and storage.nbytes == LAYER_BYTES][1:]
    peak_bytes = problem.keeping(kept).peak_bytes
    cut = ParametricCut(problem, loss if is_at_loss else loss + 1)
    assert cut.room_bytes(peak_bytes) == (LAYERS - 1) * LAYER_BYTES
