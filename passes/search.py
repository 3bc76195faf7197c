"""Searches for the fastest schedule within a budget, and proves how far from the best it can be."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..ir import Node
from .checkpointing import CheckpointProblem, Simulated
from .eviction import evict_greedily
from .staged_ilp import Relaxation
from .strategies import every_k, keep_all, sqrt_n

__all__ = ["SMALL_BACKWARD", "Found", "Frontier", "frontier", "lower_bound", "polish", "solve_staged"]

SMALL_BACKWARD = 24
"""Up to this many backward operations each of them is a stage from the start: the choice is then exact."""

_SMALL_FRACTION = 2e-5
"""Storages below this fraction of the baseline peak are always kept, on graphs that are not small."""


@dataclass(frozen=True)
class Frontier:
    """Schedules found without regard to one budget: the same for every budget, so that plans are monotone.

    Args:
        candidates: The schedules, each with its name.
        is_complete: Whether all that is tried was tried before the deadline.
    """

    candidates: tuple[tuple[str, Simulated], ...]
    is_complete: bool = True

    @property
    def minimum_bytes(self) -> int:
        """The smallest peak that a schedule was found for."""
        return min(simulated.peak_bytes for _, simulated in self.candidates)

    def best(self, budget_bytes: int) -> tuple[str, Simulated] | None:
        """The fastest candidate within the budget; of equally fast ones that with the smallest peak."""
        fitting = [pair for pair in self.candidates if pair[1].peak_bytes <= budget_bytes]
        return min(fitting, key=lambda pair: (pair[1].seconds, pair[1].peak_bytes), default=None)


@dataclass
class Found:
    """The state of a search; `best` only gets better."""

    name: str
    best: Simulated
    bound_seconds: float = 0.0
    is_exact: bool = False

    def offer(self, name: str, simulated: Simulated, budget_bytes: int) -> None:
        """Takes a schedule that fits and is faster, or as fast with a smaller peak."""
        if simulated.peak_bytes > budget_bytes:
            return
        if (simulated.seconds, simulated.peak_bytes) < (self.best.seconds, self.best.peak_bytes):
            self.name, self.best = name, simulated


# ---------------------------------------------------------------------- without a budget

_RUNGS = 10
_HALVINGS = 8
_RUN_SECONDS = 3.0
"""Time limit for eviction at one budget, and for its tries at one halving; a tenth of it is usual."""

_LEAST_PEAK_SECONDS = 5.0
"""Time limit for the least peak of a small graph."""


def frontier(problem: CheckpointProblem, *, deadline: float = math.inf) -> Frontier:
    """Known strategies, greedy eviction at a ladder of budgets, and the smallest peaks that are reached.

    Args:
        problem: The recomputation problem.
        deadline: `time.monotonic()` after which nothing more is tried.
    """
    top, floor = problem.keep_all.peak_bytes, problem.floor_bytes
    found: list[tuple[str, Simulated]] = [("keep-all", keep_all(problem)), ("sqrt-n", sqrt_n(problem))]
    found += [(f"every-{k}", every_k(problem, k)) for k in _segment_lengths(problem)]
    low, high = floor - 1, top
    started = time.monotonic()
    for rung in reversed(range(_RUNGS)):
        if time.monotonic() >= deadline:
            return Frontier(tuple(found), is_complete=False)
        budget = floor + (top - floor) * rung // _RUNGS
        simulated = evict_greedily(problem, budget, deadline=min(deadline, time.monotonic() + _RUN_SECONDS))
        if simulated is None:
            low = max(low, budget)
        else:
            high = min(high, simulated.peak_bytes)
            found.append(("eviction", simulated))
    for _ in range(_HALVINGS):
        if high - low <= max(top >> 10, 1) or time.monotonic() > started + (deadline - started) / 3:
            break
        if time.monotonic() >= deadline:
            return Frontier(tuple(found), is_complete=False)
        middle = (low + high) // 2
        latest = min(deadline, time.monotonic() + _RUN_SECONDS)
        tries = (
            evict_greedily(problem, middle, distance_weight=weight, deadline=latest)
            for weight in (1.0, 0.5, 0.0)
        )
        fitting = next((s for s in tries if s is not None), None)
        if fitting is None:
            low = middle
        else:
            high = fitting.peak_bytes
            found.append(("eviction", fitting))
    lowest = min(simulated.peak_bytes for _, simulated in found)
    left = deadline - time.monotonic()
    latest = time.monotonic() + min(left / 2, _LEAST_PEAK_SECONDS)  # the rest is for the budget itself
    found += [("ilp", lower) for lower in _below(problem, lowest, deadline=latest)]
    return Frontier(tuple(found))


def _below(problem: CheckpointProblem, peak_bytes: int, *, deadline: float) -> Iterator[Simulated]:
    """Schedules below `peak_bytes`, each below the one before, down to the least of a small graph's class."""
    low, high = problem.floor_bytes - 1, peak_bytes
    while len(problem.backward) <= SMALL_BACKWARD and low < high - 1 and time.monotonic() < deadline:
        below = _best_of_class(problem, high - 1, deadline)
        if below is None:
            return
        yield below
        high = below.peak_bytes
        middle = (low + high) // 2
        halved = _best_of_class(problem, middle, deadline) if middle > low else None
        if halved is None:
            low = middle
        else:
            yield halved
            high = halved.peak_bytes


def _best_of_class(problem: CheckpointProblem, budget_bytes: int, deadline: float) -> Simulated | None:
    """The fastest schedule within the budget that the staged programme finds from nothing."""
    found = Found("", replace(problem.keep_all, seconds=math.inf))
    solve_staged(problem, budget_bytes, found, deadline=deadline)
    return found.best if found.name else None


def _segment_lengths(problem: CheckpointProblem) -> Iterator[int]:
    length = 2
    while length < len(problem.forward):
        yield length
        length *= 2


# ---------------------------------------------------------------------- within a budget


@dataclass
class _Lazy:
    """The stages and rows that have been needed so far."""

    positions: list[int]
    forward_rows: dict[Node, None] = field(default_factory=dict)
    transients: dict[tuple[int, Node], None] = field(default_factory=dict)


_NEW_STAGES = 5
_NEW_ROWS = 12


def solve_staged(
    problem: CheckpointProblem, budget_bytes: int, found: Found, *, deadline: float, gap: float = 1e-4
) -> None:
    """Improves `found` by the staged integer programme, adding stages and rows until its choice fits.

    On a graph with few backward operations the result is the best schedule of the class of
    `CheckpointProblem`, and of the best ones that with the smallest peak.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once.
        found: The search; it is exact afterwards where the programme was solved to the end.
        deadline: `time.monotonic()` at which to stop.
        gap: At which a solve stops, as a fraction of the step's time.
    """
    small = len(problem.backward) <= SMALL_BACKWARD
    lazy = _Lazy(list(range(len(problem.backward))) if small else [0])
    limit_bytes = budget_bytes
    margin_bytes = 0
    best_seconds = math.inf
    while problem.backward and time.monotonic() < deadline:
        relaxation = Relaxation(
            problem,
            limit_bytes - margin_bytes,
            lazy.positions,
            lazy.forward_rows,
            lazy.transients,
            small_bytes=_small_bytes(problem, small),
            prune=not small,
        )
        left = deadline - time.monotonic()
        solved = relaxation.solve(
            seconds=left if small else min(left, max(left / 3, 4.0)), gap=0.0 if small else gap
        )
        if solved.staging is None:
            found.is_exact = small and solved.is_infeasible and not margin_bytes
            return
        eager = problem.simulate(solved.staging)
        if small and eager.seconds > best_seconds:
            found.is_exact = solved.is_optimal and not margin_bytes
            return
        found.offer("ilp", eager, budget_bytes)
        if not small:
            found.offer("ilp", problem.simulate(solved.staging, eager=False), budget_bytes)
        if eager.peak_bytes <= limit_bytes:
            if not small:
                return
            best_seconds, limit_bytes = eager.seconds, eager.peak_bytes - 1
        elif not _refine(problem, limit_bytes, eager, lazy):
            # The rows are all there: what is over is the solver's tolerance, or small storages.
            margin_bytes += eager.peak_bytes - limit_bytes


def _small_bytes(problem: CheckpointProblem, is_small: bool) -> int:
    return -1 if is_small else int(problem.keep_all.peak_bytes * _SMALL_FRACTION)


def _refine(problem: CheckpointProblem, budget_bytes: int, simulated: Simulated, lazy: _Lazy) -> bool:
    """Adds stages and rows where a simulated choice goes over the budget; whether there was any to add."""
    over: dict[tuple[int, Node], int] = {}
    for nbytes, node, owner in zip(simulated.during_bytes, simulated.order, simulated.owners, strict=True):
        if nbytes > budget_bytes:
            over[owner, node] = max(over.get((owner, node), 0), nbytes - budget_bytes)
    stages: list[int] = []
    rows = 0
    existing = set(lazy.positions)
    spacing = max(len(problem.backward) // 100, 1)
    for (owner, node), _ in sorted(over.items(), key=lambda item: -item[1]):
        if owner < 0:
            if node not in lazy.forward_rows and rows < _NEW_ROWS:
                lazy.forward_rows[node] = None
                rows += 1
            continue
        wanted = owner if owner not in existing else max(owner - 1, 0)
        if wanted not in existing:
            if len(stages) < _NEW_STAGES and (
                wanted != owner or all(abs(wanted - p) > spacing for p in stages)
            ):
                stages.append(wanted)
        elif node in problem.index and (owner, node) not in lazy.transients and rows < _NEW_ROWS:
            lazy.transients[owner, node] = None
            rows += 1
    lazy.positions = sorted({*lazy.positions, *stages})
    return bool(stages or rows)


def lower_bound(problem: CheckpointProblem, budget_bytes: int, *, deadline: float) -> float:
    """Seconds of recomputation that every schedule within the budget, with this order of backward, needs.

    The stages stand where backward holds most; storages that are small count as free. Forward may
    run in any way: no row but those of the stages is used.
    """
    small = len(problem.backward) <= SMALL_BACKWARD
    positions = list(range(len(problem.backward))) if small else _tightest(problem)
    bound = 0.0
    sizes = [len(positions)] if small else [6, 12, 20]
    for size in sizes:
        left = deadline - time.monotonic()
        if left <= 0.2 or not positions:
            break
        chosen = sorted({0, *positions[:size]})
        relaxation = Relaxation(
            problem,
            budget_bytes,
            chosen,
            small_bytes=_small_bytes(problem, small),
            charge_small=False,
            in_class=False,
        )
        solved = relaxation.solve(seconds=left if size == sizes[-1] else left / 3, gap=0.0 if small else 1e-5)
        if not solved.is_infeasible:
            bound = max(bound, solved.bound_seconds)
    return bound


def _tightest(problem: CheckpointProblem) -> list[int]:
    """Backward positions by the memory that keeping everything takes there, spread out."""
    kept = problem.keep_all
    start = len(problem.forward)
    demand = {
        owner: nbytes for nbytes, owner in zip(kept.during_bytes[start:], kept.owners[start:], strict=True)
    }
    spacing = max(len(problem.backward) // 40, 1)
    chosen: list[int] = []
    for position in sorted(demand, key=lambda p: -demand[p]):
        if all(abs(position - other) >= spacing for other in chosen):
            chosen.append(position)
    return chosen


def polish(problem: CheckpointProblem, budget_bytes: int, found: Found, *, deadline: float) -> None:
    """Drops one recomputation after the other, the longest first, where the schedule fits without it."""
    split = len(found.best.order) - _after_loss(found.best)
    improved = True
    while improved and time.monotonic() < deadline:
        improved = False
        order = list(found.best.order)
        owners = list(found.best.owners)
        seen: set[Node] = set()
        repeated: list[int] = []
        for step, node in enumerate(order):
            if node in seen:
                repeated.append(step)
            seen.add(node)
        repeated.sort(key=lambda step: -problem.costs.seconds[order[step]])
        for step in repeated:
            if time.monotonic() >= deadline:
                break
            shorter = order[:step] + order[step + 1 :]
            boundary = split - 1 if step < split else split
            simulated = problem.simulate_order(
                shorter[:boundary], shorter[boundary:], (owners[:step] + owners[step + 1 :])[boundary:]
            )
            if simulated.peak_bytes <= budget_bytes and simulated.seconds < found.best.seconds:
                found.offer(found.name, simulated, budget_bytes)
                split = boundary
                improved = True
                break


def _after_loss(simulated: Simulated) -> int:
    return sum(owner >= 0 for owner in simulated.owners)
