"""Recomputation as an integer programme over stages of backward, solved with lazily added stages and rows.

The one file that knows the solver (OR-Tools MathOpt with HiGHS).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from ortools.math_opt.python import mathopt

from ..ir import Node, Storage
from .checkpointing import CheckpointProblem, Stage, Staging

__all__ = ["Relaxation", "Solved"]

_LONGEST_SECONDS = 1e6
_LARGEST_COEFFICIENT = 1 << 16


@dataclass(frozen=True, slots=True)
class Solved:
    """What one solve says.

    Args:
        staging: The best choice found, or None.
        bound_seconds: No choice within the rows computes less than this again.
        is_infeasible: The rows contradict each other: no schedule of the class fits.
        is_optimal: The choice is the best within the rows, not only the best found in time.
    """

    staging: Staging | None
    bound_seconds: float
    is_infeasible: bool
    is_optimal: bool


@dataclass
class Relaxation:
    r"""The integer programme over some stages.

    Stages j stand at backward positions p_0 = 0 < p_1 < ... Variables: k[j, s] in {0, 1}, storage s stays
    resident while operation p_j runs and after it; x[j, o] in [0, 1], forward operation o runs again
    between p_j and p_{j+1}. Minimise the seconds of all x, subject to

    - read: x[j, maker(s)] + k[j, s] >= 1 for s read in (p_j, p_{j+1}];
    - closure: x[j, maker(u)] + k[j, u] >= x[j, o] for u read by o;
    - carry: k[j+1, s] <= k[j, s] + x[j, maker(s)];
    - memory: bytes of k[j, .], of what p_j reads and of what is held besides <= budget.

    These hold for every schedule with this order of backward, however often it computes something
    again, so their optimum is a lower bound. Rows for forward, for the loss and for the computations
    between two adjacent stages ("transient") hold for the schedules of the class of
    `CheckpointProblem`; they are added where a simulated choice goes over the budget.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once.
        positions: Where the stages stand; the first is 0.
        forward_rows: Forward operations whose memory is a row; the loss is always one, with them.
        transients: Pairs (backward position, forward operation): memory while the operation runs again
            right before that position; both that position and the one before it must be stages.
        small_bytes: Storages up to this size are always kept.
        charge_small: Whether these are counted (for a plan) or free (for a bound).
        in_class: Whether the rows of the class (loss, forward, transient) are there at all.
        prune: Whether later stages leave out what is never worth keeping, computations between two stages
            aside: rigorous for a bound, not for the best of the class.

    Source:
        The rows between stages are those of Checkmate (Jain et al., MLSys 2020, eq. 1), at some positions.
    """

    problem: CheckpointProblem
    budget_bytes: int
    positions: Sequence[int]
    forward_rows: Iterable[Node] = ()
    transients: Iterable[tuple[int, Node]] = ()
    small_bytes: int = 0
    charge_small: bool = True
    in_class: bool = True
    prune: bool = True
    model: mathopt.Model = field(init=False)
    resident: list[dict[Storage, mathopt.Variable]] = field(default_factory=list, init=False)
    again: list[dict[Node, mathopt.Variable]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        problem = self.problem
        self.model = mathopt.Model(name="select-checkpoints")
        self.small = [s for s in problem.wanted if s.nbytes <= self.small_bytes]
        self.large = [s for s in problem.wanted if s.nbytes > self.small_bytes]
        self.makers = list(dict.fromkeys(problem.producer[s] for s in self.large))
        self.replaced = _replaced(problem, self.large, boundary=False) if self.prune else set[Storage]()
        self.replaced_at_boundary = _replaced(problem, self.large, boundary=True)
        for stage in range(len(self.positions)):
            self._add_stage(stage)
        if self.in_class:
            self._boundary_rows()
            for position, node in self.transients:
                self._transient_row(position, node)
        seconds = problem.costs.seconds
        self.unit_seconds = max(problem.step_seconds, 1e-12) / 1000
        least = 1e-7 if self.in_class else 0.0
        self.model.minimize(
            mathopt.LinearSum(
                max(seconds[o] / self.unit_seconds, least) * x
                for stage in self.again
                for o, x in stage.items()
            )
        )

    # ------------------------------------------------------------------ rows

    def _add_stage(self, stage: int) -> None:
        problem, model = self.problem, self.model
        position = self.positions[stage]
        end = self.positions[stage + 1] if stage + 1 < len(self.positions) else len(problem.backward) - 1
        replaced = self.replaced if stage else self.replaced_at_boundary
        inputs = self._read_at(position)
        alive = [
            s for s in self.large if problem.last_useful[s] >= position and (s not in replaced or s in inputs)
        ]
        resident = {s: model.add_binary_variable(name=f"keep_{stage}_{s.name}") for s in alive}
        for storage in inputs:
            resident[storage].lower_bound = 1.0  # for nothing, unless a transient row follows
        again = {
            o: model.add_variable(
                lb=0.0, ub=1.0 if o.is_recomputable else 0.0, name=f"again_{stage}_{o.name}"
            )
            for o in self.makers
        }
        for storage, positions in problem.read_positions.items():
            if storage in resident and any(position < p <= end for p in positions):
                model.add_linear_constraint(again[problem.producer[storage]] + resident[storage] >= 1.0)
        for node, runs in again.items():
            for storage in problem.forward_reads[node]:
                maker = problem.producer[storage]
                if maker in again and storage.nbytes > self.small_bytes:
                    here = resident.get(storage, 0.0)
                    model.add_linear_constraint(again[maker] + here - runs >= 0.0)
        if stage:
            before, between = self.resident[-1], self.again[-1]
            for storage, variable in resident.items():
                carried = before.get(storage, 0.0)
                model.add_linear_constraint(variable - carried - between[problem.producer[storage]] <= 0.0)
        self.resident.append(resident)
        self.again.append(again)
        fixed = problem.held_during[position] + self._small_alive(position) + sum(s.nbytes for s in inputs)
        terms = [(s.nbytes, v) for s, v in resident.items() if s not in inputs]
        self._add_memory_row(terms, self.budget_bytes - fixed)

    def _read_at(self, position: int) -> dict[Storage, None]:
        """What the backward operation there reads, of the storages with variables, in order."""
        return dict.fromkeys(
            s
            for s in self.problem.forward_reads[self.problem.backward[position]]
            if s.nbytes > self.small_bytes
        )

    def _add_memory_row(self, terms: Sequence[tuple[int, mathopt.Variable]], room_bytes: int) -> None:
        """Adds `terms <= room`, scaled so that a byte more or less does not vanish in the solver's tolerance.

        Where the sizes have a common divisor that is large enough, the row is one of small whole numbers.
        """
        divisor = math.gcd(*(nbytes for nbytes, _ in terms)) or 1
        scale = max(
            math.ceil(max((nbytes for nbytes, _ in terms), default=0) / divisor / _LARGEST_COEFFICIENT), 1
        )
        total = mathopt.LinearSum(nbytes // divisor / scale * variable for nbytes, variable in terms)
        self.model.add_linear_constraint(total <= room_bytes // divisor / scale)

    def _small_alive(self, position: int) -> int:
        if not self.charge_small:
            return 0
        return sum(s.nbytes for s in self.small if self.problem.last_useful[s] >= position)

    def _boundary_rows(self) -> None:
        """Memory in forward and at the loss: what is kept, once its last forward read is past, stays."""
        problem, graph = self.problem, self.problem.graph
        inputs = self._read_at(0)
        kept = {s: v for s, v in self.resident[0].items() if s not in inputs}
        small = sum(s.nbytes for s in self.small) if self.charge_small else 0
        tangents = sum(s.nbytes for s in graph.tangent_storages)
        outputs = sum(s.nbytes for s in graph.output_storages if graph.producers[s] in problem.index)
        room = self.budget_bytes - graph.static_bytes - tangents - outputs - graph.loss_bytes - small
        room -= sum(s.nbytes for s in inputs)
        self._add_memory_row([(s.nbytes, v) for s, v in kept.items()], room)
        rows = set(self.forward_rows)
        last_read = {s: problem.index[users[-1]] for s, users in problem.users.items()}
        for node in rows:
            now = problem.index[node]
            fixed = graph.static_bytes + problem.costs.workspace_bytes[node]
            fixed += sum(s.nbytes for s in graph.allocates(node))
            terms: list[tuple[int, mathopt.Variable]] = []
            for maker in problem.forward[:now]:
                for storage in graph.allocates(maker):
                    if (
                        storage not in problem.producer
                        or storage in inputs
                        or last_read.get(storage, -1) >= now
                    ):
                        fixed += storage.nbytes
                    elif storage in kept:
                        terms.append((storage.nbytes, kept[storage]))
                    elif (
                        storage.nbytes <= self.small_bytes
                        and self.charge_small
                        and storage in problem.last_useful
                    ):
                        fixed += storage.nbytes if problem.last_useful[storage] >= 0 else 0
            self._add_memory_row(terms, self.budget_bytes - fixed)

    def _transient_row(self, position: int, node: Node) -> None:
        """Memory while `node` runs again between the adjacent stages before and at `position`."""
        problem, model = self.problem, self.model
        stage = list(self.positions).index(position) - 1
        assert stage >= 0 and self.positions[stage] == position - 1, "a transient row needs adjacent stages"
        again = self.again[stage]
        if node not in again:
            return
        again[node].integer = True
        for storage in self._read_at(position - 1):
            self.resident[stage][storage].lower_bound = 0.0
        inputs = self._read_at(position)
        before, after = self.resident[stage], self.resident[stage + 1]
        now = problem.index[node]
        made = set(problem.graph.allocates(node))
        terms: list[tuple[int, mathopt.Variable]] = []
        for storage in self.large:
            maker = problem.producer[storage]
            if storage in made:
                continue
            alive = model.add_variable(lb=0.0, ub=1.0)
            carried = before.get(storage)
            later = [
                again[u] for u in problem.users.get(storage, ()) if u in again and problem.index[u] >= now
            ]
            if storage in inputs:
                alive_after: list[mathopt.Variable | float] = [1.0]
            else:
                alive_after = [after[storage]] if storage in after else []
            for wish in (*later, *alive_after):
                if problem.index[maker] < now:
                    model.add_linear_constraint(alive - wish >= 0.0)
                elif carried is not None:
                    model.add_linear_constraint(alive - wish - carried >= -1.0)
            terms.append((storage.nbytes, alive))
        fixed = problem.held_after[position - 1] + problem.costs.workspace_bytes[node]
        fixed += sum(s.nbytes for s in made)
        fixed += sum(s.nbytes for s in self.small if s not in made) if self.charge_small else 0
        everything = sum(s.nbytes for s in self.large) + fixed
        divisor = math.gcd(*(nbytes for nbytes, _ in terms)) or 1
        slack = -(-max(everything - self.budget_bytes, 0) // divisor) * divisor
        self._add_memory_row([*terms, (slack, again[node])], self.budget_bytes - fixed + slack)

    # ------------------------------------------------------------------ solving

    def solve(self, *, seconds: float, gap: float) -> Solved:
        """The best choice under the rows so far.

        Args:
            seconds: Time limit of this solve.
            gap: Relative gap at which to stop, of the step's time.
        """
        parameters = mathopt.SolveParameters(
            time_limit=timedelta(seconds=min(max(seconds, 0.1), _LONGEST_SECONDS)),
            relative_gap_tolerance=1e-6,
            absolute_gap_tolerance=gap * 1000,
            random_seed=1,
        )
        result = mathopt.solve(self.model, mathopt.SolverType.HIGHS, params=parameters)
        reason = result.termination.reason
        if reason in (
            mathopt.TerminationReason.INFEASIBLE,
            mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED,
        ):
            return Solved(None, math.inf, True, False)
        bound = result.termination.objective_bounds.dual_bound
        bound_seconds = max(bound, 0.0) * self.unit_seconds if math.isfinite(bound) else 0.0
        if not result.has_primal_feasible_solution():
            return Solved(None, bound_seconds, False, False)
        values = result.variable_values()
        small = frozenset(self.small)
        staging = tuple(
            Stage(position, small | {s for s, v in resident.items() if values[v] > 0.5})
            for position, resident in zip(self.positions, self.resident, strict=True)
        )
        return Solved(staging, bound_seconds, False, reason is mathopt.TerminationReason.OPTIMAL)


def _replaced(problem: CheckpointProblem, large: Sequence[Storage], *, boundary: bool) -> set[Storage]:
    """Storages that need not be considered: keeping what their only user makes of them is never worse.

    The user's result is no larger, serves every purpose that the storage itself could, and is there at
    the boundary; at later stages that holds only where the user reads nothing else.
    """
    found: set[Storage] = set()
    considered = set(large)
    for storage in large:
        users = problem.users.get(storage, [])
        if storage in problem.read_positions or len(users) != 1:
            continue
        made = [s for s in problem.graph.allocates(users[0]) if s in considered]
        others = [s for s in problem.forward_reads[users[0]] if s is not storage]
        if len(made) == 1 and made[0].nbytes <= storage.nbytes and (boundary or not others):
            found.add(storage)
    return found
