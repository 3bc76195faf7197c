"""The main job: a module and a budget in, a module that trains within the budget out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..backends.torch import (
    Original,
    TierPlace,
    check_places,
    fit_planned,
    planning,
    refuse_hooks,
    refuse_unplannable,
    tracing,
    unfitted,
)
from ..backends.torch.guards.attribute_reads import reading
from ..frontends.torch import Captured, Loss, capture
from ..ir import Plan, UsageError
from ..passes import (
    Cost,
    HoldForwards,
    Observer,
    OfferTiers,
    Pass,
    PlanMemory,
    Program,
    ReleaseGradients,
    SelectCheckpoints,
    SplitConvolutions,
)
from ..passes.costs.optimizer_costs import OptimizerFactory
from ..torch_support.pytree import flatten
from .compile import Replanner, choose
from .tiers import device_of, measured, offer, places, what_moves

__all__ = [
    "Optimized",
    "choice_passes",
    "cost_passes",
    "hold_passes",
    "optimize",
    "optimize_module",
    "release_passes",
]


@dataclass(frozen=True)
class Optimized:
    """All that optimizing a module gives.

    Args:
        module: The module that trains within the budget.
        captured: The original as a graph.
        program: The graph with costs, schedule and plan.
        places: Where the tiers are that the module may copy to.
    """

    module: nn.Module
    captured: Captured
    program: Program
    places: tuple[TierPlace, ...] = ()

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
    accumulate_gradients: bool = False,
    optimizer_in_backward: OptimizerFactory | None = None,
    same_branches: bool = False,
    forwards_in_flight: int = 1,
    swap: str | Sequence[str] | None = None,
    plans: int = 8,
    dynamic: str | None = None,
) -> Any:
    """A module that trains as `model` does, within `budget` bytes on the device.

    It shares the model's parameters, buffers and submodules, and is a subclass of the model's class.
    With gradients enabled its forward and backward run a fixed schedule whose peak was predicted; `.plan`
    tells what was chosen. In eval(), unless the model is in eval() now, or under no_grad it runs the
    original forward.

    A call unlike the example (other shapes or constants, `requires_grad`, train/eval modes or settings of
    submodules, autocast) is planned when it comes, within the bytes of the first budget; that takes as long
    as the first plan, and a line is logged to the logger `irc`. Such plans hold no parameter and are kept:
    `.irc_plans`. `.plan` and `.irc_plan` stay those of the example.

    Args:
        model: An `nn.Module` (an `fx.GraphModule` is one), on its device, in train() mode for training.
        example_args: Arguments of one training step; shapes and types are part of the plan.
        budget: Bytes, `"4GiB"`, `"4GB"`, or `"60%"` of the baseline peak. It covers parameters,
            buffers, inputs, gradients, activations and workspaces.
        example_kwargs: Keyword arguments of one training step.
        strategy: `auto`, `ilp`, `eviction`, `min-cut`, `per-block`, `sqrt-n`, `every-<k>`, `keep-none` or
            `keep-all`; with `swap` also `lms`, `ome`, `pofo`, `swap` or `recompute`.
        time_limit: Seconds for the search of a schedule; the best one so far counts.
        profile: True measures operations thoroughly, None briefly, on the device that the model is on
            (both are cached on disk); False uses the roofline of a described machine. A text names one, such
            as `"gtx1080"`, or is the path of a file that `irc machine -o` wrote.
        loss: What the training loop computes from the model's result, where that takes memory of its
            own; a function from the result to a scalar. A loss inside the model needs no mention.
        accumulate_gradients: Add each parameter's gradient to its `.grad` as soon as it is known. The plan
            counts the `.grad` of every trained parameter as there before and after the step, so that a step
            never holds two sets of gradients.
        optimizer_in_backward: Makes the optimizer of a list of parameters, such as
            `lambda params: torch.optim.AdamW(params, lr=1e-3)`. It is called with one parameter at a time
            (and with made-up ones, to measure its state and its steps). Each optimizer takes its step within
            backward, as soon as nothing reads its parameter any more, and the gradient is freed: `.grad` is
            None afterwards. The optimizers' state is part of the budget. They are `.irc_optimizers`, by the
            names of the parameters: set learning rates and save their state there. What needs all gradients
            at once (clipping by their norm, a gradient scaler) is refused. A parameter that requires a
            gradient only later gets its optimizer then.
        same_branches: For a model whose Python code looks at the values of its tensors (a check, an assert,
            a branch) and sees the same in every step: it is run once on the example arguments, without
            gradients, and planned as it goes there. Each step checks what it sees and raises IRC347 where it
            is something else; what the forward writes into buffers is written by then.
        forwards_in_flight: How many forwards run before their backwards, as where a model is called twice for
            one loss. The budget covers them: their inputs, and what each of them saves until its backward.
            All run forward, and then backward, one by one in any order or in one `backward()`; the second of
            them finds gradients, a second set unless they are accumulated as they come. More forwards than
            planned, or a backward that retains its graph (one more), give the right numbers and are logged
            once, to the logger `irc`: the budget may not hold.
        swap: Where tensors may go while a step does not need them: `"host:64GiB"` (pinned memory, for a model
            on a GPU), `"disk:/scratch:200GiB"`, or a list of both, the faster first. The budget stays that of
            the device. Bandwidths are those that `irc machine` measured, or measured now; where `profile`
            names a machine, that machine's. With `"params"`, `"optimizer"` or `"params,optimizer"` among
            them, parameters, and the state of the optimizers in backward, live in the first of these tiers
            between steps as far as the budget asks for it (a model on the CPU, with a disk). A parameter is
            still a tensor then, to be read, written and saved between steps: a mapping of its place there.
        plans: How many plans are kept; the least recently used one is given up. 1 refuses other calls than
            the example.
        dynamic: `"batch"` says that the example has the largest batch: calls that differ from it in the first
            dimension of their tensors alone take over its schedule without a search, where their operations
            are the same and it fits. Others, larger ones among them, are planned as usual.

    Returns:
        The module, with the attribute `plan` (`irc.Plan`).

    Raises:
        BudgetError: It cannot fit; `minimum_bytes` is the smallest budget that a schedule was found for.
        UnsupportedError: The model or the optimizer uses what irc does not support; nothing has run.
        UsageError: The budget or another argument is malformed.

    Calling the module raises BudgetError, IRC520, when a call unlike the example cannot fit; nothing has run
    then.
    """
    _check_calls(plans, dynamic)
    *before, cost = cost_passes(profile)
    release = release_passes(accumulate=accumulate_gradients, optimizer=optimizer_in_backward)
    hold = hold_passes(forwards_in_flight, optimizer_in_backward)
    passes = [*before, *release, *hold, cost, *choice_passes(swap, profile, budget, strategy, time_limit)]
    given = cast(object, example_args)
    if not isinstance(given, Tensor | tuple | list):
        raise UsageError(
            "IRC406",
            f"the example arguments are a {type(given).__name__}",
            help="give a tensor, or a tuple of the arguments of one step",
        )
    arguments = (given,) if isinstance(given, Tensor) else tuple(example_args)
    return optimize_module(
        model,
        arguments,
        passes,
        kwargs=example_kwargs,
        loss=loss,
        same_branches=same_branches,
        plans=plans,
        dynamic=dynamic,
    ).module


def _check_calls(plans: object, dynamic: object) -> None:
    """Refuses malformed options for calls unlike the example."""
    if isinstance(plans, bool) or not isinstance(plans, int) or plans < 1:
        raise UsageError(
            "IRC406",
            f"plans is {plans!r}, not a number of plans",
            help="give 1 or more; 1 refuses other calls",
        )
    if dynamic not in (None, "batch"):
        raise UsageError("IRC406", f"dynamic is {dynamic!r}", help='give dynamic="batch", or leave it out')
    if dynamic is not None and plans == 1:
        raise UsageError(
            "IRC406", "dynamic shapes need more than one plan", help="give plans=8, or leave dynamic out"
        )


def release_passes(*, accumulate: object, optimizer: OptimizerFactory | None) -> list[ReleaseGradients]:
    """The pass that two options of `optimize` ask for, or none.

    Args:
        accumulate: Its `accumulate_gradients`.
        optimizer: Its `optimizer_in_backward`.

    Raises:
        UsageError: IRC406 for what these are not, or both.
    """
    if not isinstance(accumulate, bool):
        raise UsageError("IRC406", f"accumulate_gradients is a {type(accumulate).__name__}, not a bool")
    if optimizer is not None and not callable(optimizer):
        raise UsageError(
            "IRC406",
            f"optimizer_in_backward is a {type(optimizer).__name__}, not a function of a list of parameters",
            help="give a function such as lambda params: torch.optim.AdamW(params, lr=1e-3)",
        )
    if accumulate and optimizer is not None:
        raise UsageError(
            "IRC406",
            "accumulate_gradients and optimizer_in_backward exclude each other",
            help="an optimizer in backward takes each gradient and frees it: nothing is accumulated",
        )
    if optimizer is not None:
        return [ReleaseGradients("apply", optimizer)]
    return [ReleaseGradients("accumulate")] if accumulate else []


def hold_passes(count: int, optimizer: OptimizerFactory | None = None) -> list[HoldForwards]:
    """The pass that `forwards_in_flight` of `optimize` asks for, checked; none for one."""
    hold = HoldForwards(count)
    hold.check(applies=optimizer is not None)
    return [hold] if count > 1 else []


def cost_passes(profile: bool | str | None) -> list[Pass]:
    """What comes before the choice of a schedule; `profile` is that of `optimize`."""
    if isinstance(profile, str):
        return [SplitConvolutions(transpose=profile == "cpu"), Cost(profile=profile)]
    measuring = Cost(profile="cpu") if profile is False else Cost(repeats=8 if profile else 3)
    return [SplitConvolutions(), measuring]


def choice_passes(
    swap: str | Sequence[str] | None,
    profile: bool | str | None,
    budget: int | str,
    strategy: str,
    time_limit: float,
) -> list[Pass]:
    """What chooses a schedule; the arguments are those of `optimize`.

    Raises:
        UsageError: IRC423 to IRC429 for what is no tier; IRC408 for a machine without such a tier.
    """
    if swap is None:
        return [SelectCheckpoints(budget=budget, strategy=strategy, time_limit=time_limit)]
    tiers, offloaded = what_moves(swap)
    select = PlanMemory(budget=budget, strategy=strategy, time_limit=time_limit, offload=offloaded)
    return [offer(tiers, profile), select]


def check_options(passes: Sequence[Pass]) -> None:
    """Refuses malformed options.

    Raises:
        UsageError: IRC401, IRC403, IRC407, IRC410, IRC413 to IRC418, or IRC565.
    """
    for step in passes:
        if isinstance(step, Cost | HoldForwards | OfferTiers | ReleaseGradients | SelectCheckpoints):
            step.check()


def check_passes(passes: Sequence[Pass]) -> None:
    """Refuses a pipeline with malformed options, or that chooses nothing, before a model is traced.

    Raises:
        UsageError: IRC401, IRC403, IRC407 or IRC413 for an option; IRC405 when no pass chooses a schedule.
    """
    check_options(passes)
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
    same_branches: bool = False,
    observers: Sequence[Observer] = (),
    plans: int = 1,
    dynamic: str | None = None,
) -> Optimized:
    """Captures a module, runs passes over its graph, and fits the schedule that they choose.

    Args:
        model: The module.
        args: Example arguments.
        passes: A pipeline in which one pass chooses a schedule.
        kwargs: Example keyword arguments.
        loss: As in `optimize`.
        same_branches: As in `optimize`.
        observers: Told of each pass.
        plans: As in `optimize`; 1 refuses other calls than the example.
        dynamic: As in `optimize`.

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
    refuse_unplannable(model, flatten((args, kwargs))[0])
    model = unfitted(model)
    refuse_hooks(model)
    device = device_of(model, flatten((args, kwargs))[0])
    have_offloaded = any(isinstance(step, PlanMemory) and step.which for step in passes)
    check_places(places(passes, device), {str(device)}, have_offloaded=have_offloaded)
    passes = measured(passes, device)
    with planning, torch.inference_mode(False):  # under it there is no backward
        original = Original(model)
        with tracing(), reading() as readings:
            captured = capture(original.module, args, kwargs, loss=loss, specialize_branches=same_branches)
        choice = choose(model, captured, passes, observers=observers)
    replan = None
    if plans > 1:
        carries = dynamic is not None
        replan = Replanner.of(choice, passes, loss, same_branches=same_branches, carries=carries)
    fitting = replace(choice.fitting, reads=original.reads(), names=readings.of(original.module))
    tiers = places(passes, device)
    module = fit_planned(model, fitting, choice.optimizers, replan=replan, limit=plans, tiers=tiers)
    return Optimized(module, captured, choice.program, tiers)
