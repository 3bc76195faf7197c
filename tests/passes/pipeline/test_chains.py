"""Chains of stages whose cost is asked for: the best of all, with as few questions as need be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from irc.passes.pipeline.chains import best_chain
from irc.passes.pipeline.coarsened_problem import CoarsenedProblem, DeviceClass
from irc.passes.pipeline.order_ideals import Between, order_ideals

FAST = (DeviceClass("accelerator", 4),)


@st.composite
def coarsened_problems(draw: st.DrawFn) -> CoarsenedProblem:
    """Up to six items on two classes of devices, the second twice as slow."""
    count = draw(st.integers(1, 6))
    times = [float(draw(st.integers(0, 4))) for _ in range(count)]
    edges = frozenset((i, j) for j in range(count) for i in range(j) if draw(st.booleans()))
    nets = {frozenset(edge): draw(st.sampled_from([0.5, 1.0])) for edge in edges}
    members = tuple((i,) for i in range(count))
    return CoarsenedProblem(members, tuple((each, 2 * each) for each in times), (0,) * count, edges, nets)


def between(coarsened: CoarsenedProblem) -> Between:
    sets = order_ideals(coarsened, 1000)
    assert sets is not None
    return Between(coarsened, (*FAST, *FAST), sets)


def chains(sets: list[int], stages: int) -> Iterator[tuple[int, ...]]:
    """The items of the stages of all chains."""

    def longer(begun: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(begun) == stages + 1:
            if begun[-1] == sets[-1]:
                yield tuple(after & ~before for before, after in pairwise(begun))
            return
        for each in sets:
            if each != begun[-1] and not begun[-1] & ~each:
                yield from longer((*begun, each))

    yield from longer((0,))


@given(coarsened_problems(), st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**20))
@examples(100)
def test_the_chain_is_the_best_of_all(
    coarsened: CoarsenedProblem, stages: int, micro_batches: int, seed: int
) -> None:
    whole = between(coarsened)
    kinds = [seed >> stage & 1 for stage in range(stages)]
    asked: set[tuple[int, int]] = set()

    def load(stage: int, items: int) -> float:
        cut = sum(
            seconds
            for net, seconds in coarsened.nets.items()
            if 0 < sum(items >> item & 1 for item in net) < len(net)
        )
        return cut + sum(
            coarsened.seconds[i][kinds[stage]] for i in range(len(coarsened.members)) if items >> i & 1
        )

    def cost(stage: int, items: int) -> float:
        scattered = (stage * 31 + items * 7 + seed) % 5
        return math.inf if scattered == 4 else load(stage, items) * (1 + scattered / 4)

    def told(stage: int, items: int) -> float:
        assert (stage, items) not in asked
        asked.add((stage, items))
        return cost(stage, items)

    def step(items: tuple[int, ...]) -> float:
        seconds = [cost(stage, each) for stage, each in enumerate(items)]
        return sum(seconds) + (micro_batches - 1) * max(seconds) if math.inf not in seconds else math.inf

    found = best_chain(whole, kinds, told, micro_batches=micro_batches)
    best = min(map(step, chains(list(whole.sets), stages)), default=math.inf)
    if found is None:
        assert best == math.inf
        return
    assert found.step_seconds == pytest.approx(best) == step(found.items)
    assert found.bound_seconds == pytest.approx(best) and found.questions == len(asked)


def line(count: int) -> CoarsenedProblem:
    edges = frozenset(pairwise(range(count)))
    times = tuple((1.0 + i % 3, 1.0) for i in range(count))
    return CoarsenedProblem(
        tuple((i,) for i in range(count)),
        times,
        (0,) * count,
        edges,
        dict.fromkeys(map(frozenset, edges), 0.125),
    )


def test_costs_that_are_as_low_as_their_bounds_are_asked_for_once_a_stage() -> None:
    whole = between(line(12))

    def cost(stage: int, items: int) -> float:
        cut = (items & 1 == 0) + (items >> 11 == 0)
        return cut * 0.125 + sum(1.0 + i % 3 for i in range(12) if items >> i & 1)

    found = best_chain(whole, [0] * 4, cost, micro_batches=8)
    assert found is not None and found.questions == 4
    assert found.seconds == (6.125, 6.25, 6.25, 6.125) and found.step_seconds == 24.75 + 7 * 6.25


def test_a_time_limit_leaves_what_was_found_or_says_that_nothing_was() -> None:
    whole = between(line(12))
    with pytest.raises(TimeoutError):
        best_chain(whole, [0] * 4, lambda stage, items: 100.0, micro_batches=8, seconds=0)


def test_more_stages_than_items_have_no_chain() -> None:
    assert best_chain(between(line(2)), [0] * 3, lambda stage, items: 9.0, micro_batches=1) is None
