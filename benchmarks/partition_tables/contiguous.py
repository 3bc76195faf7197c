"""The best contiguous partition, proved: dynamic programming over downsets, within limits that grow."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from irc.ir import TimeLimitError
from irc.passes.pipeline.coarsen import Coarse, coarsen
from irc.passes.pipeline.order_ideals import Between, downsets
from irc.passes.pipeline.partition_problem import Partition, PartitionProblem

from .bounds import Speeds, least_load
from .constraint_programme import Solved, solve
from .reductions import can_run, contract, no_room, prefixes

__all__ = ["best_along", "best_contiguous"]

_MOST_DOWNSETS = 100_000
_ORDERS = 8
_FIRST_STEP = 0.01
"""By what part of the lower bound the first limit is above it; each further step is twice as long."""


@dataclass(frozen=True)
class _Chain:
    """Downsets from the empty one to the whole, and the class of device of each stage between two."""

    sets: tuple[int, ...]
    kinds: tuple[int, ...]
    max_load_seconds: float


def best_contiguous(problem: PartitionProblem, *, seconds: float = 60.0, workers: int = 1) -> Partition:
    """The contiguous partition with the smallest largest load.

    The stages of a contiguous partition have an order that no edge between blocks goes against, so that the
    first of them, for any number, are a downset. The search goes through all downsets, smaller ones first,
    and keeps for each number of used devices of each class the smallest largest load. It is given a limit:
    stages with a load from the limit on are not made, and neither are downsets that the devices used cannot
    have done, or the others cannot complete, below it. If a partition is found, it is the best; if not, the
    limit is a lower bound, and the next one is larger. Graphs with too many downsets to hold go to a
    constraint programme, if their devices are of one class.

    Args:
        problem: The graph and the devices.
        seconds: Time limit. When it ends, the best partition so far is the answer, at the least the best one
            along a few orders, with the bound as far as it was raised.
        workers: Threads of the constraint programme.

    Raises:
        UsageError: IRC473 when no contiguous partition fits the devices.
        TimeLimitError: IRC479 when the time ends before one is found.
    """
    started = time.monotonic()
    blocks = problem.blocks
    coarse = coarsen(problem, blocks.members, blocks.edges)
    coarse = contract(coarse, is_contiguous=True, is_memory_free=problem.is_memory_free)
    if not can_run(coarse):
        raise no_room(problem)
    found = _found(problem, coarse, started + seconds, workers)
    if found.is_infeasible:
        raise no_room(problem)
    if found.devices is None:
        raise TimeLimitError(
            "IRC479",
            f"no contiguous partition of {problem.name} was found in {seconds:g} s",
            help="give more time, or devices with more memory",
        )
    assignment = coarse.spread(found.devices, len(problem.nodes))
    return Partition.of(problem, assignment, found.bound_seconds, started)


def _found(problem: PartitionProblem, coarse: Coarse, deadline: float, workers: int) -> Solved:
    bound = least_load(coarse, problem.classes)
    best = _along_orders(problem, coarse)
    sets = downsets(coarse, _MOST_DOWNSETS)
    if sets is not None:
        best, bound = _proved(_Search(problem, coarse, sets, deadline), best, bound)
    devices = None if best is None else _devices(problem, coarse, best)
    if sets is None and len(problem.classes) == 1:
        seconds = deadline - time.monotonic()
        return solve(problem, coarse, is_contiguous=True, start=devices, seconds=seconds, workers=workers)
    return Solved(devices, bound, bound == math.inf)


def best_along(problem: PartitionProblem, order: Sequence[int]) -> Partition:
    """The partition into runs of one order with the smallest largest load; the bound is of such partitions.

    Args:
        problem: The graph and the devices.
        order: All nodes; blocks come in the order of their first nodes, which no edge goes against.

    Raises:
        UsageError: IRC473 when none fits the devices.
    """
    started = time.monotonic()
    blocks = problem.blocks
    coarse = coarsen(problem, blocks.members, blocks.edges)
    search = _Search(problem, coarse, prefixes(list(dict.fromkeys(blocks.block_of[node] for node in order))))
    found = search.below(search.ceiling_seconds) if can_run(coarse) else None
    if found is None:
        raise no_room(problem)
    assignment = coarse.spread(_devices(problem, coarse, found), len(problem.nodes))
    return Partition.of(problem, assignment, found.max_load_seconds, started)


def _proved(search: _Search, best: _Chain | None, bound: float) -> tuple[_Chain | None, float]:
    """The best of all chains, and its load as the bound, infinite without one; or as far as the time went."""
    ceiling = best.max_load_seconds if best else search.ceiling_seconds
    step = _FIRST_STEP * (bound or ceiling)
    while bound < ceiling:
        limit = min(bound + step, ceiling)
        try:
            found = search.below(limit)
        except TimeoutError:
            return best, bound
        if found is not None:
            return found, found.max_load_seconds
        bound, step = limit, 2 * step
    return best, bound if best else math.inf


def _along_orders(problem: PartitionProblem, coarse: Coarse) -> _Chain | None:
    """The best chain whose downsets are all beginnings of one of a few orders."""
    best: _Chain | None = None
    for order in _orders(coarse):
        search = _Search(problem, coarse, prefixes(order))
        best = search.below(best.max_load_seconds if best else search.ceiling_seconds) or best
    return best


def _orders(coarse: Coarse) -> Iterator[list[int]]:
    """A few orders of the items: that of their nodes, and some that follow one path as far as it goes."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(coarse.members)))
    graph.add_edges_from(coarse.edges)
    yield list(nx.lexicographical_topological_sort(graph, key=lambda item: min(coarse.members[item])))
    for seed in range(_ORDERS):
        chance = random.Random(seed)
        waiting = [len(before) for before in coarse.predecessors]
        ready = [item for item, count in enumerate(waiting) if not count]
        order: list[int] = []
        while ready:
            item = ready.pop()
            order.append(item)
            after = sorted(coarse.successors[item])
            chance.shuffle(after)
            for each in after:
                waiting[each] -= 1
                if not waiting[each]:
                    ready.append(each)
        yield order


def _devices(problem: PartitionProblem, coarse: Coarse, chain: _Chain) -> list[int]:
    """The device of each item; the devices of a class in the order of the stages."""
    free = [[d for d, kind in enumerate(problem.devices) if kind == k] for k in range(len(problem.classes))]
    found = [0] * len(coarse.members)
    for kind, (before, after) in zip(chain.kinds, itertools.pairwise(chain.sets), strict=True):
        device = free[kind].pop(0)
        for item in range(len(found)):
            if (after & ~before) >> item & 1:
                found[item] = device
    return found


class _Search:
    """Dynamic programming over some downsets, among them the empty one and the whole.

    Args:
        problem: For its devices.
        coarse: The items.
        sets: The downsets, smaller ones first.
        deadline: `time.monotonic()` at which to stop.
    """

    def __init__(
        self, problem: PartitionProblem, coarse: Coarse, sets: Sequence[int], deadline: float = math.inf
    ) -> None:
        self.coarse = coarse
        self.classes = problem.classes
        self.deadline = deadline
        self.whole = Between(coarse, problem.classes, sets)
        self.speeds = Speeds(coarse, problem.classes)
        counts = tuple(device.count for device in problem.classes)
        self.states = list(itertools.product(*(range(count + 1) for count in counts)))
        """How many devices of each class are used."""
        self.next_state = [
            {
                kind: self.states.index(_one_more(state, kind))
                for kind in range(len(counts))
                if state[kind] < counts[kind]
            }
            for state in self.states
        ]

    @property
    def ceiling_seconds(self) -> float:
        """More than any load."""
        longest = (max(filter(math.isfinite, seconds)) for seconds in self.coarse.seconds)
        return 1.0 + sum(longest) + sum(self.coarse.nets.values())

    def below(self, limit_seconds: float) -> _Chain | None:
        """The best chain with a largest load below a limit; None if there is none.

        Raises:
            TimeoutError: The deadline has come first.
        """
        between = self.whole
        for has_transfers in (False, True):
            may_be = self._may_be(between, limit_seconds, has_transfers)
            kept = np.nonzero(may_be.any(axis=0))[0]
            if not may_be[:, 0].any() or not may_be[:, -1].any():
                return None
            between = Between(self.coarse, self.classes, [between.sets[each] for each in kept.tolist()])
            may_be = may_be[:, kept]
        return self._sweep(between, may_be, limit_seconds)

    def _may_be(self, between: Between, limit_seconds: float, has_transfers: bool) -> NDArray[np.bool_]:
        """Whether some devices can have done a downset below the limit, and the others the rest.

        Args:
            between: The downsets.
            limit_seconds: What each load is below.
            has_transfers: Whether to count those that are open at the downset.

        Returns:
            For each state and each downset, `[state, downset]`.
        """
        done = between.has @ self.speeds.least_seconds
        left = done[-1] - done
        may_be = np.empty((len(self.states), len(between.sets)), np.bool_)
        for number, used in enumerate(self.states):
            others = tuple(device.count - count for device, count in zip(self.classes, used, strict=True))
            can = self.speeds.can_do(done, used, limit_seconds)
            may_be[number] = can & self.speeds.can_do(left, others, limit_seconds)
            if has_transfers:
                for part, devices in ((done, used), (left, others)):
                    may_be[number] &= self.speeds.can_do_with(
                        part, between.open_seconds, devices, limit_seconds
                    )
        return may_be

    def _sweep(self, between: Between, may_be: NDArray[np.bool_], limit_seconds: float) -> _Chain | None:
        best = np.full(may_be.shape, np.inf)
        came_from = np.zeros((*may_be.shape, 2), np.int32)
        best[0, 0] = 0.0
        for first in range(len(between.sets) - 1):
            live = np.nonzero(best[:, first] < limit_seconds)[0]
            if not len(live):
                continue
            if time.monotonic() > self.deadline:
                raise TimeoutError
            larger, loads = between.stages(first, limit_seconds)
            for state in live:
                for kind, after in self.next_state[state].items():
                    reached = np.maximum(loads[kind], best[state, first])
                    better = (reached < best[after, larger]) & may_be[after, larger]
                    chosen = larger[better]
                    best[after, chosen] = reached[better]
                    came_from[after, chosen] = first, state
            limit_seconds = min(limit_seconds, best[:, -1].min())
        state = int(best[:, -1].argmin())
        if best[state, -1] == np.inf:
            return None
        return self._back(between, came_from, state, float(best[state, -1]))

    def _back(self, between: Between, came_from: NDArray[np.int32], state: int, load: float) -> _Chain:
        """The chain that reached the whole with a state."""
        at = len(between.sets) - 1
        sets, kinds = [between.sets[at]], list[int]()
        while at:
            at, before = (int(each) for each in came_from[state, at])
            kinds.append(next(kind for kind, after in self.next_state[before].items() if after == state))
            sets.append(between.sets[at])
            state = before
        return _Chain(tuple(reversed(sets)), tuple(reversed(kinds)), load)


def _one_more(state: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*state[:kind], state[kind] + 1, *state[kind + 1 :])
