"""The door to the solver of constraint programmes: OR-Tools CP-SAT, one worker, one seed.

It imports pandas, so what may do without it imports this file where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ortools.sat.python import cp_model

from .processor_load import load

__all__ = [
    "Expression",
    "IntVariable",
    "Interval",
    "Model",
    "Outcome",
    "domain_of",
    "solve",
    "weighted_sum",
]

Expression = cp_model.LinearExprT
IntVariable = cp_model.IntVar
Interval = cp_model.IntervalVar
Model = cp_model.CpModel
domain_of = cp_model.Domain.from_values
weighted_sum = cp_model.LinearExpr.weighted_sum

_LONGEST_SECONDS = 1e6


@dataclass(frozen=True)
class Outcome:
    """The outcome of one solve.

    Args:
        value_of: Returns the value of a variable in the best solution; None if there is none.
        is_infeasible: Whether there is no solution.
        is_optimal: Whether the solution is proved the best.
    """

    value_of: Callable[[IntVariable], int] | None
    is_infeasible: bool
    is_optimal: bool


def solve(
    model: Model,
    *,
    seconds: float,
    hints: Mapping[IntVariable, int] | None = None,
    is_interleaved: bool = False,
) -> Outcome:
    """Minimises a model.

    The same model has the same outcome unless the time limit ends the search.

    Args:
        model: The model.
        seconds: The time limit, in seconds of the processor as far as the solver can keep to it.
        hints: The values of a solution to begin with.
        is_interleaved: Whether the worker takes turns with several searches, of neighbourhoods among them:
            large models find solutions earlier, and small ones their proof later.
    """
    model.clear_hints()
    for variable, value in (hints or {}).items():
        model.add_hint(variable, value)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.interleave_search = is_interleaved
    solver.parameters.max_time_in_seconds = min(max(seconds, 0.1) * load.factor, _LONGEST_SECONDS)
    solver.parameters.relative_gap_limit = 0.0
    with load.measured():
        status = solver.solve(model)
    assert status != cp_model.MODEL_INVALID, model.validate()
    has_solution = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Outcome(
        solver.value if has_solution else None,
        status == cp_model.INFEASIBLE,
        status == cp_model.OPTIMAL,
    )
