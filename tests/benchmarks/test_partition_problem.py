"""What a partition costs, and what problems are refused."""

from __future__ import annotations

import math

import pytest

from benchmarks.partition_tables.partition_problem import PartitionNode, PartitionProblem, evaluate
from irc.ir import UsageError
from irc.passes.pipeline.coarsened_problem import DeviceClass

ACCELERATORS = DeviceClass("accelerator", 2, 100)
HOST = DeviceClass("host", 1, math.inf, pays_transfers=False)


def branches() -> PartitionProblem:
    """One node read by three, the backward of the first of which is with it."""
    times = ((1, 10), (2, 20), (3, 30), (4, 40), (5, 50))
    nodes = tuple(
        PartitionNode(f"n{i}", each, 40, 0.25, colour, i == 4)
        for i, (each, colour) in enumerate(zip(times, (0, 1, 2, 3, 1), strict=True))
    )
    return PartitionProblem("branches", nodes, ((0, 1), (0, 2), (0, 3), (1, 4)), (ACCELERATORS, HOST))


def test_an_output_is_moved_once_out_and_once_into_each_device() -> None:
    found = evaluate(branches(), (0, 1, 1, 0, 1))
    assert found.loads == (1 + 4 + 0.25, 2 + 3 + 5 + 0.25, 0)
    assert found.memory_bytes == (80, 120, 0) and not found.fits
    assert found.is_together and found.is_contiguous
    assert found.max_load_seconds == 10.25


def test_the_host_pays_no_transfers_and_its_memory_is_not_theirs() -> None:
    found = evaluate(branches(), (2, 0, 1, 2, 0))
    assert found.loads == (2 + 5 + 0.25, 3 + 0.25, 10 + 40)
    assert found.fits and found.is_together and found.is_contiguous


def test_a_colour_on_two_devices_is_neither_together_nor_contiguous() -> None:
    found = evaluate(branches(), (0, 0, 0, 1, 1))
    assert not found.is_together and not found.is_contiguous


def test_backward_nodes_without_a_forward_take_their_place_from_backward() -> None:
    names = ("f0", "f1", "b1", "b0", "step")
    nodes = tuple(
        PartitionNode(name, (1.0,), 0, 0.0, colour, i > 1)
        for i, (name, colour) in enumerate(zip(names, (0, 1, 1, 0, 2), strict=True))
    )
    edges = ((0, 1), (1, 2), (2, 3), (2, 4))
    problem = PartitionProblem("step", nodes, edges, (DeviceClass("accelerator", 3),))
    members = problem.blocks.members
    by_name = {names[part[0]]: block for block, part in enumerate(members)}
    assert sorted(map(len, members)) == [1, 2, 2]
    assert problem.blocks.edges == {(by_name["f0"], by_name["f1"]), (by_name["step"], by_name["f1"])}
    assert (
        not evaluate(problem, (0, 1, 1, 0, 0)).is_contiguous
        or evaluate(problem, (0, 1, 1, 0, 2)).is_contiguous
    )


def node(name: str, *seconds: float, memory_bytes: int = 0) -> PartitionNode:
    return PartitionNode(name, seconds, memory_bytes, 0.0, ord(name))


def test_a_cycle_is_refused_with_its_nodes() -> None:
    nodes = (node("a", 1, 1), node("b", 1, 1), node("c", 1, 1))
    with pytest.raises(
        UsageError, match=r"IRC470.*loop: these nodes read each other's outputs in a circle"
    ) as e:
        PartitionProblem("loop", nodes, ((0, 1), (1, 2), (2, 1)), (ACCELERATORS, HOST))
    assert "b -> c" in e.value.message or "c -> b" in e.value.message
    assert e.value.help == "a partition is made of a graph without cycles; unroll what is repeated"


def test_a_node_without_a_time_is_refused() -> None:
    with pytest.raises(UsageError, match=r"IRC471.*node a has 1 times for 2 classes of devices") as caught:
        PartitionProblem("short", (node("a", 1),), (), (ACCELERATORS, HOST))
    assert caught.value.help == "give one time for each class; infinity where the node may not run"


@pytest.mark.parametrize("seconds, memory_bytes", [(math.inf, 0), (1.0, 101)])
def test_a_node_that_may_run_nowhere_is_refused(seconds: float, memory_bytes: int) -> None:
    with pytest.raises(UsageError, match=r"IRC472.*node a .* may not run on any of the devices") as caught:
        PartitionProblem("stuck", (node("a", seconds, memory_bytes=memory_bytes),), (), (ACCELERATORS,))
    assert caught.value.help == "give a class of devices that it may run on and whose memory it fits in"
