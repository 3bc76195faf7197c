"""Partitions whose devices may take turns, with a bound."""

from __future__ import annotations

import time
from collections.abc import Sequence

from irc.ir import TimeLimitError
from irc.passes.pipeline.coarsen import coarsen
from irc.passes.pipeline.partition_problem import Partition, PartitionProblem

from .constraint_programme import solve
from .reductions import can_run, contract, no_room

__all__ = ["best_non_contiguous"]


def best_non_contiguous(
    problem: PartitionProblem, *, seconds: float, start: Sequence[int] | None = None, workers: int = 1
) -> Partition:
    """The partition with the smallest largest load, whatever the order of the nodes.

    A device with nodes before and behind those of another one is visited twice by each micro-batch. The
    step of a pipeline that is full takes as long for each of them as its slowest device, all the same.

    Args:
        problem: The graph and the devices.
        seconds: Time limit.
        start: A partition to begin with, such as the best contiguous one.
        workers: Threads of the solver.

    Raises:
        UsageError: IRC473 when no partition fits the devices.
        TimeLimitError: IRC475 when the time ends before one is found.
    """
    started = time.monotonic()
    by_colour: dict[int, list[int]] = {}
    for position, node in enumerate(problem.nodes):
        by_colour.setdefault(node.colour, []).append(position)
    coarse = coarsen(problem, list(by_colour.values()), ())
    coarse = contract(coarse, is_contiguous=False, is_memory_free=problem.is_memory_free)
    if not can_run(coarse):
        raise no_room(problem)
    first = None if start is None else [start[members[0]] for members in coarse.members]
    solved = solve(problem, coarse, is_contiguous=False, start=first, seconds=seconds, workers=workers)
    if solved.is_infeasible:
        raise no_room(problem)
    if solved.devices is None:
        raise TimeLimitError(
            "IRC475",
            f"no partition of {problem.name} was found in {seconds:g} s",
            help="give more time, or begin with a contiguous partition",
        )
    assignment = coarse.spread(solved.devices, len(problem.nodes))
    return Partition.of(problem, assignment, solved.bound_seconds, started)
