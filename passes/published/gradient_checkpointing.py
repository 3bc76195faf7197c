"""Checkpoints by the kind of operation, by articulation points, by number, or as the user names them."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from itertools import accumulate

from ...ir import Node, Policy, Storage
from ..remat.problem import CheckpointProblem, Solution
from ..remat.strategies.segments import completed, crossing, keeping
from ..strategy_registry import Strategy
from .chain import articulations

__all__ = ["CHECKPOINTS", "COLLECTION", "MEMORY", "SPEED", "checkpoints", "collection", "memory", "speed"]

_SOURCE = "Bulatov and Salimans 2018"
SPEED = Strategy("gradient-checkpointing-speed", _SOURCE, lambda problem, _: [speed(problem)])
MEMORY = Strategy("gradient-checkpointing-memory", _SOURCE, lambda problem, _: [memory(problem)])
COLLECTION = Strategy("gradient-checkpointing-collection", _SOURCE, lambda problem, _: [collection(problem)])
CHECKPOINTS = Strategy(
    "checkpoints-<n>",
    _SOURCE,
    lambda problem, asked: filter(None, [checkpoints(problem, asked.number, asked.deadline)]),
    numbers=(0, 4, 16),
)

_SLOW = ("addbmm", "addmm", "addmv", "baddbmm", "bmm", "convolution", "linear", "mm", "mv")
"""The operations whose results are dear to make again: convolutions and matrix products."""


def speed(problem: CheckpointProblem) -> Solution:
    """Keeps the results of convolutions and of matrix products, attention's included.

    Source:
        Bulatov and Salimans, Fitting larger networks into memory (2018): gradient-checkpointing, its mode
        `speed`.
    """
    return keeping(problem, frozenset(s for s, node in problem.producer.items() if _is_slow(node.op)))


def _is_slow(op: str) -> bool:
    name = op.split(".")[1] if "." in op else op
    return name.lstrip("_").removesuffix("_") in _SLOW or "scaled_dot_product" in name


def memory(problem: CheckpointProblem) -> Solution:
    """Keeps about sqrt(n) of the n articulation points of forward, at even distances.

    An articulation point is a storage that alone is read across a position of forward. Where there is none,
    nothing is kept but what must be.

    Source:
        Bulatov and Salimans (2018), mode `memory`; the number from Chen et al., Training Deep Nets with
        Sublinear Memory Cost (2016). Theirs looks for points along the graph's edges, ours along the order in
        which forward runs.
    """
    points: list[Storage] = list(dict.fromkeys(articulations(problem).values()))
    count = math.isqrt(len(points))
    kept = (points[(index + 1) * len(points) // (count + 1)] for index in range(count))
    return keeping(problem, frozenset(kept))


def collection(problem: CheckpointProblem) -> Solution:
    """Keeps what the user's annotations keep (`irc.keep`), and makes everything else again.

    Source:
        Bulatov and Salimans (2018), mode `collection`.
    """
    named = (
        storage
        for storage, node in problem.producer.items()
        if node.annotation is not None and node.annotation.policy is Policy.KEEP
    )
    return keeping(problem, frozenset(named))


def checkpoints(problem: CheckpointProblem, count: int, deadline: float = math.inf) -> Solution | None:
    """Cuts forward at `count` positions between which it takes equal time, and keeps what crosses them.

    Each operation of backward has what it reads made again from the last checkpoint before it; of what was
    made, what the next one reads stays, and nothing else. On a chain of equal tensors, memory grows and time
    falls with the number of checkpoints.

    Args:
        problem: The recomputation problem.
        count: The number of checkpoints; at most as many as there are operations.
        deadline: `time.thread_time()` after which it is given up; time grows with the graph's square.

    Returns:
        The schedule; None if the deadline came first.

    Source:
        The ladder of checkpoints of TensorFlow's gradient checkpointing (Bulatov and Salimans, 2018), where
        the number is the user's.
    """
    seconds = list(accumulate(problem.costs.seconds[node] for node in problem.forward))
    count = min(count, len(seconds))
    shares = (seconds[-1] * (index + 1) / (count + 1) for index in range(count))
    cuts = dict.fromkeys(bisect_left(seconds, share) + 1 for share in shares)
    inner = [cut for cut in cuts if cut < len(problem.forward)]
    there = set(completed(problem, crossing(problem, inner)))
    reading = [problem.forward_reads[node] for node in problem.backward if problem.forward_reads[node]]
    following = iter((*reading[1:], ()))
    order: list[Node] = []
    made: set[Storage] = set()
    for node in problem.backward:
        if time.thread_time() > deadline:
            return None
        again = problem.closure(problem.forward_reads[node], there | made)
        order += (*again, node)
        if problem.forward_reads[node]:
            made |= {storage for other in again for storage in problem.graph.allocates(other)}
            made &= set(next(following))
    return problem.simulate_order(problem.forward, order)
