"""From the rewritten program of a call to one with costs, a schedule and a certificate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from ..backends.torch import ReservedMemory
from ..frontends.torch import Captured
from ..ir import BudgetError, Gradients, Graph, Input, InputRole, Plan, count_kernels, reordered
from ..passes import PassManager, Program
from ..passes.costs.table import StepCost
from ..passes.remat.reuse_schedule import reuse_schedule
from .request import INDUCTOR, Example, Request

__all__ = [
    "NOTHING_RESERVED",
    "Costed",
    "costed_call",
    "planned_call",
    "prepared_call",
    "released_bytes",
]

NOTHING_RESERVED = ReservedMemory({}, 0)
"""The memory that a module without plans holds for them."""


def prepared_call(captured: Captured, request: Request) -> Program:
    """The call, rewritten."""
    with torch._C._DisableAutocast():  # pyright: ignore[reportPrivateUsage]
        program = Program(captured.graph, eager=captured.eager)
        return PassManager(request.preparing, request.observers).run(program)


def costed_call(program: Program, request: Request, *, with_times: bool = True) -> Program:
    """The program with the costs of its operations, their times among them or only their workspaces."""
    with torch._C._DisableAutocast():  # pyright: ignore[reportPrivateUsage]
        cost = replace(request.bounded_cost, times=with_times)
        return PassManager([cost], request.observers).run(program)


class Costed(Protocol):
    """A function that finds the costs of a program's operations."""

    def __call__(self, program: Program, *, with_times: bool) -> Program:
        """The program with costs."""
        ...


def planned_call(
    captured: Captured,
    program: Program,
    request: Request,
    reserved: ReservedMemory,
    costed: Costed | None = None,
) -> Program:
    """The call with costs, a schedule and its certificate, which count what is reserved.

    Args:
        captured: The call as a graph.
        program: It, rewritten.
        request: What is asked of the plan.
        reserved: What the module holds already for other plans.
        costed: Finds the costs of a program, its times among them or only its workspaces, if that is not to
            be done as the request says.

    Raises:
        BudgetError: IRC204.
    """
    reserved_bytes = _held_bytes(program.graph, reserved) + reserved.constants_bytes
    within = request.with_less(reserved_bytes)
    find_costs: Costed = costed or partial(costed_call, request=request)
    program = find_costs(program, with_times=False)
    assert program.costs is not None
    if not program.costs.has_times:
        untimed = within.without_times(program)
        if untimed is None:
            program = find_costs(program, with_times=True)
        within = untimed or within
    with torch._C._DisableAutocast():  # pyright: ignore[reportPrivateUsage]
        program = _reused(captured, program, within) or _chosen(program, within, reserved_bytes)
    assert program.plan is not None
    kernels, fused_operations = count_kernels(program.graph)
    plan = replace(
        _counting(program.plan, reserved_bytes),
        gradients=program.graph.gradients.value,
        loss=captured.loss,
        roundings=captured.roundings,
        reordered=reordered(program.graph),
        compiler=INDUCTOR if kernels else request.compiler or "",
        kernels=kernels,
        fused_operations=fused_operations,
        reserved_bytes=program.graph.reserved_bytes + _held_bytes(program.graph, reserved),
    )
    return replace(program, plan=plan)


def _chosen(program: Program, request: Request, reserved_bytes: int) -> Program:
    """The program with a schedule that a search finds."""
    try:
        return PassManager(request.choosing, request.observers).run(program)
    except BudgetError as error:
        if not reserved_bytes:
            raise
        raise BudgetError(
            error.code,
            f"{error.message}; besides, {reserved_bytes} bytes are held for other plans",
            minimum_bytes=error.minimum_bytes + reserved_bytes,
            at=error.at,
            help=error.help,
        ) from error


def _reused(captured: Captured, program: Program, request: Request) -> Program | None:
    """The program with the example's schedule, if the call is the example but for its batch and it fits."""
    example = request.example
    if example is None or example.program is None or example.program.graph.offloaded_parameters:
        return None
    if not _differs_in_batch(example, captured):
        return None
    assert isinstance(request.budget, int)
    return reuse_schedule(example.program, program, request.budget)


def _differs_in_batch(example: Example, captured: Captured) -> bool:
    """Whether a call is the example but for the first dimension of its tensors."""
    mine, its = (
        replace(signature, out_tree=None, deliveries=(), branches=(), unused=frozenset(), assignments=())
        for signature in (example.signature, captured.signature)
    )
    if mine != its:
        return False
    inputs, others = ([i for i in graph.inputs if _is_given(i)] for graph in (example.graph, captured.graph))
    return len(inputs) == len(others) and all(map(_is_same_but_for_batch, inputs, others))


def _is_given(entry: Input) -> bool:
    return entry.role not in (InputRole.TANGENT, InputRole.CONSTANT)


def _is_same_but_for_batch(a: Input, b: Input) -> bool:
    if (a.role, a.target, a.requires_grad) != (b.role, b.target, b.requires_grad):
        return False
    if a.role is not InputRole.INPUT:
        return a.value.type == b.value.type
    mine, its = a.value.type, b.value.type
    sizes = len(mine.shape), mine.shape[1:], mine.dtype, mine.device
    return sizes == (len(its.shape), its.shape[1:], its.dtype, its.device)


def _counting(plan: Plan, nbytes: int) -> Plan:
    """The plan with what is reserved beside it counted."""

    def more(known_bytes: int | None) -> int | None:
        return None if known_bytes is None else known_bytes + nbytes

    return replace(
        plan,
        budget_bytes=plan.budget_bytes + nbytes,
        peak_bytes=plan.peak_bytes + nbytes,
        baseline_peak_bytes=plan.baseline_peak_bytes + nbytes,
        static_bytes=plan.static_bytes + nbytes,
        minimum_budget_bytes=plan.minimum_budget_bytes + nbytes,
        floor_bytes=plan.floor_bytes + nbytes,
        peak_with_gradients_bytes=more(plan.peak_with_gradients_bytes),
        peak_without_unused_bytes=more(plan.peak_without_unused_bytes),
        baseline_without_unused_bytes=more(plan.baseline_without_unused_bytes),
    )


def _held_bytes(graph: Graph, reserved: ReservedMemory) -> int:
    """The bytes reserved for gradients that this graph does not release itself."""
    released = {name for name, _ in released_bytes(graph)}
    return sum(nbytes for name, nbytes in reserved.reserved.items() if name not in released)


def released_bytes(graph: Graph) -> Iterator[tuple[str, int]]:
    """The bytes that the release of each parameter's gradient takes on the device from step to step."""
    names = {entry.value: entry.target for entry in graph.inputs}
    for node in graph.releases:
        parameter, gradient = node.operands
        accumulates = node.releases is Gradients.ACCUMULATED
        nbytes = gradient.storage.nbytes if accumulates else StepCost.of(node).state_bytes
        if parameter.storage in graph.state_of:
            nbytes -= graph.state_of[parameter.storage].storage.nbytes
        yield names[parameter], nbytes
