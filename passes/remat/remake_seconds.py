"""The seconds to make storages again while a step runs: kept, and changed by what comes and goes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...ir import Node, Storage
from .problem import CheckpointProblem

__all__ = ["Trees", "Walks"]

_ROUNDING = 1 - 1e-9
"""A sum of seconds times this is a bound on their sum in any other order."""


@dataclass
class Walks:
    """The seconds to make storages again, each with all that it lacks: an operation counts once.

    They are remembered. A drop lengthens the walks that ended at the storage, so that what they found is only
    a bound from below; a making shortens those that went through it, so that they are forgotten.

    Args:
        problem: The recomputation problem.
        resident: The storages that are there; the run changes them.
    """

    problem: CheckpointProblem
    resident: Mapping[Storage, None]
    seconds: dict[Storage, float] = field(init=False, default_factory=dict[Storage, float])
    """The seconds of a storage; a bound from below unless it is in `exact`."""
    exact: set[Storage] = field(init=False, default_factory=set[Storage])
    """The storages whose seconds are known."""
    walked: set[Node] = field(init=False, default_factory=set[Node])
    """The operations that count in `seconds`, and perhaps more."""
    walked_exactly: set[Node] = field(init=False, default_factory=set[Node])
    """The operations that count in seconds that are exact, and perhaps more."""

    def least_seconds(self, storage: Storage) -> float:
        """A bound on the seconds of a storage from below, without a walk."""
        return self.seconds.get(storage, 0.0) * _ROUNDING

    def walk(self, storage: Storage, most_seconds: float) -> float:
        """Counts the seconds of a storage; stops once they are more than `most_seconds`."""
        producer, recomputable, costs = self.problem.producer, self.problem.recomputable, self.problem.costs
        reads, resident = self.problem.forward_reads, self.resident
        pending = [producer[storage]]
        found: set[Node] = set()
        seconds = 0.0
        while pending and seconds <= most_seconds:
            node = pending.pop()
            if node in found:
                continue
            found.add(node)
            if node in recomputable:
                seconds += costs.seconds[node]
                pending += [producer[s] for s in reads[node] if s not in resident]
            else:
                seconds = math.inf
                pending.clear()
        self.seconds[storage] = seconds
        self.walked |= found
        if not pending:
            self.exact.add(storage)
            self.walked_exactly |= found
        return seconds

    def hold(self, storage: Storage) -> None:
        """Is told that a storage is there from now on."""
        for node in self._take_readers(storage, self.walked):
            self.walked_exactly.discard(node)
            for made in self.problem.graph.allocates(node):
                self.seconds.pop(made, None)
                self.exact.discard(made)

    def drop(self, storage: Storage) -> None:
        """Is told that a storage is missing from now on."""
        for node in self._take_readers(storage, self.walked_exactly):
            self.exact.difference_update(self.problem.graph.allocates(node))

    def _take_readers(self, storage: Storage, nodes: set[Node]) -> Iterator[Node]:
        """Takes out those of some nodes that read a storage, or what was made of it and is missing."""
        problem, resident = self.problem, self.resident
        pending = [*problem.users.get(storage, ())]
        while pending:
            node = pending.pop()
            if node in nodes:
                nodes.remove(node)
                yield node
                for made in problem.graph.allocates(node):
                    if made not in resident:
                        pending += problem.users.get(made, ())


@dataclass
class Trees:
    """The seconds to make storages again, where what is missing counts for each that needs it.

    They are at most the seconds of a step.

    Args:
        problem: The recomputation problem.
        resident: The storages that are there; the run changes them.
    """

    problem: CheckpointProblem
    resident: Mapping[Storage, None]
    seconds: dict[Node, float] = field(init=False, default_factory=dict[Node, float])
    """The seconds to make what an operation makes."""
    stale: set[Node] = field(init=False, default_factory=set[Node])
    """The operations that read a storage which came or went since the last update."""

    def __post_init__(self) -> None:
        self.stale.update(self.problem.forward)

    def change(self, storage: Storage) -> None:
        """Is told that a storage is there or missing from now on."""
        self.stale.update(self.problem.users.get(storage, ()))

    def update(self) -> None:
        """Counts the seconds again that have changed, in forward order."""
        problem, resident, found, stale = self.problem, self.resident, self.seconds, self.stale
        costs, producer, limit = problem.costs.seconds, problem.producer, problem.step_seconds
        for node in problem.forward if stale else ():
            if node in stale:
                missing = [found[producer[s]] for s in problem.forward_reads[node] if s not in resident]
                seconds = min(costs[node] + sum(missing), limit)
                if found.get(node) != seconds:
                    found[node] = seconds
                    for made in problem.graph.allocates(node):
                        if made not in resident:
                            stale.update(problem.users.get(made, ()))
        stale.clear()
