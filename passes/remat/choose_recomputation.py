"""Chooses what to keep for backward and what to compute again, within a budget in bytes."""

from __future__ import annotations

import time
from dataclasses import replace

from ...ir import BudgetError, format_bytes
from ..strategy_registry import Asked, strategy_named
from .choice import ChosenSchedule, Limits, out_of_time, over_budget
from .cut_search import bound_by_cuts, search_cuts
from .eviction import evict_greedily
from .planner import Planner
from .problem import Solution
from .search import Incumbent, fits_without_search, proved_by_cuts, search

__all__ = ["choose_recomputation", "is_all_kept"]


def is_all_kept(planner: Planner, strategy: str, budget_bytes: int) -> bool:
    """Whether a strategy keeps all within a budget and computes nothing twice, whatever operations take."""
    problems = (planner.problem, planner.original)
    return strategy in _KEEPING and any(fits_without_search(problem, budget_bytes) for problem in problems)


def choose_recomputation(planner: Planner, strategy: str, limits: Limits) -> ChosenSchedule:
    """Chooses a schedule that copies nothing.

    Args:
        planner: The planner of a program.
        strategy: One of `SEARCHES`, or a name that `strategy_named` knows.
        limits: The limits of the search.

    Raises:
        BudgetError: IRC204 when no schedule was found within the budget, IRC206 when the strategy has none.
        TimeLimitError: IRC205 when the time limit ended before any schedule was found.
        UsageError: IRC403 if the strategy cannot hold the graph: one without blocks, or that is no chain.
    """
    problem = planner.problem
    if fits_without_search(problem, limits.budget_bytes):
        limits = replace(limits, time_limit=min(limits.time_limit, _SMALLEST_SECONDS))
    keeps_all = strategy in _KEEPING
    kept_bytes = planner.original.keep_all.peak_bytes
    if keeps_all and problem.keep_all.peak_bytes > limits.budget_bytes >= kept_bytes:
        problem = planner.original  # the captured graph fits as it is, the rewritten one does not
        incumbent = Incumbent("keep-all", problem.keep_all)
    else:
        is_search = strategy in ("auto", "ilp")
        incumbent = _searched(planner, limits) if is_search else _named(planner, strategy, limits)
        planner.add_solution(limits.budget_bytes, incumbent)
    now = time.thread_time()
    latest = now + max(now - limits.started, _NAMED_SECONDS)
    minimum_bytes = planner.minimum_bytes(min(latest, limits.deadline))
    return ChosenSchedule(problem, incumbent, minimum_bytes, problem.floor_bytes)


_KEEPING = ("auto", "ilp", "keep-all")
"""Strategies that keep all if it fits."""

_SMALLEST_SECONDS = 1.0
"""Time for the smallest budget that a plan names if its own needs no search."""

_NAMED_SECONDS = 3.0
"""Time for it if its own does; as much as that took, if that is more."""

_REFUSAL_SECONDS = 3.0
"""Time for the smallest budget that the refusal of an impossible one names."""


def _searched(planner: Planner, limits: Limits) -> Incumbent:
    """Finds the fastest schedule that fits."""
    problem, budget_bytes, deadline = planner.problem, limits.budget_bytes, limits.deadline
    if budget_bytes < min(problem.floor_bytes, planner.original.keep_all.peak_bytes):
        candidates = planner.candidates(min(deadline, limits.started + _REFUSAL_SECONDS))
        raise over_budget(planner, budget_bytes, candidates.minimum_bytes, is_known=candidates.is_complete)
    cuts = search_cuts(problem, budget_bytes, deadline=deadline)
    incumbent = proved_by_cuts(problem, cuts, gap=limits.gap)
    if incumbent is not None:
        return incumbent
    candidates = planner.candidates(deadline)
    incumbent = search(problem, budget_bytes, candidates, deadline=deadline, gap=limits.gap, cuts=cuts)
    if incumbent is None:
        candidates = planner.candidates(deadline, is_thorough=True)
        incumbent = search(problem, budget_bytes, candidates, deadline=deadline, gap=limits.gap, cuts=cuts)
    if incumbent is not None:
        incumbent.bound_seconds = max(incumbent.bound_seconds, planner.bound_seconds(budget_bytes))
        return incumbent
    minimum_bytes = min(candidates.minimum_bytes, planner.original.keep_all.peak_bytes)
    if not candidates.is_complete:
        raise out_of_time(limits, minimum_bytes)
    raise over_budget(planner, budget_bytes, minimum_bytes, is_known=candidates.is_complete)


def _named(planner: Planner, strategy: str, limits: Limits) -> Incumbent:
    """The strategy's own schedule: if it has several, the fastest that fits."""
    problem, budget_bytes = planner.problem, limits.budget_bytes
    schedules = _by_name(planner, strategy, limits)
    if not schedules:
        if time.thread_time() >= limits.deadline:
            raise out_of_time(limits, problem.keep_all.peak_bytes)
        raise BudgetError(
            "IRC206",
            f"strategy {strategy} finds no schedule within {format_bytes(budget_bytes)} "
            f"({budget_bytes} bytes)",
            minimum_bytes=problem.keep_all.peak_bytes,
            help="raise the budget, or use strategy auto",
        )
    fitting = [s for s in schedules if s.peak_bytes <= budget_bytes]
    if not fitting:
        reached = min(s.peak_bytes for s in schedules)
        raise over_budget(planner, budget_bytes, reached, strategy=strategy)
    best = min(fitting, key=lambda s: (s.seconds, s.peak_bytes))
    bound_seconds = 0.0 if problem.is_fastest(best) else bound_by_cuts(problem, budget_bytes)
    return Incumbent(strategy, best, bound_seconds)


def _by_name(planner: Planner, strategy: str, limits: Limits) -> list[Solution]:
    problem, budget_bytes = planner.problem, limits.budget_bytes
    named = strategy_named(strategy)
    if named is not None:
        published, number = named
        return list(published.find(problem, Asked(budget_bytes, number, limits.deadline)))
    candidates = planner.candidates(limits.deadline)
    evicted = evict_greedily(problem, budget_bytes)
    found = [s for name, s in candidates.candidates if name == strategy]
    if evicted is None and not found and not candidates.is_complete:
        raise out_of_time(limits, candidates.minimum_bytes)
    return found if evicted is None else [*found, evicted]
