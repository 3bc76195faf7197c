"""Recomputation as an integer programme over cuts of a step: a bound for all schedules, a first choice."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...ir import Node, Storage
from ..milp import Model, Row, Term, Variable, add_memory_row, add_rounded_rows, solve, solve_relaxed
from .problem import CheckpointProblem

__all__ = ["Relaxation", "Solved", "replaced_storages"]

_ANY_GAP = 1e6
"""A gap at which the first choice will do, in units of the objective."""


@dataclass(frozen=True, slots=True)
class Solved:
    """The outcome of one solve.

    Args:
        resident: For each cut the storages that stay there, or None if no choice was found. Between the cuts
            a choice may go over the budget.
        bound_seconds: A lower bound of the time that every schedule computes again.
        is_infeasible: Whether no schedule fits.
        is_optimal: Whether the choice is the best within the rows, and not only the best found in time.
        swapped: The storages that go to a tier; each counts as staying until it is copied back.
    """

    resident: Mapping[int, frozenset[Storage]] | None
    bound_seconds: float
    is_infeasible: bool
    is_optimal: bool
    swapped: frozenset[Storage] = frozenset()


@dataclass
class Relaxation:
    r"""The integer programme over some cuts.

    Cut j stands at time step t_j, with t_0 < t_1 < ... The time steps are the forward operations, the loss
    and the backward operations (see `CheckpointProblem.time_steps`). Variables: k[j, s] in {0, 1}, storage s
    stays resident from before time step t_j until after it; x[j, o] in [0, 1], operation o, which ran before
    t_j, runs again between t_j and t_{j+1}. Minimise the seconds of all x, subject to, for storages s and u
    that were made before t_j,

    - read: x[j, maker(s)] + k[j, s] >= 1 for s read in (t_j, t_{j+1}];
    - closure: x[j, maker(u)] + k[j, u] >= x[j, o] for u read by o;
    - carry: k[j+1, s] <= k[j, s] + x[j, maker(s)];
    - memory: bytes of k[j, .], of what t_j reads and of what is held besides <= budget; other forwards in
      flight that wait hold those of k at the loss, if a cut stands there;
    - spans: the rows of read, closure and carry hold too for y[i, j, o] in [0, 1], o runs again anywhere
      between t_i and t_j, in the place of x; and y[i, j, o] <= y[i, m, o] + y[m, j, o], where y[j, j+1, o] is
      x[j, o]. Else half of a storage, kept at two cuts, could make all that is made of it, and more cuts
      would weaken the linear programme;
    - rounding: how many of the largest storages fit into the memory of a cut is a whole number;
    - annotations: x[j, o] = 0 if o is to be kept, and k[j, s] = 0 at the loss if s is transient.

    Every schedule with this order of first runs that honours the annotations satisfies these rows, however
    often and at whatever time it computes something again. So the optimum is a lower bound for all of them.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once.
        time_steps: The time steps of the cuts, in order.
        small_bytes: Storages up to this size are always kept, and free, unless they are transient.
        has_spans: Whether to add the rows of spans, which a choice does not need.
        is_open: Whether the programme ends with the last cut, and what is demanded after it is open.

    Source:
        The rows between cuts are those of Checkmate (Jain et al., MLSys 2020, eq. 1), at some time steps.
    """

    problem: CheckpointProblem
    budget_bytes: int
    time_steps: Sequence[int]
    small_bytes: int = 0
    has_spans: bool = True
    is_open: bool = False
    model: Model = field(init=False)
    objective: list[Term] = field(init=False)
    resident: list[dict[Storage, Variable]] = field(default_factory=list, init=False)
    again: list[dict[Node, Variable]] = field(default_factory=list, init=False)
    arrived: list[dict[Storage, Variable]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        problem = self.problem
        self.model = Model()
        self.demands: list[tuple[Storage, Row]] = []
        self.large = [s for s in problem.producer if s.nbytes > self.small_bytes or s in problem.transient]
        self.is_large = set(self.large)
        self.wanted = set(problem.wanted)
        considered = self.large if self._dominates else []
        # A search that is bounded by an open programme has exact memory: there the user may not fit earlier.
        later = [] if self.is_open else considered
        self.replaced = replaced_storages(problem, later, boundary=False)
        self.replaced_at_loss = replaced_storages(problem, considered, boundary=True)
        self.unit_seconds = max(problem.step_seconds, 1e-12) / 1000
        for cut in range(len(self.time_steps)):
            self._add_cut(cut)
        self.again = [self._add_span(cut, cut + 1) for cut in range(len(self.time_steps))]
        if self.has_spans:
            self._add_spans()
        waited = self._add_copies()
        for cut in range(len(self.time_steps)):
            self._add_memory(cut)
        self.objective = [term for cut in range(len(self.time_steps)) for term in self._seconds_again(cut)]
        self.objective += ((1.0, wait) for wait in waited)
        self.model.minimize(self.objective)

    def _seconds_again(self, cut: int) -> list[Term]:
        """The time of what runs again between a cut and the next, in units."""
        seconds = self.problem.costs.seconds
        return [(seconds[o] / self.unit_seconds, x) for o, x in self.again[cut].items()]

    # ------------------------------------------------------------------ for what adds copies

    def _swapped(self, values: Mapping[Variable, float]) -> dict[int, frozenset[Storage]]:
        """For each cut the storages that are in a tier, or on their way back, and come back behind it."""
        return {}

    @property
    def _forced_bytes(self) -> int:
        """The bytes that every schedule keeps at the loss."""
        return self.problem.forced_bytes

    @property
    def _dominates(self) -> bool:
        """Whether keeping what a storage's only user makes of it is never worse than keeping the storage."""
        return True

    def _arrivals(self, cut: int, made: Sequence[Storage]) -> dict[Storage, Variable]:
        """For the storages made before a cut that can be copied back before the next one, a variable each."""
        return {}

    def _add_copies(self) -> Sequence[Variable]:
        """Adds the rows of the copies; returns the units of time in which only copies run."""
        return ()

    def _copied(self, cut: int) -> Sequence[tuple[int, Variable]]:
        """Bytes at a cut that are there for a copy alone."""
        return ()

    # ------------------------------------------------------------------ rows

    def _add_cut(self, cut: int) -> None:
        """Adds what stays at a cut, and what comes back behind it."""
        problem, model = self.problem, self.model
        time_step = self.time_steps[cut]
        inputs = dict.fromkeys(s for s in problem.read_at(time_step) if s in self.is_large)
        resident = {
            s: model.add_variable(lower=1.0 if s in inputs else 0.0, upper=1.0, is_integer=True)
            for s in self.large
            if s in inputs or self._may_stay(cut, s)
        }
        self.resident.append(resident)
        self.arrived.append(self._arrivals(cut, self._made(cut)))

    def _made(self, cut: int) -> list[Storage]:
        """The storages that were made before a cut."""
        index, producer = self.problem.index, self.problem.producer
        return [s for s in self.large if index[producer[s]] < self.time_steps[cut]]

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """Spans of two, four, eight intervals and so on, and to the end: first cut, one inside, last."""
        count = len(self.time_steps)
        for power in range(1, count.bit_length()):
            for first in range(count - (1 << power) + 1):
                yield first, first + (1 << power - 1), first + (1 << power)
        for first in reversed(range(count - 1)):
            yield first, first + 1, count

    def _add_spans(self) -> None:
        """Adds what runs again anywhere in several intervals; both parts of a span are there before it."""
        spans = {(cut, cut + 1): again for cut, again in enumerate(self.again)}
        for first, inside, last in self._spans():
            if (first, last) not in spans:
                spans[first, last] = self._add_span(first, last)
            parts = spans[first, inside], spans[inside, last]
            for node, runs in spans[first, last].items():
                often = [(-1.0, part[node]) for part in parts if node in part]
                self.model.add_row([(1.0, runs), *often], upper=0.0)

    def _add_span(self, first: int, last: int) -> dict[Node, Variable]:
        """Adds what runs again between two cuts, or from one to the end of the step."""
        problem, model = self.problem, self.model
        time_step = self.time_steps[first]
        following = self.resident[last] if last < len(self.time_steps) else {}
        if last < len(self.time_steps):
            end = self.time_steps[last]
        else:
            end = self.time_steps[-1] if self.is_open else problem.time_steps - 1
        made = self._made(first)
        makers = dict.fromkeys(
            problem.producer[s] for s in made if s in self.wanted or self._is_read(s, time_step)
        )
        again = {o: model.add_variable(lower=0.0, upper=1.0 if o.is_recomputable else 0.0) for o in makers}

        def there(storage: Storage, sign: float = 1.0) -> list[Term]:
            """The terms that a storage stays from the first cut on, is copied back, or is made again."""
            stays = self.resident[first].get(storage)
            back = (arrived.get(storage) for arrived in self.arrived[first:last])
            made_again = again.get(problem.producer[storage])
            return [(sign, variable) for variable in (stays, *back, made_again) if variable is not None]

        for storage in made:
            if problem.producer[storage] in again and self._is_read(storage, time_step, end):
                model.add_row(there(storage), lower=1.0)
            elif problem.producer[storage] in again and self.is_open and last == len(self.time_steps):
                self.demands.append((storage, model.add_row(there(storage), lower=0.0)))
        for node, runs in again.items():
            for storage in problem.forward_reads[node]:
                if problem.producer[storage] in again and storage in self.is_large:
                    model.add_row([*there(storage), (-1.0, runs)], lower=0.0)
        for storage, variable in following.items():
            if problem.index[problem.producer[storage]] < time_step:
                model.add_row([(1.0, variable), *there(storage, -1.0)], upper=0.0)
        return again

    def _add_memory(self, cut: int) -> None:
        """Adds the bytes of a cut; other forwards in flight that wait hold what stays at the loss."""
        problem = self.problem
        time_step = self.time_steps[cut]
        inputs = [s for s in dict.fromkeys(problem.read_at(time_step)) if s in self.is_large]
        fixed = problem.held_in(time_step, self.small_bytes) + sum(s.nbytes for s in inputs)
        terms = [(s.nbytes, v) for s, v in self.resident[cut].items() if s not in inputs]
        copied = self._copied(cut)
        loss = len(problem.forward)
        kept = self.resident[self.time_steps.index(loss)] if loss in self.time_steps else {}
        for case in problem.others_at(time_step):
            waiting = [(case.waiting * s.nbytes, v) for s, v in kept.items()] if case.waiting else []
            least_bytes = 0 if kept else self._forced_bytes
            room_bytes = self.budget_bytes - fixed - case.bytes_at(least_bytes)
            add_memory_row(self.model, [*terms, *copied, *waiting], room_bytes)
            add_rounded_rows(self.model, [*terms, *waiting], room_bytes)

    def _is_read(self, storage: Storage, after: int, until: int | None = None) -> bool:
        """Whether the first run of an operation after a time step (up to another) reads a storage."""
        return self.problem.is_read(storage, after + 1, until)

    def _may_stay(self, cut: int, storage: Storage) -> bool:
        """Whether it is possible and of use to keep a storage at a cut."""
        problem = self.problem
        time_step = self.time_steps[cut]
        if problem.index[problem.producer[storage]] >= time_step or not problem.is_useful(
            storage, time_step + 1
        ):
            return False
        if time_step == len(problem.forward) and storage in problem.transient:
            return False
        if cut == 0 and time_step == len(problem.forward):
            return storage not in self.replaced_at_loss
        users = problem.users.get(storage, ())
        return storage not in self.replaced or any(problem.index[user] >= time_step for user in users)

    # ------------------------------------------------------------------ solving

    def fix(self, resident: Mapping[int, frozenset[Storage]]) -> None:
        """Leaves open only what stays at the cuts that `resident` does not say."""
        for time_step, variables in zip(self.time_steps, self.resident, strict=True):
            if time_step in resident:
                for storage, variable in variables.items():
                    if variable.lower < 1.0:
                        variable.lower = variable.upper = float(storage in resident[time_step])

    def relaxed_bound_seconds(self, *, seconds: float) -> float:
        """A lower bound by parts of storages: below that of `solve`, in a part of its time.

        Args:
            seconds: The time limit; a linear programme that it ends proves nothing.
        """
        with self.model.relaxed():
            outcome = solve(self.model, seconds=seconds, gap=0.0)
        if outcome.is_infeasible:
            return math.inf
        return outcome.bound * self.unit_seconds if outcome.is_optimal else 0.0

    def prices(
        self, demanded: Mapping[Storage, float], *, seconds: float
    ) -> tuple[float, dict[Storage, float]] | None:
        """A lower bound by parts of storages, and what more it is for each storage that is demanded.

        Args:
            demanded: The parts to which storages must be there after the last cut.
            seconds: The time limit; None if it ends the solve.
        """
        for storage, row in self.demands:
            row.lower = demanded.get(storage, 0.0)
        rows = [row for _, row in self.demands]
        found = solve_relaxed(self.model, rows, seconds=seconds)
        if found is None:
            return None
        prices: dict[Storage, float] = {}
        for storage, row in self.demands:
            prices[storage] = prices.get(storage, 0.0) + found[1][row] * self.unit_seconds
        return found[0] * self.unit_seconds, prices

    def solve(
        self,
        *,
        seconds: float,
        gap: float,
        node_limit: int | None = None,
        below_seconds: float = math.inf,
    ) -> Solved:
        """Returns the best choice under the rows.

        Args:
            seconds: The time limit.
            gap: The gap at which to stop, as a fraction of the step's time.
            node_limit: The number of branch-and-bound nodes after which to stop.
            below_seconds: A limit: only choices that compute again for less are asked for. If there are none,
                it is the bound.
        """
        with self._below(below_seconds):
            outcome = solve(self.model, seconds=seconds, gap=gap * 1000, node_limit=node_limit)
        if outcome.is_infeasible:
            if math.isfinite(below_seconds) and not self._is_infeasible(seconds):
                return Solved(None, below_seconds, False, True)
            return Solved(None, math.inf, True, False)
        bound_seconds = min(outcome.bound * self.unit_seconds, below_seconds)
        if outcome.values is None:
            return Solved(None, bound_seconds, False, False)
        values = outcome.values
        small = frozenset(s for s in self.problem.producer if s not in self.is_large)
        resident = {
            time_step: small | {s for s, v in cut.items() if values[v] > 0.5}
            for time_step, cut in zip(self.time_steps, self.resident, strict=True)
        }
        swapped = self._swapped(values)
        for cut, time_step in enumerate(self.time_steps):
            resident[time_step] |= swapped.get(cut, frozenset())
        return Solved(
            resident, bound_seconds, False, outcome.is_optimal, frozenset().union(*swapped.values())
        )

    def _below(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Limits the objective, for the time of a solve."""
        if not math.isfinite(seconds):
            return contextlib.nullcontext()
        return self.model.extra_row(self.objective, upper=seconds / self.unit_seconds)

    def _is_infeasible(self, seconds: float) -> bool:
        """Whether the solver finds no choice at all, by its tolerance perhaps, as far as the root tells."""
        return solve(self.model, seconds=seconds, gap=_ANY_GAP, node_limit=1).is_infeasible


def replaced_storages(
    problem: CheckpointProblem, large: Sequence[Storage], *, boundary: bool
) -> set[Storage]:
    """The storages that need not be considered: it is never worse to keep what their only user makes of them.

    The user's result is no larger, serves every purpose that the storage itself could, and is there at the
    boundary. At later cuts that holds only if the user reads nothing else, and runs earlier in whatever
    memory there is between cuts. A transient result replaces nothing: it is not there at the loss.
    """
    found: set[Storage] = set()
    considered = set(large)
    for storage in large:
        users = problem.users.get(storage, [])
        if storage in problem.read_positions or len(users) != 1:
            continue
        made = [s for s in problem.graph.allocates(users[0]) if s in considered]
        others = [s for s in problem.forward_reads[users[0]] if s is not storage]
        if len(made) != 1 or made[0] in problem.transient:
            continue
        if made[0].nbytes <= storage.nbytes and (boundary or not others):
            found.add(storage)
    return found
