"""Searches schedules from their end: from what the last operations demand to what must stay at the loss."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...ir import Node, Storage
from .cut_ilp import Relaxation, replaced_storages
from .problem import CheckpointProblem, Solution

__all__ = ["DemandSearch", "Demanded"]

_Bits = NDArray[np.bool_]
_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]
_Words = NDArray[np.uint64]

_WORD = 64
_TRIED = 4
"""The number of cheapest states at the loss of which a schedule is made; it runs nothing again in forward."""

_TOLERANCE = 1e-6
"""Each bound is lowered by this fraction of the step's time: what the solver may be off by."""

_MANY = 800
_CROWD = 2000
"""Bounds are made for states that are more than this right before an operation, or while others run again."""

_SHARPENINGS = 6
_WORTH = 0.7
"""The most bounds for a crowd of states, as long as each leaves less than this part of them."""

_BOUNDS = 12
"""The most bounds of one programme, the latest of them."""

_PRICING_SECONDS = 2.0
"""The time limit for one bound; a hundredth of it is usual."""


@dataclass(frozen=True, slots=True)
class Demanded:
    """The outcome of a search.

    Args:
        solution: The best schedule, or None if none below the limit was found. What counts as small, and
            what other forwards in flight keep, may take it over the budget.
        bound_seconds: A lower bound of the time that every schedule computes again; at most the limit.
        is_complete: Whether the search ended: there is nothing better below the limit then.
    """

    solution: Solution | None
    bound_seconds: float
    is_complete: bool


@dataclass
class _Prices:
    """Lower bounds of what is computed again up to a time, by the programme over the cuts until there.

    Each bound is linear: a constant, and a price for each storage that is demanded after the last cut. These
    are dual prices of the linear programme, so that the bound holds whatever is demanded.

    Args:
        relaxation: The programme.
        time_step: The time step of its last cut.
        constants: The constants.
        prices: The prices of all storages, for each bound.
    """

    relaxation: Relaxation
    time_step: int
    constants: list[float] = field(default_factory=list[float])
    prices: list[_Floats] = field(default_factory=list["_Floats"])


@dataclass
class _States:
    """Sets of demanded storages at one time, a row each.

    Args:
        words: The sets, as bits.
        mixed: The sum of a random number for each storage, by which a set is looked up.
        seconds: The time of what runs again after.
        ahead: A lower bound of the time of what runs again before.
        nbytes: The bytes of the set.
        way: The number of the last record on the way there.
    """

    words: _Words
    mixed: _Words
    seconds: _Floats
    ahead: _Floats
    nbytes: _Ints
    way: _Ints

    @staticmethod
    def at_end(word_count: int) -> _States:
        """The one state at the end of the step, which demands nothing."""
        none, zero = np.zeros(1, dtype=np.int64), np.zeros(1)
        words = np.zeros((1, word_count), dtype=np.uint64)
        return _States(words, np.zeros(1, dtype=np.uint64), zero, zero, none, none - 1)

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, which: _Bits | _Ints) -> _States:
        """Some of the states."""
        return _States(*(column[which] for column in self._columns))

    def joined(self, other: _States) -> _States:
        """These states, and then others."""
        pairs = zip(self._columns, other._columns, strict=True)
        return _States(*(np.concatenate(pair) for pair in pairs))

    @property
    def _columns(self) -> tuple[NDArray[Any], ...]:
        return self.words, self.mixed, self.seconds, self.ahead, self.nbytes, self.way


@dataclass
class _Ways:
    """Records how states were reached: after which other record, and by which operation."""

    chunks: list[tuple[_Ints, _Ints, int]] = field(default_factory=list[tuple["_Ints", "_Ints", int]])
    count: int = 0

    def add(self, earlier: _Ints, nodes: _Ints, time_step: int) -> _Ints:
        """Adds records, and returns their numbers."""
        first = self.count
        self.chunks.append((earlier, nodes, time_step))
        self.count += len(earlier)
        return np.arange(first, self.count, dtype=np.int64)

    def back(self, way: int) -> Iterator[tuple[int, int]]:
        """Yields the operations of a way, from its last record on, each with the time step it runs before."""
        chunk, first = len(self.chunks), self.count
        while way >= 0:
            while way < first:
                chunk -= 1
                first -= len(self.chunks[chunk][0])
            earlier, nodes, time_step = self.chunks[chunk]
            yield time_step, int(nodes[way - first])
            way = int(earlier[way - first])


@dataclass
class DemandSearch:
    """Finds the best schedule of a small graph, or proves that there is none below a limit.

    The step is gone through from its end. A state is the set of storages that must be there at some time
    for all that follows. Before each operation of the base order the set grows by what that reads. A storage
    leaves the set before the operation that makes it, and what that operation reads comes in its place: for
    nothing at the operation's first run, and for its seconds at any time behind that, if memory allows. So
    each schedule with this order of first runs is a way from the empty set at the end of the step to the
    empty set at its beginning. Little room is left where backward ends, and sets are small there. Of states
    with equal sets the cheapest stays, and none that has one storage more than another that is as cheap. A
    state goes if its seconds, with a lower bound for the rest of the way, reach the limit.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once.
        time_steps: The time steps of the cuts of the programmes that bound the rest of the way; the loss is
            the first of them.
        small_bytes: Storages up to this size are always there, and free, unless they are transient.
    """

    problem: CheckpointProblem
    budget_bytes: int
    time_steps: Sequence[int]
    small_bytes: int = 0

    def __post_init__(self) -> None:
        problem = self.problem
        self.storages = [s for s in problem.producer if s.nbytes > self.small_bytes or s in problem.transient]
        self.bit = {s: i for i, s in enumerate(self.storages)}
        self.word_count = max(math.ceil(len(self.storages) / _WORD), 1)
        self.sizes = np.array([s.nbytes for s in self.storages], dtype=np.int64)
        self.mixing = np.random.default_rng(1).integers(0, 1 << 64, len(self.storages), dtype=np.uint64)
        self.nodes = list(dict.fromkeys(problem.producer[s] for s in self.storages))
        number = {node: i for i, node in enumerate(self.nodes)}
        makers = [problem.producer[s] for s in self.storages]
        self.maker = np.array([number[node] for node in makers], dtype=np.int64)
        self.is_recomputable = np.array([node.is_recomputable for node in makers], dtype=bool)
        seconds, workspace = problem.costs.seconds, problem.costs.workspace_bytes
        self.node_seconds = np.array([seconds[node] for node in self.nodes], dtype=np.float64)
        self.node_workspace = np.array([workspace[node] for node in self.nodes], dtype=np.int64)
        reads = [problem.forward_reads[node] for node in self.nodes]
        makes = [problem.graph.allocates(node) for node in self.nodes]
        self.reads, self.makes = self._table(reads), self._table(makes)
        self.read_words, self.made_words = self._rows(reads), self._rows(makes)
        self.replaced_at_loss = self._words(replaced_storages(problem, self.storages, boundary=True))
        self.transient = self._words(problem.transient)
        self.prices: dict[int, _Prices] = {}

    def _words(self, storages: Iterable[Storage]) -> _Words:
        """A set as bits."""
        found = np.zeros(self.word_count, dtype=np.uint64)
        for storage in storages:
            bit = self.bit.get(storage)
            if bit is not None:
                found[bit // _WORD] |= np.uint64(1 << bit % _WORD)
        return found

    def _rows(self, sets: Sequence[Iterable[Storage]]) -> _Words:
        rows = [self._words(storages) for storages in sets]
        return np.stack(rows) if rows else np.zeros((0, self.word_count), dtype=np.uint64)

    def _table(self, sets: Sequence[Iterable[Storage]]) -> list[_Ints]:
        """The storages of sets by number, in columns; -1 if a set has no more."""
        rows = [[self.bit[s] for s in dict.fromkeys(some) if s in self.bit] for some in sets]
        columns = range(max(map(len, rows), default=0))
        return [np.array([row[c] if c < len(row) else -1 for row in rows], dtype=np.int64) for c in columns]

    def _bits(self, words: _Words) -> NDArray[np.uint8]:
        """For each state and each storage whether it is demanded."""
        bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
        return bits[:, : len(self.storages)]

    # ------------------------------------------------------------------ searching

    def run(self, *, limit_seconds: float, most_states: int, deadline: float) -> Demanded:
        """Searches for the best schedule that computes again for less than a limit.

        Args:
            limit_seconds: The limit.
            most_states: The search gives up if there are more states at one time.
            deadline: `time.thread_time()` at which it gives up.
        """
        split = len(self.problem.forward)
        self.limit_seconds = limit_seconds
        self.ways = _Ways()
        best: Solution | None = None
        states = _States.at_end(self.word_count)
        for time_step in reversed(range(self.problem.time_steps)):
            states = self._before(states, time_step)
            if time_step == split:
                best = self._best_at_loss(states)
                states = self._below_limit(states)
            states, is_complete = self._made_again(states, time_step, most_states, deadline)
            if not is_complete:
                least = float((states.seconds + states.ahead).min(initial=math.inf))
                return Demanded(best, min(least, self.limit_seconds), False)
            if not len(states):
                return Demanded(best, self.limit_seconds, True)
        index = int(states.seconds.argmin())  # runs something again in forward
        found = self._schedule(int(states.way[index]))
        if best is None or found.peak_bytes <= self.budget_bytes:
            best = found
        return Demanded(best, float(states.seconds[index]), True)

    def _before(self, states: _States, time_step: int) -> _States:
        """The states right before a time step: with what it reads, and without what it makes."""
        problem, split = self.problem, len(self.problem.forward)
        if time_step == split:
            is_excluded = (states.words & (self.transient | self.replaced_at_loss)).any(axis=1)
            states = states.take(np.nonzero(~is_excluded)[0])
        words, mixed = states.words, states.mixed
        node = problem.base_of(time_step)
        if node is not None:
            made = self._words(problem.graph.allocates(node))
            read = self._words(problem.forward_reads[node])
            mixed = mixed - self._mixed(words & made) + self._mixed(~words & read)
            words = words & ~made | read
        nbytes = (self._bits(words) @ self.sizes.astype(np.float64)).astype(np.int64)
        held = problem.held_in(time_step, self.small_bytes) + problem.least_others_bytes(time_step)
        found = _States(words, mixed, states.seconds, states.ahead, nbytes, states.way)
        found = found.take(nbytes <= self.budget_bytes - held)
        return self._sharpened(self._undominated(self._distinct(found)), time_step)

    def _mixed(self, words: _Words) -> _Words:
        """The sum of the random numbers of each set."""
        found = np.zeros(len(words), dtype=np.uint64)
        some = np.bitwise_or.reduce(words, axis=0, initial=np.uint64(0))
        for bit in np.nonzero(self._bits(some[None])[0])[0]:
            found += (words[:, bit // _WORD] >> np.uint64(bit % _WORD) & np.uint64(1)) * self.mixing[bit]
        return found

    def _made_again(
        self, states: _States, time_step: int, most_states: int, deadline: float
    ) -> tuple[_States, bool]:
        """The states before all that runs again right before a time step, and whether these are all."""
        room_bytes = self.budget_bytes - self._held_between(time_step)
        new, crowd = states, _CROWD
        while len(new):
            if len(states) > most_states or time.thread_time() > deadline:
                return states, False
            new, nodes = self._one_made_again(new, room_bytes)
            earlier, known = new.way, self.ways.count
            new.way = np.arange(known, known + len(new), dtype=np.int64)
            states = self._distinct(states.joined(new))
            fresh = np.nonzero(states.way >= known)[0]
            states.ahead[fresh] = self._ahead(states.words[fresh], time_step)
            states = self._below_limit(states)
            states = self._undominated(states, np.nonzero(states.way >= known)[0])
            if len(states) > crowd:
                states = self._sharpened(states, time_step)
                crowd = 2 * max(len(states), _CROWD)
            is_new = states.way >= known
            added = states.way[is_new] - known
            states.way[is_new] = self.ways.add(earlier[added], nodes[added], time_step)
            new = states.take(is_new)
        return self._undominated(states), True

    def _held_between(self, time_step: int) -> int:
        """Bytes of all but what comes and goes, while something runs again right before a time step."""
        problem = self.problem
        others_at = max(time_step - 1, 0) if time_step == len(problem.forward) else time_step
        return problem.held_between(time_step) + problem.least_others_bytes(others_at)

    def _one_made_again(self, states: _States, room_bytes: int) -> tuple[_States, _Ints]:
        """The states before one more operation, and the operation of each."""
        which, bit = np.nonzero(self._bits(states.words) & self.is_recomputable)
        node = self.maker[bit]
        seconds = states.seconds[which] + self.node_seconds[node]
        cheap = seconds < self.limit_seconds
        which, node, seconds = which[cheap], node[cheap], seconds[cheap]
        words, mixed = states.words[which], states.mixed[which]
        during = nbytes = states.nbytes[which]
        for column in self.makes:
            there, size, number = self._of(words, column[node])
            during = during + np.where(there, 0, size)
            nbytes = nbytes - np.where(there, size, 0)
            mixed = mixed - number * there
        for column in self.reads:
            there, size, number = self._of(words, column[node])
            during = during + np.where(there, 0, size)
            nbytes = nbytes + np.where(there, 0, size)
            mixed = mixed + number * ~there
        fits = during + self.node_workspace[node] <= room_bytes
        which, node = which[fits], node[fits]
        words = words[fits] & ~self.made_words[node] | self.read_words[node]
        ahead = np.zeros(len(which))
        return _States(words, mixed[fits], seconds[fits], ahead, nbytes[fits], states.way[which]), node

    def _of(self, words: _Words, bit: _Ints) -> tuple[_Bits, _Ints, _Words]:
        """For a storage of each state, or none: whether it is demanded, its size and its random number."""
        is_none = bit < 0
        at = np.where(is_none, 0, bit)
        word = words[np.arange(len(words)), at // _WORD]
        there = (word >> (at % _WORD).astype(np.uint64)) & np.uint64(1) != 0
        return there, np.where(is_none, 0, self.sizes[at]), np.where(is_none, np.uint64(0), self.mixing[at])

    def _distinct(self, states: _States) -> _States:
        """The cheapest of equal states each, in the order of `mixed`."""
        if len(states) < 2:
            return states
        states = states.take(np.lexsort((states.way, states.seconds, states.mixed)))
        first = np.ones(len(states), dtype=bool)
        first[1:] = (states.words[1:] != states.words[:-1]).any(axis=1)
        return states.take(first)

    def _undominated(self, states: _States, among: _Ints | None = None) -> _States:
        """The states without those that are no cheaper than one with a storage less.

        Args:
            states: The states, in the order of `mixed`.
            among: Those that may go; None for all.
        """
        among = np.arange(len(states)) if among is None else among
        which, bit = np.nonzero(self._bits(states.words[among]))
        which = among[which]
        wanted = states.mixed[which] - self.mixing[bit]
        at = np.minimum(np.searchsorted(states.mixed, wanted), len(states) - 1)
        found = (states.mixed[at] == wanted) & (states.seconds[at] <= states.seconds[which])
        which, bit, at = which[found], bit[found], at[found]
        less = states.words[which]
        less[np.arange(len(which)), bit // _WORD] &= ~(np.uint64(1) << (bit % _WORD).astype(np.uint64))
        kept = np.ones(len(states), dtype=bool)
        kept[which[(less == states.words[at]).all(axis=1)]] = False
        return states.take(kept)

    def _below_limit(self, states: _States) -> _States:
        return states.take(states.seconds + states.ahead < self.limit_seconds)

    # ------------------------------------------------------------------ bounds for the rest of the way

    def _bounds(self, time_step: int) -> _Prices | None:
        """The programme for what is before a time step; None before the loss."""
        count = bisect.bisect_left(self.time_steps, time_step)
        if not count:
            return None
        if count not in self.prices:
            relaxation = Relaxation(
                self.problem,
                self.budget_bytes,
                self.time_steps[:count],
                small_bytes=self.small_bytes,
                is_open=True,
            )
            self.prices[count] = _Prices(relaxation, self.time_steps[count - 1])
        return self.prices[count]

    def _coming(self, bounds: _Prices, time_step: int) -> _Ints:
        """The storages that are read after the last cut and before a time step."""
        steps = range(bounds.time_step + 1, time_step)
        found = {self.bit[s] for step in steps for s in self.problem.read_at(step) if s in self.bit}
        return np.array(sorted(found), dtype=np.int64)

    def _ahead(self, words: _Words, time_step: int) -> _Floats:
        """A lower bound of what runs again before each of these states, right before a time step."""
        bounds = self._bounds(time_step)
        if bounds is None or not bounds.constants:
            return np.zeros(len(words))
        prices, coming = np.stack(bounds.prices), self._coming(bounds, time_step)
        constants = np.array(bounds.constants) + prices[:, coming].sum(axis=1)
        prices[:, coming] = 0.0
        return np.maximum((self._bits(words) @ prices.T + constants).max(axis=1), 0.0)

    def _sharpened(self, states: _States, time_step: int) -> _States:
        """The states below the limit; if these are many, by bounds that are made for them."""
        states.ahead = self._ahead(states.words, time_step)
        states = self._below_limit(states)
        bounds = self._bounds(time_step)
        if bounds is None:
            return states
        for _ in range(_SHARPENINGS):
            count = len(states)
            if count < (_MANY if bounds.constants else 1):
                break
            lowest = states
            if bounds.constants:
                lowest = states.take(np.argsort(states.seconds + states.ahead, kind="stable")[: count // 3])
            typical = self._bits(lowest.words).mean(axis=0)
            typical[self._coming(bounds, time_step)] = 1.0
            self._add_bound(bounds, typical)
            states.ahead = np.maximum(states.ahead, self._ahead(states.words, time_step))
            states = self._below_limit(states)
            if len(states) > count * _WORTH:
                break
        return states

    def _add_bound(self, bounds: _Prices, typical: _Floats) -> None:
        """Adds the bound that is the closest one if storages are demanded to these parts."""
        demanded = dict(zip(self.storages, typical.tolist(), strict=True))
        found = bounds.relaxation.prices(demanded, seconds=_PRICING_SECONDS)
        if found is None:
            return
        bound_seconds, seconds = found
        prices = np.array([seconds.get(s, 0.0) for s in self.storages])
        tolerance = _TOLERANCE * self.problem.step_seconds
        bounds.constants.append(bound_seconds - float(prices @ typical) - tolerance)
        bounds.prices.append(prices)
        del bounds.constants[:-_BOUNDS], bounds.prices[:-_BOUNDS]

    # ------------------------------------------------------------------ schedules

    def _best_at_loss(self, states: _States) -> Solution | None:
        """The cheapest schedule within the budget that runs nothing again in forward; it lowers the limit."""
        for index in np.argsort(states.seconds, kind="stable")[:_TRIED]:
            solution = self._schedule(int(states.way[index]))
            if solution.peak_bytes <= self.budget_bytes:
                self.limit_seconds = float(states.seconds[index])
                return solution
        return None

    def _schedule(self, way: int) -> Solution:
        again: list[list[Node]] = [[] for _ in self.problem.base]
        split = len(self.problem.forward)
        for time_step, node in self.ways.back(way):
            again[time_step if time_step <= split else time_step - 1].append(self.nodes[node])
        return self.problem.simulate_recomputations(again)
