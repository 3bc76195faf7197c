"""The door to the solver of mixed-integer programmes: OR-Tools MathOpt with HiGHS, one thread, one seed.

MathOpt's own expressions take an object and several calls a term: a programme is written in lists here.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from .processor_load import load

__all__ = [
    "Model",
    "Outcome",
    "Row",
    "Term",
    "Variable",
    "add_memory_row",
    "add_rounded_rows",
    "solve",
    "solve_relaxed",
]

_LONGEST_SECONDS = 1e6
_LARGEST_COEFFICIENT = 1 << 16


@dataclass(eq=False, slots=True)
class Variable:
    """A column of a model; its bounds may change between solves.

    Args:
        index: The position among the columns.
        lower: The least value.
        upper: The largest value.
        is_integer: Whether the value is whole.
    """

    index: int
    lower: float
    upper: float
    is_integer: bool


@dataclass(eq=False, slots=True)
class Row:
    """A row of a model: its terms have a sum within bounds, which may change between solves.

    Args:
        index: The position among the rows.
        lower: The least sum.
        upper: The largest sum.
    """

    index: int
    lower: float
    upper: float


Term = tuple[float, Variable]
"""A variable with its coefficient."""


class Model:
    """A mixed-integer programme: columns, rows and an objective, which the solver gets in bulk."""

    def __init__(self) -> None:
        self.variables: list[Variable] = []
        self._rows: list[Row] = []
        self._row_ids: list[int] = []
        self._column_ids: list[int] = []
        self._coefficients: list[float] = []
        self._objective: dict[int, float] = {}
        self._is_relaxed = False

    def add_variable(
        self, *, lower: float = -math.inf, upper: float = math.inf, is_integer: bool = False
    ) -> Variable:
        """Adds a column."""
        variable = Variable(len(self.variables), lower, upper, is_integer)
        self.variables.append(variable)
        return variable

    def add_binary_variable(self) -> Variable:
        """Adds a column whose value is 0 or 1."""
        return self.add_variable(lower=0.0, upper=1.0, is_integer=True)

    def add_row(self, terms: Iterable[Term], *, lower: float = -math.inf, upper: float = math.inf) -> Row:
        """Adds `lower <= sum(coefficient * variable) <= upper`; terms of the same variable add up."""
        row = Row(len(self._rows), lower, upper)
        self._rows.append(row)
        sums = _sums(terms)
        self._row_ids += [row.index] * len(sums)
        self._column_ids += sums
        self._coefficients += sums.values()
        return row

    def minimize(self, terms: Iterable[Term]) -> None:
        """Sets the objective; terms of the same variable add up."""
        self._objective = _sums(terms)

    @contextlib.contextmanager
    def extra_row(
        self, terms: Iterable[Term], *, lower: float = -math.inf, upper: float = math.inf
    ) -> Generator[None]:
        """Adds a row for the solves within; no other row may be added there."""
        entries = len(self._row_ids)
        row = self.add_row(terms, lower=lower, upper=upper)
        try:
            yield
        finally:
            assert self._rows[-1] is row, "a row was added beside an extra one"
            del self._rows[-1]
            del self._row_ids[entries:], self._column_ids[entries:], self._coefficients[entries:]

    @contextlib.contextmanager
    def relaxed(self) -> Generator[None]:
        """Lets integers take any value between their bounds in the solves within."""
        self._is_relaxed = True
        try:
            yield
        finally:
            self._is_relaxed = False

    def for_solver(self) -> mathopt.Model:
        """Builds the model of MathOpt; the ids of columns and rows there are their positions."""
        proto = model_pb2.ModelProto()
        columns, rows, matrix = proto.variables, proto.linear_constraints, proto.linear_constraint_matrix
        columns.ids.extend(range(len(self.variables)))
        columns.lower_bounds.extend([variable.lower for variable in self.variables])
        columns.upper_bounds.extend([variable.upper for variable in self.variables])
        columns.integers.extend([variable.is_integer and not self._is_relaxed for variable in self.variables])
        rows.ids.extend(range(len(self._rows)))
        rows.lower_bounds.extend([row.lower for row in self._rows])
        rows.upper_bounds.extend([row.upper for row in self._rows])
        matrix.row_ids.extend(self._row_ids)
        matrix.column_ids.extend(self._column_ids)
        matrix.coefficients.extend(self._coefficients)
        proto.objective.linear_coefficients.ids.extend(self._objective)
        proto.objective.linear_coefficients.values.extend(self._objective.values())
        return mathopt.Model.from_model_proto(proto)


def _sums(terms: Iterable[Term]) -> dict[int, float]:
    """The coefficients that are not zero, by column in order, as MathOpt asks for."""
    found: dict[int, float] = {}
    for coefficient, variable in terms:
        index = variable.index
        found[index] = found.get(index, 0.0) + coefficient
    return {index: found[index] for index in sorted(found) if found[index]}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one solve.

    Args:
        values: The values of the best solution, or None.
        objective: The objective of that solution; infinite without one.
        bound: A lower bound of the objective of every solution; 0 if nothing is known.
        is_infeasible: Whether there is no solution.
        is_optimal: Whether the solution is the best up to the gap that was asked for.
    """

    values: dict[Variable, float] | None
    objective: float
    bound: float
    is_infeasible: bool
    is_optimal: bool


def solve(model: Model, *, seconds: float, gap: float, node_limit: int | None = None) -> Outcome:
    """Minimises a model whose objective is never negative.

    The same model has the same outcome unless the time limit ends the search.

    Args:
        model: The model.
        seconds: The time limit, in seconds of the processor as far as the solver can keep to it.
        gap: The absolute gap, in the unit of the objective, at which to stop.
        node_limit: The number of branch-and-bound nodes after which to stop.
    """
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=min(max(seconds, 0.1) * load.factor, _LONGEST_SECONDS)),
        relative_gap_tolerance=1e-6,
        absolute_gap_tolerance=gap,
        random_seed=1,
        node_limit=node_limit,
    )
    exported = model.for_solver()
    with _library_output.discarded(), load.measured():
        result = mathopt.solve(exported, mathopt.SolverType.HIGHS, params=parameters)
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return Outcome(None, math.inf, math.inf, True, False)
    bound = result.termination.objective_bounds.dual_bound
    bound = max(bound, 0.0) if math.isfinite(bound) else 0.0
    if not result.has_primal_feasible_solution():
        return Outcome(None, math.inf, bound, False, False)
    return Outcome(
        dict(zip(model.variables, result.variable_values().values(), strict=True)),
        result.objective_value(),
        bound,
        False,
        reason is mathopt.TerminationReason.OPTIMAL,
    )


def solve_relaxed(
    model: Model, rows: Sequence[Row], *, seconds: float
) -> tuple[float, dict[Row, float]] | None:
    """The optimum of a model whose integers may be parts, and the dual prices of some of its rows.

    Args:
        model: The model.
        rows: The rows.
        seconds: The time limit; None if it ends the solve.
    """
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=min(max(seconds, 0.1) * load.factor, _LONGEST_SECONDS)), random_seed=1
    )
    with model.relaxed():
        relaxed = model.for_solver()
    priced = {row: relaxed.get_linear_constraint(row.index) for row in rows}
    with _library_output.discarded(), load.measured():
        result = mathopt.solve(
            relaxed,
            mathopt.SolverType.HIGHS,
            params=parameters,
            model_params=mathopt.ModelSolveParameters(
                variable_values_filter=mathopt.VariableFilter(filtered_items=()),
                dual_values_filter=mathopt.LinearConstraintFilter(filtered_items=priced.values()),
                reduced_costs_filter=mathopt.VariableFilter(filtered_items=()),
            ),
        )
    if (
        result.termination.reason is not mathopt.TerminationReason.OPTIMAL
        or not result.has_dual_feasible_solution()
    ):
        return None
    duals = result.dual_values()
    return result.objective_value(), {row: duals[constraint] for row, constraint in priced.items()}


class _LibraryOutput:
    """Discards what C code prints to its stdout: HiGHS prints some lines whatever its parameters say.

    Only the C library's stream is replaced. Python's streams and the file descriptors stay, so what other
    threads print meanwhile is seen. Platforms whose C library does not name the stream are left alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._solves = 0
        self._kept: int | None = None
        self._nowhere: int | None = None

    @contextlib.contextmanager
    def discarded(self) -> Generator[None]:
        """Discards the output as long as any thread is within."""
        with self._lock:
            self._solves += 1
            if self._solves == 1:
                self._discard()
        try:
            yield
        finally:
            with self._lock:
                self._solves -= 1
                if not self._solves:
                    self._restore()

    def _discard(self) -> None:
        try:
            library = ctypes.CDLL(None)
            stdout = ctypes.c_void_p.in_dll(library, "stdout")
        except (OSError, TypeError, ValueError):
            return
        if self._nowhere is None:
            library.fopen.restype = ctypes.c_void_p
            self._nowhere = library.fopen(os.devnull.encode(), b"w")
        if self._nowhere is not None:
            self._kept, stdout.value = stdout.value, self._nowhere

    def _restore(self) -> None:
        if self._kept is not None:
            ctypes.c_void_p.in_dll(ctypes.CDLL(None), "stdout").value = self._kept
            self._kept = None


_library_output = _LibraryOutput()


def add_memory_row(model: Model, terms: Sequence[tuple[int, Variable]], room_bytes: int) -> None:
    """Adds `sum(bytes * variable) <= room`, scaled so that a byte does not vanish in the solver's tolerance.

    If the sizes have a common divisor that is large enough, the row has small whole numbers.
    """
    divisor = math.gcd(*(nbytes for nbytes, _ in terms)) or 1
    largest = max((nbytes for nbytes, _ in terms), default=0)
    scale = max(math.ceil(largest / divisor / _LARGEST_COEFFICIENT), 1)
    scaled = ((nbytes // divisor / scale, variable) for nbytes, variable in terms)
    model.add_row(scaled, upper=room_bytes // divisor / scale)


_ROUNDINGS = 3
"""The largest sizes that are counted."""


def add_rounded_rows(model: Model, terms: Sequence[tuple[int, Variable]], room_bytes: int) -> None:
    """Adds what `sum(bytes * variable) <= room` says of how many of the largest sizes fit; all are whole.

    Source:
        Chvatal-Gomory rounding: the row divided by each of the three largest sizes, all of it rounded down.
    """
    if sum(nbytes for nbytes, _ in terms) <= room_bytes:
        return
    sizes = sorted({nbytes for nbytes, _ in terms if nbytes}, reverse=True)
    for size in sizes[:_ROUNDINGS]:
        rounded = ((nbytes // size, variable) for nbytes, variable in terms if nbytes >= size)
        model.add_row(rounded, upper=room_bytes // size)
