"""Greedy recomputation under a budget: evicts what is cheap, large and far from its next use."""

from __future__ import annotations

import bisect
import math
import time
from dataclasses import dataclass

from ...ir import Node, Storage
from .online_run import OnlineRun, OverBudgetError, fastest_run
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
    return fastest_run(
        problem, budget_bytes, lambda kept: _Run(problem, budget_bytes, deadline, kept, distance_weight)
    )


_MANY = 300
"""With more resident storages, eviction looks at all of them less often, and takes several at a time."""

_SLACK = 200
"""The part of the budget, one in this many, that it then frees beyond what it needs."""


@dataclass
class _Run(OnlineRun):
    distance_weight: float

    def _next_use(self, storage: Storage) -> int | None:
        times = self.reads.get(storage, [])
        index = bisect.bisect_left(times, self.now)
        return times[index] if index < len(times) else None

    def _make_room(self, nbytes: int) -> None:
        """Evicts until `nbytes` fit; a little more if very many are resident, to look at fewer."""
        excess = self.alive_bytes + nbytes - self.budget_bytes
        if excess <= 0:
            return
        if time.thread_time() > self.deadline:
            raise OverBudgetError
        victims = [s for s in self.resident if self.pinned[s] <= 0 and self._is_evictable(s)]
        many = len(victims) > _MANY
        while excess > 0:
            if not victims:
                raise OverBudgetError
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
        return len(self.problem.base) if next_use is None else next_use - self.now + 1

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
