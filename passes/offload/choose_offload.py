"""Chooses what to copy to tiers, beside what to compute again, within a budget in bytes."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from ...ir import BudgetError, UsageError, format_bytes
from ..remat.choice import ChosenSchedule, Limits, out_of_time, over_budget
from ..remat.choose_recomputation import choose_recomputation
from ..remat.planner import Planner
from ..remat.search import Incumbent
from ..strategy_registry import Asked, strategy_named
from .offload_problem import OffloadProblem
from .offload_search import OffloadSearch
from .remat_and_offload import least_budget, search_with_copies
from .strategies import known_offload_solutions

__all__ = ["choose_copies", "choose_offloaded"]

_CANDIDATES_PART = 0.6
_LEAST_PART = 0.2
"""The parts of the time that is left for schedules of any budget, and then for the smallest budget."""


def choose_copies(planner: Planner, strategy: str, limits: Limits) -> ChosenSchedule:
    """Chooses a schedule that copies to the program's tiers.

    Args:
        planner: The planner of a program with tiers.
        strategy: `auto`, or the name of one that copies.
        limits: The limits of the search.

    Raises:
        BudgetError: IRC204 when no schedule was found within the budget.
        TimeLimitError: IRC205 when the time limit ended before any schedule was found.
    """
    work = OffloadProblem(planner.problem, planner.program.tiers, limits.budget_bytes)
    kept_bytes = planner.original.keep_all.peak_bytes
    if strategy != "auto":
        incumbent = _known(planner, strategy, work, limits.deadline)
        minimum_bytes = incumbent.best.peak_bytes
    elif work.problem.keep_all.peak_bytes > limits.budget_bytes >= kept_bytes:
        return choose_recomputation(planner, strategy, limits)  # the captured graph fits as it is
    else:
        incumbent, minimum_bytes = _searched(planner, work, limits)
    return ChosenSchedule(work.problem, incumbent, minimum_bytes, work.floor_bytes, work.tiers)


def choose_offloaded(
    planner: Planner, which: Sequence[str], names: Collection[str] | None, limits: Limits
) -> ChosenSchedule:
    """Chooses a schedule with parameters or optimizer state that live in a tier between steps.

    Args:
        planner: The planner of a program with tiers.
        which: Names of `OFFLOADABLE`.
        names: The names of what is offloaded; None if the search chooses it.
        limits: The limits of the search.

    Raises:
        BudgetError: IRC204 when no schedule was found within the budget.
        TimeLimitError: IRC205 when the time limit ended before any schedule was found.
        UsageError: IRC404 if nothing of the graph can live in a tier.
    """
    budget_bytes, deadline, tiers = limits.budget_bytes, limits.deadline, planner.program.tiers
    search = OffloadSearch(planner, which, budget_bytes, names, gap=limits.gap)
    if not search.offloaded_parameters and names is None:
        raise UsageError(
            "IRC404",
            f"nothing of this model can live in tier {search.tier.name} as {'+'.join(which)}",
            help="optimizer state moves where irc.optimize has optimizer_in_backward= (or --optimizer); "
            "parameters of 4 KiB and more move, as far as the tier has room for them",
        )
    least_bytes = search.least_bytes(_within(deadline, _LEAST_PART))
    chosen = search.run(deadline)
    if chosen is None:
        if budget_bytes >= search.floor_bytes and time.thread_time() >= deadline:
            raise out_of_time(limits, least_bytes)
        offloaded_bytes = sum(offloaded.storage.nbytes for offloaded in search.offloaded_parameters)
        error = over_budget(planner, budget_bytes, least_bytes, tiers=tiers, offloaded_bytes=offloaded_bytes)
        raise _with_largest_step(error, search)
    return ChosenSchedule(chosen.problem, chosen.incumbent, least_bytes, search.floor_bytes, tiers)


def _searched(planner: Planner, work: OffloadProblem, limits: Limits) -> tuple[Incumbent, int]:
    """The fastest of all, and the smallest budget that is known."""
    deadline = limits.deadline
    candidates = planner.candidates(_within(deadline, _CANDIDATES_PART))
    least_bytes = least_budget(work, candidates, deadline=_within(deadline, _LEAST_PART))
    may_fit = work.budget_bytes >= work.floor_bytes
    seeds = known_offload_solutions(work, deadline=deadline)
    incumbent = (
        search_with_copies(work, candidates, deadline=deadline, gap=limits.gap, seeds=seeds)
        if may_fit
        else None
    )
    if incumbent is None and may_fit and time.thread_time() < deadline:
        candidates = planner.candidates(deadline, is_thorough=True)
        incumbent = search_with_copies(work, candidates, deadline=deadline, gap=limits.gap)
    if incumbent is not None:
        return incumbent, min(least_bytes, incumbent.best.peak_bytes)
    least_bytes = min(least_bytes, least_budget(work, candidates, deadline=deadline))
    is_late = time.thread_time() >= deadline
    if may_fit and (is_late or not candidates.is_complete):
        raise out_of_time(limits, least_bytes)
    raise over_budget(planner, work.budget_bytes, least_bytes, is_known=not is_late, tiers=work.tiers)


def _known(planner: Planner, strategy: str, work: OffloadProblem, deadline: float) -> Incumbent:
    """The strategy's own schedule: the fastest that fits, of those found in time."""
    named = strategy_named(strategy)
    assert named is not None
    asked = Asked(work.budget_bytes, named[1], deadline, work.tiers)
    schedules = [work.problem.keep_all, *named[0].find(work.problem, asked)]
    fitting = [s for s in schedules if s.peak_bytes <= work.budget_bytes]
    if not fitting:
        raise over_budget(
            planner,
            work.budget_bytes,
            min(s.peak_bytes for s in schedules),
            strategy=strategy,
            is_known=time.thread_time() < deadline,
            tiers=work.tiers,
        )
    return Incumbent(strategy, min(fitting, key=lambda s: (s.seconds, s.peak_bytes)))


def _with_largest_step(error: BudgetError, search: OffloadSearch) -> BudgetError:
    """The refusal, with the step of an optimizer that cannot go below most of what is needed."""
    alone = search.largest_step
    if alone is not None:
        name, nbytes = alone
        error.add_note(
            f"{format_bytes(nbytes)} at least are on the device while the optimizer takes its step for "
            f"{name}: the parameter, its gradient, its state, what the step takes, and what always stays"
        )
    return error


def _within(deadline: float, part: float) -> float:
    """The `time.thread_time()` at which a part of the time that is left is over."""
    now = time.thread_time()
    return now + (deadline - now) * part
