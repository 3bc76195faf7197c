"""From a planned call to a program that runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.optim import Optimizer

from ..backends.torch import (
    Compilation,
    CompiledPlan,
    LengthForms,
    NumberSlots,
    ReservedMemory,
    compile_program,
)
from ..backends.torch.guards.dynamo_call import TraceAnswers
from ..backends.torch.guards.free_numbers import FreeNumbers
from ..backends.torch.guards.module_state import attribute, code_reads
from ..frontends.torch import Captured
from ..ir import Input
from ..passes import Program, step_memory
from ..passes.costs.optimizer_costs import optimizer_of
from ..torch_support.attribute_reads import Names
from .planned_program import released_bytes
from .request import Request

__all__ = ["CompiledCall", "emitted_call"]


@dataclass(frozen=True)
class CompiledCall(Compilation):
    """A call of a module, compiled, with what it was compiled from.

    Args:
        captured: The call as a graph.
        program: The graph with costs, schedule and certificate.
    """

    captured: Captured
    program: Program


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
    kept = {**reserved.reserved, **dict(released_bytes(program.graph))}
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
