"""Chooses recomputation and copies together: the fastest schedule within a budget, and a bound for all."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...ir import Compute, Node, Schedule, Storage, Tier, liveness, step_times
from ..remat.candidates import Candidates
from ..remat.cut_ilp import Solved
from ..remat.eviction import evict_greedily
from ..remat.problem import CheckpointProblem, Recomputations, Solution
from ..remat.search import Incumbent, search
from .cut_ilp import OffloadRelaxation
from .schedule_copies import EFFORT, Order, schedule_copies

__all__ = ["OffloadProblem", "bound_with_copies", "improve", "least_budget", "search_with_copies"]


@dataclass(frozen=True)
class OffloadProblem:
    """A recomputation problem in which storages may also go to tiers.

    Schedules considered run what a schedule of `CheckpointProblem` runs. They copy out what forward makes and
    a tier can take, each storage once, as soon as it is made; it may be away in any of its gaps.

    Args:
        problem: The recomputation problem.
        tiers: The tiers, the fastest first.
        budget_bytes: The most that may be alive at once on the device.
    """

    problem: CheckpointProblem
    tiers: tuple[Tier, ...]
    budget_bytes: int

    @property
    def floor_bytes(self) -> int:
        """The bytes that no schedule with copies can go below: what waits for its backward may be away."""
        problem = self.problem
        return problem.floor_bytes - (problem.graph.forwards_in_flight - 1) * problem.forced_bytes

    def with_copies(
        self, solution: Solution, storages: Collection[Storage] | None = None, *, effort: int = EFFORT
    ) -> Solution | None:
        """Adds copies to a schedule as needed; None if they do not make it fit.

        Args:
            solution: The schedule.
            storages: The storages that may be copied; None for all that a tier can take.
            effort: The effort of `schedule_copies`.
        """
        if solution.peak_bytes <= self.budget_bytes:
            return solution
        return self.fitted(self.order(solution), storages=storages, effort=effort)

    def order(self, solution: Solution) -> Order:
        """The order of a schedule's computations, to which copies are added."""
        return self._order(*solution.schedule.halves)

    def _order(self, forward: Sequence[Node], backward: Sequence[Node]) -> Order:
        costs = self.problem.costs
        return Order(self.problem.graph, forward, backward, costs.seconds, costs.workspace_bytes)

    def run(self, recomputations: Recomputations, *, below_seconds: float = math.inf) -> Solution | None:
        """Makes the schedule that runs these operations again, with copies if needed; None if too slow."""
        split = len(self.problem.forward)
        pairs = list(zip(self.problem.base, recomputations, strict=True))
        forward = [n for node, before in pairs[:split] for n in (*before, node)]
        backward = [n for node, before in pairs[split:] for n in (*before, node)]
        return self.fitted(self._order(forward, backward), below_seconds=below_seconds)

    def fitted(
        self,
        order: Order,
        *,
        below_seconds: float = math.inf,
        storages: Collection[Storage] | None = None,
        effort: int = EFFORT,
    ) -> Solution | None:
        """Adds copies to an order as needed; None if it does not fit, or is not that fast.

        Args:
            order: The order.
            below_seconds: A limit: only faster steps are asked for.
            storages: The storages that may be copied; None for all that a tier can take.
            effort: The effort of `schedule_copies`.
        """
        copies = schedule_copies(
            order,
            self.problem.producer if storages is None else storages,
            self.tiers,
            self.budget_bytes,
            below_seconds=below_seconds,
            effort=effort,
        )
        if copies is None or copies.step_seconds > below_seconds:
            return None
        found = self.simulate(order.schedule(copies.swaps))
        return found if found.peak_bytes <= self.budget_bytes else None

    def simulate(self, schedule: Schedule) -> Solution:
        """Simulates a schedule: its memory, and its time with that of copies which are waited for."""
        costs = self.problem.costs
        timeline = liveness(schedule, costs.workspace_bytes)
        computed = [(i, n) for i, n in zip(schedule.instructions, timeline.during_bytes, strict=True)]
        return Solution(
            schedule=schedule,
            peak_bytes=timeline.peak_bytes,
            seconds=self.seconds(schedule),
            during_bytes=tuple(n for i, n in computed if isinstance(i, Compute)),
            order=schedule.computed,
        )

    def seconds(self, schedule: Schedule) -> float:
        """The time of a step; without a wait it is that of its computations, to the last bit."""
        costs = self.problem.costs
        times = step_times(schedule, costs.seconds, self.tiers)
        computed = math.fsum(costs.seconds[node] for node in schedule.computed)
        exposed = times.exposed_seconds
        return computed + exposed if exposed > 1e-12 * computed else computed


_FREE_PART = 2e-5
"""Storages up to this fraction of the peak that keeps all are free in the programme over cuts."""

_CUT_SECONDS = 8.0
_CUT_NODES = 100

_KNOWN_PART = 0.6
"""The part of the time for known schedules, if one of them fits."""

_TIMED_ANEW = 5
"""The number of the fastest known schedules whose copies are worth an effort."""

_LAST_EFFORT = 50_000
"""The effort for the copies of the schedule that the search ends with."""

_RECOMPUTE_PART = 0.3
"""The part of the time for the best schedule without copies."""


def search_with_copies(
    work: OffloadProblem,
    candidates: Candidates,
    *,
    deadline: float,
    seeds: Iterable[tuple[str, Solution]] = (),
) -> Incumbent | None:
    """Searches for the fastest schedule with copies and recomputation, with a bound; None if none was found.

    Known schedules, of this and of larger budgets, get copies for what is over the budget. The programme over
    cuts with copies gives a bound, and an idea. The best schedule without copies is one more candidate. Then
    what runs again is changed, operation by operation, as long as that helps.

    Args:
        work: The problem.
        candidates: Schedules found without regard to the budget.
        deadline: `time.monotonic()` at which to stop.
        seeds: More schedules, which may have copies; those that fit are candidates as they are.
    """
    problem = work.problem
    incumbent: Incumbent | None = None
    known: list[tuple[str, Solution]] = []
    now = time.monotonic()
    latest = now + (deadline - now) * _KNOWN_PART
    for name, solution in itertools.chain(_candidates(work, candidates, deadline=latest), seeds):
        if solution.peak_bytes <= work.budget_bytes:
            known.append((name, solution))
            incumbent = Incumbent(name, solution) if incumbent is None else incumbent
            incumbent.update(name, solution, work.budget_bytes)
        if incumbent is not None and (incumbent.is_proved(problem, _PROOF_GAP) or time.monotonic() >= latest):
            break
    if incumbent is not None:
        _time_anew(work, known, incumbent, deadline=deadline)
        if incumbent.is_proved(problem, _PROOF_GAP) or time.monotonic() >= deadline:
            return incumbent
    left = deadline - time.monotonic()
    if left > 0 and candidates.fitting(work.budget_bytes):
        latest = time.monotonic() + left * _RECOMPUTE_PART
        alone = search(problem, work.budget_bytes, candidates, deadline=latest)
        if alone is not None:
            incumbent = Incumbent(alone.name, alone.best) if incumbent is None else incumbent
            incumbent.update(alone.name, alone.best, work.budget_bytes)
    if incumbent is None:
        return None
    time_steps = [len(problem.forward)]
    _bound(work, incumbent, time_steps, deadline)
    improve(work, incumbent, deadline=deadline)
    _time_anew(work, [(incumbent.name, incumbent.best)], incumbent, deadline=deadline, effort=_LAST_EFFORT)
    return incumbent


def _time_anew(
    work: OffloadProblem,
    known: list[tuple[str, Solution]],
    incumbent: Incumbent,
    *,
    deadline: float,
    effort: int = EFFORT,
) -> None:
    """Tries the fastest schedules once more, with copies chosen with an effort."""
    for name, solution in sorted(known, key=lambda pair: pair[1].seconds)[:_TIMED_ANEW]:
        if time.monotonic() >= deadline:
            return
        timed = work.fitted(work.order(solution), effort=effort)
        if timed is not None:
            incumbent.update(name, timed, work.budget_bytes)


def _bound(work: OffloadProblem, incumbent: Incumbent, time_steps: list[int], deadline: float) -> None:
    """Raises the bound by the programme over cuts with copies, and tries its choice."""
    problem = work.problem
    left = deadline - time.monotonic()
    if left <= 0 or incumbent.is_proved(problem, _PROOF_GAP):
        return
    solved = _relaxed(work, time_steps, min(left / 2, _CUT_SECONDS))
    if not solved.is_infeasible:
        incumbent.bound_seconds = max(incumbent.bound_seconds, solved.bound_seconds)
    if solved.resident is not None:
        with contextlib.suppress(ValueError):
            idea = work.run(problem.repeats_between(solved.resident))
            if idea is not None:
                incumbent.update("joint", idea, work.budget_bytes)


def bound_with_copies(work: OffloadProblem, *, deadline: float) -> float:
    """A lower bound of the seconds that every schedule with copies takes beyond its operations.

    Args:
        work: The problem.
        deadline: `time.monotonic()` at which to stop.
    """
    left = deadline - time.monotonic()
    if left <= 0 or not work.problem.backward:
        return 0.0
    solved = _relaxed(work, [len(work.problem.forward)], left)
    return 0.0 if solved.is_infeasible else max(solved.bound_seconds, 0.0)


def _relaxed(work: OffloadProblem, time_steps: list[int], seconds: float) -> Solved:
    """Solves the programme over cuts with copies."""
    small_bytes = int(work.problem.keep_all.peak_bytes * _FREE_PART)
    relaxation = OffloadRelaxation(
        work.problem, work.budget_bytes, time_steps, small_bytes=small_bytes, tiers=work.tiers
    )
    return relaxation.solve(seconds=seconds, gap=_PROOF_GAP, node_limit=_CUT_NODES)


def least_budget(work: OffloadProblem, candidates: Candidates, *, deadline: float = math.inf) -> int:
    """The smallest budget that a schedule with copies is found for, in bytes; that of `work` is ignored.

    Args:
        work: The problem.
        candidates: Schedules found without regard to the budget; those with the smallest peaks get copies.
        deadline: `time.monotonic()` at which to stop; what was found by then counts.
    """
    problem = work.problem
    lowest = sorted((s for _, s in candidates.candidates), key=lambda s: (s.peak_bytes, s.seconds))
    orders = [work.order(solution) for solution in (problem.keep_all, *lowest[:_LOW])]
    low, high = work.floor_bytes - 1, lowest[0].peak_bytes
    while high - low > max(problem.keep_all.peak_bytes >> _LOW_BITS, 1) and time.monotonic() < deadline:
        middle = (low + high) // 2
        peak_bytes = _reached(replace(work, budget_bytes=middle), orders)
        if peak_bytes is None:
            low = middle
        else:
            high = peak_bytes
    return high


def _reached(work: OffloadProblem, orders: list[Order]) -> int | None:
    """The peak of the first of some orders that fits with copies; it becomes the first."""
    for index, order in enumerate(orders):
        fitted = work.fitted(order, effort=0)
        if fitted is not None:
            orders.insert(0, orders.pop(index))
            return fitted.peak_bytes
    return None


_LOW = 3
"""The number of known schedules with the smallest peaks that are looked at for a small budget."""

_LOW_BITS = 10
_RUNGS = 24
_RUN_SECONDS = 1.0


def _candidates(
    work: OffloadProblem, candidates: Candidates, *, deadline: float
) -> Iterator[tuple[str, Solution]]:
    """Yields schedules that fit: they recompute for this or a larger budget, and copy the rest.

    The first few, which reach the smallest budgets, are tried whatever the time.
    """
    problem = work.problem
    known: set[tuple[float, int]] = set()

    def offered(name: str, solution: Solution) -> Iterator[tuple[str, Solution]]:
        key = solution.seconds, solution.peak_bytes
        if key not in known and (len(known) <= _LOW or time.monotonic() < deadline):
            known.add(key)
            fitted = work.with_copies(solution, effort=0)
            if fitted is not None:
                yield (name if fitted is solution else f"{name}+swap"), fitted

    yield from offered("keep-all", problem.keep_all)
    pairs = candidates.candidates
    for name, solution in sorted(pairs, key=lambda pair: (pair[1].peak_bytes, pair[1].seconds))[:_LOW]:
        yield from offered(name, solution)
    for name, solution in sorted(pairs, key=lambda pair: pair[1].seconds):
        yield from offered(name, solution)
    top = problem.keep_all.peak_bytes
    for rung in range(1, _RUNGS):
        if time.monotonic() >= deadline:
            return
        budget = work.budget_bytes + (top - work.budget_bytes) * rung // _RUNGS
        latest = min(deadline, time.monotonic() + _RUN_SECONDS)
        evicted = evict_greedily(problem, budget, deadline=latest) if budget < top else None
        if evicted is not None:
            yield from offered("eviction", evicted)


_DEPTHS = (1, 2, 4)
"""The numbers of operations, one made from the other, that an addition makes again."""

_PROOF_GAP = 1e-4
_PROGRESS = 1e-4
_BETTER = 1e-9


def improve(work: OffloadProblem, incumbent: Incumbent, *, deadline: float) -> None:
    """Runs less again, or more, if that makes a schedule faster; copies are chosen anew each time.

    Args:
        work: The problem.
        incumbent: The solution to improve.
        deadline: `time.monotonic()` at which to stop.
    """
    problem = work.problem
    recomputations = problem.recomputations(incumbent.best)
    while True:
        before = incumbent.best.seconds
        for change in (*_removals(problem, recomputations), *_additions(problem, recomputations)):
            if time.monotonic() >= deadline or incumbent.is_proved(problem, _PROOF_GAP):
                return
            changed = _changed(problem, recomputations, change)
            best = incumbent.best.seconds * (1 - _BETTER)
            is_new = changed != recomputations and _makes_transient(problem, changed)
            solution = work.run(changed, below_seconds=best) if is_new else None
            if solution is not None and solution.seconds < best:
                incumbent.update("joint", solution, work.budget_bytes)
                recomputations = changed
        if incumbent.best.seconds >= before * (1 - _PROGRESS):
            return


def _makes_transient(problem: CheckpointProblem, recomputations: Recomputations) -> bool:
    """Whether backward makes again, before it reads them, the storages that must not stay for it."""
    missing = set(problem.transient)
    split = len(problem.forward)
    for node, before in zip(problem.base[split:], recomputations[split:], strict=True):
        for run in (*before, node):
            if not missing.isdisjoint(problem.forward_reads[run]):
                return False
            missing.difference_update(problem.graph.allocates(run))
    return True


@dataclass(frozen=True, slots=True)
class _Change:
    """A change: operations that no longer run again before a step of the base order, or that now do."""

    step: int
    nodes: tuple[Node, ...]
    removes: bool


def _removals(problem: CheckpointProblem, recomputations: Recomputations) -> list[_Change]:
    """Each operation that runs again, the longest first."""
    found = [_Change(step, (node,), True) for step, before in enumerate(recomputations) for node in before]
    return sorted(found, key=lambda change: -problem.costs.seconds[change.nodes[0]])


def _additions(problem: CheckpointProblem, recomputations: Recomputations) -> list[_Change]:
    """Lists what backward reads from forward, made again just before by chains of operations; large first."""
    split = len(problem.forward)
    runs = {node for before in recomputations for node in before}
    found: list[tuple[int, _Change]] = []
    for storage, positions in problem.read_positions.items():
        maker = problem.producer[storage]
        if maker in runs or not maker.is_recomputable:
            continue
        for depth in _DEPTHS:
            chain = _chain(problem, maker, depth)
            if len(chain) > depth // 2:
                found.append((-storage.nbytes, _Change(split + positions[0], chain, False)))
    return [change for _, change in sorted(found, key=lambda pair: pair[0])]


def _chain(problem: CheckpointProblem, node: Node, depth: int) -> tuple[Node, ...]:
    """An operation and the nearest that make what it reads, in forward order."""
    chain = {node}
    while len(chain) < depth:
        makers = {problem.producer[s] for made in chain for s in problem.forward_reads[made]} - chain
        makers = {maker for maker in makers if maker.is_recomputable}
        if not makers:
            break
        chain.add(max(makers, key=problem.index.__getitem__))
    return tuple(sorted(chain, key=problem.index.__getitem__))


def _changed(problem: CheckpointProblem, recomputations: Recomputations, change: _Change) -> list[list[Node]]:
    """Applies a change, and drops the recomputations that nothing reads then."""
    made = [list(before) for before in recomputations]
    here = made[change.step]
    if change.removes:
        made[change.step] = [node for node in here if node not in change.nodes]
    else:
        made[change.step] = sorted({*here, *change.nodes}, key=problem.index.__getitem__)
    wanted: set[Storage] = set()
    found: list[list[Node]] = []
    for node, before in zip(reversed(problem.base), reversed(made), strict=True):
        live: list[Node] = []
        for again in (node, *reversed(before)):
            allocated = problem.graph.allocates(again)
            if again is not node:
                if wanted.isdisjoint(allocated):
                    continue
                live.append(again)
            wanted.difference_update(allocated)
            wanted.update(problem.graph.reads(again))
        found.append(live[::-1])
    return found[::-1]
