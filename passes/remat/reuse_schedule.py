"""Reuses the schedule of one program for another that has the same operations on other sizes."""

from __future__ import annotations

import time
from dataclasses import replace

from ...ir import Graph, Node, Region, Schedule, VerificationError, verify_graph, verify_schedule
from ..program import Program
from .certificate import certify
from .choice import ChosenSchedule
from .planner import baseline_of, kernels_seconds
from .problem import CheckpointProblem
from .search import Incumbent

__all__ = ["reuse_schedule"]


def reuse_schedule(chosen: Program, program: Program, budget_bytes: int) -> Program | None:
    """Gives `program` the schedule that was chosen for another one; nothing is searched.

    Args:
        chosen: A program with a schedule and a plan, such as that of a larger batch.
        program: The same model on other sizes, rewritten by the same passes, with costs.
        budget_bytes: The budget.

    Returns:
        The program, with a plan whose bound is that nothing is free; None if the operations do not match one
        to one by name, kind and traits, and if the schedule is not valid on these sizes or does not fit.
    """
    started = time.thread_time()
    assert chosen.schedule is not None and chosen.plan is not None and program.costs is not None
    graph = _counterpart(chosen.schedule.graph, program)
    if graph is None:
        return None
    forward, backward = _orders(chosen.schedule, graph)
    sequence = tuple(dict.fromkeys(node for node in backward if node.region is Region.BACKWARD))
    problem = CheckpointProblem(graph, program.costs, sequence)
    carried = problem.simulate_order(forward, backward)
    try:
        verify_graph(graph)
        verify_schedule(
            carried.schedule,
            program.costs.workspace_bytes,
            budget_bytes=max(budget_bytes, carried.peak_bytes),
            peak_bytes=carried.peak_bytes,
        )
    except VerificationError:
        return None  # on these sizes something lies elsewhere, in a copy or in a view
    if carried.peak_bytes > budget_bytes:
        return None
    original = CheckpointProblem(program.original or program.graph, program.costs)
    reused = ChosenSchedule(
        problem,
        Incumbent(f"{chosen.plan.strategy}, carried over", carried),
        minimum_bytes=min(carried.peak_bytes, original.keep_all.peak_bytes),
        floor_bytes=problem.floor_bytes,
    )
    plan = certify(
        reused,
        budget_bytes,
        baseline=baseline_of(program, original, problem.floor_bytes),
        seconds=time.thread_time() - started,
        kernels_seconds=kernels_seconds(program),
    )
    return replace(program, graph=graph, schedule=carried.schedule, plan=plan)


def _counterpart(graph: Graph, program: Program) -> Graph | None:
    """The graph of a program's operations that are those of `graph`, in its order; None if they are not.

    A program that was rewritten has operations as they were captured and as they were rewritten; which of
    them `graph` has was its own planner's choice.
    """
    captured = program.original or program.graph
    pool = {_key(node): node for node in (*program.graph.nodes, *captured.nodes)}
    nodes = [pool.get(_key(node)) for node in graph.nodes]
    found = tuple(node for node in nodes if node is not None)
    made = {value for node in found for value in node.values}
    if len(found) < len(nodes) or made != {value for node in captured.nodes for value in node.values}:
        return None
    return replace(captured, nodes=found)


def _key(node: Node) -> tuple[object, ...]:
    """The key that the counterparts of a node share: all but sizes."""
    operands = tuple(value.name for value in node.operands)
    results = tuple(None if value is None else value.name for value in node.results)
    return node.name, node.op, node.region, node.traits, operands, results


def _orders(schedule: Schedule, graph: Graph) -> tuple[list[Node], list[Node]]:
    """The operations that a schedule runs before and after the loss, as those of another graph."""
    nodes = {node.name: node for node in graph.nodes}
    forward, backward = ([nodes[node.name] for node in half] for half in schedule.halves)
    return forward, backward
