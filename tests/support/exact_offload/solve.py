"""Small graphs with tiers: what to keep, make again and copy, and when, all in one programme."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from irc.ir import Schedule, Tier, liveness, step_times
from irc.passes.remat.problem import CheckpointProblem

from .choice import schedule_of
from .line import ExactProblem, Step, line

__all__ = ["Exact", "best_with_swaps"]

_EASY = 1.0
"""Effort for a schedule that only makes the search easier, in the solver's deterministic seconds."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The outcome of an exact search.

    Args:
        schedule: The best schedule found, or None.
        step_seconds: Its time by `step_times`; infinite without one.
        bound_seconds: No schedule of the class within the budget takes less; infinite where there is none.
        is_proved: The schedule is the best of the class, up to 1e-4 of the step, or there is none.
    """

    schedule: Schedule | None
    step_seconds: float
    bound_seconds: float
    is_proved: bool

    @property
    def is_infeasible(self) -> bool:
        """Whether it is proved that no schedule of the class fits."""
        return self.schedule is None and self.is_proved


def best_with_swaps(
    problem: CheckpointProblem, tiers: Sequence[Tier], budget_bytes: int, *, deadline: float
) -> Exact:
    """The fastest schedule of the class of `CheckpointProblem`, with copies to tiers beside it.

    What forward makes may be copied to one tier once, begun at any time while it is there; freed at any
    time once the copy has ended; and copied back at any time and any number of times. What an annotation
    keeps from staying for backward is not copied. Time is that of `step_times` and memory that of `liveness`.

    Args:
        problem: The recomputation problem of a small graph.
        tiers: Where storages may be copied to.
        budget_bytes: The most that may be alive on the device at once.
        deadline: `time.thread_time()` at which to stop.
    """
    exact = ExactProblem(problem, tuple(tiers), budget_bytes)
    nothing = Exact(None, math.inf, 0.0, False)
    now = time.thread_time()
    first_deadline = now + (deadline - now) / 2 if exact.copyable else deadline
    best = _improve(exact, [0] * problem.time_steps, nothing, first_deadline)
    if exact.copyable:
        best = _improve(exact, exact.pauses, replace(best, is_proved=False), deadline)
    return replace(best, bound_seconds=max(best.bound_seconds, min(problem.step_seconds, best.step_seconds)))


def _improve(exact: ExactProblem, pauses: Sequence[int], best: Exact, deadline: float) -> Exact:
    """The best schedule over a line with these pauses, given one that is known.

    The times of a programme reach as far as the best schedule known, which makes it much easier: where none
    is known, any is found first.
    """
    search = _Search(exact, tuple(line(exact.problem, pauses)), deadline)
    if best.schedule is None:
        best = search.solve(any_will_do=True)
        if best.schedule is None:
            return best
        best = search.halve(best)
    found = search.solve(best.step_seconds)
    if found.step_seconds < best.step_seconds:
        return found
    bound_seconds = min(found.bound_seconds, best.step_seconds)
    return replace(best, bound_seconds=bound_seconds, is_proved=found.is_proved)


@dataclass(frozen=True, slots=True)
class _Search:
    """Solves over one line until a deadline."""

    exact: ExactProblem
    steps: Sequence[Step]
    deadline: float

    def halve(self, best: Exact) -> Exact:
        """A schedule that takes half as much more than the least as `best`, as often as that is easy."""
        least = self.exact.problem.step_seconds
        while best.step_seconds > least and time.thread_time() < self.deadline:
            below = (least + best.step_seconds) / 2
            found = self.solve(below, any_will_do=True, effort=_EASY)
            if found.step_seconds >= best.step_seconds:
                break
            best = found
        return best

    def solve(
        self, below_seconds: float = math.inf, *, any_will_do: bool = False, effort: float = math.inf
    ) -> Exact:
        """Solves, and simulates what was chosen; the arguments are those of the programme."""
        from .programme import SwapProgramme  # OR-Tools' CP-SAT imports pandas

        programme = SwapProgramme(self.exact, self.steps, below_seconds)
        left = self.deadline - time.thread_time()
        solved = programme.solve(left, any_will_do=any_will_do, effort=effort)
        if solved.choice is None:
            return Exact(None, math.inf, solved.bound_seconds, solved.is_infeasible)
        problem = self.exact.problem
        schedule = schedule_of(problem, self.steps, solved.choice)
        seconds = step_times(schedule, problem.costs.seconds, self.exact.tiers).step_seconds
        peak_bytes = liveness(schedule, problem.costs.workspace_bytes).peak_bytes
        assert peak_bytes <= self.exact.budget_bytes, "the rows of memory are not those of the schedule"
        return Exact(schedule, seconds, min(solved.bound_seconds, seconds), solved.is_best)
