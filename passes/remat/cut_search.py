"""A search over parametric cuts: a schedule within a budget, and a bound for all."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from .cut_network import Kept
from .filling import more_to_keep
from .parametric_cut import ParametricCut
from .problem import CheckpointProblem, Solution

__all__ = ["STRETCHES", "CutsFound", "bound_by_cuts", "search_cuts", "tightest_time_steps"]

STRETCHES = 6
"""Beside the loss, cuts are first set at the tightest time step of each of so many stretches of backward."""

_SIMULATIONS = 16
"""The most schedules that are made of choices at cuts."""


@dataclass
class CutsFound:
    """The outcome of a search over cuts.

    Args:
        best: The fastest schedule within the budget, or None.
        idea: The fastest choice at the tightest cut, if its schedule goes over the budget elsewhere.
        bound_seconds: A lower bound of the time that every schedule computes again.
    """

    best: Solution | None = None
    idea: Solution | None = None
    bound_seconds: float = 0.0


def search_cuts(problem: CheckpointProblem, budget_bytes: int, *, deadline: float = math.inf) -> CutsFound:
    """Finds a schedule, and a bound for all, by parametric cuts at the tightest time steps.

    The choice at the cut with the best bound is simulated. If it goes over the budget at a time step without
    a cut, that gets one; at one with a cut, the choice gets as much less room. What the schedule leaves free
    is filled with what need not run again then.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once.
        deadline: `time.thread_time()` at which to stop.
    """
    found = CutsFound()
    if not problem.backward or problem.keep_all.peak_bytes <= budget_bytes:
        return found
    cuts = _first_cuts(problem, budget_bytes)
    for _ in range(_SIMULATIONS):
        time_step = cuts.tightest()
        if time_step is None or time.thread_time() >= deadline:
            break
        kept = cuts.kept(time_step)
        solution = None if kept is None else _simulated(problem, time_step, kept)
        if kept is None or solution is None:
            cuts.drop(time_step)
        elif solution.peak_bytes <= budget_bytes:
            found.best = _filled(problem, budget_bytes, solution, time_step, kept)
            break
        else:
            found.idea = found.idea or solution
            peaks = problem.peaks(solution)
            worst = max(range(len(peaks)), key=peaks.__getitem__)
            if not cuts.add(worst) or cuts.tightest() != worst:
                cuts.shrink(time_step, solution.peak_bytes - budget_bytes)
    found.bound_seconds = cuts.bound_seconds
    return found


def bound_by_cuts(problem: CheckpointProblem, budget_bytes: int) -> float:
    """A lower bound of the time that every schedule within the budget computes again, in seconds."""
    return _first_cuts(problem, budget_bytes).bound_seconds if problem.backward else 0.0


def _first_cuts(problem: CheckpointProblem, budget_bytes: int) -> _Cuts:
    cuts = _Cuts(problem, budget_bytes)
    for time_step in dict.fromkeys((len(problem.forward), *tightest_time_steps(problem, STRETCHES))):
        cuts.add(time_step)
    return cuts


@dataclass
class _Cuts:
    """Parametric cuts of a problem under a budget.

    Attributes:
        rooms: The room of each cut whose choices are of use.
        bound_seconds: The best bound.
    """

    problem: CheckpointProblem
    budget_bytes: int
    cuts: dict[int, ParametricCut] = field(default_factory=dict[int, ParametricCut], init=False)
    bounds: dict[int, float] = field(default_factory=dict[int, float], init=False)
    rooms: dict[int, int] = field(default_factory=dict[int, int], init=False)

    def add(self, time_step: int) -> bool:
        """Adds a cut; returns whether it was not there yet."""
        if time_step in self.cuts or not 0 < time_step < self.problem.time_steps:
            return False
        cut = self.cuts[time_step] = ParametricCut(self.problem, time_step)
        self.rooms[time_step] = room_bytes = cut.room_bytes(self.budget_bytes)
        cut.within(room_bytes)
        self.bounds[time_step] = cut.bound_seconds(room_bytes)
        return True

    @property
    def bound_seconds(self) -> float:
        finite = (seconds for seconds in self.bounds.values() if math.isfinite(seconds))
        return max(finite, default=0.0)

    def tightest(self) -> int | None:
        """The time step with the best bound, of those whose choices are of use; None if none is left."""
        return max(self.rooms, key=self.bounds.__getitem__, default=None)

    def kept(self, time_step: int) -> Kept | None:
        """The storages that stay at a time step by its choice; None if it has none."""
        cut = self.cuts[time_step]
        choice = cut.within(self.rooms[time_step])
        return None if choice is None else choice.kept | cut.network.free

    def shrink(self, time_step: int, nbytes: int) -> None:
        """Leaves less room to the choice at a time step."""
        self.rooms[time_step] -= nbytes

    def drop(self, time_step: int) -> None:
        """Gives up the choices at a time step."""
        del self.rooms[time_step]


def tightest_time_steps(problem: CheckpointProblem, stretches: int) -> list[int]:
    """The time step of each stretch of backward that leaves least for what stays."""
    needed = {
        time_step: problem.held_in(time_step, 0) + sum(s.nbytes for s in problem.read_at(time_step))
        for time_step in range(len(problem.forward) + 1, problem.time_steps)
    }
    length = max(math.ceil(len(needed) / stretches), 1)
    steps = list(needed)
    return [
        max(steps[start : start + length], key=needed.__getitem__) for start in range(0, len(steps), length)
    ]


def _simulated(problem: CheckpointProblem, time_step: int, kept: Kept) -> Solution | None:
    """The schedule of a choice at a cut: what is gone is made again when it is first read, if it can be."""
    for eager in (False, True):
        try:
            return problem.simulate_recomputations(problem.repeats_between({time_step: kept}, eager=eager))
        except ValueError:
            continue  # an operation that runs once has made something that is gone by then
    return None


def _filled(
    problem: CheckpointProblem, budget_bytes: int, solution: Solution, time_step: int, kept: Kept
) -> Solution:
    """The schedule with results of what runs again kept instead, as far as they fit."""
    more = more_to_keep(problem, budget_bytes, solution, time_step)
    filled = _simulated(problem, time_step, kept.union(more)) if more else None
    if filled is None or filled.peak_bytes > budget_bytes or filled.seconds >= solution.seconds:
        return solution
    return filled
