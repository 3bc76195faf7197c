"""The published dynamic programme as it stands, to be timed and compared with: no part of a planner."""

from __future__ import annotations

import time
from itertools import product

import numpy as np

from irc.ir import TimeLimitError
from irc.passes.pipeline.coarsened_problem import CoarsenedProblem
from irc.passes.pipeline.order_ideals import order_ideals

from .partition_problem import PartitionProblem
from .reduction import coarsen

__all__ = ["plain_max_load"]

_MOST_IDEALS = 200_000


def plain_max_load(problem: PartitionProblem, *, seconds: float) -> float:
    """The smallest largest load of a contiguous partition, in seconds.

    All order ideals of the blocks, and for each all those within it, with nothing left out; what is within
    one is gone through by numpy at once. As in the authors' programme, blocks that take no time and have one
    neighbour join it first, whatever memory they take.

    Args:
        problem: The graph and the devices.
        seconds: Time limit.

    Raises:
        TimeLimitError: IRC478 when the time ends first, or there are too many order ideals to hold.

    Source:
        Tarnawski et al., "Efficient algorithms for device placement of DNN graph operators" (2020),
        section 5.1.
    """
    deadline = time.monotonic() + seconds
    coarsened = coarsen(problem, problem.blocks.members, problem.blocks.edges)
    while pendant := _pendant(coarsened):
        coarsened = coarsened.joined([pendant])
    sets = order_ideals(coarsened, _MOST_IDEALS) or [0]
    items = len(coarsened.members)
    has = np.array([[each >> item & 1 for item in range(items)] for each in sets], np.bool_)
    times = np.array(coarsened.seconds)
    member = np.array([[item in net for item in range(items)] for net in coarsened.nets], np.float32)
    member = member.reshape(len(coarsened.nets), items)
    sizes, net_seconds = member.sum(axis=1), np.array(list(coarsened.nets.values()))
    held = has.astype(np.float32) @ member.T
    taken = has @ np.array(coarsened.memory_bytes, float)
    states = list(product(*(range(device.count + 1) for device in problem.classes)))
    best = np.full((*(device.count + 1 for device in problem.classes), len(has)), np.inf)
    best[..., 0] = 0.0
    for last in range(1, len(has)):
        if time.monotonic() > deadline:
            break
        within = np.nonzero(~(has[:last] & ~has[last]).any(axis=1))[0]
        inside = held[last] - held[within]
        transfers = ((inside > 0) & (inside < sizes)) @ net_seconds
        fresh = has[last] & ~has[within]
        for kind, device in enumerate(problem.classes):
            load = np.where(fresh, times[:, kind], 0.0).sum(axis=1)
            load += transfers if device.pays_transfers else 0.0
            load[taken[last] - taken[within] > device.capacity_bytes] = np.inf
            for state in states:
                if state[kind]:
                    fewer = (*state[:kind], state[kind] - 1, *state[kind + 1 :])
                    reached = np.maximum(best[fewer][within], load).min()
                    best[(*state, last)] = min(best[(*state, last)], best[(*fewer, last)], reached)
    else:
        if has[-1].all():
            return float(best[..., -1].min())
    raise TimeLimitError(
        "IRC478",
        f"the plain dynamic programme did not end for {problem.name} in {seconds:g} s",
        help="give it more time, or leave it out",
    )


def _pendant(coarsened: CoarsenedProblem) -> tuple[int, int] | None:
    """A block that takes no time and its only neighbour."""
    for item, seconds in enumerate(coarsened.seconds):
        neighbours = coarsened.predecessors[item] | coarsened.successors[item]
        if not any(seconds) and len(neighbours) == 1:
            return item, min(neighbours)
    return None
