"""Contiguous partitions: equal to the best of all, for every kind of problem."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from support.partitions import best_of_all, problems

from benchmarks.partition_tables import contiguous
from benchmarks.partition_tables.contiguous import best_contiguous
from benchmarks.partition_tables.partition_problem import PartitionNode, PartitionProblem, evaluate
from benchmarks.partition_tables.reduction import coarsen, contract, spread
from irc.ir import TimeLimitError, UsageError
from irc.passes.pipeline.coarsened_problem import DeviceClass


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


def ladder(rungs: int, memory_bytes: int = 0) -> PartitionProblem:
    """Two chains side by side, with times that are all different."""
    nodes = tuple(
        PartitionNode(f"n{i}", (1.0 + (i * i) % 7,), memory_bytes, 0.125, i) for i in range(2 * rungs)
    )
    edges = tuple((i, i + 2) for i in range(2 * rungs - 2))
    return PartitionProblem("ladder", nodes, edges, (DeviceClass("accelerator", 3, 64),))


def test_a_time_limit_leaves_the_best_of_a_few_orders_and_a_bound() -> None:
    problem = ladder(6)
    hurried, best = best_contiguous(problem, seconds=0), best_contiguous(problem)
    assert best.is_proved
    assert hurried.bound_seconds <= best.max_load_seconds <= hurried.max_load_seconds
    assert hurried.bound_seconds < best.bound_seconds
    assert evaluate(problem, hurried.assignment).is_contiguous


@given(problems())
@settings(max_examples=40, deadline=None)
def test_graphs_with_too_many_order_ideals_go_to_the_programme(problem: PartitionProblem) -> None:
    best = best_of_all(problem, is_contiguous=True)
    with mock.patch.object(contiguous, "_MOST_IDEALS", 0):
        if best == math.inf:
            with pytest.raises((UsageError, TimeLimitError), match=r"IRC473|IRC479"):
                best_contiguous(problem)
            return
        with contextlib.suppress(TimeLimitError):  # with a host, a few orders are all that is tried
            found = best_contiguous(problem)
            evaluation = evaluate(problem, found.assignment)
            assert evaluation.is_contiguous and evaluation.fits
            assert found.bound_seconds <= best * (1 + 1e-9) and best <= found.max_load_seconds * (1 + 1e-9)
            assert len(problem.classes) > 1 or found.is_proved


def test_a_time_limit_before_any_partition_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contiguous, "_orders", lambda _: iter(()))
    with pytest.raises(
        TimeLimitError, match=r"IRC479.*no contiguous partition of ladder was found in 0 s"
    ) as caught:
        best_contiguous(ladder(6), seconds=0)
    assert caught.value.help == "give more time, or devices with more memory"


def test_what_does_not_fit_is_refused_with_its_bytes() -> None:
    with pytest.raises(
        UsageError, match=r"IRC473.*it takes 240 bytes, on 3 accelerator of 64 bytes"
    ) as caught:
        best_contiguous(ladder(6, memory_bytes=20))
    assert "devices with more memory" in (caught.value.help or "")


@given(problems())
@settings(max_examples=60, deadline=None)
def test_contraction_keeps_the_best(problem: PartitionProblem) -> None:
    """Each reduced item on one device: the best of all is still among them."""
    total_bytes = sum(node.memory_bytes for node in problem.nodes)
    is_free = all(total_bytes <= device.capacity_bytes for device in problem.classes)
    for is_contiguous in (True, False):
        blocks = problem.blocks
        colours = {
            node.colour: [i for i, n in enumerate(problem.nodes) if n.colour == node.colour]
            for node in problem.nodes
        }
        whole = (
            coarsen(problem, blocks.members, blocks.edges)
            if is_contiguous
            else coarsen(problem, list(colours.values()), ())
        )
        reduced = contract(whole, is_contiguous=is_contiguous, is_memory_free=is_free)
        colour_of = spread(reduced, range(len(reduced.members)), len(problem.nodes))
        nodes = tuple(
            replace(node, colour=colour) for node, colour in zip(problem.nodes, colour_of, strict=True)
        )
        assert best_of_all(replace(problem, nodes=nodes), is_contiguous=is_contiguous) == pytest.approx(
            best_of_all(problem, is_contiguous=is_contiguous)
        )
