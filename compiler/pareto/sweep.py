"""Traces the memory/time front of a model: one capture, one measurement of costs, many budgets."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor, nn

from ...backends.torch import check_tier_configs
from ...frontends.torch import Loss, capture
from ...ir import (
    BudgetError,
    Plan,
    TimeLimitError,
    UsageError,
    format_bytes,
    parse_budget,
    verify_schedule,
)
from ...passes import (
    OfferTiers,
    PlanMemory,
    Planner,
    Program,
    smallest_budget,
)
from ...passes.offload.offload_problem import OffloadProblem
from ...passes.offload.strategies import LOOK_AHEADS, OFFLOAD_STRATEGIES, lms_all
from ...passes.remat.strategies import known_strategies
from ...torch_support.pytree import flatten
from ..request import MEASURED, Request, renamed_costs
from ..tiers import device_of, measured_tiers, offer, tier_configs
from .front import Front
from .journal import Identity, Journal, check_folder
from .points import PROOF_GAP, Known, Point, Refusal, Survey

__all__ = ["FrontObserver", "Sweep", "pareto", "trace_front"]

_POINTS = 20
_SECONDS = 20.0
_EVERY_SCHEDULE = "100000%"
"""A budget that no strategy exceeds."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Which budgets are planned, and how.

    Args:
        points: How many budgets, evenly spread from the smallest feasible one to the baseline's peak, both
            ends included; static bytes are in all of them, so the spread is over what can be saved.
        budgets: The budgets instead, as for `irc.optimize`.
        strategy: As for `irc.optimize`.
        time_limit: Seconds for the search at each budget.
        offered: The tiers that plans may copy to; None if nothing is copied.
    """

    points: int = _POINTS
    budgets: tuple[int | str, ...] = ()
    strategy: str = "auto"
    time_limit: float = _SECONDS
    offered: OfferTiers | None = None

    def check(self) -> None:
        """Refuses malformed options.

        Raises:
            UsageError: IRC440 for the number of points; IRC401 or IRC403 for a budget, the strategy or the
                time limit; as `OfferTiers` for the tiers.
        """
        points = cast(object, self.points)
        if not isinstance(points, int) or isinstance(points, bool) or points < 2:
            raise UsageError("IRC440", f"a front of {points!r} points", help="give 2 points or more")
        for budget in self.budgets:
            parse_budget(budget)
        chooser = self.chooser("100%")
        chooser.check()
        chooser.check_tiers(has_tiers=self.offered is not None)
        if self.offered is not None:
            self.offered.check()

    def chooser(self, budget: int | str) -> PlanMemory:
        """The pass that plans within a budget."""
        return PlanMemory(budget, self.strategy, self.time_limit)

    @property
    def copies(self) -> bool:
        """Whether plans copy to tiers, and bounds hold for schedules that do."""
        return self.offered is not None and self.strategy in ("auto", *OFFLOAD_STRATEGIES)

    @property
    def swap(self) -> tuple[str, ...]:
        """The tiers as they were asked for."""
        return () if self.offered is None else tuple(map(str, self.offered.requests()))

    @property
    def tiers(self) -> str:
        """The tiers as text, to tell fronts apart; how fast those of this machine are differs by run."""
        described = () if self.offered is None or not self.offered.machine else self.offered.offered()
        return " ".join((*self.swap, *map(str, described)))

    def measured(self, model: nn.Module, leaves: Sequence[Any]) -> Sweep:
        """The same, with the tiers of this machine measured if those are offered.

        Args:
            model: What would copy.
            leaves: What its arguments hold.

        Raises:
            TierError: IRC571, IRC575 or IRC579 for a tier that the model cannot copy to.
            UsageError: IRC419 for a tier that cannot be measured.
        """
        if self.offered is None:
            return self
        device = device_of(model, leaves)
        check_tier_configs(tier_configs(self.offered, device), {str(device)})
        return replace(self, offered=measured_tiers(self.offered, device))

    def budget_bytes(self, minimum_bytes: int, baseline_bytes: int) -> tuple[int, ...]:
        """The budgets in bytes, the largest first."""
        if self.budgets:
            found = {parse_budget(budget, baseline_bytes) for budget in self.budgets}
        else:
            room, steps = max(baseline_bytes - minimum_bytes, 0), self.points - 1
            found = {minimum_bytes + room * step // steps for step in range(self.points)}
        return tuple(sorted(found, reverse=True))

    def __str__(self) -> str:
        budgets = " ".join(map(str, self.budgets)) or f"{self.points} points"
        return f"{budgets}, strategy {self.strategy}, {self.time_limit:g} s each"


class FrontObserver(Protocol):
    """Looks on while a front is traced."""

    def start(self, budgets: int, finished: int) -> None:
        """Called once the budgets are known; `finished` of them are done already."""
        ...

    def before(self, budget_bytes: int) -> None:
        """Called before a budget is planned."""
        ...

    def after(self, outcome: Point | Refusal) -> None:
        """Called with what planning at that budget gave."""
        ...


def pareto(
    model: nn.Module,
    example_args: tuple[Any, ...] | Tensor,
    *,
    points: int = _POINTS,
    budgets: Sequence[int | str] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    strategy: str = "auto",
    time_limit: float = _SECONDS,
    costs: str = MEASURED,
    loss: Loss | None = None,
    swap: str | Sequence[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    restart: bool = False,
    profile: bool | str | None = None,
) -> Front:
    """The memory/time front of a model: the least overhead at each budget, with its bound and its knee.

    The model is captured and its operations are measured once, for all budgets. Nothing of it changes.

    Args:
        model: As for `irc.optimize`.
        example_args: As for `irc.optimize`.
        points: How many budgets, evenly spread from the smallest feasible one to the baseline's peak.
        budgets: The budgets instead; each in bytes, `"4GiB"`, or `"60%"` of the baseline's peak.
        example_kwargs: As for `irc.optimize`.
        strategy: As for `irc.optimize`.
        time_limit: Seconds for the search at each budget.
        costs: As for `irc.optimize`.
        loss: As for `irc.optimize`.
        swap: As for `irc.optimize`: each point may copy to these tiers, and its bound is over all schedules
            that do. The smallest budget is the smallest one with copies.
        folder: Where each point is written as soon as it is found, and the front at the end. The same call
            goes on where an earlier one was interrupted, with the tiers as that one measured them.
        restart: Whether to begin anew in a folder that has points already.
        profile: The old name of `costs`, until the next version.

    Returns:
        The front: `.points`, `.knee`, `.table()`, `.to_json()`, `.draw(path)`, `.save(folder)`.

    Raises:
        BudgetError: IRC443 when the model fits in none of `budgets`.
        TierError: As for `irc.optimize`.
        TimeLimitError: IRC444 when the time limit ended before any plan was found.
        UnsupportedError: As for `irc.optimize`.
        UsageError: IRC440 for `points`; IRC441, IRC442, IRC446 or IRC448 for `folder`; IRC447 for what lives
            in a tier between steps; as for `irc.optimize`.
    """
    costs = renamed_costs(costs, profile)
    offered = None if swap is None else offer(swap, costs)
    sweep = Sweep(points, tuple(budgets), strategy, time_limit, offered)
    sweep.check()
    request = Request.of("100%", costs=costs)
    args = _checked(model, example_args, example_kwargs, loss)
    target = None if folder is None else Path(folder)
    if target is not None:
        check_folder(target, restart=restart)
    sweep = sweep.measured(model, flatten((args, example_kwargs))[0])
    captured = capture(model, args, example_kwargs, loss=loss, with_eager=True, measure=request.cost.measure)
    program = request.costed(captured)
    return trace_front(program, type(model).__name__, sweep, folder=target, restart=restart)


def _checked(model: object, args: object, kwargs: object, loss: object) -> tuple[Any, ...]:
    """The arguments of a step, if the call is of the right types."""
    wrong = {
        "model": (model, isinstance(model, nn.Module), "a torch.nn.Module"),
        "example_args": (args, isinstance(args, Tensor | tuple | list), "a tensor, or a tuple of arguments"),
        "example_kwargs": (kwargs, kwargs is None or isinstance(kwargs, Mapping), "a dict"),
        "loss": (loss, loss is None or callable(loss), "a function of the model's result"),
    }
    for name, (given, fits, wanted) in wrong.items():
        if not fits:
            raise UsageError("IRC406", f"{name} is a {type(given).__name__}", help=f"give {wanted}")
    return (args,) if isinstance(args, Tensor) else tuple(cast("Sequence[Any]", args))


# ---------------------------------------------------------------------- from a program with costs


def trace_front(
    program: Program,
    model: str,
    sweep: Sweep,
    *,
    folder: Path | None = None,
    restart: bool = False,
    observer: FrontObserver | None = None,
) -> Front:
    """The front of a program with costs.

    Args:
        program: A graph and its costs.
        model: The model's name.
        sweep: Which budgets, and how they are planned; tiers of this machine are measured.
        folder: As for `pareto`.
        restart: As for `pareto`.
        observer: Told of each budget.

    Raises:
        KeyboardInterrupt: With a note that says how many points are kept.
        IrcError: As for `pareto`.
    """
    sweep.check()
    journal = Journal.open(folder, Identity.of(program, str(sweep), sweep.tiers), restart=restart)
    if journal.survey is not None:
        planner = Planner(replace(program, tiers=journal.survey.tiers))  # not as they are measured now
    else:
        planner = Planner(program if sweep.offered is None else sweep.offered.run(program))
        journal.begin(_survey(planner, sweep))
    survey = journal.survey
    assert survey is not None
    finished = {outcome.budget_bytes for outcome in journal.outcomes}
    if observer is not None:
        observer.start(len(survey.budgets), len(finished))
    try:
        for budget in survey.budgets:
            if budget not in finished:
                journal.append(_plan_within(planner, budget, sweep, observer))
    except KeyboardInterrupt as interrupt:
        kept = f"{len(journal.outcomes)} of {len(survey.budgets)} points are finished"
        interrupt.add_note(f"{kept}; the same command goes on from there" if folder else kept)
        raise
    front = Front.of(model, survey, journal.outcomes)
    if not front.points:
        raise TimeLimitError(
            "IRC444",
            f"the time limit of {sweep.time_limit:g} s ended before a plan was found at any of "
            f"{len(survey.budgets)} budgets",
            help="raise the time limit, or the budgets",
        )
    if folder is not None:
        front.save(folder)
    return front


def _plan_within(
    planner: Planner, budget_bytes: int, sweep: Sweep, observer: FrontObserver | None
) -> Point | Refusal:
    if observer is not None:
        observer.before(budget_bytes)
    started = time.monotonic()
    try:
        plan = _plan(planner, sweep.chooser(budget_bytes))
        outcome = _point(plan, is_bound=sweep.copies or sweep.offered is None)
    except (BudgetError, TimeLimitError) as error:
        outcome = Refusal(budget_bytes, error.code, error.message, time.monotonic() - started)
    if observer is not None:
        observer.after(outcome)
    return outcome


def _plan(planner: Planner, select: PlanMemory) -> Plan:
    """Plans for one budget, and verifies the plan.

    Raises:
        VerificationError: When the schedule is not valid, or over the budget.
    """
    program = select.choose(planner)
    schedule, plan, costs = program.schedule, program.plan, program.costs
    assert schedule is not None and plan is not None and costs is not None
    verify_schedule(
        schedule,
        costs.workspace_bytes,
        budget_bytes=plan.budget_bytes,
        peak_bytes=plan.peak_bytes,
        tiers=program.tiers,
    )
    return plan


def _point(plan: Plan, *, is_bound: bool) -> Point:
    """A plan as a point; what was proved of schedules without copies says nothing if there are tiers."""
    bound = plan.lower_bound_overhead if is_bound else 0.0
    return Point(
        budget_bytes=plan.budget_bytes,
        peak_bytes=plan.peak_bytes,
        seconds=plan.step_seconds * (1 + plan.overhead),
        overhead=plan.overhead,
        bound=bound,
        proved=plan.overhead - bound <= PROOF_GAP,
        strategy=plan.strategy,
        found_at_bytes=plan.budget_bytes,
        plan_seconds=plan.seconds_to_plan,
        tiers=plan.tiers,
        exposed_seconds=plan.exposed_seconds,
    )


def _survey(planner: Planner, sweep: Sweep) -> Survey:
    """Looks at a program with costs.

    Raises:
        BudgetError: IRC443 when all budgets are below the smallest feasible one.
    """
    baseline = _plan(planner, PlanMemory(_EVERY_SCHEDULE, "keep-all", time_limit=0))
    work = OffloadProblem(planner.problem, planner.program.tiers, baseline.baseline_peak_bytes)
    minimum_bytes = planner.minimum_bytes(is_thorough=True)
    if sweep.copies:
        minimum_bytes = min(minimum_bytes, smallest_budget(planner))
    budgets = sweep.budget_bytes(minimum_bytes, baseline.baseline_peak_bytes)
    if budgets[0] < minimum_bytes:
        raise BudgetError(
            "IRC443",
            f"a training step needs {format_bytes(minimum_bytes)} ({minimum_bytes} bytes) at least"
            f"{_with_copies(planner, sweep)}; the largest budget is {format_bytes(budgets[0])} "
            f"({budgets[0]} bytes)",
            minimum_bytes=minimum_bytes,
            help=f"give a budget of {minimum_bytes} bytes or more, or points instead of budgets",
        )
    return Survey(
        baseline_bytes=baseline.baseline_peak_bytes,
        static_bytes=baseline.static_bytes,
        floor_bytes=work.floor_bytes if sweep.copies else planner.problem.floor_bytes,
        minimum_bytes=minimum_bytes,
        step_seconds=baseline.step_seconds,
        costs=baseline.costs,
        options=str(sweep),
        budgets=budgets,
        known=_known(work),
        swap=sweep.swap,
        tiers=planner.program.tiers,
    )


def _with_copies(planner: Planner, sweep: Sweep) -> str:
    return f" with copies to {' and '.join(t.name for t in planner.program.tiers)}" if sweep.copies else ""


def _known(work: OffloadProblem) -> tuple[Known, ...]:
    """The points of strategies that need no search; with tiers Large Model Support is one."""
    problem = work.problem
    copying = ((f"lms-{ahead}", lms_all(work, ahead)) for ahead in LOOK_AHEADS if work.tiers)
    return tuple(
        Known(name, solution.peak_bytes, solution.seconds / problem.step_seconds - 1)
        for name, solution in (*known_strategies(problem), *copying)
    )
