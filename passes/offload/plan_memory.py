"""The pass that chooses recomputation and swaps together, within a budget in bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ir import BudgetError, UsageError, format_bytes, parse_budget
from ..program import Program
from ..remat.certificate import certify
from ..remat.planner import Planner
from ..remat.search import Incumbent
from ..remat.select_checkpoints import STRATEGIES, SelectCheckpoints, out_of_time, over_budget
from .offload_search import OffloadSearch
from .offloaded_parameters import OFFLOADABLE
from .remat_and_offload import OffloadProblem, least_budget, search_with_copies
from .strategies import OFFLOAD_STRATEGIES, known_offload_solutions

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
        offload: What may live in the first tier between steps: `params`, `optimizer`, `params+optimizer` or
            `none`. How much of it does is chosen.
        offloaded_names: The names of what is offloaded, once known. Not part of the text form.
    """

    name: ClassVar[str] = "plan-memory"
    strategies: ClassVar[tuple[str, ...]] = (*STRATEGIES, *OFFLOAD_STRATEGIES, "recompute")

    offload: str = "none"
    offloaded_names: tuple[str, ...] | None = field(default=None, metadata={"in_text": False})

    def check(self) -> None:
        """Refuses malformed options.

        Raises:
            UsageError: IRC401 and IRC403 as of `select-checkpoints`; IRC403 for what cannot live in a tier,
                or with a strategy that leaves all of it on the device.
        """
        SelectCheckpoints.check(self)
        unknown = [what for what in self.which if what not in OFFLOADABLE]
        if unknown:
            raise UsageError(
                "IRC403",
                f"{unknown[0]!r} is nothing that can live in a tier between steps",
                help=f"choose of {', '.join(OFFLOADABLE)}, or none",
            )
        if self.which and self.strategy != "auto":
            raise UsageError(
                "IRC403",
                f"strategy {self.strategy} leaves parameters and optimizer state on the device",
                help="use strategy auto, or leave params and optimizer out of what is swapped",
            )

    @property
    def which(self) -> Sequence[str]:
        """What may live in a tier."""
        return () if self.offload == "none" else tuple(self.offload.split("+"))

    def choose(self, planner: Planner, /) -> Program:
        """As `run`, with what the planner knows from other budgets of the same program.

        Raises:
            BudgetError: IRC204 when no schedule was found within the budget.
            TimeLimitError: IRC205 when the time limit ended before any schedule was found.
            UsageError: IRC403 for an unknown strategy, or one that copies where there is no tier.
        """
        self.check()
        tiers = planner.program.tiers
        if self.strategy in OFFLOAD_STRATEGIES and not tiers:
            raise UsageError(
                "IRC403",
                f"strategy {self.strategy} copies, and there is no tier to copy to",
                help="offer one: --swap host, or the pass offer-tiers before; or use strategy auto",
            )
        if self.which:
            return self._with_offloaded(planner)
        if not tiers or self.strategy not in ("auto", *OFFLOAD_STRATEGIES):
            return self._without_copies(planner)
        started = time.monotonic()
        deadline = started + self.time_limit
        work = OffloadProblem(planner.problem, tiers, parse_budget(self.budget, planner.baseline_bytes))
        kept_bytes = planner.original.keep_all.peak_bytes
        if self.strategy == "auto" and work.problem.keep_all.peak_bytes > work.budget_bytes >= kept_bytes:
            return self._without_copies(planner)  # the captured graph fits as it is
        if self.strategy == "auto":
            incumbent, minimum_bytes = self._searched(planner, work, deadline)
        else:
            incumbent = self._known(planner, work, deadline)
            minimum_bytes = incumbent.best.peak_bytes
        return self._certified(planner, work, incumbent, minimum_bytes, work.floor_bytes, started)

    def _with_offloaded(self, planner: Planner) -> Program:
        """The choice where parameters or optimizer state may live in a tier.

        Raises:
            UsageError: IRC403 where there is no tier; IRC404 where nothing of the graph can live in one.
            BudgetError: IRC204 when no schedule was found within the budget.
            TimeLimitError: IRC205 when the time limit ended before any schedule was found.
        """
        started = time.monotonic()
        if not planner.program.tiers:
            raise UsageError(
                "IRC403",
                f"{self.offload} shall live in a tier, and there is none",
                help="offer one beside it: --swap disk:/scratch, or the pass offer-tiers before",
            )
        budget_bytes = parse_budget(self.budget, planner.baseline_bytes)
        search = OffloadSearch(planner, self.which, budget_bytes, self.offloaded_names)
        if not search.offloaded_parameters and self.offloaded_names is None:
            raise UsageError(
                "IRC404",
                f"nothing of this model can live in tier {search.tier.name} as {self.offload}",
                help="optimizer state moves where irc.optimize has optimizer_in_backward= (or --optimizer); "
                "parameters of 4 KiB and more move, as far as the tier has room for them",
            )
        deadline = started + self.time_limit
        least_bytes = search.least_bytes(_within(deadline, _LEAST_PART))
        chosen = search.run(deadline)
        if chosen is None:
            if budget_bytes >= search.floor_bytes and time.monotonic() >= deadline:
                raise out_of_time(self.time_limit, budget_bytes, least_bytes)
            lives_bytes = sum(offloaded.storage.nbytes for offloaded in search.offloaded_parameters)
            tiers = planner.program.tiers
            error = over_budget(planner, budget_bytes, least_bytes, tiers=tiers, offloaded_bytes=lives_bytes)
            raise _with_largest_step(error, search)
        work = OffloadProblem(chosen.problem, planner.program.tiers, budget_bytes)
        return self._certified(planner, work, chosen.incumbent, least_bytes, search.floor_bytes, started)

    def _certified(
        self,
        planner: Planner,
        work: OffloadProblem,
        incumbent: Incumbent,
        minimum_bytes: int,
        floor_bytes: int,
        started: float,
    ) -> Program:
        """The program with a schedule that was found, checked once more, and its certificate."""
        program = planner.program_of(work.problem)
        assert program.costs is not None
        plan = certify(
            work.problem,
            work.budget_bytes,
            incumbent,
            baseline_bytes=planner.baseline_bytes,
            minimum_bytes=minimum_bytes,
            seconds=time.monotonic() - started,
            floor_bytes=floor_bytes,
            tiers=work.tiers,
        )
        return replace(program, schedule=incumbent.best.schedule, plan=plan)

    def _without_copies(self, planner: Planner) -> Program:
        strategy = "auto" if self.strategy == "recompute" else self.strategy
        return SelectCheckpoints(self.budget, strategy, self.time_limit).choose(planner)

    def _searched(self, planner: Planner, work: OffloadProblem, deadline: float) -> tuple[Incumbent, int]:
        """The best of all, and the smallest budget that is known."""
        candidates = planner.candidates(_within(deadline, _CANDIDATES_PART))
        least_bytes = least_budget(work, candidates, deadline=_within(deadline, _LEAST_PART))
        may_fit = work.budget_bytes >= work.floor_bytes
        seeds = known_offload_solutions(work, deadline=deadline)
        incumbent = search_with_copies(work, candidates, deadline=deadline, seeds=seeds) if may_fit else None
        if incumbent is None and may_fit and time.monotonic() < deadline:
            candidates = planner.candidates(deadline, is_thorough=True)
            incumbent = search_with_copies(work, candidates, deadline=deadline)
        if incumbent is not None:
            return incumbent, min(least_bytes, incumbent.best.peak_bytes)
        least_bytes = min(least_bytes, least_budget(work, candidates, deadline=deadline))
        is_late = time.monotonic() >= deadline
        if may_fit and (is_late or not candidates.is_complete):
            raise out_of_time(self.time_limit, work.budget_bytes, least_bytes)
        raise over_budget(planner, work.budget_bytes, least_bytes, is_known=not is_late, tiers=work.tiers)

    def _known(self, planner: Planner, work: OffloadProblem, deadline: float) -> Incumbent:
        """The strategy's own schedule: the fastest that fits, of those found in time."""
        made = [work.problem.keep_all, *OFFLOAD_STRATEGIES[self.strategy](work, deadline)]
        fitting = [s for s in made if s.peak_bytes <= work.budget_bytes]
        if not fitting:
            least_bytes = min(s.peak_bytes for s in made)
            raise over_budget(
                planner,
                work.budget_bytes,
                least_bytes,
                strategy=self.strategy,
                is_known=time.monotonic() < deadline,
                tiers=work.tiers,
            )
        return Incumbent(self.strategy, min(fitting, key=lambda s: (s.seconds, s.peak_bytes)))


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


_CANDIDATES_PART = 0.6
_LEAST_PART = 0.2
"""Of the time that is left, for schedules without regard to the budget, and then for the smallest budget."""


def _within(deadline: float, part: float) -> float:
    """The `time.monotonic()` at which a part of the time that is left is over."""
    now = time.monotonic()
    return now + (deadline - now) * part


def smallest_budget(planner: Planner) -> int:
    """The smallest budget that a schedule with copies to the program's tiers was found for, in bytes."""
    work = OffloadProblem(planner.problem, planner.program.tiers, planner.problem.keep_all.peak_bytes)
    return least_budget(work, planner.candidates(is_thorough=True))
