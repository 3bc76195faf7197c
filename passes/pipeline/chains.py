"""The best chain of order ideals, for stages whose cost only a planner can tell, found with few questions."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .order_ideals import Between, Floats

__all__ = ["Chain", "StageCost", "best_chain"]

_ROUNDING = 1e-12

_DIVE = 100
"""The most costs that may be asked for to have a first chain."""


class StageCost(Protocol):
    """The cost of a stage, such as that of a plan of its memory."""

    def __call__(self, stage: int, items: int, /) -> float:
        """Seconds of a stage for one micro-batch, not less than its load in `Between`.

        Args:
            stage: The number of the stage; it decides how many micro-batches are in flight.
            items: The items of the stage, as bits of those of `CoarsenedProblem`.

        Returns:
            Seconds; infinite if it does not fit its device.
        """
        ...


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages one behind the other.

    Args:
        items: The items of each stage, as bits.
        seconds: The cost of each stage.
        step_seconds: The sum of `seconds`, and the largest once more for each micro-batch but the first.
        bound_seconds: A lower bound of the step of every chain.
        questions: The number of costs that were asked for.
    """

    items: tuple[int, ...]
    seconds: tuple[float, ...]
    step_seconds: float
    bound_seconds: float
    questions: int


def best_chain(
    between: Between,
    kinds: Sequence[int],
    cost: StageCost,
    *,
    micro_batches: int,
    seconds: float = math.inf,
) -> Chain | None:
    """Finds the stages with the shortest step, `sum + (micro_batches - 1) * largest`, as of GPipe and 1F1B.

    Loads from `between` are lower bounds of the costs of stages. From the back, they give for each order
    ideal and each number of stages left the least that the sum of these and the largest of them can be.
    Chains are then made from the front, the one with the least bound first (A*). A stage's cost is asked for
    only when its chain is the first in the queue, so the first chain that is whole is the best. Of two chains
    that reach the same order ideal with as many stages, one that is no better in sum and in the largest is
    dropped.

    Args:
        between: The order ideals; for graphs that have too many, those that are beginnings of one order.
        kinds: The class of the device of each stage, in their order.
        cost: Tells the cost of a stage; it is asked at most once for each.
        micro_batches: The micro-batches of a step, at least one.
        seconds: The time limit, after which the best chain so far is the answer.

    Returns:
        The best chain; None if none fits.

    Raises:
        TimeoutError: When the time ended before any chain was found.
    """
    search = _Search(between, kinds, cost, micro_batches)
    return search.best(time.thread_time() + seconds)


@dataclass(frozen=True, slots=True)
class _Begun:
    """The first stages of a chain.

    Args:
        at: The position of the order ideal that they make up.
        items: The items of each stage.
        seconds: The cost of each stage.
    """

    at: int = 0
    items: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class _Waiting:
    """A chain in the queue.

    Args:
        bound: A lower bound of the step of every chain that goes on like this.
        number: Orders chains with the same bound: the later one, which is longer, is first.
        begun: Its stages so far.
        end: The position of the order ideal that its next stage ends with; None if that is not chosen.
        others: The further ends that it may have, with their bounds.
    """

    bound: float
    number: int
    begun: _Begun = field(compare=False)
    end: int | None = field(compare=False)
    others: Iterator[tuple[float, int]] = field(compare=False)


class _Search:
    def __init__(
        self,
        between: Between,
        kinds: Sequence[int],
        cost: StageCost,
        micro_batches: int,
    ) -> None:
        self.between = between
        self.kinds = kinds
        self.cost = cost
        self.micro_batches = micro_batches
        self.told: dict[tuple[int, int], float] = {}
        self.numbers = itertools.count(0, -1)
        self.best_found: _Begun | None = None
        self.left_sum, self.left_largest = self._left()

    def _left(self) -> tuple[Floats, Floats]:
        """The least sum and the least largest load of the stages from one on, behind each order ideal.

        Returns:
            Both `[stage, ideal]`, infinite if the stages cannot end with the whole.
        """
        last = len(self.between.sets) - 1
        sums = np.full((len(self.kinds) + 1, last + 1), np.inf)
        sums[-1, last] = 0.0
        largest = sums.copy()
        for first in reversed(range(last)):
            ends, loads = self.between.stages(first, math.inf)
            for stage, kind in enumerate(self.kinds):
                sums[stage, first] = (loads[kind] + sums[stage + 1, ends]).min(initial=np.inf)
                behind = np.maximum(loads[kind], largest[stage + 1, ends])
                largest[stage, first] = behind.min(initial=np.inf)
        return sums, largest

    def best(self, deadline: float) -> Chain | None:
        queue: list[_Waiting] = []
        if self.left_sum[0, 0] == np.inf:
            return None
        self._dive(_Begun(), deadline)
        heapq.heappush(queue, self._waiting(_Begun()))
        seen: dict[tuple[int, int], list[tuple[float, float]]] = {}
        while queue:
            first = heapq.heappop(queue)
            if first.bound >= self._step(self.best_found) * (1 - _ROUNDING) or time.thread_time() > deadline:
                return self._chain(first.bound)
            if first.end is None:
                if self._is_new(first.begun, seen):
                    self._go_on(queue, first.begun, self._ends(first.begun))
                continue
            self._go_on(queue, first.begun, first.others)
            longer = self._longer(first.begun, first.end)
            if longer is not None:
                heapq.heappush(queue, self._waiting(longer))
        return self._chain(math.inf)

    def _go_on(self, queue: list[_Waiting], begun: _Begun, ends: Iterator[tuple[float, int]]) -> None:
        """Puts a chain into the queue with the next one of the ends of its next stage."""
        bound, end = next(ends, (math.inf, None))
        if bound < self._step(self.best_found):
            heapq.heappush(queue, _Waiting(bound, next(self.numbers), begun, end, ends))

    def _waiting(self, begun: _Begun) -> _Waiting:
        stage = len(begun.items)
        bound = self._bound(begun, self.left_sum[stage, begun.at], self.left_largest[stage, begun.at])
        return _Waiting(float(bound), next(self.numbers), begun, None, iter(()))

    def _is_new(self, begun: _Begun, seen: dict[tuple[int, int], list[tuple[float, float]]]) -> bool:
        """Whether no chain was here before that is as good in sum and in the largest."""
        before = seen.setdefault((begun.at, len(begun.items)), [])
        total, largest = sum(begun.seconds), max(begun.seconds, default=0.0)
        if any(one <= total and other <= largest for one, other in before):
            return False
        before.append((total, largest))
        return True

    def _ends(self, begun: _Begun) -> Iterator[tuple[float, int]]:
        """Yields the ends that the next stage may have, the one with the least bound of the step first."""
        stage = len(begun.items)
        if stage == len(self.kinds):
            return
        ends, loads = self.between.stages(begun.at, math.inf)
        load = loads[self.kinds[stage]]
        can_end = (load < np.inf) & (self.left_sum[stage + 1, ends] < np.inf)
        ends, load = ends[can_end], load[can_end]
        largest = np.maximum(load, self.left_largest[stage + 1, ends])
        bounds = self._bound(begun, load + self.left_sum[stage + 1, ends], largest)
        for each in np.argsort(bounds, kind="stable"):
            yield float(bounds[each]), int(ends[each])

    def _bound(self, begun: _Begun, left_sum: Floats, left_largest: Floats) -> Floats:
        largest = np.maximum(left_largest, max(begun.seconds, default=0.0))
        return sum(begun.seconds) + left_sum + (self.micro_batches - 1) * largest

    def _longer(self, begun: _Begun, end: int) -> _Begun | None:
        """Adds a stage to the chain; None if it does not fit. Keeps the best of those that are whole."""
        stage, sets = len(begun.items), self.between.sets
        items = sets[end] & ~sets[begun.at]
        if (stage, items) not in self.told:
            self.told[stage, items] = self.cost(stage, items)
        seconds = self.told[stage, items]
        if seconds == math.inf:
            return None
        longer = _Begun(end, (*begun.items, items), (*begun.seconds, seconds))
        if len(longer.items) == len(self.kinds) and self._step(longer) < self._step(self.best_found):
            self.best_found = longer
        return longer

    def _dive(self, begun: _Begun, deadline: float) -> None:
        """Follows the ends with the least bounds until a chain is whole, so that there is one."""
        for _, end in self._ends(begun):
            if self.best_found or len(self.told) >= _DIVE or time.thread_time() > deadline:
                return
            longer = self._longer(begun, end)
            if longer is not None:
                self._dive(longer, deadline)

    def _step(self, whole: _Begun | None) -> float:
        if whole is None:
            return math.inf
        return sum(whole.seconds) + (self.micro_batches - 1) * max(whole.seconds)

    def _chain(self, bound: float) -> Chain | None:
        """The best chain that is whole, when no other one has a step below the bound."""
        found = self.best_found
        if found is None:
            if bound < math.inf:
                raise TimeoutError
            return None
        step_seconds = self._step(found)
        bound_seconds = min(bound, step_seconds)
        return Chain(found.items, found.seconds, step_seconds, bound_seconds, len(self.told))
