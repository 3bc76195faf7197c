"""What else a schedule can keep in the memory that it leaves free."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from ...ir import Node, Storage
from .problem import CheckpointProblem, Solution

__all__ = ["more_to_keep"]

_FILLINGS = 8
"""The most operations that need not run again because of what a schedule leaves free."""


def more_to_keep(
    problem: CheckpointProblem, budget_bytes: int, solution: Solution, time_step: int
) -> list[Storage]:
    """The results of what runs again that fit beside a schedule, those that save most first.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once.
        solution: The schedule.
        time_step: The time step at which what is kept must have been made.
    """
    return _Filling(problem, budget_bytes, solution, time_step).chosen()


class _Filling:
    """The operations that run again in a schedule, and the memory that their results would take.

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
