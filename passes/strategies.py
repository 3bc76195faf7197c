"""Known rules for what to keep: everything, every k-th operation's results, sqrt(n) segments."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..ir import Storage
from .checkpointing import CheckpointProblem, Simulated, Stage

__all__ = ["every_k", "keep_all", "sqrt_n"]


def keep_all(problem: CheckpointProblem) -> Simulated:
    """Computes nothing twice."""
    return problem.keep_all


def every_k(problem: CheckpointProblem, k: int) -> Simulated:
    """Cuts forward into segments of `k` operations and keeps what crosses from one to the next.

    Inside a segment only what may not be computed again (masks) is kept.
    """
    return problem.simulate((Stage(0, _crossing(problem, range(k, len(problem.forward), k))),))


def sqrt_n(problem: CheckpointProblem) -> Simulated:
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
    return problem.simulate((Stage(0, _crossing(problem, cuts)),))


def _crossing(problem: CheckpointProblem, cuts: Iterable[int]) -> frozenset[Storage]:
    """The storages that forward reads across one of the cuts, with what backward could not get otherwise."""
    kept: set[Storage] = set()
    places = list(cuts)
    for storage, node in problem.producer.items():
        users = problem.users.get(storage, ())
        last = max((problem.index[user] for user in users), default=-1)
        if any(problem.index[node] < cut <= last for cut in places):
            kept.add(storage)
    return frozenset(_with_unrepeatable(problem, kept))


def _with_unrepeatable(problem: CheckpointProblem, kept: set[Storage]) -> set[Storage]:
    """Adds what backward needs from operations that may run only once, and what its first operation reads."""
    first = problem.forward_reads[problem.backward[0]] if problem.backward else ()
    found = set(kept) | set(first)
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
    return found
