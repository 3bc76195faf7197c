"""How others cut sequences: each rule by what its paper says of it."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irc.ir import UsageError
from irc.passes.pipeline.balance import block_partition, loads, pipedream, uniform

SIZES = st.lists(st.floats(0, 100), min_size=1, max_size=9)


@given(SIZES, st.data())
def test_blocks_differ_by_at_most_the_range_and_their_minima(sizes: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(sizes)))
    ends = block_partition(sizes, stages)
    assert len(ends) == stages and ends[-1] == len(sizes) and list(ends) == sorted(ends)
    least, span = min(sizes), max(sizes) - min(sizes)
    above = [size - least for size in sizes]
    parts = loads(above, ends)
    assert max(parts) - min(parts) <= span * (1 + 1e-9)


def test_blocks_begin_even_and_move_one_layer_at_a_time() -> None:
    assert block_partition([5, 5, 5], 2) == (1, 3)  # even already: the rest is in the last
    assert block_partition([0, 0, 0, 1, 1, 1], 2) == (4, 6)
    assert block_partition([2, 2, 0, 0, 0, 1], 3) == (1, 4, 6)


@given(SIZES, st.data())
def test_pipedream_makes_the_slowest_stage_or_transfer_fastest(
    sizes: list[float], data: st.DataObject
) -> None:
    transfers = data.draw(st.lists(st.floats(0, 50), min_size=len(sizes), max_size=len(sizes)))
    stages = data.draw(st.integers(1, len(sizes)))

    def slowest(ends: tuple[int, ...]) -> float:
        return max(*loads(sizes, ends), *(2 * transfers[end - 1] for end in ends[:-1]), 0.0)

    ends = pipedream(sizes, transfers, stages)
    assert len(ends) == stages and all(start < end for start, end in pairwise((0, *ends)))
    every = ((*cuts, len(sizes)) for cuts in combinations(range(1, len(sizes)), stages - 1))
    assert slowest(ends) == pytest.approx(min(map(slowest, every)))


def test_uniform_stages_have_as_many_layers() -> None:
    assert uniform(8, 4) == (2, 4, 6, 8)
    assert uniform(7, 3) == (3, 5, 7)


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_layers_are_refused(stages: int) -> None:
    for cut in (
        lambda: uniform(3, stages),
        lambda: block_partition([1, 2, 3], stages),
        lambda: pipedream([1, 2, 3], [0, 0, 0], stages),
    ):
        with pytest.raises(
            UsageError, match=f"IRC474.*3 layers cannot be cut into {stages} stages"
        ) as caught:
            cut()
        assert caught.value.help == "ask for between 1 and 3 stages"
