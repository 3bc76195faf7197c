"""Minimum cuts of what is saved between forward and backward."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import count, islice

from ....ir import Node, Storage
from ...combinatorial import knapsack
from ..cut_network import CutNetwork, Kept
from ..parametric_cut import ParametricCut
from ..problem import CheckpointProblem, Solution

__all__ = ["min_cut", "min_cut_candidates", "priced_cuts"]


def min_cut(problem: CheckpointProblem, fraction: float) -> Solution:
    """Saves between forward and backward the fewest bytes from which backward can be computed.

    At fraction 1 no operation runs again that takes more seconds a byte than forward as a whole: saving
    bytes costs hardly any time. At 0 everything may run again. Between them a knapsack chooses which of
    the slow operations do not: the most seconds whose results are within `fraction` of the bytes that
    lie between the two ends.

    Args:
        problem: The recomputation problem.
        fraction: A number from 0 to 1.

    Source:
        PyTorch's partitioner with `activation_memory_budget` (torch/_functorch/partitioners.py, 2022 to
        2024). Ours knows an operation as slow by its time, theirs by its name.
    """
    return problem.keeping(_Network(problem).at(fraction))


def min_cut_candidates(problem: CheckpointProblem) -> Iterator[Solution]:
    """The schedules of `min_cut` at fractions 1, 0.9, ... 0, without repetition."""
    network = _Network(problem)
    kept = (network.at(tenths / 10) for tenths in reversed(range(11)))
    yield from (problem.keeping(saved) for saved in dict.fromkeys(kept))


def priced_cuts(
    problem: CheckpointProblem, *, kept: Kept = frozenset(), limit: int = 16
) -> Iterator[Solution]:
    """Schedules at the best trade-offs of bytes saved between forward and backward against time.

    Each is the minimum of bytes plus seconds times a price. The prices are found between the two known
    trade-offs whose bytes differ most: in the end that gives the convex hull of all of them.

    Args:
        problem: The recomputation problem.
        kept: Storages that are saved in any case; with the borders of blocks, little is alive while one runs
            again.
        limit: The most schedules.

    Source:
        Prices as in Eisner and Severance, Mathematical Techniques for Efficient Record Segmentation in Large
        Shared Databases (1976).
    """
    there = kept | _read_first(problem)
    cut = ParametricCut(problem, len(problem.forward), kept=there, breaks_ties=False)
    yield from (problem.keeping(saved | kept) for saved in islice(_hull(cut), limit))


def _hull(cut: ParametricCut) -> Iterator[Kept]:
    """Yields the choices of a hull: the ends, then those between the largest gaps."""
    small, large = cut.ends
    yield large.kept
    if small.nbytes < large.nbytes:
        yield small.kept
    order = count()
    gaps = [(small.nbytes - large.nbytes, next(order), small, large)]
    while gaps:
        _, _, small, large = heapq.heappop(gaps)
        between = cut.between(small, large)
        if between is not None:
            yield between.kept
            for less, more in ((between, large), (small, between)):
                heapq.heappush(gaps, (less.nbytes - more.nbytes, next(order), less, more))


_KNAPSACK_UNITS = 10_000
"""The number of units that the capacity of a knapsack is divided into; sizes are rounded up to them."""


def _read_first(problem: CheckpointProblem) -> Kept:
    """The storages that the first operation of backward reads: they are there anyway."""
    return frozenset(s for node in problem.backward[:1] for s in problem.forward_reads[node])


class _Network(CutNetwork):
    """The cuts between forward and backward that save a fraction of what slow operations make.

    Args:
        problem: The recomputation problem.
    """

    def __init__(self, problem: CheckpointProblem) -> None:
        super().__init__(problem, len(problem.forward), kept=_read_first(problem))

    @cached_property
    def slow(self) -> frozenset[Node]:
        """The operations that take more seconds a byte of results than all of them together."""
        seconds = self.problem.costs.seconds
        makers = [node for node in self.feeds if node.is_recomputable and not node.is_transient]
        made = {node: sum(s.nbytes for s in self.results(node)) for node in makers}
        average = math.fsum(seconds[node] for node in makers) / max(sum(made.values()), 1)
        return frozenset(node for node in makers if seconds[node] > average * made[node])

    @cached_property
    def ends(self) -> tuple[Kept, Kept]:
        """The storages to save if nothing is forbidden to run again, and if the slow operations are."""
        return self.cut(lambda node: 0), self.cut(lambda node: math.inf if node in self.slow else 0)

    def at(self, fraction: float) -> Kept:
        """The storages that `min_cut` saves."""
        least, most = self.ends
        if fraction >= 1:
            return most
        between = self._size(most) - self._size(least)
        chosen = self._knapsack(fraction * between)
        return self.cut(lambda node: math.inf if node in chosen else 0)

    def _knapsack(self, capacity_bytes: float) -> frozenset[Node]:
        """The slow operations that take the most seconds, with at most these bytes of results."""
        nbytes = {node: self._size(self.results(node)) for node in self.feeds if node in self.slow}
        items = [node for node in nbytes if nbytes[node] <= capacity_bytes]
        if not items:
            return frozenset()
        unit = max(capacity_bytes / _KNAPSACK_UNITS, 1)
        nanoseconds = [round(1e9 * self.problem.costs.seconds[node]) for node in items]
        sizes = [math.ceil(nbytes[node] / unit) for node in items]
        return frozenset(items[k] for k in knapsack(nanoseconds, sizes, int(capacity_bytes / unit)))

    def _size(self, storages: Iterable[Storage]) -> int:
        return sum(self.bytes[storage] for storage in storages)
