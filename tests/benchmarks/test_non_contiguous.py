"""Partitions of any order: equal to the best of all, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from ortools.sat.python import cp_model
from support.partitions import best_of_all, problems

from benchmarks.partition_tables.contiguous import best_contiguous
from benchmarks.partition_tables.non_contiguous import best_non_contiguous
from benchmarks.partition_tables.partition_problem import PartitionNode, PartitionProblem, evaluate
from irc.ir import TimeLimitError, UsageError
from irc.passes.pipeline.coarsened_problem import DeviceClass


@given(problems())
@settings(max_examples=40, deadline=None)
def test_partitions_are_the_best_of_all(problem: PartitionProblem) -> None:
    best = best_of_all(problem, is_contiguous=False)
    if best == math.inf:
        with pytest.raises(UsageError, match="IRC473"):
            best_non_contiguous(problem, seconds=60)
        return
    found = best_non_contiguous(problem, seconds=60)
    evaluation = evaluate(problem, found.assignment)
    assert evaluation.fits and evaluation.is_together
    assert evaluation.max_load_seconds == found.max_load_seconds
    assert found.max_load_seconds == pytest.approx(best)
    assert found.is_proved


def one_again() -> PartitionProblem:
    """A chain whose ends are short and whose middle is long: the ends go together."""
    times = (1.0, 2.0, 1.0)
    nodes = tuple(PartitionNode(f"n{i}", (each,), 0, 0.1, i) for i, each in enumerate(times))
    return PartitionProblem("ends", nodes, ((0, 1), (1, 2)), (DeviceClass("accelerator", 2),))


def test_a_device_may_have_both_ends() -> None:
    problem = one_again()
    cut = best_contiguous(problem)
    assert cut.max_load_seconds == pytest.approx(3.1) and cut.is_proved
    found = best_non_contiguous(problem, seconds=60, start=cut.assignment)
    assert found.assignment[0] == found.assignment[2] != found.assignment[1]
    assert found.max_load_seconds == pytest.approx(2.2) and found.is_proved
    assert not evaluate(problem, found.assignment).is_contiguous


def test_a_time_limit_that_ends_at_once_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_model.CpSolver, "solve", lambda *_: cp_model.UNKNOWN)
    with pytest.raises(TimeLimitError, match=r"IRC475.*no partition of ends was found in 0 s") as caught:
        best_non_contiguous(one_again(), seconds=0)
    assert caught.value.help == "give more time, or begin with a contiguous partition"
