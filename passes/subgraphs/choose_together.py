"""Chooses schedules for all subgraphs of a tree together."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence

from ...ir import BudgetError, TimeLimitError
from ..milp import Model, add_memory_row, solve
from ..remat.choice import GAP
from .plan_subgraph import certified, plan_subgraph
from .subgraph import Choice, KnownSchedule, Subgraph, SubgraphSolutions

__all__ = ["choose_together"]

_GAP = 1e-3
"""The absolute gap of the programme, as a fraction of the time of a step that computes nothing twice."""

_TRIES = 4
_SLACK = 10_000
"""If a choice is over the budget, within the solver's tolerance, one part in this many is taken off."""


def choose_together(
    root: Subgraph, budget_bytes: int, *, time_limit: float, gap: float = GAP
) -> dict[Subgraph, Choice] | None:
    """Chooses schedules for all known subgraphs of a tree, such that every path through it fits the budget.

    First an integer programme with the least time in total picks one of the known schedules for each
    subgraph. Then each subgraph is planned anew in what the others leave to it.

    Args:
        root: The lowest subgraph.
        budget_bytes: The budget of the whole step.
        time_limit: The time limit in seconds.
        gap: As of `plan_subgraph`.

    Returns:
        The choices; None if the known schedules do not fit together.
    """
    deadline = time.thread_time() + time_limit
    subgraphs = [subgraph for subgraph in root.tree if subgraph.ambient is not None]
    if len(subgraphs) == 1:
        try:
            return {root: plan_subgraph(root, budget_bytes, {}, time_limit=time_limit, gap=gap)}
        except (BudgetError, TimeLimitError):
            return None
    picked = _pick(subgraphs, budget_bytes, deadline)
    if picked is None:
        return None
    chosen = {subgraph: known.footprint for subgraph, known in picked.items()}
    choices: dict[Subgraph, Choice] = {}
    for index, subgraph in enumerate(subgraphs):
        known = picked[subgraph]
        better: Choice | None = None
        left = (deadline - time.thread_time()) / (len(subgraphs) - index)
        if left > 0:
            with contextlib.suppress(BudgetError, TimeLimitError):
                better = plan_subgraph(subgraph, budget_bytes, chosen, time_limit=left, gap=gap)
        if better is None or better.solution.seconds > known.solution.seconds:
            better = certified(subgraph, budget_bytes, chosen, known.problem, known.solution, name="shared")
        choices[subgraph] = better
        chosen[subgraph] = better.footprint
    return choices


_Picked = dict[Subgraph, KnownSchedule]


def _pick(subgraphs: Sequence[Subgraph], budget_bytes: int, deadline: float) -> _Picked | None:
    pools = list(dict.fromkeys(subgraph.solutions for subgraph in subgraphs))
    each = max(deadline - time.thread_time(), 0.0) / 2 / len(pools)
    schedules = {solutions: solutions.schedules(time.thread_time() + each) for solutions in pools}
    room_bytes = budget_bytes
    for _ in range(_TRIES):
        picked = _solve(subgraphs, schedules, room_bytes, deadline)
        if picked is None:
            return None
        chosen = {subgraph: known.footprint for subgraph, known in picked.items()}
        over = max(subgraph.peak_bytes(chosen) for subgraph in subgraphs) - budget_bytes
        if over <= 0:
            return picked
        room_bytes -= max(over, budget_bytes // _SLACK)
    return None


def _solve(
    subgraphs: Sequence[Subgraph],
    schedules: Mapping[SubgraphSolutions, Sequence[KnownSchedule]],
    room_bytes: int,
    deadline: float,
) -> _Picked | None:
    """Solves the programme: one schedule for each subgraph; forward, loss and backward fit into the room."""
    model = Model()
    takes = {
        subgraph: [model.add_binary_variable() for _ in schedules[subgraph.solutions]]
        for subgraph in subgraphs
    }
    pairs = {
        subgraph: [
            (known.footprint, variable)
            for known, variable in zip(schedules[subgraph.solutions], takes[subgraph], strict=True)
        ]
        for subgraph in subgraphs
    }
    for subgraph in subgraphs:
        assert subgraph.ambient is not None
        model.add_row([(1.0, variable) for variable in takes[subgraph]], lower=1.0, upper=1.0)
        below = [(t.saved_bytes, v) for other in subgraph.below for t, v in pairs[other]]
        own = pairs[subgraph]
        for ambient_bytes, terms in (
            (subgraph.ambient.forward_bytes, [(t.forward_bytes, v) for t, v in own]),
            (subgraph.ambient.loss_bytes, [(t.saved_bytes, v) for t, v in own]),
            (subgraph.ambient.backward_bytes, [(t.backward_bytes, v) for t, v in own]),
        ):
            add_memory_row(model, [*below, *terms], room_bytes - ambient_bytes)
    model.minimize(
        (known.solution.seconds, variable)
        for subgraph in subgraphs
        for known, variable in zip(schedules[subgraph.solutions], takes[subgraph], strict=True)
    )
    least = math.fsum(
        min(known.solution.seconds for known in schedules[subgraph.solutions]) for subgraph in subgraphs
    )
    outcome = solve(model, seconds=max(deadline - time.thread_time(), 1.0), gap=_GAP * least)
    values = outcome.values
    if values is None:
        return None
    return {
        subgraph: max(
            zip(schedules[subgraph.solutions], takes[subgraph], strict=True),
            key=lambda pair, found=values: found[pair[1]],
        )[0]
        for subgraph in subgraphs
    }
