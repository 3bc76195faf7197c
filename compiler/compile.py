"""From a call of a module to a compiled plan: capture, plan, emission."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..backends.torch import NumberSlots, ReservedMemory, VariedCall, tracing
from ..backends.torch.guards.dynamo_call import TraceAnswers
from ..backends.torch.guards.free_numbers import NO_NUMBERS, FreeNumbers
from ..frontends.torch import capture
from ..ir import IrcError
from .case import Case, Planned
from .compiled_call import CompiledCall, emitted_call
from .frozen_heap import frozen_heap
from .number_slots import number_slots
from .request import Request
from .time_steps import has_kernels, seconds_to_capture

__all__ = ["compile_call"]


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
    case = Case.of(module, args, kwargs, request, reserved)
    planned = case.plan()
    program, slots = planned.program, None
    stepwise = program.kernels is not None and has_kernels(program.kernels.graph)
    is_as_captured = program.kernels is None or stepwise  # neither in tiles nor fused
    if varied is not None and is_as_captured and request.compiler is None:
        slots = _number_slots(module, planned, request, varied, stepwise=stepwise)
    free = (
        NO_NUMBERS if slots is None or varied is None else FreeNumbers(expressions=varied.numbers.expressions)
    )
    return emitted_call(
        module, planned.captured, planned.names, program, request, reserved, slots or {}, free
    )


def _number_slots(
    module: nn.Module,
    planned: Planned,
    request: Request,
    varied: VariedCall,
    *,
    stepwise: bool,
) -> NumberSlots | None:
    """The literals of a planned graph that are numbers of the call; None if they cannot be told."""
    captured = planned.captured
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
    return number_slots(planned.program, (captured, other), prepared, varied.numbers)
