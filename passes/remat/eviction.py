"""Greedy recomputation under a budget: evicts what is cheap, large and far from its next use."""

from __future__ import annotations

import bisect
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...ir import Node, Storage
from .problem import CheckpointProblem, Solution

__all__ = ["evict_greedily"]


def evict_greedily(
    problem: CheckpointProblem,
    budget_bytes: int,
    *,
    distance_weight: float = 1.0,
    deadline: float = math.inf,
) -> Solution | None:
    """Finds a schedule within the budget by running the step, and evicting when memory is short.

    The victim is the resident storage with the least recomputation time for each byte and each
    operation until its next use (to the power `distance_weight`). It is made again when it is read, as
    often as need be, in forward too.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once, static bytes included.
        distance_weight: The weight of the distance to the next use; 0 ignores it.
        deadline: `time.thread_time()` at which to give up.

    Returns:
        The schedule, or None if eviction does not reach the budget, or only by computing the step several
        times over.

    Source:
        Kirisame et al., Dynamic Tensor Rematerialization (2021); the known next use replaces staleness.
    """
    if problem.keep_all.peak_bytes <= budget_bytes:
        return problem.keep_all  # nothing is evicted
    found: list[Solution] = []
    for kept_bytes in _limits(problem, budget_bytes):
        try:
            run = _Run(problem, budget_bytes, distance_weight, deadline, kept_bytes)
            solution = problem.simulate_order(*run.step())
        except _OverBudgetError:
            continue
        if solution.peak_bytes <= budget_bytes:
            found.append(solution)
        if len(found) == _ENOUGH:
            break
    return min(found, key=lambda s: (s.seconds, s.peak_bytes), default=None)


def _limits(problem: CheckpointProblem, budget_bytes: int) -> Iterator[int]:
    """Limits for the bytes that stay at the loss: with several forwards in flight each of them holds as much.

    A step alone needs no limit. Otherwise the largest limit is what fits at the loss n times. Parts of it
    follow, in case more than that is needed while one of the calls runs.
    """
    graph, split = problem.graph, len(problem.forward)
    if graph.forwards_in_flight == 1:
        yield budget_bytes
        return
    here_bytes = problem.held_before[split] - graph.loss_held_bytes + graph.loss_bytes
    most = min(
        (budget_bytes - here_bytes - case.nbytes) // (case.waiting + 1) for case in problem.others_at(split)
    )
    most = min(most, sum(s.nbytes for s in problem.wanted))
    limits = dict.fromkeys(max(int(most * part), problem.forced_bytes) for part in _PARTS)
    yield from (limit for limit in limits if limit <= most)


class _OverBudgetError(Exception):
    """Raised when nothing is left to evict."""


_MANY = 300
"""With more resident storages, eviction looks at all of them less often, and takes several at a time."""

_SLACK = 200
"""The part of the budget, one in this many, that it then frees beyond what it needs."""

_PARTS = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0625, 0.0)
"""With several forwards in flight, the fractions of what fits at the loss that are tried as a limit."""

_ENOUGH = 2
"""Stop after this many limits that lead to a schedule: larger ones mostly give faster schedules."""

_STEPS_LIMIT = 4.0
"""The times of a whole step after which eviction is thrashing."""


@dataclass
class _Run:
    problem: CheckpointProblem
    budget_bytes: int
    distance_weight: float
    deadline: float
    kept_bytes: int
    resident: dict[Storage, None] = field(default_factory=dict)
    trace: list[Node] = field(default_factory=list)
    now: int = 0
    spent_seconds: float = 0.0
    pinned: Counter[Storage] = field(default_factory=Counter[Storage])

    def __post_init__(self) -> None:
        problem = self.problem
        self.order = (*problem.forward, *problem.backward)
        self.reads: dict[Storage, list[int]] = {}
        for step, node in enumerate(self.order):
            for storage in problem.graph.reads(node):
                self.reads.setdefault(storage, []).append(step)
        for storage, step in (*_sources(problem).items(), *_states(problem)):
            bisect.insort(self.reads.setdefault(storage, []), step)
        graph = problem.graph
        self.permanent = graph.static_storages | graph.tangent_storages | graph.output_storages
        self.alive_bytes = graph.static_bytes + self._others_bytes(0)

    def step(self) -> tuple[list[Node], list[Node]]:
        """The operations before and after the loss."""
        graph, problem = self.problem.graph, self.problem
        for self.now, node in enumerate(problem.forward):
            self._run(node)
        split = len(self.trace)
        self.now = len(problem.forward)
        for storage in problem.transient:
            if storage in self.resident:
                self._drop(storage)
        tangents = sum(s.nbytes for s in graph.tangent_storages)
        self.alive_bytes += self._others_bytes(self.now) - self._others_bytes(0)
        kept_bytes = sum(s.nbytes for s in self.resident if s not in self.permanent)
        over_bytes = kept_bytes - self.kept_bytes
        self._make_room(max(tangents + graph.loss_bytes, self.budget_bytes - self.alive_bytes + over_bytes))
        self.alive_bytes += tangents + graph.loss_held_bytes
        for self.now, node in enumerate(problem.backward, len(problem.forward)):
            self._run(node)
        return self.trace[:split], self.trace[split:]

    def _others_bytes(self, time_step: int) -> int:
        """The bytes that other forwards in flight hold if as much stays at the loss as may."""
        return max(case.bytes_at(self.kept_bytes) for case in self.problem.others_at(time_step))

    def _run(self, node: Node) -> None:
        """Runs an operation, after making again what it reads; what waits for a reader is pinned."""
        graph, problem = self.problem.graph, self.problem
        waiting = [node]
        self.pinned.update(graph.reads(node))
        while waiting:
            node = waiting[-1]
            missing = next((s for s in problem.forward_reads[node] if s not in self.resident), None)
            if missing is not None:
                maker = problem.producer[missing]
                if not maker.is_recomputable or self.spent_seconds > _STEPS_LIMIT * problem.step_seconds:
                    raise _OverBudgetError
                waiting.append(maker)
                self.pinned.update(graph.reads(maker))
                continue
            waiting.pop()
            made = graph.allocates(node)
            self._make_room(sum(s.nbytes for s in made) + problem.costs.workspace_bytes[node])
            self.trace.append(node)
            self.spent_seconds += problem.costs.seconds[node]
            for storage in made:
                if storage not in self.resident:
                    self.resident[storage] = None
                    self.alive_bytes += storage.nbytes
            self.pinned.subtract(graph.reads(node))
            for storage in (*made, *graph.reads(node)):
                if self.pinned[storage] <= 0:
                    self._release(storage)

    def _next_use(self, storage: Storage) -> int | None:
        times = self.reads.get(storage, [])
        index = bisect.bisect_left(times, self.now)
        return times[index] if index < len(times) else None

    def _release(self, storage: Storage) -> None:
        """Frees the storages that no operation reads any more."""
        if storage in self.permanent or storage not in self.resident:
            return
        times = self.reads.get(storage, [])
        if not times or times[-1] <= self.now:
            self._drop(storage)

    def _drop(self, storage: Storage) -> None:
        del self.resident[storage]
        self.alive_bytes -= storage.nbytes

    def _make_room(self, nbytes: int) -> None:
        """Evicts until `nbytes` fit; a little more if very many are resident, to look at fewer."""
        excess = self.alive_bytes + nbytes - self.budget_bytes
        if excess <= 0:
            return
        if time.thread_time() > self.deadline:
            raise _OverBudgetError
        victims = [s for s in self.resident if self.pinned[s] <= 0 and self._is_evictable(s)]
        many = len(victims) > _MANY
        while excess > 0:
            if not victims:
                raise _OverBudgetError
            if many:
                self._drop_apart(victims, excess + self.budget_bytes // _SLACK)
                victims = [s for s in victims if s in self.resident]
            else:
                worst = min(victims, key=self._score)
                victims.remove(worst)
                self._drop(worst)
            excess = self.alive_bytes + nbytes - self.budget_bytes

    def _drop_apart(self, victims: list[Storage], wanted_bytes: int) -> None:
        """Evicts about `wanted_bytes`, and of storages that are made from each other only one at a time."""
        problem = self.problem
        seconds = self._seconds_of_all()
        score = {s: seconds[s] / (s.nbytes * self._distance(s) ** self.distance_weight) for s in victims}
        beside: set[Storage] = set()
        for storage in sorted(victims, key=score.__getitem__):
            if wanted_bytes <= 0:
                break
            if storage not in beside:
                self._drop(storage)
                wanted_bytes -= storage.nbytes
                beside.update(problem.forward_reads[problem.producer[storage]])
                for user in problem.users.get(storage, ()):
                    beside.update(problem.graph.allocates(user))

    def _seconds_of_all(self) -> dict[Storage, float]:
        """Seconds to make each storage again; a missing storage that several need counts for each of them."""
        problem = self.problem
        limit = problem.step_seconds
        found: dict[Storage, float] = {}
        for storage, node in problem.producer.items():
            missing = (found[s] for s in problem.forward_reads[node] if s not in self.resident)
            found[storage] = min(problem.costs.seconds[node] + sum(missing), limit)
        return found

    def _is_evictable(self, storage: Storage) -> bool:
        maker = self.problem.producer.get(storage)
        return maker is not None and maker.is_recomputable and storage.nbytes > 0

    def _score(self, storage: Storage) -> float:
        """Seconds to make a storage again with all that it lacks, by byte and operation of distance."""
        return self._seconds(storage) / (storage.nbytes * self._distance(storage) ** self.distance_weight)

    def _distance(self, storage: Storage) -> int:
        next_use = self._next_use(storage)
        return len(self.order) if next_use is None else next_use - self.now + 1

    def _seconds(self, storage: Storage) -> float:
        problem = self.problem
        pending = [problem.producer[storage]]
        found: set[Node] = set()
        seconds = 0.0
        while pending:
            node = pending.pop()
            if node in found:
                continue
            found.add(node)
            seconds += problem.costs.seconds[node]
            if not node.is_recomputable:
                return float("inf")
            missing = (s for s in problem.forward_reads[node] if s not in self.resident)
            pending.extend(problem.producer[s] for s in missing)
        return seconds


def _sources(problem: CheckpointProblem) -> dict[Storage, int]:
    """The storages that transient ones are made from again, with the step of the base order that needs each.

    Their operations read these, or only an operation that runs once makes these of what they read.
    """
    found: dict[Storage, int] = {}
    for storage, node in reversed(problem.producer.items()):
        step = found.get(storage, -1)
        if storage in problem.transient and storage in problem.read_positions:
            step = max(step, len(problem.forward) + problem.read_positions[storage][0])
        if step < 0:
            continue
        if storage in problem.transient:
            sources = problem.forward_reads[node]
        else:
            sources = _unrepeatable(problem, node)
        for source in sources:
            found[source] = max(found.get(source, -1), step)
    return {storage: step for storage, step in found.items() if storage not in problem.transient}


def _states(problem: CheckpointProblem) -> Iterator[tuple[Storage, int]]:
    """Yields what only one run makes and is smaller than what is made of it, with the step of its last use.

    A state of a generator stays as long as its draws may run again.
    """
    for storage, node in problem.producer.items():
        if node.is_recomputable or storage in problem.transient:
            continue
        made = [s.nbytes for user in problem.users.get(storage, ()) for s in problem.graph.allocates(user)]
        if problem.last_useful[storage] >= 0 and storage.nbytes < min(made, default=0):
            yield storage, len(problem.forward) + problem.last_useful[storage]


def _unrepeatable(problem: CheckpointProblem, node: Node) -> list[Storage]:
    """The nearest storages that an operation depends on and that only operations make that run once."""
    pending, seen = [node], set[Node]()
    found: list[Storage] = []
    while pending:
        node = pending.pop()
        if node in seen or not node.is_recomputable:
            continue
        seen.add(node)
        for storage in problem.forward_reads[node]:
            maker = problem.producer[storage]
            if maker.is_recomputable:
                pending.append(maker)
            else:
                found.append(storage)
    return found
