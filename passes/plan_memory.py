"""The pass that chooses recomputation and swaps together, within a budget in bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

from ..ir import UsageError, parse_budget, verify_schedule
from .certificate import certify
from .joint import SwapProblem, least_budget, search_with_copies
from .planner import Planner
from .program import Program
from .search import Found
from .select_checkpoints import STRATEGIES, SelectCheckpoints, out_of_time, over_budget
from .swap_strategies import SWAP_STRATEGIES, known_swaps

__all__ = ["PlanMemory", "smallest_budget"]


@dataclass(frozen=True, slots=True)
class PlanMemory(SelectCheckpoints):
    """Chooses a schedule that recomputes and copies to the program's tiers, at the least loss of time.

    Without tiers it is `select-checkpoints`.

    Args:
        budget: As of `select-checkpoints`; it is for the device alone.
        strategy: `auto` takes the best of all, with copies. For comparison, `lms` copies as Large Model
            Support, `ome` recomputes between checkpoints and copies some of these, `pofo` plans a chain of
            blocks, `swap` copies and computes nothing twice, `recompute` copies nothing. The others are
            those of `select-checkpoints`, which copy nothing.
        time_limit: Seconds for the search; the best schedule so far counts when they are over.
    """

    name: ClassVar[str] = "plan-memory"
    strategies: ClassVar[tuple[str, ...]] = (*STRATEGIES, *SWAP_STRATEGIES, "recompute")

    def choose(self, planner: Planner, /) -> Program:
        """As `run`, with what the planner knows from other budgets of the same program.

        Raises:
            BudgetError: IRC204 when no schedule was found within the budget.
            TimeLimitError: IRC205 when the time limit ended before any schedule was found.
            UsageError: IRC403 for an unknown strategy, or one that copies where there is no tier.
        """
        self.check()
        tiers = planner.program.tiers
        if self.strategy in SWAP_STRATEGIES and not tiers:
            raise UsageError(
                "IRC403",
                f"strategy {self.strategy} copies, and there is no tier to copy to",
                help="offer one: --swap host, or the pass offer-tiers before; or use strategy auto",
            )
        if not tiers or self.strategy not in ("auto", *SWAP_STRATEGIES):
            return self._without_copies(planner)
        started = time.monotonic()
        deadline = started + self.time_limit
        work = SwapProblem(planner.problem, tiers, parse_budget(self.budget, planner.baseline_bytes))
        kept_bytes = planner.original.keep_all.peak_bytes
        if self.strategy == "auto" and work.problem.keep_all.peak_bytes > work.budget_bytes >= kept_bytes:
            return self._without_copies(planner)  # the captured graph fits as it is
        if self.strategy == "auto":
            found, minimum_bytes = self._searched(planner, work, deadline)
        else:
            found = self._known(planner, work)
            minimum_bytes = found.best.peak_bytes
        program = planner.program_of(planner.problem)
        assert program.costs is not None
        plan = certify(
            planner.problem,
            work.budget_bytes,
            found,
            baseline_bytes=planner.baseline_bytes,
            minimum_bytes=minimum_bytes,
            seconds=time.monotonic() - started,
            floor_bytes=work.floor_bytes,
            tiers=tiers,
        )
        schedule = found.best.schedule
        verify_schedule(
            schedule,
            program.costs.workspace_bytes,
            budget_bytes=work.budget_bytes,
            peak_bytes=plan.peak_bytes,
            tiers=tiers,
        )
        return replace(program, schedule=schedule, plan=plan)

    def _without_copies(self, planner: Planner) -> Program:
        strategy = "auto" if self.strategy == "recompute" else self.strategy
        return SelectCheckpoints(self.budget, strategy, self.time_limit).choose(planner)

    def _searched(self, planner: Planner, work: SwapProblem, deadline: float) -> tuple[Found, int]:
        """The best of all, and the smallest budget that is known."""
        candidates = planner.candidates(deadline)
        seeds = known_swaps(work)
        found = search_with_copies(work, candidates, deadline=deadline, seeds=seeds)
        may_fit = work.budget_bytes >= work.floor_bytes
        if found is None and may_fit:
            candidates = planner.candidates(deadline, is_thorough=True)
            found = search_with_copies(work, candidates, deadline=deadline)
        least_bytes = least_budget(work, candidates)
        if found is not None:
            return found, least_bytes
        if may_fit and not candidates.is_complete:
            raise out_of_time(self.time_limit, work.budget_bytes, least_bytes)
        raise over_budget(planner, work.budget_bytes, least_bytes, tiers=work.tiers)

    def _known(self, planner: Planner, work: SwapProblem) -> Found:
        """The strategy's own schedule: the fastest that fits."""
        made = [work.problem.keep_all, *SWAP_STRATEGIES[self.strategy](work)]
        fitting = [s for s in made if s.peak_bytes <= work.budget_bytes]
        if not fitting:
            least_bytes = min(s.peak_bytes for s in made)
            raise over_budget(
                planner, work.budget_bytes, least_bytes, strategy=self.strategy, tiers=work.tiers
            )
        return Found(self.strategy, min(fitting, key=lambda s: (s.seconds, s.peak_bytes)))


def smallest_budget(planner: Planner) -> int:
    """The smallest budget that a schedule with copies to the program's tiers was found for, in bytes."""
    work = SwapProblem(planner.problem, planner.program.tiers, planner.problem.keep_all.peak_bytes)
    return least_budget(work, planner.candidates(is_thorough=True))
