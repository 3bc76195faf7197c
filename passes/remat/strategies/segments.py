"""Rules that keep everything, nothing, or what crosses from one segment of forward to the next."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from ....ir import Storage
from ..cut_network import Kept
from ..problem import CheckpointProblem, Solution

__all__ = ["completed", "crossing", "every_k", "keeping", "segments", "sqrt_n"]


def every_k(problem: CheckpointProblem, k: int) -> Solution:
    """Cuts forward into segments of `k` operations and keeps what crosses from one to the next.

    Inside a segment it keeps only what may not be computed again (masks).
    """
    return segments(problem, range(k, len(problem.forward), k))


def segments(problem: CheckpointProblem, cuts: Sequence[int]) -> Solution:
    """Cuts forward before the operations at `cuts`, in order, and keeps what crosses from one to the next."""
    return keeping(problem, crossing(problem, cuts))


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


def crossing(problem: CheckpointProblem, cuts: Sequence[int]) -> Kept:
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
    return problem.keeping(completed(problem, kept))


def completed(problem: CheckpointProblem, kept: Kept) -> Kept:
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
