"""Revolve and rotor: their claims on chains, and valid schedules on every graph that has one."""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.exhaustive import chains, cheapest_of_all, problem_of
from support.solutions import verify
from support.strategies import Sample, graphs

from irc.ir import UsageError
from irc.passes.published.chain_schedules import Pass, Run
from irc.passes.published.revolve import revolve, runs_of
from irc.passes.published.rotor import Stage, fastest, rotor

SOME = examples(60)


def closed_form(blocks: int, checkpoints: int) -> int:
    stored = checkpoints + 1
    rounds = next(r for r in count() if math.comb(stored + r, stored) >= blocks)
    return (rounds + 1) * blocks - (math.comb(stored + rounds, rounds - 1) if rounds else 0)


@pytest.mark.parametrize("blocks", range(1, 25))
def test_revolve_runs_forward_as_often_as_its_closed_form_says(blocks: int) -> None:
    for checkpoints in range(blocks):
        runs = list(runs_of(blocks, checkpoints))
        assert sum(run.what is not Pass.BACKWARD for run in runs) == closed_form(blocks, checkpoints)
        assert most_stored(runs) <= checkpoints + 1


def most_stored(runs: Iterable[Run]) -> int:
    """The most sources that wait for their blocks' backward at once, but for one whose turn it is."""
    stored: set[int] = set()
    most = 0
    for run in runs:
        if run.what in (Pass.CHECKPOINT, Pass.SAVE):
            stored.add(run.block)
        elif run.what is Pass.BACKWARD:
            stored.discard(run.block)
        most = max(most, len(stored - {run.block} if run.what is Pass.SAVE else stored))
    return most


# ---------------------------------------------------------------------- rotor on chains


sizes = st.integers(0, 5)
stages_of_any_kind = st.lists(
    st.builds(
        Stage,
        forward_seconds=st.integers(1, 5).map(float),
        last_seconds=st.integers(0, 5).map(float),
        backward_seconds=st.integers(1, 5).map(float),
        source_bytes=st.integers(1, 4),
        saved_bytes=st.integers(3, 8),
        kept_bytes=st.integers(0, 3),
        advancing_bytes=sizes,
        saving_bytes=st.integers(8, 9),
        entry_bytes=sizes,
        backward_bytes=sizes,
    ),
    min_size=1,
    max_size=5,
)


def exhaustive(stages: Sequence[Stage], room_bytes: int) -> float:
    """The least time of all schedules in which what is stored stays until its backward, by Dijkstra."""
    last = len(stages) - 1
    # stored sources, stored saves, the source in hand, the next backward
    start = (frozenset({0}), frozenset[int](), 0, last)
    queue: list[tuple[float, int, tuple[frozenset[int], frozenset[int], int, int]]] = [(0.0, 0, start)]
    numbers, seen = count(1), set[object]()

    def held(sources: frozenset[int], saves: frozenset[int]) -> int:
        alone = (k for k in sources if k and k - 1 not in saves)  # a save has the next source
        return sum(stages[k].source_bytes for k in alone) + sum(stages[k].saved_bytes for k in saves)

    def steps(state: tuple[frozenset[int], frozenset[int], int, int]) -> Iterator[tuple[float, object]]:
        sources, saves, j, b = state
        beside = 0 if b == last else stages[b].entry_bytes
        if b in saves:
            left = (sources - {b}, saves - {b})
            with_source = held(sources, saves - {b}) + stages[b].kept_bytes
            if with_source + stages[b].backward_bytes <= room_bytes:
                for k in left[0] or {0}:
                    yield stages[b].backward_seconds, (*left, k, b - 1)
            return
        if j > b:
            return
        stage = stages[j]
        is_stored = j in sources or j - 1 in saves
        here = held(sources, saves) + beside
        if is_stored or here + stage.source_bytes <= room_bytes:
            with_source = here if is_stored else here + stage.source_bytes
            if not is_stored and with_source + stage.advancing_bytes <= room_bytes:
                yield stage.forward_seconds, (sources, saves, j + 1, b)
            kept = sources | {j}
            if with_source + stage.advancing_bytes <= room_bytes and j not in saves:
                yield stage.forward_seconds, (kept, saves, j + 1, b)
            if with_source + stage.saving_bytes <= room_bytes:
                is_again = j == b < last
                yield (
                    stage.last_seconds if is_again else stage.forward_seconds,
                    (kept, saves | {j}, j + 1, b),
                )

    while queue:
        seconds, _, state = heapq.heappop(queue)
        if state[3] < 0:
            return seconds
        if state in seen:
            continue
        seen.add(state)
        for more, following in steps(state):
            heapq.heappush(queue, (seconds + more, next(numbers), following))  # pyright: ignore
    return math.inf


def seconds_of(stages: Sequence[Stage], runs: Iterable[Run]) -> float:
    seconds, following = 0.0, len(stages) - 1
    for run in runs:
        stage = stages[run.block]
        if run.what is Pass.BACKWARD:
            seconds += stage.backward_seconds
            following -= 1
        elif run.what is Pass.SAVE and run.block == following < len(stages) - 1:
            seconds += stage.last_seconds
        else:
            seconds += stage.forward_seconds
    return seconds


@given(stages_of_any_kind, st.integers(1, 60))
@examples(300)
def test_rotor_is_the_best_of_its_class(stages: list[Stage], room_bytes: int) -> None:
    runs = fastest(stages, room_bytes, parts=room_bytes)
    found = math.inf if runs is None else seconds_of(stages, runs)
    assert found == exhaustive(stages, room_bytes)
    if runs is not None:
        assert [run.block for run in runs if run.what is Pass.BACKWARD] == [*reversed(range(len(stages)))]


@pytest.mark.parametrize("blocks", [1, 2, 5, 9])
@pytest.mark.parametrize("checkpoints", [0, 1, 2, 3])
def test_rotor_does_as_well_as_revolve_on_alike_stages(blocks: int, checkpoints: int) -> None:
    """With saves as large as nothing else could hold, both store sources alone."""
    stage = Stage(1.0, 1.0, 1.0, 1, 0, 0, 0, 0, 0, 0)
    stages = [stage] * blocks
    runs = fastest(stages, checkpoints + 1, parts=checkpoints + 1)
    assert runs is not None
    assert seconds_of(stages, runs) <= closed_form(blocks, checkpoints) + blocks


# ---------------------------------------------------------------------- on graphs


@given(chains() | graphs(), st.floats(0.4, 1.0))
@SOME
def test_schedules_of_chains_are_valid_on_any_graph(sample: Sample, share: float) -> None:
    problem = problem_of(sample)
    budget_bytes = int(share * problem.keep_all.peak_bytes)
    try:
        found = [*revolve(problem), *rotor(problem, budget_bytes)]
    except UsageError as error:
        assert error.code == "IRC403" and "this graph is none" in str(error)
        return
    for solution in found:
        verify(problem, solution)
    fitting = [solution.seconds for solution in found if solution.peak_bytes <= budget_bytes]
    if fitting:
        assert min(fitting) >= cheapest_of_all(problem, budget_bytes) * (1 - 1e-9)
