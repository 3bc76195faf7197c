"""The pass that chooses what to compute again and what to copy to tiers, within a budget in bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

from ..ir import UsageError, parse_budget
from .offload.choose_offload import choose_copies, choose_offloaded
from .offload.offload_problem import OffloadProblem
from .offload.offloaded_parameters import OFFLOADABLE
from .offload.remat_and_offload import least_budget
from .program import Program
from .remat.certificate import certify
from .remat.choice import GAP, ChosenSchedule, Limits
from .remat.choose_recomputation import choose_recomputation, is_all_kept
from .remat.planner import Planner
from .strategy_registry import SEARCHES, STRATEGIES, needs_tiers, strategy_named

__all__ = ["PlanMemory", "smallest_budget"]


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Chooses a schedule whose peak is within the budget, at the least loss of time.

    It recomputes; if the program has tiers, it copies to them too.

    Args:
        budget: Bytes of the device, `4GiB`, `4GB`, or `60%` of the baseline peak, which is `100%`.
        strategy: `auto` takes the best of all. For comparison, `ilp`, `eviction` and the published methods
            (`STRATEGIES`; `every-8`: any k) recompute, and copy nothing. With tiers, `lms` copies as Large
            Model Support, `ome` copies some of its checkpoints, `pofo` plans a chain of blocks, `swap`
            copies and computes nothing twice, and `recompute` is `auto` without copies.
        time_limit: Seconds of the processor for the search; the best schedule so far counts when they are
            over.
        gap: The search stops at a schedule that is proved this close to the best, as a fraction of the
            step's time.
        offload: The kinds that may live in the first tier between steps: `params`, `optimizer`,
            `params+optimizer` or `none`. How much of it does is chosen.
        offloaded_names: The names of what is offloaded, once known. Not part of the text form.
        planner: The planner of the program that is to be planned, once known. Not part of the text form.
    """

    name: ClassVar[str] = "plan-memory"
    strategies: ClassVar[tuple[str, ...]] = (*SEARCHES, *STRATEGIES, "recompute")

    budget: int | str = "100%"
    strategy: str = "auto"
    time_limit: float = 60.0
    offload: str = "none"
    gap: float = GAP
    offloaded_names: tuple[str, ...] | None = field(default=None, metadata={"in_text": False})
    planner: Planner | None = field(default=None, compare=False, repr=False, metadata={"in_text": False})

    def check(self) -> None:
        """Refuses malformed options.

        Raises:
            UsageError: IRC401 for a malformed budget; IRC403 for an unknown strategy or time limit, for what
                cannot live in a tier, and for a strategy that leaves all of it on the device.
        """
        parse_budget(self.budget)
        self._check_types()
        if self.strategy not in (*SEARCHES, "recompute") and strategy_named(self.strategy) is None:
            raise UsageError(
                "IRC403",
                f"there is no strategy {self.strategy!r}",
                help=f"choose one of {', '.join(self.strategies)}",
            )
        if not 0 <= self.time_limit < math.inf:
            raise UsageError(
                "IRC403",
                f"the time limit is {self.time_limit} seconds",
                help="give a number of seconds, 0 or more",
            )
        if not 0 <= self.gap < 1:
            raise UsageError(
                "IRC403",
                f"the gap is {self.gap} of the step's time",
                help="give a fraction of it: 0.005 stops within half a per cent of the best, 0 at the best",
            )
        unknown = [what for what in self.which if what not in OFFLOADABLE]
        if unknown:
            raise UsageError(
                "IRC403",
                f"{unknown[0]!r} cannot live in a tier between steps",
                help=f"choose of {', '.join(OFFLOADABLE)}, or none",
            )
        if self.which and self.strategy != "auto":
            raise UsageError(
                "IRC403",
                f"strategy {self.strategy} leaves parameters and optimizer state on the device",
                help="use strategy auto, or leave params and optimizer out of what is swapped",
            )

    def check_tiers(self, *, has_tiers: bool) -> None:
        """Refuses options that need a tier if there is none.

        Args:
            has_tiers: Whether there are tiers to copy to.

        Raises:
            UsageError: IRC403 for a strategy that copies, and for what shall live in a tier.
        """
        if has_tiers:
            return
        if needs_tiers(self.strategy):
            raise UsageError(
                "IRC403",
                f"strategy {self.strategy} copies, and there is no tier to copy to",
                help="offer one: --swap host, or the pass offer-tiers before; or use strategy auto",
            )
        if self.which:
            raise UsageError(
                "IRC403",
                f"{self.offload} shall live in a tier, and there is none",
                help="offer one beside it: --swap disk:/scratch, or the pass offer-tiers before",
            )

    def _check_types(self) -> None:
        strategy = cast(object, self.strategy)
        numbers = cast("tuple[object, object]", (self.time_limit, self.gap))
        are_numbers = all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers)
        if not isinstance(strategy, str) or not are_numbers:
            raise UsageError(
                "IRC403",
                f"strategy is {strategy!r}, time_limit {numbers[0]!r} and gap {numbers[1]!r}",
                help="give the strategy's name as a text, the time limit as a number of seconds, and the gap "
                "as a fraction",
            )

    @property
    def which(self) -> Sequence[str]:
        """The kinds that may live in a tier."""
        return () if self.offload == "none" else tuple(self.offload.split("+"))

    def run(self, program: Program, /) -> Program:
        """The program with a schedule and its plan.

        Raises:
            BudgetError: IRC204 when no schedule was found within the budget.
            TimeLimitError: IRC205 when the time limit ended before any schedule was found.
            UsageError: IRC401 and IRC403 as of `check` and `check_tiers`; IRC404 if nothing of the graph can
                live in a tier.
        """
        planner = self.planner
        return self.choose(
            planner if planner is not None and planner.program is program else Planner(program)
        )

    def choose(self, planner: Planner, /) -> Program:
        """Does what `run` does, with all that the planner knows from other budgets of the same program."""
        self.check()
        self.check_tiers(has_tiers=bool(planner.program.tiers))
        limits = Limits(parse_budget(self.budget, planner.baseline_bytes), self.time_limit, self.gap)
        choice = self._choice(planner, limits)
        program = planner.program_of(choice.problem)
        assert program.costs is not None
        plan = certify(
            choice,
            limits.budget_bytes,
            baseline=planner.baseline,
            seconds=time.thread_time() - limits.started,
            kernels_seconds=planner.kernels_seconds,
        )
        return replace(program, schedule=choice.incumbent.best.schedule, plan=plan)

    def without_times(self, program: Program) -> PlanMemory | None:
        """The pass for a program of which it keeps all, and runs nothing twice; None if times may matter.

        Raises:
            UsageError: As of `run`.
        """
        self.check()
        if program.tiers or self.which or program.kernels is not None:
            return None
        planner = Planner(program)
        budget_bytes = parse_budget(self.budget, planner.baseline_bytes)
        return replace(self, planner=planner) if is_all_kept(planner, self.strategy, budget_bytes) else None

    def _choice(self, planner: Planner, limits: Limits) -> ChosenSchedule:
        if self.which:
            return choose_offloaded(planner, self.which, self.offloaded_names, limits)
        if planner.program.tiers and (self.strategy == "auto" or needs_tiers(self.strategy)):
            return choose_copies(planner, self.strategy, limits)
        strategy = "auto" if self.strategy == "recompute" else self.strategy
        return choose_recomputation(planner, strategy, limits)


def smallest_budget(planner: Planner, deadline: float = math.inf) -> int:
    """The smallest budget that a schedule was found for, with copies if the program has tiers, in bytes.

    Args:
        planner: The program's planner.
        deadline: `time.thread_time()` after which nothing more is tried.
    """
    if not planner.program.tiers:
        return planner.minimum_bytes(deadline, is_thorough=True)
    work = OffloadProblem(planner.problem, planner.program.tiers, planner.problem.keep_all.peak_bytes)
    return least_budget(work, planner.candidates(deadline, is_thorough=True))
