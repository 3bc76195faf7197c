"""Merges schedules: what several of them run again is put together and chosen from anew."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...ir import Node
from .problem import CheckpointProblem, Recomputations, Solution
from .retention_ilp import RetentionProgramme, Step

__all__ = ["SolutionMerger", "complete", "united", "with_neighbours"]

_GAP = 2e-4
_NODE_LIMIT = 80
_LEAST_SECONDS = 1.0
_LONGEST_SECONDS = 8.0
_SOLVING = 50.0
"""The time to solve a programme, in times of what it takes to write it down."""

_CHAIN = 10
"""The most operations of a chain that a neighbourhood adds before a step."""

_LONG_AGO = 8
"""The steps of forward after which a value that was used once more may have been dropped."""


@dataclass
class SolutionMerger:
    """Improves one solution with the ideas of others.

    What two schedules run again is united into one master sequence, from which the retention programme
    chooses. With the memory of every step exact, it finds the best schedule that can be put together from
    both. A schedule that goes over the budget is as good a source of ideas as one that fits.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once; None looks for the least peak.
        best: The solution to improve; None if none is known yet.
        deadline: `time.thread_time()` at which to stop.
        gap: The distance from the best choice at which one counts as best, as a fraction of the step's time.
    """

    problem: CheckpointProblem
    budget_bytes: int | None
    best: Solution | None
    deadline: float = math.inf
    gap: float = _GAP
    rows: dict[Step, None] = field(default_factory=dict[Step, None])

    def add(self, *ideas: Solution) -> bool:
        """Unites the best solution with others and chooses anew; returns whether that gave a better one."""
        sources = [self.problem.recomputations(s) for s in (*([self.best] if self.best else []), *ideas)]
        return self.choose(united(self.problem, sources))

    def look_around(self, window: Iterable[int]) -> bool:
        """Lets more run again before the base steps in `window`; returns whether that was better."""
        assert self.best is not None
        return self.choose(with_neighbours(self.problem, self.problem.recomputations(self.best), window))

    def choose(self, recomputations: Recomputations) -> bool:
        """Chooses among `recomputations`; returns whether that gave a better solution."""
        left = self.deadline - time.thread_time()
        if left <= 0:
            return False
        began = time.thread_time()
        programme = RetentionProgramme(self.problem, recomputations, self.budget_bytes, self.rows)
        seconds = max((time.thread_time() - began) * _SOLVING, _LEAST_SECONDS)
        chosen = programme.solve(
            seconds=min(left, seconds, _LONGEST_SECONDS), gap=self.gap, node_limit=_NODE_LIMIT
        ).solution
        if chosen is None or (self.budget_bytes is not None and chosen.peak_bytes > self.budget_bytes):
            return False
        if self.best is not None and self._rank(chosen) >= self._rank(self.best):
            return False
        self.best = chosen
        return True

    def _rank(self, solution: Solution) -> tuple[float, float]:
        pair = solution.seconds, solution.peak_bytes
        return pair if self.budget_bytes is not None else (pair[1], pair[0])


def united(problem: CheckpointProblem, sources: Sequence[Recomputations]) -> list[list[Node]]:
    """Lists what any of the sources runs again, before the same steps; the first one's order is kept."""
    found = [list(before) for before in sources[0]]
    for source in sources[1:]:
        for before, more in zip(found, source, strict=True):
            _insert(problem, before, more)
    return found


def with_neighbours(
    problem: CheckpointProblem, recomputations: Recomputations, window: Iterable[int]
) -> list[list[Node]]:
    """`recomputations`, and before each step in `window` the nearest operations that make what it reads."""
    found = [list(before) for before in recomputations]
    for base in window:
        _insert(problem, found[base], _chain(problem, base))
    return found


def complete(problem: CheckpointProblem) -> list[list[Node]]:
    """All that may usefully run again before the backward operations of the class, in forward order."""
    found: list[list[Node]] = [[] for _ in problem.base]
    split = len(problem.forward)
    makers = {problem.producer[s]: 0 for s in problem.wanted if problem.producer[s].is_recomputable}
    for storage in problem.wanted:
        node = problem.producer[storage]
        if node in makers:
            makers[node] = max(makers[node], problem.last_needed[storage] - split - 1)
    for position in range(0 if problem.transient else 1, len(problem.backward)):
        found[split + position] = [n for n in problem.forward if makers.get(n, -1) >= position]
    return found


def _chain(problem: CheckpointProblem, base: int) -> list[Node]:
    """The makers of what a step reads, and theirs, nearest first."""
    pending = list(problem.forward_reads[problem.base[base]])
    found: dict[Node, None] = {}
    for storage in pending:
        node = problem.producer[storage]
        recent = base < len(problem.forward) and base - problem.index[node] < _LONG_AGO
        if len(found) >= _CHAIN:
            break
        if node.is_recomputable and node not in found and not recent:
            found[node] = None
            pending.extend(problem.forward_reads[node])
    return list(found)


def _insert(problem: CheckpointProblem, before: list[Node], more: Iterable[Node]) -> None:
    """Adds to `before` the operations it lacks, each before the first operation that reads what it makes."""
    there = set(before)
    new = sorted((node for node in more if node not in there), key=lambda n: -problem.index[n])
    for node in new:
        made = set(problem.graph.allocates(node))
        readers = (i for i, other in enumerate(before) if made.intersection(problem.forward_reads[other]))
        before.insert(next(readers, len(before)), node)
