"""A schedule that a search chose within a budget, and the refusals if it chose none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...ir import (
    BudgetError,
    Tier,
    TimeLimitError,
    format_bytes,
    named_annotations,
)
from ..program import without_annotations
from .floor import Floor
from .planner import Planner
from .problem import CheckpointProblem
from .search import Incumbent

__all__ = ["GAP", "ChosenSchedule", "Limits", "out_of_time", "over_budget"]


GAP = 0.005
"""The distance from the best at which a search stops, unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a search, which starts when they are made.

    Args:
        budget_bytes: The budget of the device.
        time_limit: Seconds of the processor for the search.
        gap: The distance from the best at which to stop, as a fraction of the step's time.

    Attributes:
        started: `time.thread_time()` at the start.
    """

    budget_bytes: int
    time_limit: float
    gap: float = GAP
    started: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "started", time.thread_time())

    @property
    def deadline(self) -> float:
        """`time.thread_time()` at which to stop; the best schedule so far counts then."""
        return self.started + self.time_limit


@dataclass(frozen=True, slots=True)
class ChosenSchedule:
    """A schedule within a budget.

    Args:
        problem: The problem that it solves.
        incumbent: The schedule, and the bound of its time.
        minimum_bytes: The smallest budget that a schedule is known for.
        floor_bytes: The bytes that no schedule can go below.
        tiers: The tiers that it may copy to.
    """

    problem: CheckpointProblem
    incumbent: Incumbent
    minimum_bytes: int
    floor_bytes: int
    tiers: Sequence[Tier] = ()


def over_budget(
    planner: Planner,
    budget_bytes: int,
    minimum_bytes: int,
    *,
    strategy: str | None = None,
    is_known: bool = True,
    tiers: Sequence[Tier] = (),
    offloaded_bytes: int = 0,
) -> BudgetError:
    """Makes the error that refuses a budget if no schedule was found for it.

    Args:
        planner: The planner that was asked.
        budget_bytes: The budget.
        minimum_bytes: The smallest budget that a schedule is known for.
        strategy: The strategy that was asked for; None if all were tried.
        is_known: Whether all was tried that gives the smallest budget.
        tiers: The tiers to which the schedule might have copied storages.
        offloaded_bytes: Bytes of parameters and optimizer state that would live in a tier then.
    """
    problem = planner.problem
    floor = Floor.of(problem)
    by = f" with copies to {' and '.join(tier.name for tier in tiers)}" if tiers else ""
    by += f" by strategy {strategy}" if strategy else ""
    is_proved = not tiers and minimum_bytes <= problem.floor_bytes
    count = problem.graph.forwards_in_flight
    what = "a training step" if count == 1 else f"a training step with {count} forwards in flight"
    if is_proved:
        least = "at least"
    elif is_known:
        least = "by the smallest schedule that was found"
    else:
        least = "by what was found within the time limit"
    proved = (
        ""
        if is_proved or tiers
        else f" (proved: with this order of backward none needs less than {problem.floor_bytes})"
    )
    return BudgetError(
        "IRC204",
        f"{what} needs {format_bytes(minimum_bytes)} ({minimum_bytes} bytes) {least}{by}{proved}, over "
        f"the budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes); "
        + (_static(problem, tiers[0], offloaded_bytes) if tiers else f"every schedule holds {floor}")
        + _under_annotations(planner, minimum_bytes, strategy)
        + ("" if strategy else _beside_eager(planner, budget_bytes)),
        minimum_bytes=minimum_bytes,
        at=floor.node.at if floor.node is not None else None,
        help="; ".join(
            (
                f"raise the budget to {minimum_bytes} bytes, or lower the batch size"
                + (", or use strategy auto" if strategy else ""),
                *floor.lower,
            )
        ),
    )


def _beside_eager(planner: Planner, budget_bytes: int) -> str:
    """Says what a plan holds and eager does not, if eager's own step is within the budget; else empty."""
    eager_bytes = planner.baseline.eager_bytes
    gradients_bytes = sum(storage.nbytes for storage in planner.problem.graph.tangent_storages)
    if planner.baseline.source != "followed" or eager_bytes > budget_bytes or not gradients_bytes:
        return ""
    return (
        f"; eager's step takes {eager_bytes} bytes: a plan holds the gradients of outputs, {gradients_bytes} "
        "bytes, until backward ends"
    )


def _static(problem: CheckpointProblem, tier: Tier, offloaded_bytes: int) -> str:
    """Says what copies leave on the device all the time."""
    what = "parameters, buffers and inputs"
    if problem.graph.reserved_bytes:
        what = "parameters, buffers, inputs, and gradients or optimizer state that stay"
    besides = f", without {format_bytes(offloaded_bytes)} that live in {tier.name}" if offloaded_bytes else ""
    return f"{format_bytes(problem.graph.static_bytes - offloaded_bytes)} of it are {what}{besides}"


_FREE_SECONDS = 5.0
"""Time for what a step would need without annotations."""


def _under_annotations(planner: Planner, minimum_bytes: int, strategy: str | None) -> str:
    """Says that annotations are in force, and what a step would need without them; else empty."""
    who = named_annotations(
        annotation.by for annotation in planner.problem.graph.annotations if not annotation.is_hint
    )
    if not who:
        return ""
    if strategy is not None:
        return f"; annotations are in force ({who})"
    free = Planner(without_annotations(planner.program))
    nbytes = min(free.minimum_bytes(time.thread_time() + _FREE_SECONDS), minimum_bytes)
    needs = f"{format_bytes(nbytes)} ({nbytes} bytes)"
    return f"; annotations are in force ({who}), and without them it needs {needs}"


def out_of_time(limits: Limits, reached_bytes: int) -> TimeLimitError:
    """Makes the error of a time limit that ended before any schedule was found.

    Args:
        limits: The limits of the search.
        reached_bytes: The smallest peak that was found.
    """
    budget_bytes = limits.budget_bytes
    return TimeLimitError(
        "IRC205",
        f"the time limit of {limits.time_limit:g} s ended before a schedule within "
        f"{format_bytes(budget_bytes)} ({budget_bytes} bytes) was found; the smallest so far needs "
        f"{format_bytes(reached_bytes)} ({reached_bytes} bytes)",
        help="raise the time limit, or the budget",
    )
