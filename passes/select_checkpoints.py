"""The pass that chooses what to keep for backward and what to compute again, within a budget in bytes."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

from ..ir import (
    BudgetError,
    Compute,
    Decision,
    Loss,
    Node,
    Plan,
    Storage,
    TimeLimitError,
    UsageError,
    format_bytes,
    parse_budget,
    verify_schedule,
)
from .checkpointing import CheckpointProblem, Simulated
from .cost import Cost
from .eviction import evict_greedily
from .program import Program
from .search import SMALL_BACKWARD, Found, Frontier, frontier, lower_bound, polish, solve_staged
from .strategies import every_k, keep_all, sqrt_n

__all__ = ["STRATEGIES", "SelectCheckpoints", "minimum_budget"]

STRATEGIES = ("auto", "ilp", "eviction", "sqrt-n", "every-<k>", "keep-all")
_NAMED = tuple(name for name in STRATEGIES if "<" not in name)
_PROOF_GAP = 1e-4
_BOUND_SHARE = 0.3
_POLISH_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class SelectCheckpoints:
    """Chooses a schedule whose peak is within the budget, at the least loss of time.

    Args:
        budget: Bytes, `4GiB`, `4GB`, or `60%` of the baseline peak; `100%` is the baseline itself.
        strategy: `auto` takes the best of all; the others are `ilp`, `eviction`, `sqrt-n`, `every-8`
            (any k) and `keep-all`.
        time_limit: Seconds for the search; the best schedule so far counts when they are over.
    """

    name: ClassVar[str] = "select-checkpoints"

    budget: int | str = "100%"
    strategy: str = "auto"
    time_limit: float = 60.0

    def check(self) -> None:
        """Refuses malformed options.

        Raises:
            UsageError: IRC401 for a malformed budget, IRC403 for an unknown strategy or time limit.
        """
        parse_budget(self.budget)
        given: tuple[object, object] = self.strategy, self.time_limit
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
        if self.strategy not in _NAMED and not re.fullmatch(r"every-[1-9][0-9]{0,8}", self.strategy):
            raise UsageError(
                "IRC403",
                f"there is no strategy {self.strategy!r}",
                help=f"choose one of {', '.join(STRATEGIES)}",
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
        self.check()
        started = time.monotonic()
        if program.costs is None:
            program = Cost(profile="cpu").run(program)
        assert program.costs is not None
        problem = CheckpointProblem(program.graph, program.costs)
        budget_bytes = parse_budget(self.budget, problem.keep_all.peak_bytes)
        deadline = started + self.time_limit
        candidates = frontier(problem, deadline=deadline)
        found = self._search(problem, budget_bytes, candidates, deadline)
        found.bound_seconds = self._bound(problem, budget_bytes, found, deadline)
        plan = _plan(problem, budget_bytes, found, candidates, time.monotonic() - started)
        schedule = found.best.schedule
        verify_schedule(
            schedule, program.costs.workspace_bytes, budget_bytes=budget_bytes, peak_bytes=plan.peak_bytes
        )
        return replace(program, schedule=schedule, plan=plan)

    def _search(
        self, problem: CheckpointProblem, budget_bytes: int, candidates: Frontier, deadline: float
    ) -> Found:
        if self.strategy in ("auto", "ilp"):
            nothing = "", replace(problem.keep_all, seconds=math.inf)
            found = Found(*(candidates.best(budget_bytes) or nothing))
            if budget_bytes >= problem.floor_bytes and found.best.seconds > problem.step_seconds * (
                1 + 1e-12
            ):
                self._improve(problem, budget_bytes, found, deadline)
            if not found.name and budget_bytes >= problem.floor_bytes and not candidates.is_complete:
                raise _out_of_time(self.time_limit, budget_bytes, candidates.minimum_bytes)
            if not found.name:
                raise _over_budget(problem, budget_bytes, candidates.minimum_bytes)
            return found
        simulated = _by_name(problem, self.strategy, budget_bytes, candidates)
        if simulated is None and not candidates.is_complete:
            raise _out_of_time(self.time_limit, budget_bytes, candidates.minimum_bytes)
        if simulated is None or simulated.peak_bytes > budget_bytes:
            reached = (simulated or problem.keep_all).peak_bytes
            raise _over_budget(problem, budget_bytes, reached, strategy=self.strategy)
        return Found(self.strategy, simulated)

    def _improve(self, problem: CheckpointProblem, budget_bytes: int, found: Found, deadline: float) -> None:
        seconds = max(deadline - time.monotonic(), 0.0)
        share = 1 - _BOUND_SHARE - _POLISH_SHARE
        if len(problem.backward) > SMALL_BACKWARD:
            for weight in (1.0, 0.5, 0.25, 0.0):
                if time.monotonic() >= deadline:
                    break
                simulated = evict_greedily(problem, budget_bytes, distance_weight=weight, deadline=deadline)
                if simulated is not None:
                    found.offer("eviction", simulated, budget_bytes)
        solve_staged(problem, budget_bytes, found, deadline=time.monotonic() + seconds * share)
        if not found.is_exact:
            polish(problem, budget_bytes, found, deadline=time.monotonic() + seconds * _POLISH_SHARE)

    def _bound(self, problem: CheckpointProblem, budget_bytes: int, found: Found, deadline: float) -> float:
        if budget_bytes >= problem.keep_all.peak_bytes:
            return 0.0
        latest = max(deadline, time.monotonic() + min(self.time_limit * _BOUND_SHARE, 1.0))
        return lower_bound(problem, budget_bytes, deadline=latest)


def minimum_budget(program: Program) -> tuple[int, int]:
    """The smallest budget that a schedule was found for, and the floor that none can go below, in bytes."""
    assert program.costs is not None, "costs come first"
    problem = CheckpointProblem(program.graph, program.costs)
    return frontier(problem).minimum_bytes, problem.floor_bytes


def _by_name(
    problem: CheckpointProblem, strategy: str, budget_bytes: int, candidates: Frontier
) -> Simulated | None:
    match strategy:
        case "keep-all":
            return keep_all(problem)
        case "sqrt-n":
            return sqrt_n(problem)
        case "eviction":
            evicted = [s for name, s in candidates.candidates if name == strategy]
            evicted.extend(filter(None, [evict_greedily(problem, budget_bytes)]))
            fitting = [s for s in evicted if s.peak_bytes <= budget_bytes]
            if fitting:
                return min(fitting, key=lambda s: (s.seconds, s.peak_bytes))
            return min(evicted, key=lambda s: s.peak_bytes, default=None)
        case _:
            return every_k(problem, int(strategy.removeprefix("every-")))


def _over_budget(
    problem: CheckpointProblem, budget_bytes: int, minimum_bytes: int, *, strategy: str | None = None
) -> BudgetError:
    place = _heaviest(problem)
    by = f" by strategy {strategy}" if strategy else ""
    return BudgetError(
        "IRC204",
        f"a training step needs {format_bytes(minimum_bytes)} ({minimum_bytes} bytes) at least{by}, over "
        f"the budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes); "
        f"{format_bytes(problem.graph.static_bytes)} of it are parameters, buffers and inputs",
        minimum_bytes=minimum_bytes,
        at=place.at if place is not None else None,
        help=f"raise the budget to {minimum_bytes} bytes, or lower the batch size"
        + (", or use strategy auto" if strategy else ""),
    )


def _out_of_time(time_limit: float, budget_bytes: int, reached_bytes: int) -> TimeLimitError:
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


# ---------------------------------------------------------------------- the certificate


def _plan(
    problem: CheckpointProblem, budget_bytes: int, found: Found, candidates: Frontier, seconds: float
) -> Plan:
    step = problem.step_seconds
    overhead = max(found.best.seconds / step - 1, 0.0) if step else 0.0
    bound = min(found.bound_seconds / step, overhead) if step else 0.0
    return Plan(
        budget_bytes=budget_bytes,
        peak_bytes=found.best.peak_bytes,
        baseline_peak_bytes=problem.keep_all.peak_bytes,
        static_bytes=problem.graph.static_bytes,
        minimum_budget_bytes=min(candidates.minimum_bytes, found.best.peak_bytes),
        floor_bytes=problem.floor_bytes,
        step_seconds=step,
        overhead=overhead,
        lower_bound_overhead=bound,
        proven_optimal=overhead - bound <= _PROOF_GAP,
        strategy=found.name,
        costs=problem.costs.source,
        decisions=_decisions(problem, found.best),
        seconds_to_plan=seconds,
    )


def _decisions(problem: CheckpointProblem, simulated: Simulated) -> tuple[Decision, ...]:
    """One decision for each storage that forward makes and that is no output."""
    runs = Counter(simulated.order)
    kept = _alive_at_loss(simulated)
    wanted = set(problem.wanted)
    decisions: list[Decision] = []
    for storage, node in problem.producer.items():
        again = runs[node] - 1
        seconds = problem.costs.seconds[node] * again
        if storage in kept:
            action, reason = "keep", _why_kept(problem, storage, node)
        elif storage in problem.read_positions or (again and storage in wanted):
            action, reason = _why_not_kept(problem, storage, again, seconds)
        else:
            action, reason = "free", "backward reads neither it nor anything that is made from it again"
        where = str(node.at) if node.at is not None else ""
        decisions.append(
            Decision(
                storage.name,
                f"{node.name} ({node.op})",
                storage.nbytes,
                action,
                again,
                seconds,
                reason,
                where,
            )
        )
    return tuple(decisions)


def _alive_at_loss(simulated: Simulated) -> set[Storage]:
    alive: set[Storage] = set()
    for instruction in simulated.schedule.instructions:
        if isinstance(instruction, Loss):
            break
        if isinstance(instruction, Compute):
            alive |= instruction.retained
        else:
            alive.discard(instruction.storage)
    return alive


def _why_kept(problem: CheckpointProblem, storage: Storage, node: Node) -> str:
    if not node.is_recomputable:
        return "its operation may run only once (" + ", ".join(sorted(t.value for t in node.traits)) + ")"
    return f"{_purpose(problem, storage)}; its operation takes {_milliseconds(problem.costs.seconds[node])}"


def _why_not_kept(
    problem: CheckpointProblem, storage: Storage, again: int, seconds: float
) -> tuple[str, str]:
    if not again:
        return "free", "backward does not need it under this plan"
    return (
        "recompute",
        f"{_purpose(problem, storage)}; its operation runs again {_times(again)} "
        f"({_milliseconds(seconds)}) and {format_bytes(storage.nbytes)} are free in between",
    )


def _purpose(problem: CheckpointProblem, storage: Storage) -> str:
    reads = len(problem.read_positions.get(storage, ()))
    return f"backward reads it {_times(reads)}" if reads else "other values are made from it again"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds * 1e3:,.0f} ms"
