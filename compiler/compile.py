"""From a call of a module to a compiled plan: capture, passes, emission."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ..backends.torch import (
    Compilation,
    CompiledPlan,
    LengthForms,
    NumberSlots,
    ReservedMemory,
    VariedCall,
    compile_program,
    tracing,
)
from ..backends.torch.guards.dynamo_call import TraceAnswers
from ..backends.torch.guards.free_numbers import NO_NUMBERS, FreeNumbers
from ..backends.torch.guards.module_state import attribute, code_reads
from ..frontends.torch import Captured, DataAssignedError, capture, settled
from ..ir import (
    BudgetError,
    Gradients,
    Graph,
    Input,
    InputRole,
    IrcError,
    OutputRole,
    Plan,
    TimeLimitError,
    Trait,
    UsageError,
    count_kernels,
    reordered,
)
from ..passes import PassManager, Program, step_memory
from ..passes.costs.optimizer_costs import optimizer_of
from ..passes.costs.table import StepCost
from ..passes.progress import Progress, report
from ..passes.remat.reuse_schedule import reuse_schedule
from ..torch_support.attribute_reads import Names, recording_attribute_reads
from ..torch_support.packed_weights import packed_weights
from .frozen_heap import frozen_heap
from .number_slots import number_slots
from .request import INDUCTOR, Example, Request
from .tiles import tiles_advice, tiles_of, whole_or_tiled
from .time_steps import has_kernels, kernels_or_time_steps, seconds_to_capture

__all__ = [
    "NOTHING_RESERVED",
    "CompiledCall",
    "Costed",
    "capture_call",
    "captured_call",
    "compile_call",
    "costed_call",
    "emitted_call",
    "plan_captured",
    "planned_call",
    "prepared_call",
]


@dataclass(frozen=True)
class CompiledCall(Compilation):
    """A call of a module, compiled, with what it was compiled from.

    Args:
        captured: The call as a graph.
        program: The graph with costs, schedule and certificate.
    """

    captured: Captured
    program: Program


NOTHING_RESERVED = ReservedMemory({}, 0)
"""The memory that a module without plans holds for them."""


@frozen_heap()
def compile_call(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    reserved: ReservedMemory,
    varied: VariedCall | None = None,
) -> CompiledCall:
    """Compiles a call of a module: the first one, and each that differs from those before.

    Operations that were not measured before are measured now: their workspaces, and their times unless all
    is kept and nothing runs twice. For later calls that is amid training: one
    after another on tensors made up for it (see `profile_costs`), and nothing stays. What that takes, the
    operands, results and workspace of one operation and a mark of a megabyte, comes on top of what is
    alive between two steps and of what forwards in flight have saved. So does a run of the loss, on outputs
    made up for it. Operations, and a loss, that take more than the budget by themselves are not run; their
    costs are modelled.

    Args:
        module: What is called.
        args: Its arguments.
        kwargs: Its keyword arguments.
        request: What is asked of the plan. After the first one, its budget is in bytes.
        reserved: What the module holds already for other plans.
        varied: The call with other numbers, which the program then takes as inputs if it can.

    Raises:
        BudgetError: IRC204 if no schedule fits; nothing has run.
        TimeLimitError: IRC205 if the time limit ended before any schedule was found.
        UnsupportedError: The model uses what is not supported.
        UsageError: IRC522 if the loss does not run on a result that is larger than the example's.
    """
    planned, read, program = _plan(module, args, kwargs, request, reserved)
    slots = None
    stepwise = program.kernels is not None and has_kernels(program.kernels.graph)
    is_as_captured = program.kernels is None or stepwise  # neither in tiles nor fused
    if varied is not None and is_as_captured and request.compiler is None:
        slots = _number_slots(module, planned, program, request, varied, stepwise=stepwise)
    free = (
        NO_NUMBERS if slots is None or varied is None else FreeNumbers(expressions=varied.numbers.expressions)
    )
    return emitted_call(module, planned, read, program, request, reserved, slots or {}, free)


def capture_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: Request
) -> Captured:
    """Captures a call of a module, which may be without data, as `compile_call` does.

    Raises:
        IrcError: As `compile_call`.
    """
    return captured_call(module, args, kwargs, request)[0]


def plan_captured(captured: Captured, request: Request) -> Program:
    """Plans a captured call, and compiles nothing; LSTM layers stay the kernels that they are.

    Raises:
        IrcError: As `compile_call`.
    """
    return _fused_or_not(captured, prepared_call(captured, request), request, NOTHING_RESERVED)


def _plan(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    reserved: ReservedMemory,
) -> tuple[Captured, Names, Program]:
    """The call as a graph, what was read of each submodule on the way, and its program with a plan."""
    captured, names = captured_call(module, args, kwargs, request)
    prepared = prepared_call(captured, request)

    def by_kernels() -> tuple[Captured, Names, Program]:
        return captured, names, _fused_or_not(captured, prepared, request, reserved)

    def by_time_steps() -> tuple[Captured, Names, Program]:
        steps, names_of_steps = captured_call(module, args, kwargs, request, stepwise=True)
        program = replace(prepared_call(steps, request), kernels=costed_call(prepared, request))
        return steps, names_of_steps, planned_call(steps, program, request, reserved)

    return kernels_or_time_steps(captured.graph, by_kernels, by_time_steps)


def _number_slots(
    module: nn.Module,
    captured: Captured,
    program: Program,
    request: Request,
    varied: VariedCall,
    *,
    stepwise: bool,
) -> NumberSlots | None:
    """The literals of a planned graph that are numbers of the call; None if they cannot be told."""
    if TraceAnswers(captured.mode.compiling, captured.mode.exporting) != varied.answers:
        return None
    try:
        with tracing():
            other = capture(
                module,
                varied.args,
                varied.kwargs,
                loss=request.loss,
                specialize_branches=request.specialize_branches,
                stepwise=stepwise,
                time_limit=seconds_to_capture(request.plan.time_limit),
            )
        with torch._C._DisableAutocast():  # pyright: ignore[reportPrivateUsage]
            prepared = request.rewritten(captured), request.rewritten(other)
    except IrcError:
        return None
    return number_slots(program, (captured, other), prepared, varied.numbers)


# ---------------------------------------------------------------------- capture


def captured_call(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    *,
    stepwise: bool = False,
    with_eager: bool = True,
) -> tuple[Captured, Names]:
    """The call as a graph, and what was read of each submodule on the way.

    Args:
        module: What is called.
        args: Its arguments.
        kwargs: Its keyword arguments.
        request: What is asked of the plan.
        stepwise: Whether LSTM layers are traced as their time steps.
        with_eager: Whether to find the memory of the step as it is written.
    """
    traced = partial(
        capture,
        module,
        args,
        kwargs,
        specialize_branches=request.specialize_branches,
        stepwise=stepwise,
        time_limit=seconds_to_capture(request.plan.time_limit),
        with_eager=with_eager and not stepwise,
        measure=request.bounded_cost.measure,
    )
    report(Progress("capture"))
    with tracing(), recording_attribute_reads() as readings:
        try:
            captured = traced(loss=request.loss)
        except DataAssignedError as error:
            if request.example is not None:  # the first call of the module was long ago
                raise
            with settled(module, args, kwargs, error):
                captured = traced(loss=request.loss)
        except UsageError as error:
            if error.code != "IRC341" or request.example is None:
                raise
            captured = traced()
            captured = _with_loss_of(request.example, captured, error)
    changed = {(each.module, each.name) for each in captured.signature.assignments}
    changed |= {
        (path.rpartition(".")[0], name)
        for path, weight in packed_weights(module)
        for name in weight.state_names
    }
    return captured, readings.of(module, changed)


def _with_loss_of(example: Example, captured: Captured, failed: UsageError) -> Captured:
    """The call, with a loss that is written for the example's result counted as it does there.

    Raises:
        UsageError: IRC522 if the result is larger than the example's.
    """
    known, found = _output_bytes(example.graph), _output_bytes(captured.graph)
    if len(known) != len(found) or any(now > then for now, then in zip(found, known, strict=True)):
        raise UsageError(
            "IRC522",
            f"the loss does not run on the result of this call, whose tensors take {_listed(found)} "
            f"bytes where those of the example take {_listed(known)} bytes: {failed.message}",
            help="give irc.optimize a loss that runs on results of any size, or the largest call as the "
            "example",
        ) from failed
    counted = replace(
        captured.graph,
        loss_bytes=example.graph.loss_bytes,
        loss_held_bytes=example.graph.loss_held_bytes,
        loss_saved_bytes=example.graph.loss_saved_bytes,
    )
    return replace(captured, graph=counted)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _output_bytes(graph: Graph) -> list[int]:
    outputs = (o.value for o in graph.outputs if o.role is OutputRole.OUTPUT)
    return [value.type.nbytes for value in outputs if value is not None]


# ---------------------------------------------------------------------- passes


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


def _fused_or_not(
    captured: Captured, program: Program, request: Request, reserved: ReservedMemory
) -> Program:
    """The call with a plan: of kernels, if the request names their compiler and such a plan fits.

    Raises:
        BudgetError: IRC204.
    """
    if request.compiler is None:
        return _whole_or_tiled(captured, program, request, reserved)
    try:
        return _whole_or_tiled(captured, program, request, reserved)
    except BudgetError as fused:
        try:
            planned = _whole_or_tiled(captured, program, replace(request, compiler=None), reserved)
        except BudgetError as whole:
            raise min((fused, whole), key=lambda error: error.minimum_bytes) from None
    assert planned.plan is not None
    return replace(planned, plan=replace(planned.plan, compiler=request.compiler))


def _fused(program: Program, request: Request) -> Program:
    """The program with kernels, if the request names their compiler, and with writes in place."""
    fusing = () if request.fusing is None else (request.fusing,)
    with torch._C._DisableAutocast():  # pyright: ignore[reportPrivateUsage]
        return PassManager([*fusing, *request.writing], request.observers).run(program)


def _whole_or_tiled(
    captured: Captured, program: Program, request: Request, reserved: ReservedMemory
) -> Program:
    """The call with a plan: with rows in tiles where the request lets them be.

    Once something fits, each further search takes what is left of the time limit, and at least a quarter.

    Raises:
        BudgetError: IRC204.
    """
    started = time.thread_time()
    functional = program
    if any(Trait.OVERWRITES in node.traits for node in program.graph.nodes):
        functional = prepared_call(captured, request.without_writes)
    tried: list[int] = []
    fitting: list[Program] = []

    def planned(program: Program) -> Program:
        limit = request.plan.time_limit
        left = max(limit - (time.thread_time() - started), limit / 4) if fitting else limit
        within = replace(request, plan=replace(request.plan, time_limit=left))
        tried.append(program.tiles)
        fitting.append(planned_call(captured, _fused(program, within), within, reserved))
        return fitting[-1]

    def tiled(tiles: int) -> Program | None:
        in_tiles = PassManager([*request.in_tiles(tiles)], request.observers).run(functional)
        if not in_tiles.tiles:
            return None
        in_tiles = replace(in_tiles, original=None, kernels=costed_call(program, request))
        return planned(in_tiles)

    example = None if request.example is None else request.example.program
    if example is not None and example.tiles:
        with contextlib.suppress(BudgetError, TimeLimitError):
            same = tiled(example.tiles)  # its schedule may be taken over
            if same is not None:
                return same
    try:
        best = whole_or_tiled(
            tiles_of(functional.graph, request),
            lambda: planned(functional if request.fusing else program),
            tiled,
            step_seconds=_step_seconds,
            is_best=lambda found: found.plan is not None and found.plan.overhead <= request.plan.gap,
        )
    except BudgetError as error:
        error.help = "; ".join(filter(None, (error.help, tiles_advice(functional.graph, request))))
        raise
    if len(tried) == 1:
        return best
    assert best.plan is not None
    return replace(best, plan=replace(best.plan, seconds_to_plan=time.thread_time() - started))


def _step_seconds(program: Program) -> float:
    assert program.plan is not None
    return (1 + program.plan.overhead) * (program.plan.step_seconds or 0.0)


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
    released = {name for name, _ in _released(graph)}
    return sum(nbytes for name, nbytes in reserved.reserved.items() if name not in released)


def _released(graph: Graph) -> Iterator[tuple[str, int]]:
    """The bytes that the release of each parameter's gradient takes on the device from step to step."""
    names = {entry.value: entry.target for entry in graph.inputs}
    for node in graph.releases:
        parameter, gradient = node.operands
        accumulates = node.releases is Gradients.ACCUMULATED
        nbytes = gradient.storage.nbytes if accumulates else StepCost.of(node).state_bytes
        if parameter.storage in graph.state_of:
            nbytes -= graph.state_of[parameter.storage].storage.nbytes
        yield names[parameter], nbytes


# ---------------------------------------------------------------------- emission


def emitted_call(
    module: nn.Module,
    captured: Captured,
    names: Names,
    program: Program,
    request: Request,
    reserved: ReservedMemory,
    slots: NumberSlots,
    free: FreeNumbers,
    lengths: LengthForms | None = None,
) -> CompiledCall:
    """The planned call as a program that runs, with optimizers for gradients that are released now first."""
    assert program.schedule is not None and program.plan is not None
    compiled = compile_program(program.schedule, captured.constants, captured.generators, slots, lengths)
    kept = {**reserved.reserved, **dict(_released(program.graph))}
    fresh = [name for name in compiled.released if name not in reserved.reserved]
    plan = program.plan if lengths is not None else replace(program.plan, memory=step_memory(program))
    program = replace(program, plan=plan)
    return CompiledCall(
        CompiledPlan(
            compiled,
            captured.signature,
            plan,
            reserved=kept,
            names=names,
            code_reads=code_reads(captured.code_names),
            tensor_reads=tuple(_tensor_reads(captured, compiled.statics)),
            answers=TraceAnswers(captured.mode.compiling, captured.mode.exporting),
            free=free,
        ),
        _optimizers(module, request, fresh),
        request if request.example is not None else request.settled(captured, program),
        captured,
        program,
    )


def _tensor_reads(captured: Captured, statics: Sequence[Input]) -> Iterator[tuple[int, str, object]]:
    """Yields the attributes of static inputs that the forward reads, with stand-ins of what they hold."""
    places = {(entry.role, entry.target): index for index, entry in enumerate(statics)}
    for role, target, name, value in captured.tensor_reads:
        if (role, target) in places:
            yield places[role, target], name, attribute({name: value}, name)


def _optimizers(module: nn.Module, request: Request, names: Iterable[str]) -> dict[str, Optimizer]:
    """An optimizer of each of these parameters, if gradients are applied."""
    factory = request.optimizer
    if factory is None:
        return {}
    return {name: optimizer_of(factory, [module.get_parameter(name)]) for name in names}
