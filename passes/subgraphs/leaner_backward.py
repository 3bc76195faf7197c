"""Backwards that get by with less than a forward has saved already."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from ...ir import Storage
from ..remat.eviction import evict_greedily
from ..remat.problem import CheckpointProblem, Solution
from .footprint import outputs_bytes, saved_by, tangents_bytes

__all__ = ["leaner_backwards"]

_HALVINGS = 6
_RUN_SECONDS = 2.0


def leaner_backwards(
    problem: CheckpointProblem, saved: frozenset[Storage], budget_bytes: int
) -> Iterator[Solution]:
    """Yields schedules that hold as little as can be between forward and backward, of what is held now.

    A forward that has run by another schedule of the same graph can go on by the backward of one of these:
    each holds a part of `saved`. The rest can be freed at once; backward computes it again.

    Args:
        problem: The problem of the schedule that has run; its graph's `loss_held_bytes` count.
        saved: The storages that this schedule holds, without the outputs.
        budget_bytes: The most that may be alive at once, for this graph alone.

    Yields:
        Those with the smallest peaks in backward first; the last one makes everything again at its first
        read and may be over the budget.
    """
    least = _least(problem, saved)
    yield from _within(problem, saved, sum(storage.nbytes for storage in least), budget_bytes)
    yield problem.keeping(least)


def _least(problem: CheckpointProblem, saved: frozenset[Storage]) -> frozenset[Storage]:
    """The storages of `saved` that backward cannot do without, such as results of run-once operations."""
    kept = {s for s in saved if s in problem.producer and not problem.producer[s].is_recomputable}
    for storage in problem.read_positions:
        try:
            problem.closure([storage], kept)
        except ValueError:
            again = problem.closure([storage], set(saved))
            kept |= {s for node in again for s in problem.forward_reads[node] if s in saved}
            kept |= {storage} & saved
    return frozenset(kept)


def _within(
    problem: CheckpointProblem, saved: frozenset[Storage], least_bytes: int, budget_bytes: int
) -> Iterator[Solution]:
    """Yields evictions that hold at most `least_bytes`, at budgets between the floor and `budget_bytes`."""
    low, high = problem.floor_bytes - 1, budget_bytes
    found: list[Solution] = []
    for _ in range(_HALVINGS):
        tried = (low + high) // 2 if found else high
        evicted = _evicted(problem, least_bytes, tried)
        if evicted is not None and saved_by(evicted.schedule) <= saved:
            found.append(evicted)
            high = tried
        elif not found:
            return
        else:
            low = tried
        if high - low <= 1:
            break
    yield from reversed(found)


def _evicted(problem: CheckpointProblem, least_bytes: int, budget_bytes: int) -> Solution | None:
    """Finds a schedule within the budget whose loss leaves room for at most `least_bytes` to be saved."""
    graph = problem.graph
    around = graph.static_bytes + outputs_bytes(graph) + tangents_bytes(graph) + least_bytes
    loss_bytes = max(budget_bytes - around, graph.loss_held_bytes)
    crowded = CheckpointProblem(replace(graph, loss_bytes=loss_bytes), problem.costs, problem.sequence)
    return evict_greedily(crowded, budget_bytes, deadline=time.thread_time() + _RUN_SECONDS)
