"""What the planner finds for a network on a described machine, strategy by strategy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from irc.frontends.torch import capture
from irc.ir import BudgetError, Graph, Plan, TimeLimitError, UsageError, stored_bytes
from irc.passes import Costs, Machine, PlanMemory, Planner, Program, Solution, analytic_costs
from irc.passes.offload.offload_problem import OffloadProblem
from irc.passes.published.lms import LOOK_AHEADS, lms_all

from ..models import MODELS
from ..models.registry import Example
from .published import Case

__all__ = [
    "Entry",
    "Maker",
    "captured",
    "entries",
    "fitted",
    "largest_original",
    "program_on",
    "reached",
    "roofline",
]

Maker = Callable[[str, int], Example]
"""A network and its arguments, from the name of a benchmark model and the batch."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one strategy does within one budget.

    Args:
        strategy: Its name.
        budget_bytes: Of the device; 0 where the strategy looks at none.
        peak_bytes: The most memory on the device; the smallest that it reaches, where it does not fit.
        host_bytes: The most that the tier holds.
        seconds: Time of a step; None where it does not fit.
        bound_seconds: No plan is faster; 0 where nothing was proved.
        plan_seconds: How long planning took.
        note: What found the plan, or why there is none.
    """

    strategy: str
    budget_bytes: int
    peak_bytes: int
    host_bytes: int
    seconds: float | None
    bound_seconds: float
    plan_seconds: float
    note: str


def _benchmark(model: str, batch: int) -> Example:
    return MODELS[model](batch=batch)


def captured(model: str, batch: int, make: Maker | None = None) -> Graph:
    """The training step as a graph; activations take no memory while it is captured."""
    module, args = (make or _benchmark)(model, batch)
    return capture(module, args).graph


def roofline(graph: Graph, machine: Machine) -> Costs:
    """The times of a machine's roofline, and no workspaces."""
    costs = analytic_costs(graph, machine)
    return Costs(costs.seconds, dict.fromkeys(costs.workspace_bytes, 0), costs.source)


def program_on(graph: Graph, machine: Machine) -> Program:
    """The graph with the times of a machine's roofline, no workspaces, and its host memory as a tier.

    Args:
        graph: A training step.
        machine: What it runs on.
    """
    return Program(
        graph, roofline(graph, machine), tiers=tuple(tier for tier in machine.tiers if tier.name == "host")
    )


def fitted(machine: Machine, graph: Graph, seconds: float) -> Machine:
    """The machine with another rate of operations, so that the original's step takes `seconds`.

    Args:
        machine: What else it is.
        graph: The step.
        seconds: More than memory and launches take alone.

    Raises:
        UsageError: IRC400 where they take more.
    """
    rates = 1.0, 1e24

    def step(flops: float) -> float:
        return analytic_costs(graph, replace(machine, flops=flops)).step_seconds(graph)

    low, high = rates
    if not step(high) < seconds <= step(low):
        raise UsageError(
            "IRC400",
            f"no rate of operations makes a step of {machine.name} take {seconds:g} s: memory and launches "
            f"alone take {step(high):.3g} s",
            help="choose another machine",
        )
    while high > low * (1 + _FIT):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step(middle) > seconds else (low, middle)
    return replace(machine, name=f"{machine.name}, fitted", flops=high)


_FIT = 1e-9


def entries(planner: Planner, case: Case, seconds: float) -> Iterator[Entry]:
    """All strategies for one case, at the published memory; joint at the published part of the original too.

    Args:
        planner: Of the case's program, with a tier.
        case: Its published memory is what budgets are.
        seconds: Time limit of each search.
    """
    yield original(planner)
    ome_bytes = case.published["ome"].device_bytes
    yield reached(planner, "recompute", case.published["recompute"].device_bytes, seconds)
    yield reached(planner, "recompute", ome_bytes, seconds)
    yield lowest_lms(planner)
    if "swap" in case.published:
        yield reached(planner, "lms", case.published["swap"].device_bytes, seconds)
    for strategy in ("lms", "swap", "ome", "pofo"):
        yield reached(planner, strategy, ome_bytes, seconds)
    yield reached(planner, "joint", ome_bytes, seconds)
    if "original" in case.published:
        same_part = ome_bytes / case.published["original"].device_bytes
        yield reached(planner, "joint", int(planner.baseline_bytes * same_part), seconds)


def original(planner: Planner) -> Entry:
    """The step as eager runs it."""
    problem = planner.original
    note = f"with the bound of workspaces {_with_workspaces(planner) / 1e6:,.0f} MB"
    return Entry("original", 0, planner.baseline_bytes, 0, problem.step_seconds, 0.0, 0.0, note)


def _with_workspaces(planner: Planner) -> int:
    program = planner.program
    assert program.costs is not None
    bound = analytic_costs(program.graph, _ANY)
    return Planner(Program(program.graph, bound)).baseline_bytes


_ANY = Machine("any", 1e12, 1e11, 0.0)
"""Workspaces do not depend on the machine."""


def lowest_lms(planner: Planner) -> Entry:
    """Large Model Support with all that can be swapped, at the look-ahead that takes the least memory."""
    started = time.monotonic()
    work = OffloadProblem(planner.problem, planner.program.tiers, 0)
    made = [(lms_all(work, look_ahead), look_ahead) for look_ahead in LOOK_AHEADS]
    simulated, look_ahead = min(made, key=lambda pair: (pair[0].peak_bytes, pair[0].seconds))
    return Entry(
        "lms",
        0,
        simulated.peak_bytes,
        _held_bytes(simulated),
        simulated.seconds,
        0.0,
        time.monotonic() - started,
        f"all swapped, look-ahead {look_ahead}",
    )


def _held_bytes(simulated: Solution) -> int:
    return sum(max(held, default=0) for held in stored_bytes(simulated.schedule).values())


def reached(planner: Planner, strategy: str, budget_bytes: int, seconds: float) -> Entry:
    """What a strategy of `plan-memory` finds; `joint` is `auto`."""
    started = time.monotonic()
    name = "auto" if strategy == "joint" else strategy
    try:
        plan = PlanMemory(budget_bytes, name, seconds).choose(planner).plan
    except (BudgetError, TimeLimitError) as error:
        least_bytes = error.minimum_bytes if isinstance(error, BudgetError) else 0
        took = time.monotonic() - started
        return Entry(strategy, budget_bytes, least_bytes, 0, None, 0.0, took, error.code)
    assert plan is not None
    return _entry(strategy, plan, time.monotonic() - started)


def _entry(strategy: str, plan: Plan, plan_seconds: float) -> Entry:
    assert plan.step_seconds is not None, "the costs are a machine's"
    return Entry(
        strategy,
        plan.budget_bytes,
        plan.peak_bytes,
        sum(use.held_bytes for use in plan.tiers),
        plan.step_seconds * (1 + plan.overhead),
        plan.step_seconds * (1 + plan.lower_bound_overhead),
        plan_seconds,
        plan.strategy,
    )


def largest_original(baseline: Callable[[int], int], budget_bytes: int, start: int) -> int:
    """The largest batch whose original fits; 0 where none does.

    Args:
        baseline: The peak of a batch, which grows with it, nearly in proportion; looked at seldom.
        budget_bytes: Of the device.
        start: The batch to begin with.
    """
    low, high = 0, math.inf
    batch, before = start, (0, 0)
    while high - low > 1:
        nbytes = baseline(batch)
        low, high = (batch, high) if nbytes <= budget_bytes else (low, batch)
        each = (nbytes - before[1]) / (batch - before[0])
        before = batch, nbytes
        batch += int((budget_bytes - nbytes) / each)
        batch = int(min(max(batch, low + 1), high - 1))
    return low
