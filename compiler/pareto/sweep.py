"""Traces the memory/time front of a model: one capture, one measurement of costs, many budgets."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
from ...passes.remat.choice import GAP
from ...passes.remat.strategies import known_strategies
from ...passes.strategy_registry import Asked, load_strategies, needs_tiers
from ...torch_support.pytree import flatten
from ..request import MEASURED, Request, renamed_costs
from ..tiers import device_of, measured_tiers, offer, tier_configs
from ..time_steps import has_kernels, kernels_or_time_steps, seconds_to_capture
from .front import Front
from .journal import Identity, Journal, check_folder
from .points import PROOF_GAP, Known, Point, Refusal, Survey

__all__ = ["FrontObserver", "Sweep", "captured_for_front", "pareto", "trace_front"]

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
        gap: As for `irc.optimize`.
    """

    points: int = _POINTS
    budgets: tuple[int | str, ...] = ()
    strategy: str = "auto"
    time_limit: float = _SECONDS
    offered: OfferTiers | None = None
    gap: float = GAP

    def check(self) -> None:
        """Refuses malformed options.

        Raises:
            UsageError: IRC440 for the number of points; IRC401 or IRC403 for a budget, the strategy, the time
                limit or the gap; as `OfferTiers` for the tiers.
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
        return PlanMemory(budget, self.strategy, self.time_limit, gap=self.gap)

    @property
    def copies(self) -> bool:
        """Whether plans copy to tiers, and bounds hold for schedules that do."""
        return self.offered is not None and (self.strategy == "auto" or needs_tiers(self.strategy))

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
        gap = "" if self.gap == GAP else f", gap {self.gap:g}"
        return f"{budgets}, strategy {self.strategy}, {self.time_limit:g} s each{gap}"


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
    gap: float = GAP,
    costs: str = MEASURED,
    loss: Loss | None = None,
    swap: str | Sequence[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    restart: bool = False,
    profile: bool | str | None = None,
) -> Front:
    """The memory/time front of a model: the least overhead at each budget, with its bound and its knee.

    The model is captured and its operations are measured once, for all budgets. Nothing of it changes. If
    budgets are below what the kernels of LSTM layers take, it is captured once more, with their time steps.

    Args:
        model: As for `irc.optimize`.
        example_args: As for `irc.optimize`.
        points: How many budgets, evenly spread from the smallest feasible one to the baseline's peak.
        budgets: The budgets instead; each in bytes, `"4GiB"`, or `"60%"` of the baseline's peak.
        example_kwargs: As for `irc.optimize`.
        strategy: As for `irc.optimize`.
        time_limit: Seconds for the search at each budget.
        gap: As for `irc.optimize`, at each budget.
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
    sweep = Sweep(points, tuple(budgets), strategy, time_limit, offered, gap)
    sweep.check()
    request = Request.of("100%", costs=costs)
    args = _checked(model, example_args, example_kwargs, loss)
    target = None if folder is None else Path(folder)
    if target is not None:
        check_folder(target, restart=restart)
    sweep = sweep.measured(model, flatten((args, example_kwargs))[0])
    program, time_steps = captured_for_front(model, args, example_kwargs, loss, request, sweep)
    return trace_front(
        program, type(model).__name__, sweep, folder=target, restart=restart, time_steps=time_steps
    )


def captured_for_front(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    loss: Loss | None,
    request: Request,
    sweep: Sweep,
) -> tuple[Program, Callable[[], Program]]:
    """Captures a model for `trace_front`.

    Args:
        model: As for `pareto`.
        args: Its arguments.
        kwargs: Its keyword arguments.
        loss: As for `pareto`.
        request: Where costs come from.
        sweep: Its time limit holds for tracing time steps.

    Returns:
        The program with costs, and what captures it with the time steps of LSTM layers in place of kernels.

    Raises:
        IrcError: As for `pareto`.
    """
    traced = partial(capture, model, args, kwargs, loss=loss, measure=request.cost.measure)
    program = request.costed(traced(with_eager=True))

    def time_steps() -> Program:
        limit = seconds_to_capture(sweep.time_limit)
        return replace(request.costed(traced(stepwise=True, time_limit=limit)), kernels=program)

    return program, time_steps


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
    time_steps: Callable[[], Program] | None = None,
) -> Front:
    """The front of a program with costs.

    Args:
        program: A graph and its costs.
        model: The model's name.
        sweep: Which budgets, and how they are planned; tiers of this machine are measured.
        folder: As for `pareto`.
        restart: As for `pareto`.
        observer: Told of each budget.
        time_steps: Captures the program with the time steps of LSTM layers in place of kernels, for budgets
            below the smallest one that kernels fit into; None plans kernels alone.

    Raises:
        KeyboardInterrupt: With a note that says how many points are kept.
        IrcError: As for `pareto`.
    """
    sweep.check()
    journal = Journal.open(folder, Identity.of(program, str(sweep), sweep.tiers), restart=restart)
    if journal.survey is not None:
        program = replace(program, tiers=journal.survey.tiers)  # not as they are measured now
        planners = _Planners(Planner(program), time_steps)
    else:
        planners = _Planners(
            Planner(program if sweep.offered is None else sweep.offered.run(program)), time_steps
        )
        journal.begin(_survey(planners, sweep))
    survey = journal.survey
    assert survey is not None
    finished = {outcome.budget_bytes for outcome in journal.outcomes}
    if observer is not None:
        observer.start(len(survey.budgets), len(finished))
    try:
        for budget in survey.budgets:
            if budget not in finished:
                journal.append(_plan_within(planners, budget, sweep, observer))
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


@dataclass
class _Planners:
    """The planner of a front's program, and that of its time steps once one is needed.

    Args:
        kernels: The planner of the program as eager runs it.
        capture: Captures its time steps; None if it has no others.
    """

    kernels: Planner
    capture: Callable[[], Program] | None

    @property
    def has_time_steps(self) -> bool:
        """Whether there are kernels that can be captured as their time steps."""
        return self.capture is not None and has_kernels(self.kernels.program.graph)

    @cached_property
    def time_steps(self) -> Planner:
        """The planner of the time steps, which may copy to the same tiers.

        Raises:
            TimeLimitError: IRC205 for too many time steps.
        """
        assert self.capture is not None
        return Planner(replace(self.capture(), tiers=self.kernels.program.tiers))

    def plan(self, chooser: PlanMemory) -> Program:
        """Plans for one budget, by time steps if kernels do not fit.

        Raises:
            BudgetError: IRC204.
            TimeLimitError: IRC205.
            VerificationError: As `_planned`.
        """
        if not self.has_time_steps:
            return _planned(self.kernels, chooser)
        graph = self.kernels.program.graph
        return kernels_or_time_steps(
            graph, lambda: _planned(self.kernels, chooser), lambda: _planned(self.time_steps, chooser)
        )


def _plan_within(
    planners: _Planners, budget_bytes: int, sweep: Sweep, observer: FrontObserver | None
) -> Point | Refusal:
    if observer is not None:
        observer.before(budget_bytes)
    started = time.thread_time()
    try:
        program = planners.plan(sweep.chooser(budget_bytes))
        outcome = _point(program, is_bound=sweep.copies or sweep.offered is None)
    except (BudgetError, TimeLimitError) as error:
        outcome = Refusal(budget_bytes, error.code, error.message, time.thread_time() - started)
    if observer is not None:
        observer.after(outcome)
    return outcome


def _planned(planner: Planner, select: PlanMemory) -> Program:
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
    return program


def _point(program: Program, *, is_bound: bool) -> Point:
    """A plan as a point; what was proved of schedules without copies says nothing if there are tiers."""
    plan = _plan_of(program)
    assert plan.step_seconds is not None, "a front is of measured times"
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
        time_steps=program.kernels is not None,
    )


def _plan_of(program: Program) -> Plan:
    assert program.plan is not None
    return program.plan


def _survey(planners: _Planners, sweep: Sweep) -> Survey:
    """Looks at a program with costs.

    Raises:
        BudgetError: IRC443 when all budgets are below the smallest feasible one.
    """
    planner = planners.kernels
    baseline = _plan_of(_planned(planner, PlanMemory(_EVERY_SCHEDULE, "keep-all", time_limit=0)))
    assert baseline.step_seconds is not None, "a front is of measured times"
    work = OffloadProblem(planner.problem, planner.program.tiers, baseline.baseline_peak_bytes)
    floor_bytes, minimum_bytes = _least_bytes(planner, sweep)
    budgets = sweep.budget_bytes(minimum_bytes, baseline.baseline_peak_bytes)
    kernels_minimum_bytes, remark = 0, ""
    if planners.has_time_steps and (not sweep.budgets or budgets[-1] < minimum_bytes):
        try:
            floor, least = _least_bytes(planners.time_steps, sweep, time.thread_time() + sweep.time_limit)
            if least < minimum_bytes:
                kernels_minimum_bytes = minimum_bytes
                floor_bytes, minimum_bytes = min(floor_bytes, floor), least
                budgets = sweep.budget_bytes(minimum_bytes, baseline.baseline_peak_bytes)
        except TimeLimitError as late:
            remark = f"; with the time steps of its LSTM layers it may fit into less, but {late.message}"
    if budgets[0] < minimum_bytes:
        raise BudgetError(
            "IRC443",
            f"a training step needs {format_bytes(minimum_bytes)} ({minimum_bytes} bytes) at least"
            f"{_with_copies(planner, sweep)}; the largest budget is {format_bytes(budgets[0])} "
            f"({budgets[0]} bytes){remark}",
            minimum_bytes=minimum_bytes,
            help=f"give a budget of {minimum_bytes} bytes or more, or points instead of budgets",
        )
    return Survey(
        baseline_bytes=baseline.baseline_peak_bytes,
        static_bytes=baseline.static_bytes,
        floor_bytes=floor_bytes,
        minimum_bytes=minimum_bytes,
        step_seconds=baseline.step_seconds,
        costs=baseline.costs,
        options=str(sweep),
        budgets=budgets,
        known=_known(work),
        swap=sweep.swap,
        tiers=planner.program.tiers,
        kernels_minimum_bytes=kernels_minimum_bytes,
    )


def _least_bytes(planner: Planner, sweep: Sweep, deadline: float = math.inf) -> tuple[int, int]:
    """The bytes that no schedule goes below, and the smallest budget that one was found for until then."""
    minimum_bytes = planner.minimum_bytes(deadline, is_thorough=True)
    if not sweep.copies:
        return planner.problem.floor_bytes, minimum_bytes
    work = OffloadProblem(planner.problem, planner.program.tiers, planner.baseline_bytes)
    return work.floor_bytes, min(minimum_bytes, smallest_budget(planner, deadline))


def _with_copies(planner: Planner, sweep: Sweep) -> str:
    return f" with copies to {' and '.join(t.name for t in planner.program.tiers)}" if sweep.copies else ""


def _known(work: OffloadProblem) -> tuple[Known, ...]:
    """The points of strategies that need no search; with tiers Large Model Support is one."""
    problem = work.problem
    asked = Asked(work.budget_bytes, 0, math.inf, work.tiers)
    copying = (
        named
        for strategy in (load_strategies(copies=True) if work.tiers else ())
        for named in zip(strategy.without_budget, strategy.find(problem, asked), strict=False)
    )
    return tuple(
        Known(name, solution.peak_bytes, solution.seconds / problem.step_seconds - 1)
        for name, solution in (*known_strategies(problem), *copying)
    )
