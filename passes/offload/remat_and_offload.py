"""Chooses recomputation and copies together: the fastest schedule within a budget, and a bound for all."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..remat.candidates import Candidates
from ..remat.cut_ilp import Solved
from ..remat.eviction import evict_greedily
from ..remat.problem import Solution
from ..remat.search import Incumbent, search
from .cut_ilp import OffloadRelaxation
from .local_search import PROOF_GAP, improve
from .offload_problem import OffloadProblem
from .schedule_copies import EFFORT, Order

__all__ = ["bound_with_copies", "least_budget", "search_with_copies"]

_FREE_PART = 2e-5
"""Storages up to this fraction of the peak that keeps all are free in the programme over cuts."""

_CUT_SECONDS = 8.0
_CUT_NODES = 100

_KNOWN_PART = 0.6
"""The part of the time for known schedules, if one of them fits."""

_TIMED_ANEW = 5
"""The number of the fastest known schedules whose copies are worth an effort."""

_LAST_EFFORT = 50_000
"""The effort for the copies of the schedule that the search ends with."""

_RECOMPUTE_PART = 0.3
"""The part of the time for the best schedule without copies."""

_LOW = 3
"""The number of known schedules with the smallest peaks that are looked at for a small budget."""

_LOW_BITS = 10
_RUNGS = 24
_RUN_SECONDS = 1.0


def search_with_copies(
    work: OffloadProblem,
    candidates: Candidates,
    *,
    deadline: float,
    gap: float = PROOF_GAP,
    seeds: Iterable[tuple[str, Solution]] = (),
) -> Incumbent | None:
    """Searches for the fastest schedule with copies and recomputation, with a bound; None if none was found.

    Known schedules, of this and of larger budgets, get copies for what is over the budget. The programme over
    cuts with copies gives a bound, and an idea. The best schedule without copies is one more candidate. Then
    what runs again is changed, operation by operation, as long as that helps.

    Args:
        work: The problem.
        candidates: Schedules found without regard to the budget.
        deadline: `time.thread_time()` at which to stop.
        gap: The distance from the best at which to stop, as a fraction of the step's time.
        seeds: More schedules, which may have copies; those that fit are candidates as they are.
    """
    problem, gap = work.problem, max(gap, PROOF_GAP)
    incumbent: Incumbent | None = None
    known: list[tuple[str, Solution]] = []
    now = time.thread_time()
    latest = now + (deadline - now) * _KNOWN_PART
    for name, solution in itertools.chain(_candidates(work, candidates, deadline=latest), seeds):
        if solution.peak_bytes <= work.budget_bytes:
            known.append((name, solution))
            incumbent = Incumbent(name, solution) if incumbent is None else incumbent
            incumbent.update(name, solution, work.budget_bytes)
        if incumbent is not None and (incumbent.is_proved(problem, gap) or time.thread_time() >= latest):
            break
    if incumbent is not None:
        _time_anew(work, known, incumbent, deadline=deadline)
        if incumbent.is_proved(problem, gap) or time.thread_time() >= deadline:
            return incumbent
    left = deadline - time.thread_time()
    if left > 0 and candidates.fitting(work.budget_bytes):
        latest = time.thread_time() + left * _RECOMPUTE_PART
        alone = search(problem, work.budget_bytes, candidates, deadline=latest, gap=gap)
        if alone is not None:
            incumbent = Incumbent(alone.name, alone.best) if incumbent is None else incumbent
            incumbent.update(alone.name, alone.best, work.budget_bytes)
    if incumbent is None:
        return None
    _bound(work, incumbent, deadline, gap)
    improve(work, incumbent, deadline=deadline, gap=gap)
    _time_anew(work, [(incumbent.name, incumbent.best)], incumbent, deadline=deadline, effort=_LAST_EFFORT)
    return incumbent


def _time_anew(
    work: OffloadProblem,
    known: list[tuple[str, Solution]],
    incumbent: Incumbent,
    *,
    deadline: float,
    effort: int = EFFORT,
) -> None:
    """Tries the fastest schedules once more, with copies chosen with an effort."""
    for name, solution in sorted(known, key=lambda pair: pair[1].seconds)[:_TIMED_ANEW]:
        if time.thread_time() >= deadline:
            return
        timed = work.fitted(work.order(solution), effort=effort)
        if timed is not None:
            incumbent.update(name, timed, work.budget_bytes)


def _bound(work: OffloadProblem, incumbent: Incumbent, deadline: float, gap: float) -> None:
    """Raises the bound by the programme over cuts with copies, and tries its choice."""
    problem = work.problem
    left = deadline - time.thread_time()
    if left <= 0 or incumbent.is_proved(problem, gap):
        return
    solved = _relaxed(work, min(left / 2, _CUT_SECONDS))
    if not solved.is_infeasible:
        incumbent.bound_seconds = max(incumbent.bound_seconds, solved.bound_seconds)
    if solved.resident is not None:
        with contextlib.suppress(ValueError):
            idea = work.run(problem.repeats_between(solved.resident))
            if idea is not None:
                incumbent.update("joint", idea, work.budget_bytes)


def bound_with_copies(work: OffloadProblem, *, deadline: float) -> float:
    """A lower bound of the seconds that every schedule with copies takes beyond its operations.

    Args:
        work: The problem.
        deadline: `time.thread_time()` at which to stop.
    """
    left = deadline - time.thread_time()
    if left <= 0 or not work.problem.backward:
        return 0.0
    solved = _relaxed(work, left)
    return 0.0 if solved.is_infeasible else max(solved.bound_seconds, 0.0)


def _relaxed(work: OffloadProblem, seconds: float) -> Solved:
    """Solves the programme over cuts with copies, with one cut at the loss."""
    small_bytes = int(work.problem.keep_all.peak_bytes * _FREE_PART)
    relaxation = OffloadRelaxation(
        work.problem,
        work.budget_bytes,
        [len(work.problem.forward)],
        small_bytes=small_bytes,
        tiers=work.tiers,
    )
    return relaxation.solve(seconds=seconds, gap=PROOF_GAP, node_limit=_CUT_NODES)


def least_budget(work: OffloadProblem, candidates: Candidates, *, deadline: float = math.inf) -> int:
    """The smallest budget that a schedule with copies is found for, in bytes; that of `work` is ignored.

    Args:
        work: The problem.
        candidates: Schedules found without regard to the budget; those with the smallest peaks get copies.
        deadline: `time.thread_time()` at which to stop; what was found by then counts.
    """
    problem = work.problem
    lowest = sorted((s for _, s in candidates.candidates), key=lambda s: (s.peak_bytes, s.seconds))
    orders = [work.order(solution) for solution in (problem.keep_all, *lowest[:_LOW])]
    low, high = work.floor_bytes - 1, lowest[0].peak_bytes
    while high - low > max(problem.keep_all.peak_bytes >> _LOW_BITS, 1) and time.thread_time() < deadline:
        middle = (low + high) // 2
        peak_bytes = _reached(replace(work, budget_bytes=middle), orders)
        if peak_bytes is None:
            low = middle
        else:
            high = peak_bytes
    return high


def _reached(work: OffloadProblem, orders: list[Order]) -> int | None:
    """The peak of the first of some orders that fits with copies; it becomes the first."""
    for index, order in enumerate(orders):
        fitted = work.fitted(order, effort=0)
        if fitted is not None:
            orders.insert(0, orders.pop(index))
            return fitted.peak_bytes
    return None


def _candidates(
    work: OffloadProblem, candidates: Candidates, *, deadline: float
) -> Iterator[tuple[str, Solution]]:
    """Yields schedules that fit: they recompute for this or a larger budget, and copy the rest.

    The first few, which reach the smallest budgets, are tried whatever the time.
    """
    problem = work.problem
    known: set[tuple[float, int]] = set()

    def offered(name: str, solution: Solution) -> Iterator[tuple[str, Solution]]:
        key = solution.seconds, solution.peak_bytes
        if key not in known and (len(known) <= _LOW or time.thread_time() < deadline):
            known.add(key)
            fitted = work.with_copies(solution, effort=0)
            if fitted is not None:
                yield (name if fitted is solution else f"{name}+swap"), fitted

    yield from offered("keep-all", problem.keep_all)
    pairs = candidates.candidates
    for name, solution in sorted(pairs, key=lambda pair: (pair[1].peak_bytes, pair[1].seconds))[:_LOW]:
        yield from offered(name, solution)
    for name, solution in sorted(pairs, key=lambda pair: pair[1].seconds):
        yield from offered(name, solution)
    top = problem.keep_all.peak_bytes
    for rung in range(1, _RUNGS):
        if time.thread_time() >= deadline:
            return
        budget = work.budget_bytes + (top - work.budget_bytes) * rung // _RUNGS
        latest = min(deadline, time.thread_time() + _RUN_SECONDS)
        evicted = evict_greedily(problem, budget, deadline=latest) if budget < top else None
        if evicted is not None:
            yield from offered("eviction", evicted)
