"""Solves get the wall time that their seconds of the processor take on this machine."""

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
        model.minimize(model.add_variable(lb=1.0))
        assert milp.solve(model, seconds=10.0, gap=0.0).objective == 1.0
    return limits


def test_a_busy_machine_gives_a_solve_more_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    walls = iter([0.0, 3.0, 3.0, 3.1, 4.1, 4.1, 104.1, 104.1, 105.1])  # a short one says nothing
    works = iter([0.0, 1.0, 1.0, 1.01, 1.01, 2.01, 2.01, 3.01, 3.01, 4.01])
    assert solved_limits(monkeypatch, walls, works) == [10.0, 30.0, 30.0, 10.0, 100.0]
