"""The pass that chooses what to keep for backward and what to compute again, within a budget in bytes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from ...ir import (
    BudgetError,
    Node,
    Tier,
    TimeLimitError,
    UsageError,
    format_bytes,
    named_annotations,
    parse_budget,
    verify_schedule,
)
from ..program import Program, without_annotations
from .candidates import Candidates
from .certificate import certify
from .eviction import evict_greedily
from .planner import Planner
from .problem import CheckpointProblem, Solution
from .search import Incumbent, search
from .strategies import every_k, keep_all, keep_none, min_cut_candidates, per_block, sqrt_n

__all__ = ["STRATEGIES", "SelectCheckpoints", "minimum_budget", "out_of_time", "over_budget"]

STRATEGIES = (
    "auto",
    "ilp",
    "eviction",
    "min-cut",
    "per-block",
    "sqrt-n",
    "every-<k>",
    "keep-none",
    "keep-all",
)


@dataclass(frozen=True, slots=True)
class SelectCheckpoints:
    """Chooses a schedule whose peak is within the budget, at the least loss of time.

    Args:
        budget: Bytes, `4GiB`, `4GB`, or `60%` of the baseline peak; `100%` is the baseline itself.
        strategy: `auto` takes the best of all; the others are `ilp`, `eviction`, `min-cut`, `per-block`,
            `sqrt-n`, `every-8` (any k), `keep-none` and `keep-all`.
        time_limit: Seconds for the search; the best schedule so far counts when they are over.
    """

    name: ClassVar[str] = "select-checkpoints"
    strategies: ClassVar[tuple[str, ...]] = STRATEGIES

    budget: int | str = "100%"
    strategy: str = "auto"
    time_limit: float = 60.0

    def check(self) -> None:
        """Refuses malformed options.

        Raises:
            UsageError: IRC401 for a malformed budget, IRC403 for an unknown strategy or time limit.
        """
        parse_budget(self.budget)
        given = cast("tuple[object, object]", (self.strategy, self.time_limit))
        if (
            not isinstance(given[0], str)
            or isinstance(given[1], bool)
            or not isinstance(given[1], (int, float))
        ):
            raise UsageError(
                "IRC403",
                f"strategy is {given[0]!r} and time_limit {given[1]!r}",
                help="give the strategy's name as a text, and the time limit as a number of seconds",
            )
        named = tuple(name for name in self.strategies if "<" not in name)
        if self.strategy not in named and not re.fullmatch(r"every-[1-9][0-9]{0,8}", self.strategy):
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

    def run(self, program: Program, /) -> Program:
        """The program with a schedule and its plan.

        Raises:
            BudgetError: IRC204 when no schedule was found within the budget.
            TimeLimitError: IRC205 when the time limit ended before any schedule was found.
            UsageError: IRC401 for a malformed budget, IRC403 for an unknown strategy or time limit.
        """
        return self.choose(Planner(program))

    def choose(self, planner: Planner, /) -> Program:
        """As `run`, with what the planner knows from other budgets of the same program."""
        self.check()
        started = time.monotonic()
        budget_bytes = parse_budget(self.budget, planner.baseline_bytes)
        deadline = started + self.time_limit
        problem = planner.problem
        everything_kept = self.strategy in ("auto", "ilp", "keep-all")
        kept_bytes = planner.original.keep_all.peak_bytes
        if everything_kept and problem.keep_all.peak_bytes > budget_bytes >= kept_bytes:
            problem = planner.original  # the captured graph fits as it is, the rewritten one does not
            incumbent = Incumbent("keep-all", problem.keep_all)
        else:
            incumbent = self._search(planner, budget_bytes, deadline)
            planner.add_solution(budget_bytes, incumbent)
        program = planner.program_of(problem)
        assert program.costs is not None
        plan = certify(
            problem,
            budget_bytes,
            incumbent,
            baseline_bytes=planner.baseline_bytes,
            minimum_bytes=planner.minimum_bytes(deadline),
            seconds=time.monotonic() - started,
        )
        schedule = incumbent.best.schedule
        verify_schedule(
            schedule, program.costs.workspace_bytes, budget_bytes=budget_bytes, peak_bytes=plan.peak_bytes
        )
        return replace(program, schedule=schedule, plan=plan)

    def _search(self, planner: Planner, budget_bytes: int, deadline: float) -> Incumbent:
        problem = planner.problem
        candidates = planner.candidates(deadline)
        if self.strategy not in ("auto", "ilp"):
            return self._named(planner, budget_bytes, candidates)
        incumbent = search(problem, budget_bytes, candidates, deadline=deadline)
        if incumbent is None and budget_bytes >= problem.floor_bytes:
            candidates = planner.candidates(deadline, is_thorough=True)
            incumbent = search(problem, budget_bytes, candidates, deadline=deadline)
        if incumbent is not None:
            incumbent.bound_seconds = max(incumbent.bound_seconds, planner.bound_seconds(budget_bytes))
            return incumbent
        minimum_bytes = min(candidates.minimum_bytes, planner.original.keep_all.peak_bytes)
        if budget_bytes >= problem.floor_bytes and not candidates.is_complete:
            raise out_of_time(self.time_limit, budget_bytes, minimum_bytes)
        raise over_budget(planner, budget_bytes, minimum_bytes, is_known=candidates.is_complete)

    def _named(self, planner: Planner, budget_bytes: int, candidates: Candidates) -> Incumbent:
        """The strategy's own schedule: where it has several, the fastest that fits, or else the lowest."""
        problem = planner.problem
        schedules = _by_name(problem, self.strategy, budget_bytes, candidates)
        if not schedules and self.strategy == "eviction" and not candidates.is_complete:
            raise out_of_time(self.time_limit, budget_bytes, candidates.minimum_bytes)
        if not schedules and self.strategy == "per-block":
            raise UsageError(
                "IRC403",
                "strategy per-block finds no blocks in the names of this model's modules",
                help="use strategy auto, or put the blocks into a Sequential or ModuleList",
            )
        fitting = [s for s in schedules if s.peak_bytes <= budget_bytes]
        if not fitting:
            reached = min((s.peak_bytes for s in schedules), default=problem.keep_all.peak_bytes)
            raise over_budget(planner, budget_bytes, reached, strategy=self.strategy)
        return Incumbent(self.strategy, min(fitting, key=lambda s: (s.seconds, s.peak_bytes)))


def minimum_budget(program: Program) -> tuple[int, int]:
    """The smallest budget that a schedule was found for, and the floor that none can go below, in bytes."""
    planner = Planner(program)
    return planner.minimum_bytes(is_thorough=True), planner.problem.floor_bytes


def _by_name(
    problem: CheckpointProblem, strategy: str, budget_bytes: int, candidates: Candidates
) -> list[Solution]:
    match strategy:
        case "keep-all":
            return [keep_all(problem)]
        case "keep-none":
            return [keep_none(problem)]
        case "sqrt-n":
            return [sqrt_n(problem)]
        case "per-block":
            return list(per_block(problem))
        case "min-cut":
            return list(min_cut_candidates(problem))
        case "eviction":
            evicted = evict_greedily(problem, budget_bytes)
            found = [s for name, s in candidates.candidates if name == strategy]
            return found if evicted is None else [*found, evicted]
        case _:
            return [every_k(problem, int(strategy.removeprefix("every-")))]


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
    """What refuses a budget that no schedule was found for.

    Args:
        planner: What was planned.
        budget_bytes: What was asked for.
        minimum_bytes: The smallest budget that a schedule is known for.
        strategy: The strategy that was asked for; None where all were tried.
        is_known: Whether all was tried that gives the smallest budget.
        tiers: Where the schedule might have copied storages.
        offloaded_bytes: Parameters and optimizer state that would live in a tier then.
    """
    problem = planner.problem
    place = _heaviest(problem)
    by = f" with copies to {' and '.join(tier.name for tier in tiers)}" if tiers else ""
    by += f" by strategy {strategy}" if strategy else ""
    least = "at least" if is_known else "by what was found within the time limit"
    count = problem.graph.forwards_in_flight
    what = "a training step" if count == 1 else f"a training step with {count} forwards in flight"
    static = "parameters, buffers and inputs"
    if problem.graph.reserved_bytes:
        static = "parameters, buffers, inputs, and gradients or optimizer state that stay"
    besides = (
        f", without {format_bytes(offloaded_bytes)} that live in {tiers[0].name}" if offloaded_bytes else ""
    )
    return BudgetError(
        "IRC204",
        f"{what} needs {format_bytes(minimum_bytes)} ({minimum_bytes} bytes) {least}{by}, over "
        f"the budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes); "
        f"{format_bytes(problem.graph.static_bytes - offloaded_bytes)} of it are {static}{besides}"
        + _under_annotations(planner, minimum_bytes, strategy),
        minimum_bytes=minimum_bytes,
        at=place.at if place is not None else None,
        help=f"raise the budget to {minimum_bytes} bytes, or lower the batch size"
        + (", or use strategy auto" if strategy else ""),
    )


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
    nbytes = min(free.minimum_bytes(time.monotonic() + _FREE_SECONDS), minimum_bytes)
    needs = f"{format_bytes(nbytes)} ({nbytes} bytes)"
    return f"; annotations are in force ({who}), and without them it needs {needs}"


def out_of_time(time_limit: float, budget_bytes: int, reached_bytes: int) -> TimeLimitError:
    """What is raised where the time limit ended before any schedule was found.

    Args:
        time_limit: In seconds.
        budget_bytes: What was asked for.
        reached_bytes: The smallest peak that was found.
    """
    return TimeLimitError(
        "IRC205",
        f"the time limit of {time_limit:g} s ended before a schedule within {format_bytes(budget_bytes)} "
        f"({budget_bytes} bytes) was found; the smallest so far needs {format_bytes(reached_bytes)} "
        f"({reached_bytes} bytes)",
        help="raise the time limit, or the budget",
    )


def _heaviest(problem: CheckpointProblem) -> Node | None:
    """The operation that needs most by itself; None where all nodes are views."""
    return max(problem.demand_bytes, key=problem.demand_bytes.__getitem__, default=None)
