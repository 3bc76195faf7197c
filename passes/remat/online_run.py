"""Runs a step within a budget, operation by operation: what is missing is made again when it is read."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ...ir import Node, Storage
from .problem import CheckpointProblem, Solution

__all__ = ["OnlineRun", "OverBudgetError", "fastest_run"]

_PARTS = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0625, 0.0)
"""With several forwards in flight, the fractions of what fits at the loss that are tried as a limit."""

_ENOUGH = 2
"""Stop after this many limits that lead to a schedule: larger ones mostly give faster schedules."""

_STEPS_LIMIT = 4.0
"""The times of a whole step after which a run is thrashing, and nothing is made again any more."""


def fastest_run(
    problem: CheckpointProblem, budget_bytes: int, run_with: Callable[[int], OnlineRun]
) -> Solution | None:
    """Runs the step under some limits of what stays at the loss, and returns the fastest schedule that fits.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once, static bytes included.
        run_with: Makes the run with a limit in bytes.
    """
    found: list[Solution] = []
    for kept_bytes in _limits(problem, budget_bytes):
        try:
            solution = problem.simulate_order(*run_with(kept_bytes).step())
        except OverBudgetError:
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


class OverBudgetError(Exception):
    """Raised when nothing is left to evict."""


@dataclass
class OnlineRun(ABC):
    """One run of the step, in which a subclass says what is evicted when memory is short.

    It frees a storage when the last operation of the step that reads it has run, as a program does. What
    annotations ask to make again holds what it is made from until then, and draws hold their states.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once, static bytes included.
        deadline: `time.thread_time()` at which to give up.
        kept_bytes: The most that may stay at the loss, if other forwards in flight hold as much.
    """

    problem: CheckpointProblem
    budget_bytes: int
    deadline: float
    kept_bytes: int
    resident: dict[Storage, None] = field(init=False, default_factory=dict[Storage, None])
    trace: list[Node] = field(init=False, default_factory=list[Node])
    now: int = field(init=False, default=0)
    spent_seconds: float = field(init=False, default=0.0)
    pinned: Counter[Storage] = field(init=False, default_factory=Counter[Storage])

    def __post_init__(self) -> None:
        problem = self.problem
        self.reads: dict[Storage, list[int]] = {}
        for step, node in enumerate(problem.base):
            for storage in problem.graph.reads(node):
                self.reads.setdefault(storage, []).append(step)
        for storage, step in (*_sources(problem).items(), *_states(problem)):
            bisect.insort(self.reads.setdefault(storage, []), step)
        graph = problem.graph
        self.permanent = graph.static_storages | graph.tangent_storages | graph.output_storages
        self.alive_bytes = graph.static_bytes + self._others_bytes(0)

    def step(self) -> tuple[list[Node], list[Node]]:
        """Runs the step; returns the operations before the loss and those after it.

        Raises:
            OverBudgetError: if nothing is left to evict, if the run is thrashing, or after the deadline.
        """
        graph, problem = self.problem.graph, self.problem
        for self.now, node in enumerate(problem.forward):
            self._run(node)
        split = len(self.trace)
        self.now = len(problem.forward)
        for storage in [s for s in problem.producer if s in problem.transient and s in self.resident]:
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
                    raise OverBudgetError
                waiting.append(maker)
                self.pinned.update(graph.reads(maker))
                continue
            waiting.pop()
            made = graph.allocates(node)
            self._make_room(graph.allocated_bytes(node) + problem.costs.workspace_bytes[node])
            self.trace.append(node)
            self.spent_seconds += problem.costs.seconds[node]
            self._add_results(node)
            self.pinned.subtract(graph.reads(node))
            for storage in (*made, *graph.reads(node)):
                if self.pinned[storage] <= 0:
                    self._release(storage)

    def _add_results(self, node: Node) -> None:
        """Adds what a run has made, before what nothing reads any more is released."""
        for storage in self.problem.graph.allocates(node):
            if storage not in self.resident:
                self._hold(storage)

    @abstractmethod
    def _make_room(self, nbytes: int) -> None:
        """Evicts until `nbytes` fit.

        Raises:
            OverBudgetError: if nothing is left to evict, or the deadline has passed.
        """

    def _release(self, storage: Storage) -> None:
        """Frees the storages that no operation reads any more."""
        if storage in self.permanent or storage not in self.resident:
            return
        times = self.reads.get(storage, [])
        if not times or times[-1] <= self.now:
            self._let_go(storage)

    def _let_go(self, storage: Storage) -> None:
        """Gives up a storage that no operation of the step reads any more."""
        self._drop(storage)

    def _hold(self, storage: Storage) -> None:
        """Adds a storage that was not there."""
        self.resident[storage] = None
        self.alive_bytes += storage.nbytes

    def _drop(self, storage: Storage) -> None:
        """Takes away a storage, evicted or read for the last time."""
        del self.resident[storage]
        self.alive_bytes -= storage.nbytes


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
        last = problem.last_needed[storage]
        if last > len(problem.forward) and storage.nbytes < min(made, default=0):
            yield storage, last - 1  # a step of the base order: the loss is none


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
