"""Schedules and bounds from the trade-offs of one time step: bytes that stay there against seconds again."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...ir import Node, Storage
from .cut_network import CutNetwork, Kept
from .problem import CheckpointProblem, Solution

__all__ = ["CutsFound", "ParametricCut", "Tradeoff", "bound_by_cuts", "search_cuts", "tightest_time_steps"]

_TIE = 1e-4
"""A byte that stays to the end of the step counts as this much more than one: equal layers then leave one
after the other as bytes get dearer, the longest-lived first."""

_STRETCHES = 6
"""Beside the loss, cuts are first set at the tightest time step of each of so many stretches of backward."""

_SIMULATIONS = 16
"""The most schedules that are made of choices at cuts."""

_FILLINGS = 8
"""The most operations that need not run again because of what a choice leaves free."""


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """A choice at a time step.

    Args:
        counted_bytes: The bytes that stay, each counted by its storage's weight.
        nbytes: The bytes that stay.
        seconds: The time of what runs again.
        kept: The storages that stay.
    """

    counted_bytes: float
    nbytes: int
    seconds: float
    kept: Kept


class ParametricCut:
    """The convex hull of bytes that stay at a time step against seconds that run again behind it.

    For a price of a second in bytes, a minimum cut is the choice with the least bytes plus price times
    seconds. The prices that matter lie between two known choices, where these cost the same. The width of
    each cut bounds all choices from below (Lagrange). So equal layers are solved together, in one network:
    all of them change at one price, and weights say which goes first.

    Args:
        problem: The recomputation problem.
        time_step: The time step of the cut.

    Source:
        Gallo, Grigoriadis and Tarjan, A Fast Parametric Maximum Flow Algorithm (1989); the prices are those
        of Eisner and Severance, Mathematical Techniques for Efficient Record Segmentation in Large Shared
        Databases (1976).
    """

    def __init__(self, problem: CheckpointProblem, time_step: int) -> None:
        self.problem, self.time_step = problem, time_step
        steps = problem.time_steps
        weights = {storage: 1 + _TIE * last / steps for storage, last in problem.last_needed.items()}
        self.network = CutNetwork(problem, time_step, weights=weights)
        self._lines: list[tuple[float, float]] = []
        """The prices that were tried, in bytes a second, and the width of each cut."""
        fastest, smallest = self._tradeoff(lambda node: math.inf), self._tradeoff(lambda node: 0.0)
        self._least_bytes = self.network.width_bytes / self.network.most_weight
        self._hull = [smallest, fastest]
        """The known choices, from the fewest bytes to the most."""

    def room_bytes(self, budget_bytes: int) -> int:
        """The bytes that a budget leaves for what stays at the time step, beside what that reads.

        At the loss, each other forward in flight that waits holds as much.
        """
        problem, time_step = self.problem, self.time_step
        left = budget_bytes - problem.held_in(time_step, 0)
        left -= sum(s.nbytes for s in problem.read_at(time_step))
        if time_step != len(problem.forward):
            return left - problem.least_others_bytes(time_step)
        return min((left - case.nbytes) // (1 + case.waiting) for case in problem.others_at(time_step))

    def within(self, room_bytes: int) -> Tradeoff | None:
        """The choice of the hull with the most bytes that are within `room_bytes`; None if there is none."""
        hull = self._hull
        if hull[0].nbytes > room_bytes:
            return None
        at = max(index for index, choice in enumerate(hull) if choice.nbytes <= room_bytes)
        while at + 1 < len(hull) and (between := self._between(hull[at], hull[at + 1])) is not None:
            hull.insert(at + 1, between)
            at += between.nbytes <= room_bytes
        return hull[at]

    def bound_seconds(self, room_bytes: int) -> float:
        """A lower bound of the time that runs again if no more than `room_bytes` stay; infinite if none do.

        It is that of the prices tried so far: `within` tries those that matter.
        """
        if self._least_bytes > room_bytes:
            return math.inf
        counted = self.network.most_weight * room_bytes
        return max((max(width - counted, 0.0) / price for price, width in self._lines), default=0.0)

    def _between(self, small: Tradeoff, large: Tradeoff) -> Tradeoff | None:
        """A choice of the hull between two; None if there is none."""
        seconds = small.seconds - large.seconds
        if seconds <= 0.0:
            return None
        price = (large.counted_bytes - small.counted_bytes) / seconds
        node_seconds = self.problem.costs.seconds
        found = self._tradeoff(lambda node: price * node_seconds[node])
        self._lines.append((price, self.network.width_bytes - self.network.rounding_bytes))
        is_new = small.counted_bytes < found.counted_bytes < large.counted_bytes
        return found if is_new and found.kept not in (small.kept, large.kept) else None

    def _tradeoff(self, price: Callable[[Node], float]) -> Tradeoff:
        network, weights = self.network, self.network.weights
        kept, again = network.cut_with_repeats(price)
        counted = math.fsum(network.bytes[s] * weights[s] for s in kept)
        seconds = math.fsum(self.problem.costs.seconds[node] for node in again)
        free = (storage for storage, nbytes in network.bytes.items() if not nbytes)
        return Tradeoff(counted, sum(network.bytes[s] for s in kept), seconds, kept.union(free))


# ---------------------------------------------------------------------- the search


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
        if time_step is None or (found.best is not None and time.thread_time() >= deadline):
            break
        choice = cuts.choice(time_step)
        solution = None if choice is None else _simulated(problem, time_step, choice.kept)
        if choice is None or solution is None:
            cuts.drop(time_step)
            continue
        peaks = problem.peaks(solution)
        if solution.peak_bytes <= budget_bytes:
            found.best = _filled(problem, budget_bytes, solution, time_step, choice.kept)
            break
        found.idea = found.idea or solution
        worst = max(range(len(peaks)), key=peaks.__getitem__)
        is_tighter = cuts.add(worst) and cuts.tightest() == worst
        if not is_tighter:
            cuts.shrink(time_step, solution.peak_bytes - budget_bytes)
    found.bound_seconds = cuts.bound_seconds
    return found


def bound_by_cuts(problem: CheckpointProblem, budget_bytes: int) -> float:
    """A lower bound of the time that every schedule within the budget computes again, in seconds."""
    return _first_cuts(problem, budget_bytes).bound_seconds if problem.backward else 0.0


def _first_cuts(problem: CheckpointProblem, budget_bytes: int) -> _Cuts:
    cuts = _Cuts(problem, budget_bytes)
    for time_step in dict.fromkeys((len(problem.forward), *tightest_time_steps(problem, _STRETCHES))):
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

    def choice(self, time_step: int) -> Tradeoff | None:
        """The choice at a time step."""
        return self.cuts[time_step].within(self.rooms[time_step])

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


# ---------------------------------------------------------------------- what is left free


def _filled(
    problem: CheckpointProblem, budget_bytes: int, solution: Solution, time_step: int, kept: Kept
) -> Solution:
    """The schedule with results of what runs again kept instead, as far as they fit."""
    more = _Filling(problem, budget_bytes, solution, time_step).chosen()
    filled = _simulated(problem, time_step, kept.union(more)) if more else None
    if filled is None or filled.peak_bytes > budget_bytes or filled.seconds >= solution.seconds:
        return solution
    return filled


class _Filling:
    """What runs once more in a schedule, and what it takes not to run it.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once.
        solution: The schedule.
        time_step: The time step at which what is kept instead must have been made.
    """

    def __init__(
        self, problem: CheckpointProblem, budget_bytes: int, solution: Solution, time_step: int
    ) -> None:
        self.problem = problem
        self.free = budget_bytes - np.array(problem.peaks(solution), dtype=np.int64)
        self.made_again: dict[Node, int] = {}
        """The operations that run again, with the time step before which they do."""
        readers: Counter[Storage] = Counter()
        split = len(problem.forward)
        for base, again in enumerate(problem.recomputations(solution)):
            step = base if base < split else base + 1
            for node in again:
                self.made_again.setdefault(node, step)
                readers.update(problem.forward_reads[node])
        self.readers = readers
        self.before = time_step

    def chosen(self) -> list[Storage]:
        """The storages to keep, one operation after the other: each time the one that saves most."""
        found: list[Storage] = []
        for _ in range(_FILLINGS):
            most_seconds, best = 0.0, None
            for node in self.made_again:
                seconds = math.fsum(self.problem.costs.seconds[n] for n in self._saved(node))
                if seconds > most_seconds and self._fits(node):
                    most_seconds, best = seconds, node
            if best is None:
                break
            found += self._results(best)
            self._keep(best)
        return found

    def _results(self, node: Node) -> list[Storage]:
        """The results of an operation that are read where it runs again."""
        problem = self.problem
        made = (s for s in problem.graph.allocates(node) if s in problem.producer)
        return [s for s in made if self.readers[s] or s in problem.read_positions]

    def _stretch(self, node: Node, storage: Storage) -> slice:
        """The time steps at which a storage is not there now, and would be."""
        users = self.problem.users.get(storage, ())
        last = max((self.problem.index[user] for user in users), default=self.problem.index[node])
        return slice(last + 1, self.made_again[node] + 1)

    def _fits(self, node: Node) -> bool:
        results = self._results(node)
        if self.problem.index[node] >= self.before or not self.problem.transient.isdisjoint(results):
            return False
        nbytes = sum(storage.nbytes for storage in results)
        return all(self.free[self._stretch(node, s)].min(initial=nbytes) >= nbytes for s in results)

    def _keep(self, node: Node) -> None:
        for storage in self._results(node):
            self.free[self._stretch(node, storage)] -= storage.nbytes
        for saved in list(self._saved(node)):
            del self.made_again[saved]
            self.readers.subtract(self.problem.forward_reads[saved])

    def _saved(self, node: Node) -> Iterator[Node]:
        """Yields the operations that need not run again if the results of one of them stay."""
        left: Counter[Storage] = Counter()
        pending: Sequence[Node] = [node]
        while pending:
            yield from pending
            lonely: dict[Node, None] = {}
            for done in pending:
                for storage in self.problem.forward_reads[done]:
                    left[storage] += 1
                    maker = self.problem.producer[storage]
                    if maker in self.made_again and self._is_unread(maker, left):
                        lonely[maker] = None
            pending = list(lonely)

    def _is_unread(self, node: Node, left: Counter[Storage]) -> bool:
        """Whether nothing reads the results of an operation any more, with some readers gone."""
        problem = self.problem
        made = (s for s in problem.graph.allocates(node) if s in problem.producer)
        return all(self.readers[s] <= left[s] and s not in problem.read_positions for s in made)
