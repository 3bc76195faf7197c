"""The main job: a module and a budget in, a module that trains within the budget out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from ..backends.torch import compile_program, fit
from ..frontends.torch import Captured, Loss, capture
from ..ir import Plan, UsageError
from ..passes import Cost, Observer, Pass, PassManager, Program, SelectCheckpoints

__all__ = ["Optimized", "cost_pass", "optimize", "optimize_module"]


@dataclass(frozen=True)
class Optimized:
    """All that optimizing a module gives.

    Args:
        module: The module that trains within the budget.
        captured: The original as a graph.
        program: The graph with costs, schedule and plan.
    """

    module: nn.Module
    captured: Captured
    program: Program

    @property
    def plan(self) -> Plan:
        """The certificate."""
        assert self.program.plan is not None
        return self.program.plan


def optimize(
    model: nn.Module,
    example_args: tuple[Any, ...] | Tensor,
    budget: int | str,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    strategy: str = "auto",
    time_limit: float = 60.0,
    profile: bool | str | None = None,
    loss: Loss | None = None,
) -> Any:
    """A module that trains as `model` does, within `budget` bytes on the device.

    It shares the model's parameters, buffers and submodules, and is a subclass of the model's class.
    With gradients enabled and in the modes the model is in now, its forward and backward run a fixed
    schedule whose peak was predicted; `.plan` tells what was chosen. In eval() or under no_grad it
    runs the original forward.

    Args:
        model: An `nn.Module` (an `fx.GraphModule` is one), on its device, in train() mode for training.
        example_args: Arguments of one training step; shapes and types are part of the plan.
        budget: Bytes, `"4GiB"`, `"4GB"`, or `"60%"` of the baseline peak. It covers parameters,
            buffers, inputs, gradients, activations and workspaces.
        example_kwargs: Keyword arguments of one training step.
        strategy: `auto`, `ilp`, `eviction`, `sqrt-n`, `every-<k>` or `keep-all`.
        time_limit: Seconds for the search of a schedule; the best one so far counts.
        profile: True measures operations thoroughly, None briefly, on the device that the model is on
            (both are cached on disk); False uses the roofline of a described machine, a text names one.
        loss: What the training loop computes from the model's result, where that takes memory of its
            own; a function from the result to a scalar. A loss inside the model needs no mention.

    Returns:
        The module, with the attribute `plan` (`irc.Plan`).

    Raises:
        BudgetError: It cannot fit; `minimum_bytes` is the smallest budget that a schedule was found for.
        UnsupportedError: The model uses what irc does not support; nothing has run.
        UsageError: The budget or another argument is malformed.
    """
    passes = [cost_pass(profile), SelectCheckpoints(budget=budget, strategy=strategy, time_limit=time_limit)]
    given = cast(object, example_args)
    if not isinstance(given, Tensor | tuple | list):
        raise UsageError(
            "IRC406",
            f"the example arguments are a {type(given).__name__}",
            help="give a tensor, or a tuple of the arguments of one step",
        )
    arguments = (given,) if isinstance(given, Tensor) else tuple(example_args)
    return optimize_module(model, arguments, passes, kwargs=example_kwargs, loss=loss).module


def cost_pass(profile: bool | str | None) -> Cost:
    """The cost pass that `profile` asks for, as in `optimize`."""
    if isinstance(profile, str):
        return Cost(profile=profile)
    if profile is False:
        return Cost(profile="cpu")
    return Cost(repeats=8 if profile else 3)


def check_passes(passes: Sequence[Pass]) -> None:
    """Refuses a pipeline with malformed options, or that chooses nothing, before a model is traced.

    Raises:
        UsageError: IRC401, IRC403 or IRC407 for an option; IRC405 when no pass chooses a schedule.
    """
    for step in passes:
        if isinstance(step, Cost | SelectCheckpoints):
            step.check()
    if not any(isinstance(step, SelectCheckpoints) for step in passes):
        raise UsageError(
            "IRC405", "no pass of the pipeline chooses a schedule", help="add select-checkpoints{budget=...}"
        )


def optimize_module(
    model: nn.Module,
    args: tuple[Any, ...],
    passes: Sequence[Pass],
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    observers: Sequence[Observer] = (),
) -> Optimized:
    """Captures a module, runs passes over its graph, and fits the schedule that they choose.

    Args:
        model: The module.
        args: Example arguments.
        passes: A pipeline in which one pass chooses a schedule.
        kwargs: Example keyword arguments.
        loss: As in `optimize`.
        observers: Told of each pass.

    Raises:
        UsageError: IRC405 when no pass chooses a schedule; IRC406 when `model` is no module.
    """
    if not isinstance(cast(object, model), nn.Module):
        raise UsageError("IRC406", f"the model is a {type(model).__name__}, not a torch.nn.Module")
    if loss is not None and not callable(loss):
        raise UsageError("IRC406", f"the loss is a {type(loss).__name__}, not a function of the result")
    if kwargs is not None and not isinstance(cast(object, kwargs), Mapping):
        raise UsageError("IRC406", f"example_kwargs is a {type(kwargs).__name__}, not a dict")
    check_passes(passes)
    captured = capture(model, args, kwargs, loss=loss)
    program = PassManager(passes, observers).run(Program(captured.graph))
    if program.schedule is None or program.plan is None:
        raise UsageError(
            "IRC405", "no pass of the pipeline chooses a schedule", help="add select-checkpoints{budget=...}"
        )
    compiled = compile_program(program.schedule, captured.constants)
    module = fit(model, compiled, captured.signature, program.plan)
    return Optimized(module, captured, program)
