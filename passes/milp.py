"""The door to the solver of mixed-integer programmes: OR-Tools MathOpt with HiGHS, one thread, one seed."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from ortools.math_opt.python import mathopt

from .processor_load import load

__all__ = [
    "LinearConstraint",
    "LinearSum",
    "LinearTypes",
    "Model",
    "Outcome",
    "Variable",
    "add_memory_row",
    "add_rounded_rows",
    "solve",
    "solve_relaxed",
]

LinearConstraint = mathopt.LinearConstraint
LinearSum = mathopt.LinearSum
LinearTypes = mathopt.LinearTypes
Model = mathopt.Model
Variable = mathopt.Variable

_LONGEST_SECONDS = 1e6
_LARGEST_COEFFICIENT = 1 << 16


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
    with _library_output.discarded(), load.measured():
        result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return Outcome(None, math.inf, math.inf, True, False)
    bound = result.termination.objective_bounds.dual_bound
    bound = max(bound, 0.0) if math.isfinite(bound) else 0.0
    if not result.has_primal_feasible_solution():
        return Outcome(None, math.inf, bound, False, False)
    return Outcome(
        result.variable_values(),
        result.objective_value(),
        bound,
        False,
        reason is mathopt.TerminationReason.OPTIMAL,
    )


def solve_relaxed(
    model: Model, rows: Sequence[LinearConstraint], *, seconds: float
) -> tuple[float, dict[LinearConstraint, float]] | None:
    """The optimum of a model whose integers may be parts, and the dual prices of some of its rows.

    Args:
        model: The model.
        rows: The rows.
        seconds: The time limit; None if it ends the solve.
    """
    whole = [variable for variable in model.variables() if variable.integer]
    for variable in whole:
        variable.integer = False
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=min(max(seconds, 0.1) * load.factor, _LONGEST_SECONDS)), random_seed=1
    )
    with _library_output.discarded(), load.measured():
        result = mathopt.solve(
            model,
            mathopt.SolverType.HIGHS,
            params=parameters,
            model_params=mathopt.ModelSolveParameters(
                variable_values_filter=mathopt.VariableFilter(filtered_items=()),
                dual_values_filter=mathopt.LinearConstraintFilter(filtered_items=rows),
                reduced_costs_filter=mathopt.VariableFilter(filtered_items=()),
            ),
        )
    for variable in whole:
        variable.integer = True
    if (
        result.termination.reason is not mathopt.TerminationReason.OPTIMAL
        or not result.has_dual_feasible_solution()
    ):
        return None
    duals = result.dual_values()
    return result.objective_value(), {row: duals[row] for row in rows}


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
    total = LinearSum(nbytes // divisor / scale * variable for nbytes, variable in terms)
    model.add_linear_constraint(total <= room_bytes // divisor / scale)


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
        total = LinearSum(nbytes // size * variable for nbytes, variable in terms if nbytes >= size)
        model.add_linear_constraint(total <= room_bytes // size)
