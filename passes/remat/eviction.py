"""Greedy recomputation under a budget: evicts what is cheap, large and far from its next use."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...ir import Storage
from .online_run import OnlineRun, OverBudgetError, fastest_run
from .problem import CheckpointProblem, Solution
from .remake_seconds import Trees, Walks

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

_MARGIN = 2.0
"""A walk goes on until its storage is this many times as bad a victim as the best one known."""


@dataclass
class _Run(OnlineRun):
    """A run that evicts the storage with the least seconds for its worth.

    Args:
        distance_weight: The weight of the distance to the next use; 0 ignores it.
    """

    distance_weight: float
    evictable: dict[Storage, None] = field(init=False, default_factory=dict[Storage, None])
    """The resident storages that can be made again, in the order of `resident`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.walks = Walks(self.problem, self.resident)
        self.trees = Trees(self.problem, self.resident)

    def _make_room(self, nbytes: int) -> None:
        """Evicts until `nbytes` fit; a little more if very many are resident, to look at fewer."""
        excess = self.alive_bytes + nbytes - self.budget_bytes
        if excess <= 0:
            return
        if time.thread_time() > self.deadline:
            raise OverBudgetError
        pinned = self.pinned
        worths = {s: self._worth(s) for s in self.evictable if pinned.get(s, 0) <= 0}
        many = len(worths) > _MANY
        while excess > 0:
            if not worths:
                raise OverBudgetError
            if many:
                self._drop_apart(worths, excess + self.budget_bytes // _SLACK)
                worths = {s: worth for s, worth in worths.items() if s in self.resident}
            else:
                worst = self._worst(worths)
                del worths[worst]
                self._drop(worst)
            excess = self.alive_bytes + nbytes - self.budget_bytes

    def _worth(self, storage: Storage) -> float:
        """Bytes that a victim frees, times the operations until its next use."""
        times = self.reads.get(storage, ())
        index = bisect.bisect_left(times, self.now)
        distance = times[index] - self.now + 1 if index < len(times) else len(self.problem.base)
        return storage.nbytes * distance**self.distance_weight

    def _worst(self, worths: Mapping[Storage, float]) -> Storage:
        """Finds the storage with the fewest seconds for its worth, the first among equals."""
        walks = self.walks
        known = (walks.seconds[s] / worth for s, worth in worths.items() if s in walks.exact)
        least = min(known, default=math.inf)
        worst: Storage | None = None
        for storage, worth in worths.items():
            if storage in walks.exact:
                score = walks.seconds[storage] / worth
            elif walks.least_seconds(storage) / worth > least:
                continue
            else:
                score = walks.walk(storage, _MARGIN * least * worth) / worth
            if score < least or (score == least and worst is None):
                least, worst = score, storage
        assert worst is not None, "there is a victim"
        return worst

    def _drop_apart(self, worths: Mapping[Storage, float], wanted_bytes: int) -> None:
        """Evicts about `wanted_bytes`, and of storages that are made from each other only one at a time."""
        problem, producer = self.problem, self.problem.producer
        self.trees.update()
        score = {s: self.trees.seconds[producer[s]] / worth for s, worth in worths.items()}
        beside: set[Storage] = set()
        for storage in sorted(score, key=score.__getitem__):
            if wanted_bytes <= 0:
                break
            if storage not in beside:
                self._drop(storage)
                wanted_bytes -= storage.nbytes
                beside.update(problem.forward_reads[producer[storage]])
                for user in problem.users.get(storage, ()):
                    beside.update(problem.graph.allocates(user))

    def _hold(self, storage: Storage) -> None:
        super()._hold(storage)
        if self.problem.producer.get(storage) in self.problem.recomputable and storage.nbytes > 0:
            self.evictable[storage] = None
        self.walks.hold(storage)
        self.trees.change(storage)

    def _drop(self, storage: Storage) -> None:
        super()._drop(storage)
        self.evictable.pop(storage, None)
        self.walks.drop(storage)
        self.trees.change(storage)
