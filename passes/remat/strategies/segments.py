"""Rules that keep everything, nothing, or what crosses from one segment of forward to the next."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ....ir import Node, Storage
from ..cut_network import Kept
from ..problem import CheckpointProblem, Solution

__all__ = ["checkpoints", "every_k", "keep_all", "keep_none", "keeping", "segments", "sqrt_n"]


def keep_all(problem: CheckpointProblem) -> Solution:
    """Computes nothing twice."""
    return problem.keep_all


def keep_none(problem: CheckpointProblem) -> Solution:
    """Keeps forward's inputs, what may not be computed again (masks) and what backward reads first.

    `torch.utils.checkpoint` around the whole model does the same.
    """
    return keeping(problem, frozenset())


def every_k(problem: CheckpointProblem, k: int) -> Solution:
    """Cuts forward into segments of `k` operations and keeps what crosses from one to the next.

    Inside a segment it keeps only what may not be computed again (masks).
    """
    return segments(problem, range(k, len(problem.forward), k))


def segments(problem: CheckpointProblem, cuts: Sequence[int]) -> Solution:
    """Cuts forward before the operations at `cuts`, in order, and keeps what crosses from one to the next."""
    return keeping(problem, _crossing(problem, cuts))


def sqrt_n(problem: CheckpointProblem) -> Solution:
    """Cuts forward into about sqrt(n) segments of equal bytes and keeps what crosses from one to the next.

    Source:
        Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), section 4; ours on any graph.
    """
    forward = problem.forward
    sizes = [sum(s.nbytes for s in problem.graph.allocates(node)) for node in forward]
    segment_bytes = sum(sizes) / max(math.isqrt(len(forward)), 1)
    cuts: list[int] = []
    filled = 0.0
    for index, size in enumerate(sizes):
        filled += size
        if filled >= segment_bytes:
            cuts.append(index + 1)
            filled = 0.0
    return segments(problem, cuts)


def _crossing(problem: CheckpointProblem, cuts: Sequence[int]) -> Kept:
    """The storages that forward reads across one of the cuts, which are in order."""
    kept: set[Storage] = set()
    for storage, node in problem.producer.items():
        made = problem.index[node]
        last = max((problem.index[user] for user in problem.users.get(storage, ())), default=made)
        if bisect_right(cuts, made) < bisect_right(cuts, last):
            kept.add(storage)
    return frozenset(kept)


def keeping(problem: CheckpointProblem, kept: Kept) -> Solution:
    """Makes the schedule that keeps these storages, and what cannot be made from them."""
    return problem.keeping(_with_unrepeatable(problem, kept))


def _with_unrepeatable(problem: CheckpointProblem, kept: Kept) -> Kept:
    """Adds what backward needs from operations that may run only once, and what its first operation reads."""
    first = problem.forward_reads[problem.backward[0]] if problem.backward else ()
    found = (set(kept) | set(first)) - problem.transient
    pending = [s for s in problem.read_positions if s not in found]
    seen: set[Storage] = set()
    while pending:
        storage = pending.pop()
        if storage in found or storage in seen:
            continue
        seen.add(storage)
        node = problem.producer[storage]
        if node.is_recomputable:
            pending.extend(problem.forward_reads[node])
        else:
            found.add(storage)
    return frozenset(found)


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
    there = set(_with_unrepeatable(problem, _crossing(problem, inner)))
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
