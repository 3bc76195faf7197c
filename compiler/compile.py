"""Plans calls of a fitted module that are not the example: within the bytes of the first plan's budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..backends.torch import (
    CompiledPlan,
    Replanned,
    ReservedMemory,
    compile_program,
    pack_signature,
    tracing,
    unpack_signature,
)
from ..backends.torch.guards.attribute_reads import reading
from ..frontends.torch import Captured, Loss, capture
from ..ir import BudgetError, Gradients, Graph, Input, InputRole, OutputRole, Plan, Signature, UsageError
from ..passes import (
    Cost,
    Observer,
    Pass,
    PassManager,
    PlanMemory,
    Program,
    ReleaseGradients,
    SelectCheckpoints,
    offloadable_in,
)
from ..passes.costs.optimizer_costs import optimizer_of
from ..passes.costs.table import StepCost
from ..passes.remat.reuse_schedule import reuse_schedule

__all__ = ["Choice", "Replanner", "choose"]


@dataclass(frozen=True)
class Choice:
    """A call of a module, captured and planned.

    Args:
        captured: The call as a graph.
        program: The graph with costs, schedule and plan.
        fitting: The same, compiled.
        optimizers: Where gradients are applied: those of parameters that had none before, by name.
    """

    captured: Captured
    program: Program
    fitting: CompiledPlan
    optimizers: Mapping[str, Optimizer]


@dataclass(frozen=True)
class Replanner:
    """Plans other calls of a module.

    Operations that were not measured before are measured then, amid training: one after another on tensors
    made up for it (see `profile_costs`), and nothing stays. What that takes, the operands, results and
    workspace of one operation and a mark of a megabyte, comes on top of what is alive between two steps
    (parameters, gradients, the optimizer's state) and of what forwards in flight have saved. Operations that
    cannot fit into the budget are not run.

    Args:
        passes: The pipeline of the first plan, with its budget in bytes.
        loss: What the caller computes from the module's result.
        same_branches: Whether its Python code sees in each step what it sees in the example's.
        graph: The example's call, captured.
        signature: How the example is called.
        carried: What was chosen for the example, where calls that differ from it in their batch alone take
            over its schedule; None where each call gets a search of its own.
    """

    passes: tuple[Pass, ...]
    loss: Loss | None
    same_branches: bool
    graph: Graph
    signature: Signature
    carried: Program | None

    @staticmethod
    def of(
        choice: Choice, passes: Sequence[Pass], loss: Loss | None, *, same_branches: bool, carries: bool
    ) -> Replanner:
        """What plans other calls as the example's was planned."""
        known = tuple(_knowing(step, choice.program) for step in passes)
        captured, carried = choice.captured, choice.program if carries else None
        return Replanner(known, loss, same_branches, captured.graph, captured.signature, carried)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], beside: ReservedMemory
    ) -> Replanned:
        """The plan of a call, within the budget of the first one.

        Raises:
            BudgetError: IRC204 when no schedule fits; nothing has run.
            UsageError: IRC522 when the loss does not run on a result that is larger than the example's.
        """
        with reading() as readings:
            captured = self._capture(module, args, kwargs)
        is_batch = self.carried is not None and self._differs_in_batch(captured)
        choice = choose(
            module, captured, self.passes, beside=beside, carried=self.carried if is_batch else None
        )
        return Replanned(replace(choice.fitting, names=readings.of(module)), choice.optimizers)

    def __reduce__(self) -> tuple[Any, ...]:
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        return _replanner, ({**known, "signature": pack_signature(self.signature)},)

    def _differs_in_batch(self, captured: Captured) -> bool:
        """Whether a call is the example but for the first dimension of its tensors."""
        mine, its = (
            replace(signature, out_tree=None, deliveries=(), branches=(), unused=frozenset())
            for signature in (self.signature, captured.signature)
        )
        if mine != its:
            return False
        inputs, others = ([i for i in graph.inputs if _is_given(i)] for graph in (self.graph, captured.graph))
        return len(inputs) == len(others) and all(map(_is_same_but_for_batch, inputs, others))

    def _capture(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        """The call as a graph. A loss that is written for the example's result counts as it does there."""
        with tracing():
            try:
                return capture(module, args, kwargs, loss=self.loss, same_branches=self.same_branches)
            except UsageError as error:
                if error.code != "IRC341":
                    raise
                failed = error
            captured = capture(module, args, kwargs, same_branches=self.same_branches)
        known, found = _output_bytes(self.graph), _output_bytes(captured.graph)
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
            loss_bytes=self.graph.loss_bytes,
            loss_held_bytes=self.graph.loss_held_bytes,
            loss_saved_bytes=self.graph.loss_saved_bytes,
        )
        return replace(captured, graph=counted)


def _replanner(known: dict[str, Any]) -> Replanner:
    known["signature"] = unpack_signature(known["signature"])
    return Replanner(**known)


def _knowing(step: Pass, chosen: Program) -> Pass:
    """A pass with what the first run of the pipeline told: the budget in bytes, and what optimizers take."""
    match step:
        case PlanMemory() if chosen.plan is not None and step.which:
            offloaded_names = tuple(offloaded.name for offloaded in chosen.graph.offloaded_parameters)
            return replace(step, budget=chosen.plan.budget_bytes, offloaded_names=offloaded_names)
        case SelectCheckpoints() if chosen.plan is not None:
            return replace(step, budget=chosen.plan.budget_bytes)
        case ReleaseGradients(optimizer=factory) if factory is not None:
            return replace(
                step, known={node.operands[0].type: StepCost.of(node) for node in chosen.graph.releases}
            )
        case _:
            return step


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _output_bytes(graph: Graph) -> list[int]:
    outputs = (o.value for o in graph.outputs if o.role is OutputRole.OUTPUT)
    return [value.type.nbytes for value in outputs if value is not None]


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


def choose(
    module: nn.Module,
    captured: Captured,
    passes: Sequence[Pass],
    *,
    observers: Sequence[Observer] = (),
    beside: ReservedMemory | None = None,
    carried: Program | None = None,
) -> Choice:
    """Plans what was captured.

    Args:
        module: Whose parameters are trained.
        captured: A call of it.
        passes: A pipeline in which one pass chooses a schedule; where something is held beside, its budget is
            in bytes.
        observers: Told of each pass.
        beside: What the module holds already.
        carried: A program whose schedule is taken where it can be, instead of a search.

    Raises:
        UsageError: IRC405 when no pass chooses a schedule.
    """
    at = next((k for k, step in enumerate(passes) if isinstance(step, SelectCheckpoints)), len(passes))
    first = next((k for k, step in enumerate(passes[:at]) if isinstance(step, Cost)), at)
    with torch._C._DisableAutocast():  # pyright: ignore[reportPrivateUsage]
        program = PassManager(passes[:first], observers).run(Program(captured.graph))
        costs = passes[first:at]
        if beside is not None and not _can_run(program, passes[at:], beside):
            costs = [replace(step, profile="cpu") if isinstance(step, Cost) else step for step in costs]
        program = PassManager(costs, observers).run(program)
        released = {name for name, _ in _reserved(program.graph)}
        kept = {} if beside is None else dict(beside.reserved)
        constants_bytes = 0 if beside is None else beside.constants_bytes
        kept_bytes = sum(nbytes for name, nbytes in kept.items() if name not in released)
        beside_bytes = kept_bytes + constants_bytes
        later = [_with_less(step, beside_bytes) for step in passes[at:]]
        taken = None if carried is None else _reuse_schedule(carried, program, later)
        try:
            program = taken or PassManager(later, observers).run(program)
        except BudgetError as error:
            if not beside_bytes:
                raise
            raise _beside(error, beside_bytes) from error
    if program.schedule is None or program.plan is None:
        raise UsageError(
            "IRC405", "no pass of the pipeline chooses a schedule", help="add select-checkpoints{budget=...}"
        )
    graph = program.graph
    plan = _counting(program.plan, beside_bytes)
    plan = replace(plan, gradients=graph.gradients.value, reserved_bytes=graph.reserved_bytes + kept_bytes)
    compiled = compile_program(program.schedule, captured.constants)
    fresh = [name for name in compiled.released if name not in kept]
    return Choice(
        captured,
        replace(program, plan=plan),
        CompiledPlan(compiled, captured.signature, plan, reserved={**kept, **dict(_reserved(graph))}),
        _optimizers(module, passes, fresh),
    )


def _can_run(program: Program, passes: Sequence[Pass], beside: ReservedMemory) -> bool:
    """Whether each operation fits into the budget by itself, beside what is there before and after a step."""
    budgets = (step.budget for step in passes if isinstance(step, SelectCheckpoints))
    budget = next(budgets, None)
    if not isinstance(budget, int):
        return True
    graphs = [program.graph, *([] if program.original is None else [program.original])]
    graphs = [_with_offloaded(graph, passes) for graph in graphs]
    return all(
        graph.static_bytes + _largest_bytes(graph) + beside.constants_bytes <= budget for graph in graphs
    )


def _with_offloaded(graph: Graph, passes: Sequence[Pass]) -> Graph:
    """The graph with what is known to live in a tier."""
    for step in passes:
        if isinstance(step, PlanMemory) and step.offloaded_names is not None:
            offloaded_parameters = offloadable_in("", graph, step.which)
            return replace(
                graph,
                offloaded_parameters=tuple(
                    offloaded for offloaded in offloaded_parameters if offloaded.name in step.offloaded_names
                ),
            )
    return graph


def _largest_bytes(graph: Graph) -> int:
    """What the largest operation reads and allocates beyond what is there before and after a step."""
    touched = ({*graph.reads(node), *graph.allocates(node)} for node in graph.operations)
    return max((sum(s.nbytes for s in each - graph.static_storages) for each in touched), default=0)


def _with_less(step: Pass, nbytes: int) -> Pass:
    if not nbytes or not isinstance(step, SelectCheckpoints):
        return step
    assert isinstance(step.budget, int), "the budget of another plan is in bytes"
    return replace(step, budget=max(step.budget - nbytes, 1))


def _reuse_schedule(carried: Program, program: Program, passes: Sequence[Pass]) -> Program | None:
    budgets = [step.budget for step in passes if isinstance(step, SelectCheckpoints)]
    assert len(passes) == 1 and isinstance(budgets[0], int)
    if carried.graph.offloaded_parameters:
        return None
    return reuse_schedule(carried, program, budgets[0])


def _beside(error: BudgetError, nbytes: int) -> BudgetError:
    """The error with what is held beside counted in the smallest budget."""
    return BudgetError(
        error.code,
        f"{error.message}; besides, {nbytes} bytes are held for other plans",
        minimum_bytes=error.minimum_bytes + nbytes,
        at=error.at,
        help=error.help,
    )


def _counting(plan: Plan, nbytes: int) -> Plan:
    """The plan with what is held beside it counted."""
    there_bytes = plan.peak_with_gradients_bytes
    return replace(
        plan,
        budget_bytes=plan.budget_bytes + nbytes,
        peak_bytes=plan.peak_bytes + nbytes,
        baseline_peak_bytes=plan.baseline_peak_bytes + nbytes,
        static_bytes=plan.static_bytes + nbytes,
        minimum_budget_bytes=plan.minimum_budget_bytes + nbytes,
        floor_bytes=plan.floor_bytes + nbytes,
        peak_with_gradients_bytes=None if there_bytes is None else there_bytes + nbytes,
    )


def _reserved(graph: Graph) -> Iterator[tuple[str, int]]:
    """What the release of each parameter's gradient takes on the device from step to step, in bytes."""
    names = {entry.value: entry.target for entry in graph.inputs}
    for node in graph.releases:
        parameter, gradient = node.operands
        accumulates = node.releases is Gradients.ACCUMULATED
        nbytes = gradient.storage.nbytes if accumulates else StepCost.of(node).state_bytes
        if parameter.storage in graph.state_of:
            nbytes -= graph.state_of[parameter.storage].storage.nbytes
        yield names[parameter], nbytes


def _optimizers(module: nn.Module, passes: Sequence[Pass], names: Iterable[str]) -> dict[str, Optimizer]:
    """An optimizer of each of these parameters, where gradients are applied."""
    factories = (step.optimizer for step in passes if isinstance(step, ReleaseGradients))
    factory = next(filter(None, factories), None)
    if factory is None:
        return {}
    return {name: optimizer_of(factory, [module.get_parameter(name)]) for name in names}
