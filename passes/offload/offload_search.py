"""Searches for what lives in a tier between steps, with the schedule that brings it and takes it back."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from ...ir import Gradients, OffloadedParameter, Tier
from ..remat.planner import Planner
from ..remat.problem import CheckpointProblem
from ..remat.search import Incumbent
from .local_search import PROOF_GAP
from .offload_problem import OffloadProblem
from .offloaded_parameters import LEAST_BYTES, LoadedProgram, offloadable_in
from .prefetch import prefetch
from .remat_and_offload import bound_with_copies, least_budget, search_with_copies
from .strategies import known_offload_solutions

__all__ = ["OffloadSearch"]

_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The parts, in bytes, of what can live in a tier that are tried; then parts around the best of them."""

_STEPS = (0.125, 0.0625)

_WEIGHT = 0.25
"""The weight of a second of a copy to the device in the search: most copies run beside computations."""

_MARGINS = (0.0, 1.0, 3.0)
"""The memory that a search leaves free for copies under way, as multiples of the largest one offloaded."""

_TRIAL_PART = 0.1
"""The part of the time for a first look at each part."""

_BOUND_PART = 0.1

_GRACE_SECONDS = 2.0
"""The time for a schedule if none was found in time."""


@dataclass(frozen=True, slots=True)
class OffloadChoice:
    """A choice of what lives in a tier.

    Args:
        problem: The recomputation problem of the graph with these offloaded parameters.
        incumbent: The schedule, with its time.
    """

    problem: CheckpointProblem
    incumbent: Incumbent


@dataclass
class OffloadSearch:
    """Searches for the fastest schedule among those in which more or less lives in a tier.

    Args:
        planner: The planner of a program without offloaded parameters.
        which: Names of `OFFLOADABLE`.
        budget_bytes: The budget of the device.
        names: The names of the parameters to offload; None if the search chooses them.
        least_offloaded_bytes: Smaller parameters stay on the device.
        gap: The distance from the best at which to stop, as a fraction of the step's time.
    """

    planner: Planner
    which: Sequence[str]
    budget_bytes: int
    names: Collection[str] | None = None
    least_offloaded_bytes: int = LEAST_BYTES
    gap: float = PROOF_GAP

    def __post_init__(self) -> None:
        tiers = self.planner.program.tiers
        self.tier = tiers[0]
        left_bytes = self.tier.capacity_bytes
        offloaded_parameters: list[OffloadedParameter] = []
        graph = self.planner.program.graph
        for offloaded in offloadable_in(
            self.tier.name, graph, self.which, least_bytes=self.least_offloaded_bytes
        ):
            if offloaded.storage.nbytes <= left_bytes and (
                self.names is None or offloaded.name in self.names
            ):
                left_bytes -= offloaded.storage.nbytes
                offloaded_parameters.append(offloaded)
        self.offloaded_parameters = tuple(offloaded_parameters)

    def run(self, deadline: float) -> OffloadChoice | None:
        """Returns the fastest schedule found; None if none fits.

        Args:
            deadline: `time.thread_time()` at which to stop.
        """
        started = time.thread_time()
        trial_seconds = (deadline - started) * _TRIAL_PART
        tried: dict[tuple[OffloadedParameter, ...], OffloadChoice | None] = {}

        def seconds(offloaded_parameters: tuple[OffloadedParameter, ...]) -> float:
            choice = tried.get(offloaded_parameters)
            return math.inf if choice is None else choice.incumbent.best.seconds

        def best_of(parts: Sequence[float]) -> float:
            """The part that gives the fastest schedule."""
            for part in parts:
                offloaded_parameters = self._part(part)
                if offloaded_parameters not in tried and not is_good_enough():
                    latest = time.thread_time() + trial_seconds
                    tried[offloaded_parameters] = next(self._with(offloaded_parameters, (0.0,), latest), None)
            return min(parts, key=lambda part: (seconds(self._part(part)), part))

        def is_good_enough() -> bool:
            """Whether a schedule is nearly as fast as computing nothing twice, and waiting for nothing."""
            gap = max(self.gap, PROOF_GAP)
            choices = [choice for choice in tried.values() if choice is not None]
            return any(c.incumbent.best.seconds <= c.problem.step_seconds * (1 + gap) for c in choices)

        best = best_of((1.0,) if self.names is not None else _PARTS)
        for step in _STEPS if self.names is None else ():
            best = best_of((best, max(best - step, 0.0), min(best + step, 1.0)))
        offloaded_parameters = self._part(best)
        choice = tried.get(offloaded_parameters)
        if choice is None:
            return next(
                self._with(self.offloaded_parameters, (0.0,), time.thread_time() + _GRACE_SECONDS), None
            )
        bound_seconds = self._bound_seconds(time.thread_time() + (deadline - started) * _BOUND_PART)
        margins = _MARGINS
        while margins and time.thread_time() < deadline and not is_good_enough():
            latest = time.thread_time() + (deadline - time.thread_time()) / len(margins)
            for other in self._with(offloaded_parameters, margins[:1], latest):
                if other.incumbent.best.seconds < choice.incumbent.best.seconds:
                    choice = other
            margins = margins[1:]
        step_seconds = choice.problem.step_seconds
        choice.incumbent.bound_seconds = max(bound_seconds - step_seconds, 0.0)
        return choice

    def least_bytes(self, deadline: float = math.inf) -> int:
        """The smallest budget that a schedule is found for if everything lives in the tier that can.

        For models so small that moving takes more than it frees, it is the peak of keeping everything.

        Args:
            deadline: `time.thread_time()` at which to stop; what was found by then counts.
        """
        loaded, planner = self._loaded(self.offloaded_parameters)
        work = OffloadProblem(
            planner.problem, self._tiers_beside(loaded.offloaded_parameters), self.budget_bytes
        )
        candidates = planner.candidates((time.thread_time() + deadline) / 2, is_thorough=True)
        found_bytes = least_budget(work, candidates, deadline=deadline)
        return min(found_bytes, self.planner.problem.keep_all.peak_bytes)

    @property
    def largest_step(self) -> tuple[str, int] | None:
        """The parameter whose gradient takes most to apply, and the bytes; None if none is applied."""
        _, planner = self._loaded(self.offloaded_parameters)
        problem = planner.problem
        demands = {n: problem.demand_bytes[n] for n in problem.backward if n.releases is Gradients.APPLIED}
        if not demands:
            return None
        node = max(demands, key=demands.__getitem__)
        names = {entry.value: entry.target for entry in problem.graph.inputs}
        return names[node.operands[0]], demands[node]

    @property
    def floor_bytes(self) -> int:
        """The bytes that no schedule can go below, whatever lives in the tier."""
        _, planner = self._loaded(self.offloaded_parameters)
        return OffloadProblem(planner.problem, (), self.budget_bytes).floor_bytes

    def _part(self, part: float) -> tuple[OffloadedParameter, ...]:
        """The first of the offloaded parameters, of at least this part of their bytes."""
        least = part * sum(offloaded.storage.nbytes for offloaded in self.offloaded_parameters)
        ends = itertools.accumulate(
            (offloaded.storage.nbytes for offloaded in self.offloaded_parameters),
            initial=0,
        )
        count = next(
            (count for count, nbytes in enumerate(ends) if nbytes >= least), len(self.offloaded_parameters)
        )
        return self.offloaded_parameters[:count]

    def _with(
        self, offloaded_parameters: tuple[OffloadedParameter, ...], margins: Sequence[float], deadline: float
    ) -> Iterator[OffloadChoice]:
        """Yields schedules with these offloaded parameters, with memory left free for copies under way."""
        loaded, planner = self._loaded(offloaded_parameters)
        tiers = self._tiers_beside(offloaded_parameters)
        largest = max((offloaded.storage.nbytes for offloaded in offloaded_parameters), default=0)
        for margin in margins:
            budget_bytes = self.budget_bytes - int(margin * largest)
            work = OffloadProblem(planner.problem, tiers, budget_bytes)
            if budget_bytes < work.floor_bytes:
                continue
            candidates = planner.candidates((time.thread_time() + deadline) / 2)
            seeds = known_offload_solutions(work, deadline=(time.thread_time() + deadline) / 2)
            incumbent = search_with_copies(work, candidates, deadline=deadline, gap=self.gap, seeds=seeds)
            if incumbent is not None:
                yield self._offloaded(loaded, planner.problem, incumbent)

    def _offloaded(
        self, loaded: LoadedProgram, seen: CheckpointProblem, incumbent: Incumbent
    ) -> OffloadChoice:
        """Adds the copies of offloaded parameters beside computations to a schedule."""
        problem = loaded.problem(seen)
        tiers = self.planner.program.tiers
        schedule = loaded.schedule(problem.graph, incumbent.best.schedule)
        costs = problem.costs
        if loaded.offloaded_parameters:
            schedule = prefetch(schedule, costs.seconds, costs.workspace_bytes, tiers, self.budget_bytes)
        best = OffloadProblem(problem, tiers, self.budget_bytes).simulate(schedule)
        return OffloadChoice(problem, Incumbent(incumbent.name, best))

    def _loaded(
        self, offloaded_parameters: tuple[OffloadedParameter, ...], weight: float = _WEIGHT
    ) -> tuple[LoadedProgram, Planner]:
        loaded = LoadedProgram(self.planner.program, offloaded_parameters, self.tier, weight)
        return loaded, Planner(loaded.seen)

    def _tiers_beside(self, offloaded_parameters: Sequence[OffloadedParameter]) -> tuple[Tier, ...]:
        """The tiers, with the capacity left beside offloaded parameters for copies within a step."""
        taken = sum(offloaded.storage.nbytes for offloaded in offloaded_parameters)
        first, *others = self.planner.program.tiers
        return replace(first, capacity_bytes=first.capacity_bytes - taken), *others

    def _bound_seconds(self, deadline: float) -> float:
        """A lower bound of the time of every step, whatever lives in the tier, in seconds.

        A schedule in which less lives in the tier is also one in which everything does, with copies that cost
        nothing: what is on the device from the beginning is copied once and stays. If the budget does not
        hold everything that operations read, beside what cannot live in the tier, the rest has to come.
        """
        loaded, planner = self._loaded(self.offloaded_parameters, weight=0.0)
        work = OffloadProblem(planner.problem, self._tiers_beside(()), self.budget_bytes)
        computed = planner.problem.step_seconds + bound_with_copies(work, deadline=deadline)
        missing_bytes = self.planner.program.graph.static_bytes - self.budget_bytes - loaded.unread_bytes
        return max(computed, missing_bytes / self.tier.in_bytes_per_second)
