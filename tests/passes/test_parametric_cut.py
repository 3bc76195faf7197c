"""Parametric cuts: below every schedule at every time step, and exact for layers that are equal."""

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import chains, cheapest_in_class, cheapest_of_all, problem_of
from support.strategies import Sample, graphs

from irc.ir import parse_graph
from irc.ir.verify import verify_schedule
from irc.passes import CheckpointProblem, Costs
from irc.passes.remat.parametric_cut import ParametricCut, bound_by_cuts, search_cuts

samples = chains() | graphs()
LAYERS = 6
LAYER_BYTES = 1024


def layered(layers: int) -> CheckpointProblem:
    """Equal layers: each keeps a small result, and may make a large one again for backward."""
    names = [f"{kind}{i}" for i in range(layers) for kind in ("x", "a")]
    sizes = {name: 16 if name[0] == "x" else LAYER_BYTES for name in names} | {"in": 16, "t": 16}
    sizes |= {f"g{i}": 16 for i in range(layers)}
    lines = [f"  storage @{name} {nbytes} cpu" for name, nbytes in sizes.items()]

    def value(name: str) -> str:
        return f"%{name}: float32[{sizes[name] // 4}]{{1}} @{name}"

    lines += [
        f'  input {value("in")} input "0" requires_grad',
        f'  input {value("t")} tangent "0"',
        "forward:",
    ]
    for i in range(layers):
        read = "in" if not i else f"x{i - 1}"
        lines += [f"  a{i} = op(%{read}) -> {value(f'a{i}')}", f"  x{i} = op(%a{i}) -> {value(f'x{i}')}"]
    lines.append("backward:")
    for i in reversed(range(layers)):
        read = "t" if i == layers - 1 else f"g{i + 1}"
        lines.append(f"  g{i} = op(%{read}, %a{i}) -> {value(f'g{i}')}")
    lines += [f'  output %x{layers - 1} "0"', '  gradient %g0 "input:0"']
    graph = parse_graph("\n".join(["graph loss_bytes=0 {", *lines, "}", ""]))
    seconds = {node: 2.0 if node.name[0] == "a" else 1.0 for node in graph.nodes}
    return CheckpointProblem(graph, Costs(seconds, dict.fromkeys(graph.nodes, 0), "analytic:test"))


@given(samples, st.data())
@examples(40)
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
    assert names == {f"a{i}" for i in range(LAYERS - kept, LAYERS)}, "the first layers live longest"
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
