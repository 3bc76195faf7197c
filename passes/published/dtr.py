"""Dynamic tensor rematerialisation: eviction that knows the past of the step and nothing of what follows."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ...ir import Node, Storage
from ..remat.online_run import OnlineRun, OverBudgetError, fastest_run
from ..remat.problem import CheckpointProblem, Solution
from ..strategy_registry import Strategy

__all__ = ["HEURISTICS", "H_DTR", "H_DTR_EQ", "H_DTR_LOCAL", "dtr"]


def dtr(
    problem: CheckpointProblem, budget_bytes: int, heuristic: str = "h-dtr", deadline: float = math.inf
) -> Solution | None:
    """Finds a schedule by running the step, and evicting the least valuable storage when memory is short.

    The value of a storage is seconds / (bytes * staleness): the seconds to make it again, with those of its
    evicted neighbours, and the seconds since an operation last made or read it. The step frees what its
    program frees. What is missing is made again when it is read, with all that it lacks in turn.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once, static bytes included.
        heuristic: What counts as neighbours: `h-dtr` takes the evicted storages from which this one is made,
            or which are made from it, through evicted ones alone; `h-dtr-eq` all that are connected with it
            through evicted ones, by union-find; `h-dtr-local` none.
        deadline: `time.thread_time()` at which to give up.

    Returns:
        The schedule, or None if eviction does not reach the budget, or only by thrashing: it gives up when it
        has to make anything again after four times the seconds of a step.

    Source:
        Kirisame et al., Dynamic Tensor Rematerialization (ICLR 2021), the heuristics, the evicted
        neighbourhood and the treatment of deallocation. Ours takes time from the costs, and evicts what the
        program frees; it banishes only what no run can make again. It looks at all storages, without
        sampling. The schedule that is returned frees what was made again after its last read, and not when
        the run would have evicted it.
    """
    if problem.keep_all.peak_bytes <= budget_bytes:
        return problem.keep_all  # nothing is evicted
    neighbours = HEURISTICS[heuristic]
    return fastest_run(
        problem, budget_bytes, lambda kept: _Run(problem, budget_bytes, deadline, kept, neighbours(problem))
    )


_LEAST_STALENESS = 1e-12
"""The least staleness, as a part of the step's time: what was touched just now is not infinitely valuable."""


@dataclass
class _Neighbours(ABC):
    """The seconds that a storage costs with what was evicted around it.

    Args:
        problem: The recomputation problem.
    """

    problem: CheckpointProblem
    evicted: set[Storage] = field(init=False, default_factory=set[Storage])

    def evict(self, storage: Storage) -> None:
        """Is told that a storage is evicted."""
        self.evicted.add(storage)

    def restore(self, storage: Storage) -> None:
        """Is told that a storage is there, or gone for good, whether or not it was evicted."""
        self.evicted.discard(storage)

    @abstractmethod
    def seconds(self, storage: Storage) -> float:
        """Seconds to make a storage again, and those of its neighbours."""

    def own_seconds(self, storage: Storage) -> float:
        """Seconds of the operation that makes a storage."""
        return self.problem.costs.seconds[self.problem.producer[storage]]

    def parents(self, storage: Storage) -> Iterable[Storage]:
        """The storages that a storage is made from."""
        return self.problem.forward_reads[self.problem.producer[storage]]

    def children(self, storage: Storage) -> Iterator[Storage]:
        """The storages that are made from a storage."""
        for user in self.problem.users.get(storage, ()):
            yield from (s for s in self.problem.graph.allocates(user) if s in self.problem.producer)


@dataclass
class _Local(_Neighbours):
    """No neighbours.

    Source:
        Kirisame et al. (2021), the heuristic h_DTR^local.
    """

    def seconds(self, storage: Storage) -> float:
        return self.own_seconds(storage)


@dataclass
class _Exact(_Neighbours):
    """The evicted neighbourhood e*: what is reached up or down through evicted storages alone.

    What a storage costs is remembered until one of its neighbours is evicted or restored. An operation with
    several results counts once for each of them that is evicted.

    Source:
        Kirisame et al. (2021), the heuristic h_DTR.
    """

    known: dict[Storage, float] = field(init=False, default_factory=dict[Storage, float])

    def evict(self, storage: Storage) -> None:
        super().evict(storage)
        self._forget_around(storage)

    def restore(self, storage: Storage) -> None:
        if storage in self.evicted:
            super().restore(storage)
            self._forget_around(storage)

    def seconds(self, storage: Storage) -> float:
        if storage not in self.known:
            around = self._reached(storage) & self.evicted
            self.known[storage] = math.fsum(map(self.own_seconds, (storage, *around)))
        return self.known[storage]

    def _forget_around(self, storage: Storage) -> None:
        for each in (storage, *self._reached(storage)):
            self.known.pop(each, None)

    def _reached(self, storage: Storage) -> set[Storage]:
        """The evicted storages around a storage, and the resident ones that border on them."""
        found: set[Storage] = set()
        for step in (self.parents, self.children):
            pending = list(step(storage))
            seen: set[Storage] = set()
            while pending:
                each = pending.pop()
                if each not in seen:
                    seen.add(each)
                    if each in self.evicted:
                        pending.extend(step(each))
            found |= seen
        found.discard(storage)
        return found


@dataclass
class _Classes(_Neighbours):
    """Classes of connected evicted storages, each with the sum of its seconds, in a union-find structure.

    A storage that is there again takes its seconds off its class, which is not split.

    Source:
        Kirisame et al. (2021), the heuristic h_DTR^eq.
    """

    parent: dict[int, int] = field(init=False, default_factory=dict[int, int])
    sums: dict[int, float] = field(init=False, default_factory=dict[int, float])
    member: dict[Storage, int] = field(init=False, default_factory=dict[Storage, int])

    def evict(self, storage: Storage) -> None:
        super().evict(storage)
        made = len(self.parent)
        self.parent[made], self.sums[made] = made, self.own_seconds(storage)
        for root in self._around(storage):
            self.parent[root] = made
            self.sums[made] += self.sums.pop(root)
        self.member[storage] = made

    def restore(self, storage: Storage) -> None:
        super().restore(storage)
        if storage in self.member:
            self.sums[self._root(self.member.pop(storage))] -= self.own_seconds(storage)

    def seconds(self, storage: Storage) -> float:
        around = (self.sums[root] for root in self._around(storage))
        return max(math.fsum((self.own_seconds(storage), *around)), 0.0)

    def _around(self, storage: Storage) -> dict[int, None]:
        """The classes that a storage borders on."""
        beside = (*self.parents(storage), *self.children(storage))
        return dict.fromkeys(self._root(self.member[s]) for s in beside if s in self.member)

    def _root(self, each: int) -> int:
        while self.parent[each] != each:
            self.parent[each] = self.parent[self.parent[each]]
            each = self.parent[each]
        return each


HEURISTICS: Mapping[str, type[_Neighbours]] = {"h-dtr": _Exact, "h-dtr-eq": _Classes, "h-dtr-local": _Local}
"""The heuristics by name."""

H_DTR, H_DTR_EQ, H_DTR_LOCAL = (
    Strategy(
        key,
        "Kirisame et al. 2021",
        lambda problem, asked, key=key: filter(None, [dtr(problem, asked.budget_bytes, key, asked.deadline)]),
    )
    for key in HEURISTICS
)


@dataclass
class _Run(OnlineRun):
    """A run that evicts by a heuristic.

    A storage that cannot be made again is fixed: it is not evicted. When the program frees it, it is
    banished, and with it all evicted storages that are made of it; what is made of these and still there
    becomes fixed. It stays until later if the program still refers to any of what would be banished.
    """

    neighbours: _Neighbours
    touched: dict[Storage, float] = field(init=False, default_factory=dict[Storage, float])
    fixed: set[Storage] = field(init=False, default_factory=set[Storage])
    delayed: dict[Storage, None] = field(init=False, default_factory=dict[Storage, None])

    def __post_init__(self) -> None:
        super().__post_init__()
        producer = self.problem.producer
        self.fixed.update(s for s, node in producer.items() if not node.is_recomputable)
        self.least_seconds = _LEAST_STALENESS * max(self.problem.step_seconds, _LEAST_STALENESS)

    def _run(self, node: Node) -> None:
        super()._run(node)
        for storage in [s for s in self.delayed if self.pinned[s] <= 0]:
            self._let_go(storage)

    def _add_results(self, node: Node) -> None:
        super()._add_results(node)
        graph = self.problem.graph
        for storage in graph.allocates(node):
            self.neighbours.restore(storage)
        for storage in (*graph.allocates(node), *graph.reads(node)):
            self.touched[storage] = self.spent_seconds

    def _make_room(self, nbytes: int) -> None:
        excess = self.alive_bytes + nbytes - self.budget_bytes
        if excess <= 0:
            return
        if time.thread_time() > self.deadline:
            raise OverBudgetError
        victims = [s for s in self.resident if self.pinned[s] <= 0 and self._is_evictable(s)]
        while excess > 0:
            if not victims:
                raise OverBudgetError
            worst = min(victims, key=self._value)
            victims.remove(worst)
            self._drop(worst)
            excess -= worst.nbytes

    def _is_evictable(self, storage: Storage) -> bool:
        return storage in self.problem.producer and storage not in self.fixed and storage.nbytes > 0

    def _value(self, storage: Storage) -> float:
        staleness = max(self.spent_seconds - self.touched[storage], self.least_seconds)
        return self.neighbours.seconds(storage) / (storage.nbytes * staleness)

    def _drop(self, storage: Storage) -> None:
        super()._drop(storage)
        if storage in self.problem.producer and storage not in self.fixed:
            self.neighbours.evict(storage)

    def _let_go(self, storage: Storage) -> None:
        if storage not in self.fixed:
            self._drop(storage)
        elif self._banish(storage):
            self.delayed.pop(storage, None)
            self._drop(storage)
        else:
            self.delayed[storage] = None

    def _banish(self, storage: Storage) -> bool:
        """Gives up that anything is made of a fixed storage again; returns whether that may be."""
        gone: dict[Storage, None] = {storage: None}
        left: set[Storage] = set()
        pending = [storage]
        while pending:
            for made in self.neighbours.children(pending.pop()):
                if made in self.resident:
                    left.add(made)
                elif made in self.neighbours.evicted and made not in gone:
                    if self.pinned[made] > 0 or self._is_referenced(made):
                        return False
                    gone[made] = None
                    pending.append(made)
        self.fixed |= left
        self.fixed.update(gone)
        for each in gone:
            self.neighbours.restore(each)
        return True

    def _is_referenced(self, storage: Storage) -> bool:
        """Whether the program has yet to free a storage; what the operation reads that runs is pinned."""
        times = self.reads.get(storage, [])
        return bool(times) and times[-1] > self.now
