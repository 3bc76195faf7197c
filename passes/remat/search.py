"""Searches for the fastest schedule within a budget, and proves how far from the best it can be."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...ir import Storage
from ..progress import Progress, report
from .candidates import Candidates
from .cut_ilp import Relaxation, Solved
from .cut_search import STRETCHES, CutsFound, search_cuts, tightest_time_steps
from .demand_search import DemandSearch
from .eviction import evict_greedily
from .exact import best_of_class, is_small, lower_bound
from .problem import CheckpointProblem, Solution
from .retention_ilp import RetentionProgramme
from .solution_merging import SolutionMerger

__all__ = ["Incumbent", "fits_without_search", "proved_by_cuts", "search"]

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


def _relaxation(
    problem: CheckpointProblem, budget_bytes: int, time_steps: Sequence[int], *, has_spans: bool = True
) -> Relaxation:
    free_bytes = int(problem.keep_all.peak_bytes * _NEGLIGIBLE)
    return Relaxation(problem, budget_bytes, time_steps, small_bytes=free_bytes, has_spans=has_spans)


def fits_without_search(problem: CheckpointProblem, budget_bytes: int) -> bool:
    """Whether keeping everything is within the budget and computes nothing twice."""
    return problem.keep_all.peak_bytes <= budget_bytes and problem.is_fastest(problem.keep_all)


_PROOF_GAP = 1e-4
"""The least gap: a schedule counts as proved up to this fraction of the step's time above the bound."""

_NEGLIGIBLE = 2e-5
"""Storages up to this fraction of the peak that keeps all are free in the programme over cuts."""

_NEW_CUTS = 5
_DIVE_SECONDS = 0.5
_DIVE_GAP = 1e-3
"""The time limit and the gap for a choice at new cuts alone; a tenth of the time is usual."""

_CUT_ROUNDS = 8
_PROGRESS = 2e-4
_IDLE_SECONDS = 2.0
"""Stop if for this time, or half of what was worth it, no `_PROGRESS` of the step's time was closed."""

_FAIR_IDLE_SECONDS = 1.0
"""The same if the proof is not poor: more rounds seldom help then."""

_CUT_NODES = 100
_LEAST_CUT_SECONDS = 0.6
_LONGEST_CUT_SECONDS = 8.0
_SOLVING = 24.0
"""The time to solve a programme over cuts, in times of what it takes to write it down."""

_DEMAND_OPERATIONS = 300
_FAIR_DEMAND_OPERATIONS = 150
"""Graphs up to this size are searched from their end: if the proof is poor, and if it is not. Of larger ones
the programmes over cuts close more in the time."""

_DEMAND_STATES = 5000
_MORE_DEMAND_STATES = 40_000
"""The most states at one time when a graph is searched from its end, and once such a search has ended."""

_LAST_DEMAND_STATES = 2000
"""The most states of the search that looks for the best once a schedule within the gap is proved."""

_FAR = 3.0
"""A limit is halfway between bound and incumbent if they are this many times the gap apart."""

_DEMAND_SECONDS = 4.0
_DEMAND_PART = 0.5
"""Such searches take this time, and more up to a part of what the whole search has taken."""

_WITHIN = 1 - 1e-6
"""A limit that is this part of the gap below the incumbent proves it, whatever is lost to rounding."""

_LARGE_OPERATIONS = 1000
"""For graphs beyond this size, a schedule of parametric cuts within the gap is the last."""

_CLOSER = 0.2
"""The part of the gap that a small graph is searched to, in the time for all of it."""

_MERGING_GAP = 0.2
"""The part of the gap that schedules are merged to."""

_LONGEST_PROOF_SECONDS = 30.0
_POOR = 2.0
"""A proof is poor, and worth more time, beyond so many times the gap that was asked for."""

_NEAR = 4.0
"""A proof is near, and programmes ask for better schedules alone, within so many times the gap."""

_EXACT_SECONDS = 2.0
"""The time for the programme over all of a small graph, if the gap is not reached before."""

_WINDOW = 12
_WINDOWS_SECONDS = 15.0
_LEAST_WINDOWS_SECONDS = 2.0

_SECONDS = 3.0
_OPERATIONS = 500
_GAP = 5e-3
"""A search for this gap may take so many seconds for a graph of so many operations, and more for a larger
graph or a smaller gap in proportion: more seldom closes what is left."""

_PATIENCE = 10.0
"""It may take up to so many times as long while the proof is poor, in proportion to what is open."""

_CUTS_PART = 0.65
"""The part of that time for programmes over cuts; the rest is for windows."""


def search(
    problem: CheckpointProblem,
    budget_bytes: int,
    candidates: Candidates,
    *,
    deadline: float,
    gap: float = 0.0,
    cuts: CutsFound | None = None,
) -> Incumbent | None:
    """Searches for the fastest schedule within the budget, with a bound for all; None if none was found.

    Parametric cuts give a bound, and a schedule often. Candidates and evictions at this budget are merged.
    Then, in rounds, the programme over cuts gives a bound and a first choice with ever more cuts, and that
    choice is merged with the best so far. If the gap is not closed by then, one programme holds all that a
    small graph can do.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once.
        candidates: Schedules that are known.
        deadline: `time.thread_time()` at which to stop.
        gap: The distance from the best at which to stop, as a fraction of the step's time.
        cuts: The outcome of `search_cuts`, if it is known.
    """
    cuts = search_cuts(problem, budget_bytes, deadline=deadline) if cuts is None else cuts
    asked = max(gap, _PROOF_GAP)
    closer = asked if len(problem.base) > _DEMAND_OPERATIONS else max(_CLOSER * gap, _PROOF_GAP)
    incumbent = _Search(problem, budget_bytes, candidates, cuts, deadline, closer, asked).run()
    if (incumbent is not None and incumbent.is_proved(problem, gap)) or not problem.backward:
        return incumbent
    return _exactly(problem, budget_bytes, incumbent, deadline) if is_small(problem) else incumbent


def proved_by_cuts(problem: CheckpointProblem, cuts: CutsFound, *, gap: float) -> Incumbent | None:
    """The schedule of parametric cuts if no other search is worth it; None if one is.

    On a small graph, where searches take little, it is to be closer to the bound than was asked for.
    """
    if cuts.best is None:
        return None
    is_large = len(problem.base) > _LARGE_OPERATIONS
    incumbent = Incumbent("cut", cuts.best, cuts.bound_seconds)
    return incumbent if incumbent.is_proved(problem, gap if is_large else _CLOSER * gap) else None


def _exactly(
    problem: CheckpointProblem, budget_bytes: int, incumbent: Incumbent | None, deadline: float
) -> Incumbent | None:
    """Closes what is left between the best schedule of a small graph and the bound."""
    now = time.thread_time()
    latest = min(deadline, now + _EXACT_SECONDS)
    bound_seconds = lower_bound(problem, budget_bytes, deadline=now + (latest - now) / 2)
    exact = best_of_class(problem, budget_bytes, deadline=latest)
    if incumbent is None and exact.best is not None:
        incumbent = Incumbent("ilp", exact.best)
    if incumbent is None:
        return None
    if exact.best is not None:
        incumbent.update("ilp", exact.best, budget_bytes)
    incumbent.bound_seconds = max(incumbent.bound_seconds, bound_seconds)
    return incumbent


@dataclass
class _Search:
    problem: CheckpointProblem
    budget_bytes: int
    candidates: Candidates
    cuts: CutsFound
    deadline: float
    gap: float
    asked_gap: float
    incumbent: Incumbent | None = field(default=None, init=False)
    tightest: Relaxation | None = field(default=None, init=False)
    """The programme that gave the best bound, if more time could raise it."""
    from_end: DemandSearch | None = field(default=None, init=False)
    demand_seconds: float = field(default=0.0, init=False)
    """The time that searches from the end took."""
    failed_seconds: float = field(default=math.inf, init=False)
    """The lowest limit with which one did not end."""
    has_ended: bool = field(default=False, init=False)
    """Whether any has ended."""
    started: float = field(default_factory=time.thread_time, init=False)

    def left(self, part: float = 1.0) -> float:
        """Seconds that are left of a part of the time, the more the poorer the proof."""
        allowed = _SECONDS * max(len(self.problem.base) / _OPERATIONS, 1.0) * max(_GAP / self.asked_gap, 1.0)
        fair_seconds = _POOR * self.gap * self.problem.step_seconds
        poverty = self._gap_seconds / fair_seconds if fair_seconds else 1.0
        allowed *= min(max(poverty, 1.0), _PATIENCE)
        return min(self.deadline, self.started + part * allowed) - time.thread_time()

    def run(self) -> Incumbent | None:
        by_cuts = [] if self.cuts.best is None else [("cut", self.cuts.best)]
        seeds = self._seeds() or by_cuts
        if not seeds:
            return None
        self.incumbent = incumbent = Incumbent(*seeds[0])
        gap = max(self.gap * _MERGING_GAP, _PROOF_GAP)
        work = SolutionMerger(self.problem, self.budget_bytes, incumbent.best, self.deadline, gap)
        for name, solution in by_cuts:  # nothing is merged with it: what others run again has more to choose
            incumbent.update(name, solution, self.budget_bytes)
        if self.problem.is_fastest(incumbent.best):
            return incumbent
        incumbent.bound_seconds = self.cuts.bound_seconds
        if self.cuts.idea is not None:
            self._merge(work, self.cuts.idea)
        self._by_cuts(work)
        self._by_windows(work)
        self._lower(work)
        self._tighten()
        self._report()
        return incumbent

    def _report(self) -> None:
        assert self.incumbent is not None
        step_seconds = self.problem.step_seconds or 1.0
        report(
            Progress(
                "plan-memory",
                len(self.problem.base),
                self.incumbent.best.seconds / step_seconds - 1,
                self.incumbent.bound_seconds / step_seconds,
                max(self.deadline - time.thread_time(), 0.0),
            )
        )

    def _take(self, work: SolutionMerger) -> None:
        assert self.incumbent is not None and work.best is not None
        self.incumbent.update("ilp", work.best, self.budget_bytes)

    def _seeds(self) -> list[tuple[str, Solution]]:
        found = self.candidates.fitting(self.budget_bytes)
        for weight in () if fits_without_search(self.problem, self.budget_bytes) else _WEIGHTS:
            latest = min(self.deadline, time.thread_time() + _RUN_SECONDS)
            evicted = evict_greedily(self.problem, self.budget_bytes, distance_weight=weight, deadline=latest)
            if evicted is not None:
                found.append(("eviction", evicted))
        distinct = {(s.seconds, s.peak_bytes): (name, s) for name, s in reversed(found)}
        return [distinct[key] for key in sorted(distinct)]

    def _by_cuts(self, work: SolutionMerger) -> None:
        """Takes, in rounds, a bound and a first choice from ever more cuts, and merges that choice."""
        assert self.incumbent is not None
        time_steps = [len(self.problem.forward)]
        began = closed = time.thread_time()
        gap, stretches = math.inf, STRETCHES
        for _ in range(_CUT_ROUNDS):
            started = time.thread_time()
            self._report()
            if gap - self._gap_seconds >= _PROGRESS * self.problem.step_seconds:
                gap, closed = self._gap_seconds, started
            left = self.left(_CUTS_PART)
            is_fair = self._is_fair
            idle = max((closed - began) / 2, _FAIR_IDLE_SECONDS if is_fair else _IDLE_SECONDS)
            if left <= 0 or started - closed > idle or self.is_proved:
                return
            relaxation = _relaxation(self.problem, self.budget_bytes, time_steps)
            seconds = max((time.thread_time() - started) * _SOLVING, _LEAST_CUT_SECONDS)
            seconds = min(self.left(), seconds, idle if is_fair else _LONGEST_CUT_SECONDS)
            bound_seconds = relaxation.relaxed_bound_seconds(seconds=seconds)
            if math.isfinite(bound_seconds):
                self.incumbent.bound_seconds = max(self.incumbent.bound_seconds, bound_seconds)
            if len(time_steps) > 1:
                demand_seconds = self.demand_seconds
                self._by_demands(work, time_steps)
                closed += self.demand_seconds - demand_seconds
            if self.is_proved:
                return
            solved = self._solved(relaxation, seconds)
            if solved.is_infeasible:
                return  # within the solver's tolerance: a schedule that fits is at hand
            if solved.bound_seconds > self.incumbent.bound_seconds:
                self.incumbent.bound_seconds = solved.bound_seconds
                self.tightest = None if solved.is_optimal else relaxation
            if solved.resident is None:
                return  # nothing that is worth it, as far as there was time: what is left is the bound
            ideas = list(self._ideas(solved.resident))
            self._merge(work, *ideas)
            if len(time_steps) > 1:
                self._dive(work, solved.resident)
            more: set[int] = set()
            if len(time_steps) > 1 and ideas:
                more.update(_violated(self.problem, self.budget_bytes, ideas[0], time_steps))
            if not more:
                more.update(tightest_time_steps(self.problem, stretches))
                stretches *= 2
            if more.issubset(time_steps):
                return
            time_steps = sorted(more.union(time_steps))

    def _by_demands(self, work: SolutionMerger, time_steps: Sequence[int]) -> None:
        """Searches a small graph from its end: for a schedule that is better by the gap, or the proof.

        Limits begin halfway between the bound and the incumbent: the lower they are, the less is searched.
        """
        assert self.incumbent is not None
        problem = self.problem
        if len(problem.base) > (_FAIR_DEMAND_OPERATIONS if self._is_fair else _DEMAND_OPERATIONS):
            return
        began = time.thread_time()
        allowed = max(_DEMAND_SECONDS, _DEMAND_PART * (began - self.started)) - self.demand_seconds
        deadline = began + min(allowed, self.left())
        if self.from_end is None:
            free_bytes = int(problem.keep_all.peak_bytes * _NEGLIGIBLE)
            self.from_end = DemandSearch(problem, self.budget_bytes, time_steps, free_bytes)
        gap_seconds = self.gap * _WITHIN * problem.step_seconds
        while not self.is_proved and time.thread_time() < deadline:
            bound_seconds = self.incumbent.bound_seconds
            limit_seconds = self.incumbent.best.seconds - problem.step_seconds - gap_seconds
            if limit_seconds - bound_seconds > _FAR * gap_seconds:
                limit_seconds = (limit_seconds + bound_seconds) / 2
            if limit_seconds >= self.failed_seconds:
                limit_seconds = (self.failed_seconds + bound_seconds) / 2 if self.has_ended else bound_seconds
            if limit_seconds - bound_seconds < gap_seconds / _FAR:
                break
            most_states = _MORE_DEMAND_STATES if self.has_ended else _DEMAND_STATES
            if not self._from_end(work, limit_seconds, deadline, most_states):
                break
        if self.has_ended and self.is_proved:
            limit_seconds = self.incumbent.best.seconds - problem.step_seconds
            self._from_end(work, limit_seconds, deadline, _LAST_DEMAND_STATES)
        self.demand_seconds += time.thread_time() - began

    def _from_end(
        self, work: SolutionMerger, limit_seconds: float, deadline: float, most_states: int
    ) -> bool:
        """Searches a graph from its end, below a limit; returns whether another limit may be of use."""
        assert self.incumbent is not None and self.from_end is not None
        found = self.from_end.run(limit_seconds=limit_seconds, most_states=most_states, deadline=deadline)
        self.incumbent.bound_seconds = max(self.incumbent.bound_seconds, found.bound_seconds)
        if found.is_complete:
            self.has_ended = True
        else:
            self.failed_seconds = min(self.failed_seconds, limit_seconds)
        if found.solution is None:
            return True
        self.incumbent.update("ilp", found.solution, self.budget_bytes)
        if self.incumbent.best is found.solution:
            work.best = found.solution
            return True
        self._merge(work, found.solution)  # over the budget, by what counts as small
        return False

    def _dive(self, work: SolutionMerger, resident: Mapping[int, frozenset[Storage]]) -> None:
        """Merges what a choice becomes as cuts are set where it is over the budget, and only these are open.

        Each programme is small, and rules out what is no better than the incumbent. The last choice fits at
        many more cuts than one programme could have, and often between them too.
        """
        assert self.incumbent is not None
        idea: Solution | None = None
        chosen: Mapping[int, frozenset[Storage]] | None = resident
        while chosen is not None:
            ideas = list(self._ideas(chosen))
            if not ideas:
                break
            idea = min(ideas, key=lambda s: s.peak_bytes)
            more = _violated(self.problem, self.budget_bytes, idea, list(chosen))
            left = self.left()
            if not more or left <= 0:
                break
            relaxation = _relaxation(
                self.problem, self.budget_bytes, sorted({*chosen, *more}), has_spans=False
            )
            relaxation.fix(chosen)
            better_seconds = self.incumbent.best.seconds - self.problem.step_seconds
            chosen = relaxation.solve(
                seconds=min(left, _DIVE_SECONDS), gap=_DIVE_GAP, below_seconds=better_seconds
            ).resident
        if idea is not None and chosen is not resident:
            self._merge(work, idea)

    def _merge(self, work: SolutionMerger, *ideas: Solution) -> None:
        """Merges ideas with the incumbent, one after the other, until the gap is reached."""
        for idea in ideas:
            if not self.is_proved:
                work.add(idea)
                self._take(work)

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
    def is_proved(self) -> bool:
        """Whether the gap that was asked for is reached."""
        return self.incumbent is not None and self.incumbent.is_proved(self.problem, self.gap)

    @property
    def _is_fair(self) -> bool:
        """Whether the proof is not poor."""
        return self.incumbent is not None and self.incumbent.is_proved(self.problem, _POOR * self.gap)

    @property
    def _gap_seconds(self) -> float:
        assert self.incumbent is not None
        return self.incumbent.best.seconds - self.problem.step_seconds - self.incumbent.bound_seconds

    def _solved(self, relaxation: Relaxation, seconds: float) -> Solved:
        """Asks for a choice that is better by the gap; if there is none, for any better one.

        If there was no time to tell, and the proof is poor, it asks for any choice, as an idea.
        """
        started = time.thread_time()
        limit_seconds = self._better_seconds(self.gap)
        solved = relaxation.solve(
            seconds=seconds, gap=_PROOF_GAP, node_limit=_CUT_NODES, below_seconds=limit_seconds
        )
        if math.isinf(limit_seconds) or solved.resident is not None or solved.is_infeasible:
            return solved
        if not solved.is_optimal:
            if self._is_fair:
                return solved
            free = relaxation.solve(seconds=seconds, gap=_PROOF_GAP, node_limit=_CUT_NODES)
            return replace(free, bound_seconds=max(free.bound_seconds, solved.bound_seconds))
        closer = relaxation.solve(
            seconds=time.thread_time() - started,
            gap=_PROOF_GAP,
            node_limit=_CUT_NODES,
            below_seconds=self._better_seconds(_PROOF_GAP),
        )
        return solved if closer.bound_seconds < solved.bound_seconds or closer.is_infeasible else closer

    def _better_seconds(self, gap: float) -> float:
        """The time that a schedule computes again at most if it is better than the incumbent by a gap.

        It is infinite far from a proof, where the limit only makes programmes harder.
        """
        assert self.incumbent is not None
        if not self.incumbent.is_proved(self.problem, _NEAR * self.gap):
            return math.inf
        return self.incumbent.best.seconds - (1 + gap) * self.problem.step_seconds

    def _by_windows(self, work: SolutionMerger) -> None:
        """Lets more run again in one part of backward after the other, for as long as was searched so far."""
        assert self.incumbent is not None
        split, end = len(self.problem.forward), len(self.problem.base)
        now = time.thread_time()
        latest = now + min(self.left(), max(now - self.started, _LEAST_WINDOWS_SECONDS), _WINDOWS_SECONDS)
        for start in range(split, end, _WINDOW // 2):
            if time.thread_time() >= latest or self._is_fair:
                return
            work.look_around(range(start, min(start + _WINDOW, end)))
            self._take(work)

    def _tighten(self) -> None:
        """Spends more time on the bound if the proof is poor: half as much as on the search."""
        assert self.incumbent is not None
        left = self.left()
        if self.tightest is None or left <= 0 or self._is_fair:
            return
        seconds = min(left, (time.thread_time() - self.started) / 2, _LONGEST_PROOF_SECONDS)
        solved = self.tightest.solve(
            seconds=seconds, gap=_PROOF_GAP, below_seconds=self._better_seconds(self.gap)
        )
        if not solved.is_infeasible:
            self.incumbent.bound_seconds = max(self.incumbent.bound_seconds, solved.bound_seconds)

    def _lower(self, work: SolutionMerger) -> None:
        """Among schedules as fast as the incumbent, takes the one with the lowest peak."""
        assert self.incumbent is not None
        left = self.left()
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
