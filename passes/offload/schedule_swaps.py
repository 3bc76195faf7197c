"""The pass that copies to tiers what a schedule keeps, until it is within a budget in bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

from ...ir import BudgetError, Region, UsageError, format_bytes, parse_budget, verify_schedule
from ..program import Program
from ..remat.certificate import certify
from ..remat.problem import CheckpointProblem
from ..remat.search import Incumbent
from .remat_and_offload import OffloadProblem

__all__ = ["ScheduleSwaps"]


@dataclass(frozen=True, slots=True)
class ScheduleSwaps:
    """Chooses and times copies for a schedule whose computations are chosen; these stay as they are.

    Args:
        budget: Of the device, as of `select-checkpoints`.
    """

    name: ClassVar[str] = "schedule-swaps"

    budget: int | str = "100%"

    def check(self) -> None:
        """Refuses a malformed budget.

        Raises:
            UsageError: IRC401.
        """
        parse_budget(self.budget)

    def run(self, program: Program, /) -> Program:
        """The program with copies in its schedule.

        Raises:
            UsageError: IRC405 where no pass before chose a schedule or offered a tier; IRC401 for a malformed
                budget.
            BudgetError: IRC204 where copies do not make the schedule fit.
        """
        if program.schedule is None or program.plan is None:
            raise UsageError(
                "IRC405",
                "schedule-swaps has no schedule to add copies to",
                help="choose one before: select-checkpoints{budget=...},schedule-swaps{budget=...}",
            )
        if not program.tiers:
            raise UsageError(
                "IRC405",
                "schedule-swaps has no tier to copy to",
                help="offer one before: offer-tiers{swap=disk},select-checkpoints{...},schedule-swaps{...}",
            )
        started = time.monotonic()
        assert program.costs is not None
        backward = tuple(n for n in program.schedule.computed if n.region is Region.BACKWARD)
        problem = CheckpointProblem(program.graph, program.costs, backward)
        baseline_bytes = program.plan.baseline_peak_bytes
        budget_bytes = parse_budget(self.budget, baseline_bytes)
        work = OffloadProblem(problem, program.tiers, budget_bytes)
        chosen = work.with_copies(work.simulate(program.schedule))
        if chosen is None:
            raise BudgetError(
                "IRC204",
                f"copies do not bring this schedule of {program.plan.peak_bytes} bytes within "
                f"{format_bytes(budget_bytes)} ({budget_bytes} bytes)",
                minimum_bytes=program.plan.peak_bytes,
                help="choose a schedule for a smaller budget before, or use plan-memory{budget=...}",
            )
        plan = certify(
            problem,
            budget_bytes,
            Incumbent(f"{program.plan.strategy}+swap", chosen),
            baseline_bytes=baseline_bytes,
            minimum_bytes=min(program.plan.minimum_budget_bytes, chosen.peak_bytes),
            seconds=time.monotonic() - started,
            floor_bytes=work.floor_bytes,
            tiers=program.tiers,
        )
        verify_schedule(
            chosen.schedule,
            program.costs.workspace_bytes,
            budget_bytes=budget_bytes,
            peak_bytes=plan.peak_bytes,
            tiers=program.tiers,
        )
        return replace(program, schedule=chosen.schedule, plan=plan)
