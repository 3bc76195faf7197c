"""Searches for the fastest schedule within a budget, and proves how far from the best it can be."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ...ir import Storage
from .candidates import Candidates
from .cut_ilp import Relaxation
from .eviction import evict_greedily
from .exact import best_of_class, is_small, lower_bound
from .problem import CheckpointProblem, Solution
from .retention_ilp import RetentionProgramme
from .solution_merging import SolutionMerger

__all__ = ["Incumbent", "fits_without_search", "search"]

_WEIGHTS = (1.0, 0.5, 0.25, 0.0)
"""The weights that the distance to the next use has in eviction."""

_RUN_SECONDS = 3.0
"""The time limit for one eviction, and for the last look for a smaller peak; a tenth of it is usual."""


@dataclass
class Incumbent:
    """The state of a search; `best` only gets better, and so does the bound.

    Args:
        name: The name of what found it.
        best: The best schedule so far.
        bound_seconds: A lower bound of the time that every schedule recomputes.
    """

    name: str
    best: Solution
    bound_seconds: float = 0.0

    def update(self, name: str, solution: Solution, budget_bytes: int) -> None:
        """Takes a schedule that fits and is faster, or as fast with a smaller peak."""
        if solution.peak_bytes > budget_bytes:
            return
        if (solution.seconds, solution.peak_bytes) < (self.best.seconds, self.best.peak_bytes):
            self.name, self.best = name, solution

    def is_proved(self, problem: CheckpointProblem, gap: float) -> bool:
        """Whether no schedule is faster by more than `gap` of the step's time."""
        return self.best.seconds - problem.step_seconds - self.bound_seconds <= gap * problem.step_seconds


def fits_without_search(problem: CheckpointProblem, budget_bytes: int) -> bool:
    """Whether keeping everything is within the budget and computes nothing twice."""
    return problem.keep_all.peak_bytes <= budget_bytes and problem.is_fastest(problem.keep_all)


_PROOF_GAP = 1e-4
"""A schedule counts as proved up to this fraction of the step's time above the bound."""

_NEGLIGIBLE = 2e-5
"""Storages up to this fraction of the peak that keeps all are free in the programme over cuts."""

_SEEDS = 5
_NEW_CUTS = 5
_CUT_ROUNDS = 8
_PROGRESS = 2e-4
_IDLE_TURNS = 2
"""Stop after this many rounds that each close less of the gap than `_PROGRESS` of the step's time."""

_CUT_NODES = 100
_LONGEST_CUT_SECONDS = 8.0
_POOR_GAP = 5e-3
_LONGEST_PROOF_SECONDS = 30.0
"""The time that the bound is worth if the gap is above `_POOR_GAP`, a fraction of the step's time."""

_WINDOW = 12
_WINDOWS_SECONDS = 15.0
_WINDOW_GAP = 3e-2
"""Windows are looked at if the schedule may be this far from the best, as a fraction of the step's time."""


def search(
    problem: CheckpointProblem, budget_bytes: int, candidates: Candidates, *, deadline: float
) -> Incumbent | None:
    """Searches for the fastest schedule within the budget, with a bound for all; None if none was found.

    Candidates and evictions at this budget are merged. Then, in rounds, the programme over cuts gives a bound
    and a first choice with ever more cuts, and that choice is merged with the best so far.
    """
    fitting = candidates.fitting(budget_bytes)
    if is_small(problem):
        incumbent = Incumbent(*(fitting[0] if fitting else ("", replace(problem.keep_all, seconds=math.inf))))
        if problem.backward:
            latest = time.monotonic() + (deadline - time.monotonic()) / 3
            incumbent.bound_seconds = lower_bound(problem, budget_bytes, deadline=latest)
            exact = best_of_class(problem, budget_bytes, deadline=deadline)
            if exact.best is not None:
                incumbent.update("ilp", exact.best, budget_bytes)
        return incumbent if incumbent.name else None
    work = _Large(problem, budget_bytes, candidates, deadline)
    return work.run()


@dataclass
class _Large:
    problem: CheckpointProblem
    budget_bytes: int
    candidates: Candidates
    deadline: float
    incumbent: Incumbent | None = field(default=None, init=False)
    tightest: Relaxation | None = field(default=None, init=False)
    """The programme that gave the best bound, if more time could raise it."""

    def run(self) -> Incumbent | None:
        seeds = self._seeds()
        if not seeds:
            return None
        self.incumbent = incumbent = Incumbent(*seeds[0])
        work = SolutionMerger(self.problem, self.budget_bytes, incumbent.best, self.deadline)
        if self.problem.is_fastest(incumbent.best):
            return incumbent
        work.add()
        self._take(work)
        self._by_cuts(work, [seed for _, seed in seeds[1:_SEEDS]])
        self._by_windows(work)
        self._lower(work)
        self._tighten()
        return incumbent

    def _take(self, work: SolutionMerger) -> None:
        assert self.incumbent is not None and work.best is not None
        self.incumbent.update("ilp", work.best, self.budget_bytes)

    def _seeds(self) -> list[tuple[str, Solution]]:
        found = self.candidates.fitting(self.budget_bytes)
        for weight in () if fits_without_search(self.problem, self.budget_bytes) else _WEIGHTS:
            latest = min(self.deadline, time.monotonic() + _RUN_SECONDS)
            evicted = evict_greedily(self.problem, self.budget_bytes, distance_weight=weight, deadline=latest)
            if evicted is not None:
                found.append(("eviction", evicted))
        distinct = {(s.seconds, s.peak_bytes): (name, s) for name, s in reversed(found)}
        return [distinct[key] for key in sorted(distinct)]

    def _by_cuts(self, work: SolutionMerger, seeds: list[Solution]) -> None:
        """Takes, in rounds, a bound and a first choice from ever more cuts, and merges that choice."""
        assert self.incumbent is not None
        time_steps = [len(self.problem.forward)]
        gap, idle = math.inf, 0
        for _ in range(_CUT_ROUNDS):
            closed = gap - self._gap_seconds
            idle = idle + 1 if closed < _PROGRESS * self.problem.step_seconds else 0
            if idle > _IDLE_TURNS:
                return
            gap = self._gap_seconds
            left = self.deadline - time.monotonic()
            if left <= 0 or self.incumbent.is_proved(self.problem, _PROOF_GAP):
                return
            free_bytes = int(self.problem.keep_all.peak_bytes * _NEGLIGIBLE)
            relaxation = Relaxation(self.problem, self.budget_bytes, time_steps, small_bytes=free_bytes)
            solved = relaxation.solve(
                seconds=min(left / 2, _LONGEST_CUT_SECONDS), gap=_PROOF_GAP, node_limit=_CUT_NODES
            )
            if solved.is_infeasible:
                return  # within the solver's tolerance: a schedule that fits is at hand
            if solved.bound_seconds > self.incumbent.bound_seconds:
                self.incumbent.bound_seconds = solved.bound_seconds
                self.tightest = None if solved.is_optimal else relaxation
            if solved.resident is None:
                return
            ideas = list(self._ideas(solved.resident))
            for idea in (*ideas, *seeds[:1]):
                if not self.incumbent.is_proved(self.problem, _PROOF_GAP):
                    work.add(idea)
                    self._take(work)
            seeds = seeds[1:]
            more = _violated(self.problem, self.budget_bytes, ideas[0], time_steps) if ideas else []
            if not more:
                more = [m for m in _tightest(self.problem) if m not in time_steps][:_NEW_CUTS]
            if not more:
                return
            time_steps = sorted({*time_steps, *more})

    def _ideas(self, resident: Mapping[int, frozenset[Storage]]) -> Iterator[Solution]:
        """The schedules of a choice at cuts: all made again at the cuts, and all when it is first read."""
        # An operation that runs once may have made something that is gone by now: at its first read, or if
        # the choice makes it between the last forward operation and the loss, at which no schedule of ours
        # runs anything.
        for eager in (True, False):
            with contextlib.suppress(ValueError):
                yield self.problem.simulate_recomputations(
                    self.problem.repeats_between(resident, eager=eager)
                )

    @property
    def _gap_seconds(self) -> float:
        assert self.incumbent is not None
        return self.incumbent.best.seconds - self.problem.step_seconds - self.incumbent.bound_seconds

    def _by_windows(self, work: SolutionMerger) -> None:
        assert self.incumbent is not None
        split, end = len(self.problem.forward), len(self.problem.base)
        latest = min(self.deadline, time.monotonic() + _WINDOWS_SECONDS)
        for start in range(split, end, _WINDOW // 2):
            if time.monotonic() >= latest or self.incumbent.is_proved(self.problem, _WINDOW_GAP):
                return
            work.look_around(range(start, min(start + _WINDOW, end)))
            self._take(work)

    def _tighten(self) -> None:
        """Spends more time on the bound if the proof is poor."""
        assert self.incumbent is not None
        left = self.deadline - time.monotonic()
        if self.tightest is None or left <= 0 or self.incumbent.is_proved(self.problem, _POOR_GAP):
            return
        solved = self.tightest.solve(seconds=min(left, _LONGEST_PROOF_SECONDS), gap=_PROOF_GAP)
        if not solved.is_infeasible:
            self.incumbent.bound_seconds = max(self.incumbent.bound_seconds, solved.bound_seconds)

    def _lower(self, work: SolutionMerger) -> None:
        """Among schedules as fast as the incumbent, takes the one with the lowest peak."""
        assert self.incumbent is not None
        left = self.deadline - time.monotonic()
        if left <= 0:
            return
        best = self.incumbent.best
        programme = RetentionProgramme(
            self.problem,
            self.problem.recomputations(best),
            None,
            {},
            below_seconds=best.seconds - self.problem.step_seconds,
        )
        chosen = programme.solve(seconds=min(left, _RUN_SECONDS), gap=_PROOF_GAP).solution
        if chosen is not None:
            self.incumbent.update(self.incumbent.name, chosen, self.budget_bytes)


def _violated(
    problem: CheckpointProblem, budget_bytes: int, solution: Solution, time_steps: list[int]
) -> list[int]:
    """The time steps without a cut at which a choice goes furthest over the budget, spread out."""
    peaks = problem.peaks(solution)
    over = sorted((-nbytes, time_step) for time_step, nbytes in enumerate(peaks) if nbytes > budget_bytes)
    return _apart(problem, (time_step for _, time_step in over if time_step not in time_steps))[:_NEW_CUTS]


def _apart(problem: CheckpointProblem, time_steps: Iterable[int]) -> list[int]:
    """The time steps in their order, without those that are next to an earlier one."""
    spacing = max(problem.time_steps // 150, 1)
    found: list[int] = []
    for time_step in time_steps:
        if all(abs(time_step - other) > spacing for other in found):
            found.append(time_step)
    return found


def _tightest(problem: CheckpointProblem) -> list[int]:
    """The time steps in the order of the memory that keeping everything takes there, spread out."""
    peaks = problem.peaks(problem.keep_all)
    return _apart(problem, sorted(range(len(peaks)), key=lambda m: (-peaks[m], m)))
