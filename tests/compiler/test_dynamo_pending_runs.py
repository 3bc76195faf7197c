"""Runs that wait for their backward: what is alive in each backward, whatever the order they come in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from irc.compiler.dynamo.pending_runs import Backward, Gradient, PendingRun, Run
from irc.passes.subgraphs.footprint import Footprint
from irc.passes.subgraphs.subgraph import Choice

NOTHING = cast(Any, None)


def at_random(random: Random, count: int) -> list[Run]:
    """Runs in the order of their forwards, with outputs and leaves that they share; the last is new."""
    runs: list[Run] = []
    for index in range(count):
        takers = [run for run in runs if random.random() < 0.4]
        given: list[Gradient] = []
        for taker in takers:
            assert isinstance(taker, PendingRun)
            place = random.randint(0, 1)
            given.append(Gradient(3 + 4 * place, taker, place))
        leaves = {
            leaf: Gradient(leaf, leaf=leaf) for leaf in random.sample(range(1, 9), random.randint(0, 3))
        }
        gradients = (*given, *leaves.values())
        upstream = frozenset(takers).union(*(taker.upstream for taker in takers))
        if index == count - 1:
            runs.append(Run(NOTHING, NOTHING, gradients, upstream))
        else:
            footprint = Footprint(0, random.randint(0, 20), 0)
            choice = Choice(NOTHING, NOTHING, footprint, NOTHING)
            runs.append(PendingRun(NOTHING, NOTHING, gradients, upstream, choice))
    return runs


def alive_bytes(order: Sequence[Run], run: Run, new_bytes: int) -> int:
    """What runs hold when the backward of one begins, beside the gradients that are its tangents."""
    done, waiting = order[: order.index(run)], order[order.index(run) + 1 :]
    saved = [
        other.choice.footprint.saved_bytes if isinstance(other, PendingRun) else new_bytes
        for other in waiting
    ]
    handed = [gradient for other in done for gradient in other.gradients]
    leaves = {gradient.leaf: gradient.nbytes for gradient in handed if gradient.leaf}
    passed = [gradient.nbytes for gradient in handed if gradient.taker in waiting]
    tangents: dict[int, int] = {}
    for gradient in handed:
        if gradient.taker is run:  # the first to arrive is the tangent, others are added to it
            passed.append(gradient.nbytes if gradient.place in tangents else 0)
            tangents[gradient.place] = gradient.nbytes
    return sum(saved) + sum(leaves.values()) + sum(passed)


@given(st.integers(0, 1 << 32), st.integers(1, 5), st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_no_order_of_backwards_has_more_alive(seed: int, count: int, new_bytes: int) -> None:
    runs = at_random(Random(seed), count)
    bounds = {run: Backward.of(run, runs, 0).nbytes(new_bytes) for run in runs}
    worst = dict.fromkeys(runs, 0)
    for order in itertools.permutations(runs):
        places = {run: place for place, run in enumerate(order)}
        if all(places[run] < places[above] for run in runs for above in run.upstream):
            for run in runs:
                worst[run] = max(worst[run], alive_bytes(order, run, new_bytes))
    assert all(worst[run] <= bounds[run] for run in runs)
    chain = all(frozenset(runs[:k]) == run.upstream for k, run in enumerate(runs))
    assert not chain or worst == bounds  # nothing to guess where each depends on all before it
