"""Pipelines from a module: what `irc.pipeline` and `irc optimize --stages` plan, and what ranks run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..frontends.torch import Captured, capture
from ..ir import Graph, InputRole, IrcError, UnsupportedError, UsageError, parse_program
from ..ir.nesting import flatten
from ..ir.pipeline import PipelineSchedule
from ..ir.pipeline_plan import PipelinePlan
from ..passes import Cost, Program, SplitConvolutions
from ..passes.optimizer_costs import OptimizerFactory, step_costs
from ..passes.pipeline import Devices, PipelineOptions, PlannedPipeline, Updates, plan_pipeline
from .loading import training_loss
from .optimizers import DescribedOptimizer
from .pipeline_call import PlannedCall, micro_batches_of
from .pipeline_request import PipelineRequest
from .pipeline_results import own_results
from .pipeline_summary import plan_of
from .pipeline_trainer import PipelineLoss, PipelineTrainer, Stages, state_of

__all__ = ["Pipeline", "captured_micro_batch", "pipeline", "plan_stages"]

_LINK_SECONDS = 20e-6
"""What is assumed that a transfer takes beside its bytes."""


@dataclass(frozen=True)
class Pipeline:
    """A model with a planned pipeline; nothing of it runs yet.

    Args:
        model: Whose parameters it trains.
        captured: One micro-batch of the model as a graph.
        stages: What runs.
        loss: As in `irc.pipeline`.
    """

    model: nn.Module
    captured: Captured
    stages: Stages
    loss: PipelineLoss | None = None

    @property
    def plan(self) -> PipelinePlan:
        """The certificate."""
        return self.stages.plan

    def start(
        self, *, device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None
    ) -> PipelineTrainer:
        """This rank's stages with the model's parameters; all of them in a process without a group.

        Args:
            device: Of this rank.
            group: The ranks, one for each device of the plan; None for all ranks.

        Raises:
            UsageError: IRC488 for another number of ranks than devices.
        """
        tree = cast("pytree.TreeSpec", self.captured.signature.out_tree)
        state = state_of(self.model)
        return PipelineTrainer(
            self.stages,
            state,
            rebuild=lambda leaves: pytree.tree_unflatten(leaves, tree),
            loss=self.loss,
            device=device,
            group=group,
            call=PlannedCall(self.model, self.captured),
            saved=[name for name in self.model.state_dict() if name in state],
        )


def pipeline(
    model: nn.Module,
    example_args: tuple[Any, ...] | Tensor,
    budget: int | str | Sequence[int | str],
    *,
    stages: int,
    micro_batches: int,
    schedule: str = "1f1b",
    chunks: int | None = None,
    loss: PipelineLoss | None = None,
    strategy: str = "auto",
    time_limit: float = 60.0,
    profile: bool | str | None = None,
    checkpoint: str | None = None,
    optimizer: OptimizerFactory | None = None,
    link: int | str = "10GB",
) -> Pipeline:
    """Cuts a model into pipeline stages that fit their devices, for the shortest step.

    Under torchrun every rank calls it with the same arguments; the first one plans, and the others take its
    plan over. `start()` then gives the stages of each rank.

    Args:
        model: An `nn.Module`, in train() mode.
        example_args: Arguments of one training step of the whole batch.
        budget: Bytes of each device: `"4GiB"`, or one for each device, with its speed beside the one that
            costs are measured on where that differs: `["16GiB", "8GiB@0.5"]`. It covers parameters,
            gradients, buffers, the batch, activations of all micro-batches in flight, what is sent and
            received, workspaces, and the state and steps of `optimizer`. Different devices take their stages
            in the order that is best (`plan.device_names`, `plan.budget_bytes`).
        stages: How many devices.
        micro_batches: In how many parts a batch goes through.
        schedule: `gpipe`, `1f1b`, `interleaved`, `zb-h1`, `zbv` or `dualpipev`.
        chunks: Stages of each device, for `interleaved` (2).
        loss: A function from the model's result, and the arguments of a micro-batch, to a scalar: called as
            `loss(result, *args)`. Without it the result is the loss, where it is a scalar, else the mean of
            its squares.
        strategy: As in `irc.optimize`.
        time_limit: Seconds for planning.
        profile: As in `irc.optimize`.
        checkpoint: Instead of a plan for each stage: `always` computes all of a stage's forward again,
            `except_last` does so but for the last micro-batch, `never` keeps all.
        optimizer: Makes the optimizer of a list of parameters, such as
            `lambda params: torch.optim.AdamW(params, lr=1e-3)`: the budget covers its state and its steps,
            and `trainer.optimizer` is it.
        link: Bytes that go from one device to the next in a second.

    Raises:
        BudgetError: IRC486 when no partition was found that fits.
        UnsupportedError: The model uses what is not supported.
        UsageError: An argument is malformed.
    """
    arguments = (example_args,) if isinstance(example_args, Tensor) else tuple(example_args)
    request = PipelineRequest(
        stages,
        micro_batches,
        budget,
        schedule,
        chunks,
        strategy,
        time_limit,
        profile,
        checkpoint,
        optimizer,
        link,
    )
    request.check()
    captured = captured_micro_batch(model, micro_batches_of(arguments, micro_batches)[0], loss)
    if dist.is_initialized() and dist.get_world_size() > 1:
        return Pipeline(model, captured, _agreed(captured, request), loss)
    return Pipeline(model, captured, plan_stages(captured, request), loss)


def captured_micro_batch(
    model: nn.Module, micro_batch: tuple[Any, ...], loss: PipelineLoss | None
) -> Captured:
    """The training graph of one micro-batch.

    Raises:
        UnsupportedError: IRC483 for arguments that require a gradient; IRC489 for written arguments and
            results that are parameters; others for what is not supported.
    """
    of_result = training_loss if loss is None else (lambda result: loss(result, *micro_batch))
    leaves, tree = flatten(micro_batch)
    own = [_own(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    captured = capture(model, pytree.tree_unflatten(own, tree), {}, loss=of_result)
    for entry in captured.graph.inputs:
        if entry.role is InputRole.INPUT and entry.requires_grad:
            raise UnsupportedError(
                "IRC483",
                f"argument {entry.target} requires a gradient, which a pipeline does not give back",
                help="detach the argument, or make it a parameter of the model",
            )
    return own_results(captured)


def _own(tensor: Tensor) -> Tensor:
    """A copy of a part of a batch, which would hold all of it: a plan counts what is held."""
    if tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def plan_stages(captured: Captured, request: PipelineRequest) -> Stages:
    """Plans the pipeline of a captured micro-batch.

    Raises:
        BudgetError: IRC486.
        UnsupportedError: IRC508 for an optimizer that takes no steps parameter by parameter.
        UsageError: IRC485 for more stages than operations; as `PipelineRequest`.
    """
    started = time.monotonic()
    planned = _planned(captured, request, started)
    names = [device.name for device in request.requested_devices()]
    optimizer = request.optimizer
    named = str(optimizer) if isinstance(optimizer, DescribedOptimizer) else "one of the program's own"
    plan = plan_of(planned, names, None if optimizer is None else named)
    return Stages(
        planned.schedule,
        tuple(stage.schedule for stage in planned.stages),
        tuple(stage.schedule for stage in planned.last_stages),
        captured.signature.deliveries,
        captured.constants,
        replace(plan, planning_seconds=time.monotonic() - started),
        optimizer,
    )


def _planned(captured: Captured, request: PipelineRequest, started: float) -> PlannedPipeline:
    profile = request.profile
    if isinstance(profile, str):
        split, cost = SplitConvolutions(transpose=profile == "cpu"), Cost(profile=profile)
    else:
        cost = Cost(profile="cpu") if profile is False else Cost(repeats=8 if profile else 3)
        split = SplitConvolutions()
    program = cost.run(replace(split.run(Program(captured.graph)), original=None))
    updates = Updates() if request.optimizer is None else _updates(program.graph, request.optimizer)
    left = max(request.time_limit - (time.monotonic() - started), request.time_limit / 4)
    asked = request.requested_devices()
    devices = Devices(
        tuple(device.budget_bytes for device in asked),
        tuple(device.speed for device in asked),
        request.link_bytes_per_second(),
        _LINK_SECONDS,
    )
    options = PipelineOptions(devices, request.strategy, request.strategies(), left, updates)
    return plan_pipeline(program, request.order(), options, cost.run)


def _updates(graph: Graph, optimizer: OptimizerFactory) -> Updates:
    """What the steps of an optimizer take for the parameters of a graph."""
    trained = [i.value for i in graph.inputs if i.role is InputRole.PARAMETER and i.requires_grad]
    costs = step_costs(optimizer, trained)
    return Updates({value.storage: cost for value, cost in costs.items()})


def _agreed(captured: Captured, request: PipelineRequest) -> Stages:
    """The plan of the first rank, on all of them: plans may differ, as they depend on measured times."""
    said: list[Any] = [None]
    failure: IrcError | None = None
    if dist.get_rank() == 0:
        try:
            said = [plan_stages(captured, request).texts()]
        except IrcError as error:
            failure, said = error, [str(error)]
    dist.broadcast_object_list(said)
    if failure is not None:
        raise failure
    if isinstance(said[0], str):
        raise UsageError("IRC484", f"planning failed on the first rank: {said[0]}")
    plan, order_text, *texts = cast("list[str]", said[0])
    order = PipelineSchedule.parse(order_text)
    schedules = tuple(map(parse_program, texts))
    return Stages(
        order,
        schedules[: order.stages],
        schedules[order.stages :],
        captured.signature.deliveries,
        captured.constants,
        PipelinePlan.from_json(json.loads(plan)),
        request.optimizer,
    )
