"""Contiguous partitions: equal to the best of all, for every kind of problem."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from partitions import best_of_all, problems

from irc.ir import UsageError
from irc.passes.pipeline.contiguous import best_contiguous
from irc.passes.pipeline.partition_problem import (
    PartitionProblem,
    evaluate,
)


@given(problems())
@settings(max_examples=100, deadline=None)
def test_contiguous_partitions_are_the_best_of_all(problem: PartitionProblem) -> None:
    best = best_of_all(problem, is_contiguous=True)
    if best == math.inf:
        with pytest.raises(UsageError, match="IRC473"):
            best_contiguous(problem)
        return
    found = best_contiguous(problem)
    evaluation = evaluate(problem, found.assignment)
    assert evaluation.fits and evaluation.is_together and evaluation.is_contiguous
    assert evaluation.max_load_seconds == found.max_load_seconds
    assert found.max_load_seconds == pytest.approx(best)
    assert found.is_proved
