"""Programmes have the rows and bounds that they were given, and enough wall time on a busy machine."""

import math
import time
from collections.abc import Iterator

import pytest
from ortools.math_opt.python import mathopt

from irc.passes import milp
from irc.passes.processor_load import Load


def solved_limits(
    monkeypatch: pytest.MonkeyPatch, walls: Iterator[float], works: Iterator[float]
) -> list[float]:
    """The time limits in wall seconds that five solves of ten seconds get, under given clocks."""
    limits: list[float] = []
    solve = mathopt.solve

    def noted(*args: object, params: mathopt.SolveParameters) -> mathopt.SolveResult:
        assert params.time_limit is not None
        limits.append(params.time_limit.total_seconds())
        return solve(*args, params=params)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(mathopt, "solve", noted)
    monkeypatch.setattr(milp, "load", Load())
    monkeypatch.setattr(time, "monotonic", walls.__next__)
    monkeypatch.setattr(time, "thread_time", works.__next__)
    for _ in range(5):
        model = milp.Model()
        model.minimize([(1.0, model.add_variable(lower=1.0))])
        assert milp.solve(model, seconds=10.0, gap=0.0).objective == 1.0
    return limits


def test_a_busy_machine_gives_a_solve_more_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    walls = iter([0.0, 3.0, 3.0, 3.1, 4.1, 4.1, 104.1, 104.1, 105.1])  # a short one says nothing
    works = iter([0.0, 1.0, 1.0, 1.01, 1.01, 2.01, 2.01, 3.01, 3.01, 4.01])
    assert solved_limits(monkeypatch, walls, works) == [10.0, 30.0, 30.0, 10.0, 100.0]


def solved(model: milp.Model) -> milp.Outcome:
    """The outcome of a small programme, to the optimum."""
    return milp.solve(model, seconds=10.0, gap=0.0)


def least_of_two_at_least(lower: float) -> tuple[milp.Model, milp.Variable, milp.Variable, milp.Row]:
    """A programme that minimises x + 3 y of whole x and y up to 4, of which 2 x + y is at least `lower`."""
    model = milp.Model()
    x, y = (model.add_variable(lower=0.0, upper=4.0, is_integer=True) for _ in range(2))
    row = model.add_row([(1.0, y), (1.0, x), (0.5, y), (1.0, x), (-0.5, y)], lower=lower)
    model.minimize([(3.0, y), (0.5, x), (0.5, x)])
    return model, x, y, row


def test_terms_of_the_same_variable_add_up() -> None:
    model, x, y, _ = least_of_two_at_least(9.0)
    values = solved(model).values
    assert values is not None
    assert (values[x], values[y]) == (4.0, 1.0)
    proto = model.for_solver().export_model()
    assert proto.linear_constraint_matrix.column_ids == [0, 1]
    assert proto.linear_constraint_matrix.coefficients == [2.0, 1.0]
    assert proto.objective.linear_coefficients.values == [1.0, 3.0]


def test_terms_that_cancel_are_no_entries_of_the_row() -> None:
    model = milp.Model()
    x, y = model.add_binary_variable(), model.add_binary_variable()
    model.add_row([(1.0, x), (0.0, y), (-1.0, x)], upper=0.0)
    proto = model.for_solver().export_model()
    assert proto.linear_constraints.upper_bounds == [0.0]
    assert not proto.linear_constraint_matrix.row_ids


def test_bounds_change_between_solves() -> None:
    model, x, _, row = least_of_two_at_least(5.0)
    assert solved(model).objective == 3.0
    row.lower = 3.0
    assert solved(model).objective == 2.0
    x.upper = 1.0
    assert solved(model).objective == 4.0
    x.lower = x.upper = 0.0
    row.lower = 5.0
    assert solved(model).is_infeasible


def test_an_extra_row_is_there_for_the_solves_within() -> None:
    model, x, _, _ = least_of_two_at_least(5.0)
    before = model.for_solver().export_model()
    with pytest.raises(KeyError), model.extra_row([(1.0, x)], upper=2.0):
        assert solved(model).objective == 5.0
        raise KeyError
    assert model.for_solver().export_model() == before
    assert solved(model).objective == 3.0


def test_integers_are_parts_only_while_the_model_is_relaxed() -> None:
    model, _, _, row = least_of_two_at_least(5.0)
    with model.relaxed():
        assert solved(model).objective == 2.5
    assert milp.solve_relaxed(model, [row], seconds=10.0) == (2.5, {row: 0.5})
    assert solved(model).objective == 3.0


def test_a_relaxed_programme_without_a_solution_has_no_prices() -> None:
    model, _, _, row = least_of_two_at_least(13.0)
    assert milp.solve_relaxed(model, [row], seconds=10.0) is None
    outcome = solved(model)
    assert outcome.is_infeasible
    assert outcome.objective == math.inf
