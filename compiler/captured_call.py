"""From a call of a module to its graph."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..backends.torch import tracing
from ..frontends.torch import Captured, DataAssignedError, capture, settled
from ..ir import Graph, OutputRole, UsageError
from ..passes.progress import Progress, report
from ..torch_support.attribute_reads import Names, recording_attribute_reads
from ..torch_support.packed_weights import packed_weights
from .request import Example, Request
from .time_steps import seconds_to_capture

__all__ = ["captured_call"]


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
