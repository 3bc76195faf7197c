"""Greedy recomputation under a budget: evict what is cheap, large and far from its next use."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from ..ir import Node, Storage
from .checkpointing import CheckpointProblem, Simulated

__all__ = ["evict_greedily"]


def evict_greedily(
    problem: CheckpointProblem, budget_bytes: int, *, distance_weight: float = 1.0
) -> Simulated | None:
    """A schedule within the budget, found by running the step and evicting when memory is short.

    The victim is the resident storage with the least recomputation time for each byte and each
    operation until its next use (to the power `distance_weight`). It is made again when it is read, as
    often as need be, in forward too.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once, static bytes included.
        distance_weight: How much the distance to the next use counts; 0 ignores it.

    Returns:
        The schedule, or None where eviction does not reach the budget.

    Source:
        Kirisame et al., Dynamic Tensor Rematerialization (2021), with the known next use in the place of staleness.
    """
    try:
        run = _Run(problem, budget_bytes, distance_weight)
        forward, backward = run.step()
    except _OverBudgetError:
        return None
    simulated = problem.simulate_order(forward, backward)
    return simulated if simulated.peak_bytes <= budget_bytes else None


class _OverBudgetError(Exception):
    """Nothing is left to evict."""


_RUNS_LIMIT = 20
"""Runs of an operation, on average, after which eviction is thrashing."""


@dataclass
class _Run:
    problem: CheckpointProblem
    budget_bytes: int
    distance_weight: float
    resident: dict[Storage, None] = field(default_factory=dict)
    trace: list[Node] = field(default_factory=list)
    now: int = 0

    def __post_init__(self) -> None:
        problem = self.problem
        self.order = (*problem.forward, *problem.backward)
        self.reads: dict[Storage, list[int]] = {}
        for time, node in enumerate(self.order):
            for storage in problem.graph.reads(node):
                self.reads.setdefault(storage, []).append(time)
        graph = problem.graph
        self.permanent = graph.static_storages | graph.tangent_storages | graph.output_storages
        self.alive_bytes = graph.static_bytes

    def step(self) -> tuple[list[Node], list[Node]]:
        """The operations before and after the loss."""
        graph = self.problem.graph
        split = 0
        for time, node in enumerate(self.order):
            self.now = time
            if time == len(self.problem.forward):
                split = len(self.trace)
                tangents = sum(s.nbytes for s in graph.tangent_storages)
                self._make_room(tangents + graph.loss_bytes, frozenset())
                self.alive_bytes += tangents + graph.loss_held_bytes
            self._run(node, frozenset())
        return self.trace[:split], self.trace[split:]

    def _run(self, node: Node, pinned: frozenset[Storage]) -> None:
        """Runs an operation, after making again what it reads; `pinned` waits for an operation that reads it."""
        graph = self.problem.graph
        inner = pinned.union(graph.reads(node))
        for storage in graph.reads(node):
            if storage in self.problem.producer and storage not in self.resident:
                maker = self.problem.producer[storage]
                if not maker.is_recomputable or len(self.trace) > _RUNS_LIMIT * len(self.order):
                    raise _OverBudgetError
                self._run(maker, inner)
        made = graph.allocates(node)
        self._make_room(sum(s.nbytes for s in made) + self.problem.costs.workspace_bytes[node], inner)
        self.trace.append(node)
        for storage in made:
            if storage not in self.resident:
                self.resident[storage] = None
                self.alive_bytes += storage.nbytes
        for storage in (*made, *graph.reads(node)):
            if storage not in pinned:
                self._release(storage)

    def _next_use(self, storage: Storage) -> int | None:
        times = self.reads.get(storage, [])
        index = bisect.bisect_left(times, self.now)
        return times[index] if index < len(times) else None

    def _release(self, storage: Storage) -> None:
        """Frees what no operation reads any more."""
        if storage in self.permanent or storage not in self.resident:
            return
        times = self.reads.get(storage, [])
        if not times or times[-1] <= self.now:
            self._drop(storage)

    def _drop(self, storage: Storage) -> None:
        del self.resident[storage]
        self.alive_bytes -= storage.nbytes

    def _make_room(self, nbytes: int, pinned: frozenset[Storage]) -> None:
        while self.alive_bytes + nbytes > self.budget_bytes:
            victims = [s for s in self.resident if s not in pinned and self._is_evictable(s)]
            if not victims:
                raise _OverBudgetError
            self._drop(min(victims, key=self._score))

    def _is_evictable(self, storage: Storage) -> bool:
        maker = self.problem.producer.get(storage)
        return maker is not None and maker.is_recomputable and storage.nbytes > 0

    def _score(self, storage: Storage) -> float:
        """Seconds to make it again, with what is missing for that, for each byte and operation of distance."""
        next_use = self._next_use(storage)
        distance = len(self.order) if next_use is None else next_use - self.now + 1
        return self._seconds(storage) / (storage.nbytes * distance**self.distance_weight)

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
