"""Captures one micro-batch of a model, and plans its pipeline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...frontends.torch import Captured, capture
from ...ir import Graph, InputRole, UnsupportedError, reordered
from ...ir.liveness import liveness
from ...passes import Cost, OfferTiers, PassManager, Program
from ...passes.costs.optimizer_costs import OptimizerFactory, step_costs
from ...passes.pipeline import (
    Devices,
    LinearOrder,
    OptimizerSteps,
    PipelineOptions,
    linear_order_of,
    lower_bound_seconds,
    plan_pipeline,
)
from ...torch_support.pytree import flatten
from ..model_source import training_loss
from ..optimizers import DescribedOptimizer
from ..tiers import tier_configs
from ..tiles import tiles_of, whole_or_tiled
from ..time_steps import kernels_or_time_steps
from .request import PipelineRequest
from .results import own_results
from .summary import plan_of
from .trainer import PipelineLoss, Stages

__all__ = [
    "MicroBatch",
    "baseline_bytes",
    "captured_micro_batch",
    "devices_of",
    "optimizer_steps_of",
    "plan_stages",
]

_LINK_SECONDS = 20e-6
"""The assumed latency of a transfer, in seconds."""


def captured_micro_batch(
    model: nn.Module,
    micro_batch: tuple[Any, ...],
    loss: PipelineLoss | None,
    *,
    stepwise: bool = False,
    time_limit: float = math.inf,
) -> Captured:
    """The training graph of one micro-batch.

    Args:
        model: What is trained.
        micro_batch: Its arguments.
        loss: As in `irc.pipeline`.
        stepwise: As in `capture`.
        time_limit: As there.

    Raises:
        TimeLimitError: As `capture`.
        UnsupportedError: IRC483 for arguments that require a gradient; IRC489 for written arguments and
            results that are parameters; others for what is not supported.
    """
    of_result = training_loss if loss is None else (lambda result: loss(result, *micro_batch))
    leaves, tree = flatten(micro_batch)
    own = [_own(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    captured = capture(
        model,
        pytree.tree_unflatten(own, tree),
        {},
        loss=of_result,
        stepwise=stepwise,
        time_limit=time_limit,
    )
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


def baseline_bytes(captured: Captured, optimizer: OptimizerFactory | None) -> int:
    """The peak of a step on one device that keeps all, without workspaces, and with the optimizer's state.

    Args:
        captured: The training graph of the whole batch.
        optimizer: Makes the optimizer; None if none is counted.
    """
    graph = captured.graph
    state_bytes = 0 if optimizer is None else optimizer_steps_of(graph, optimizer).state_bytes(graph)
    return liveness(Program(graph).baseline, {}).peak_bytes + state_bytes


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a model with what its operations take.

    Args:
        captured: Its training graph.
        program: The same with costs.
        cost: What found them, for the graphs of stages.
        optimizer_steps: What the steps of an optimizer take.
        tiers: Offers the tiers that stages may copy to; None if there are none.
        time_steps: Captures the same with the time steps of LSTM layers in place of kernels; None plans
            kernels alone.
        tiles: The same with its widest layers in tiles, by the number of these; None where nothing can be.
    """

    captured: Captured
    program: Program
    cost: Cost
    optimizer_steps: OptimizerSteps
    tiers: OfferTiers | None = None
    time_steps: Callable[[], MicroBatch] | None = None
    tiles: Mapping[int, Callable[[], MicroBatch | None]] = field(
        default_factory=dict[int, "Callable[[], MicroBatch | None]"]
    )

    @staticmethod
    def measured(
        captured: Captured, request: PipelineRequest, time_steps: Callable[[], Captured] | None = None
    ) -> MicroBatch:
        """Finds what the operations of a captured micro-batch take, the optimizer's steps, and copies.

        Args:
            captured: The training graph.
            request: What is asked of the pipeline.
            time_steps: Captures it with the time steps of LSTM layers in place of kernels.

        Raises:
            UnsupportedError: IRC508 for an optimizer that takes no steps parameter by parameter.
            UsageError: As `PipelineRequest.offered`.
        """
        stage = request.of_a_stage()
        # a write and all that reads the old numbers would have to be in one stage
        stage = stage.without_writes
        prepared = replace(PassManager(stage.preparing).run(Program(captured.graph)), original=None)
        program = stage.cost.run(prepared)
        optimizer = request.optimizer
        steps = OptimizerSteps() if optimizer is None else optimizer_steps_of(program.graph, optimizer)
        again = None if time_steps is None else cache(lambda: MicroBatch.measured(time_steps(), request))
        whole = MicroBatch(captured, program, stage.cost, steps, stage.on(_device(program)).tiers, again)

        def tiled(number: int) -> MicroBatch | None:
            in_tiles = PassManager([*stage.in_tiles(number)]).run(prepared)
            if not in_tiles.tiles:
                return None
            costed = stage.cost.run(replace(in_tiles, original=None))
            return replace(whole, program=costed, time_steps=None)

        return replace(whole, tiles={n: cache(partial(tiled, n)) for n in tiles_of(prepared.graph, stage)})

    @cached_property
    def linear_order(self) -> LinearOrder:
        """Its operations as they may be cut."""
        return linear_order_of(self.program, self.cost.run)

    def plan(self, request: PipelineRequest, time_limit: float) -> Stages:
        """Plans its pipeline: whole, in tiles, and, if nothing fits, with LSTM layers taken apart.

        The bound holds for all of these.

        Args:
            request: What it is asked to be.
            time_limit: Seconds, instead of the request's.

        Raises:
            BudgetError: IRC486.
            TimeLimitError: IRC205.
            UsageError: IRC485 for more stages than operations; as `PipelineRequest`.
        """
        started = time.thread_time()

        def left() -> float:
            return max(time_limit - (time.thread_time() - started), time_limit / 4)

        def tiled(number: int) -> Stages | None:
            in_tiles = self.tiles[number]()
            return None if in_tiles is None else self._comparing(in_tiles._planned(request, left()), request)

        return whole_or_tiled(
            self.tiles,
            lambda: self._whole(request, left),
            tiled,
            step_seconds=lambda stages: stages.plan.step_seconds,
            is_best=lambda stages: stages.plan.gap <= request.gap,
        )

    def _whole(self, request: PipelineRequest, left: Callable[[], float]) -> Stages:
        """Plans it as it is, or with LSTM layers taken apart, in the seconds that are left."""
        time_steps = self.time_steps
        if time_steps is None:
            return self._planned(request, left())
        return kernels_or_time_steps(
            self.captured.graph,
            lambda: self._planned(request, left()),
            lambda: self._comparing(time_steps().plan(request, left()), request),
        )

    def _comparing(self, stages: Stages, request: PipelineRequest) -> Stages:
        """Stages of the same micro-batch with other operations, compared with these."""
        bound_seconds = min(self.bound_seconds(request), stages.plan.bound_seconds)
        plan = replace(stages.plan, bound_seconds=bound_seconds, single_seconds=self._single_seconds(request))
        return replace(stages, plan=plan)

    def bound_seconds(self, request: PipelineRequest) -> float:
        """No plan of a request in which nothing is open takes less for a step."""
        return lower_bound_seconds(
            self.linear_order,
            request.order(),
            devices_of(request),
            self.optimizer_steps.seconds([self.linear_order.graph]),
        )

    def _single_seconds(self, request: PipelineRequest) -> float:
        """Time of a step's operations on one device, each once for each micro-batch."""
        once = self.linear_order.seconds(0, len(self.linear_order.operations))
        return once * request.count_of_micro_batches + self.optimizer_steps.seconds([self.linear_order.graph])

    def _planned(self, request: PipelineRequest, time_limit: float) -> Stages:
        options = PipelineOptions(
            devices_of(request),
            request.strategy,
            request.partition,
            request.strategies(),
            time_limit,
            self.optimizer_steps,
            gap=request.gap,
        )
        order = request.order()
        find = partial(self._costed, parts=order.stages // order.devices)
        planned = plan_pipeline(self.program, order, options, find, self.linear_order)
        names = [device.name for device in request.requested_devices()]
        optimizer = request.optimizer
        reached = reordered(self.program.graph, order.micro_batches)
        named = str(optimizer) if isinstance(optimizer, DescribedOptimizer) else "one of the program's own"
        return Stages(
            planned.schedule,
            tuple(stage.schedule for stage in planned.stages),
            tuple(stage.schedule for stage in planned.last_stages),
            self.captured.signature.deliveries,
            self.captured.constants,
            plan_of(planned, names, None if optimizer is None else named, self.captured.roundings, reached),
            optimizer,
            () if self.tiers is None else tier_configs(self.tiers, _device(self.program)),
        )

    def _costed(self, program: Program, parts: int) -> Program:
        """A stage's program with costs and with its part of the tiers of its device."""
        found = self.cost.run(program)
        if self.tiers is None:
            return found
        offered = self.tiers.run(found)
        shares = (replace(tier, capacity_bytes=tier.capacity_bytes // parts) for tier in offered.tiers)
        return replace(offered, tiers=tuple(shares))


def _device(program: Program) -> torch.device:
    return torch.device(program.graph.storages[0].device)


def optimizer_steps_of(graph: Graph, optimizer: OptimizerFactory) -> OptimizerSteps:
    """Returns the cost of an optimizer's steps for the parameters of a graph.

    Raises:
        UnsupportedError: IRC508 for an optimizer that takes no steps parameter by parameter.
    """
    trained = [i.value for i in graph.inputs if i.role is InputRole.PARAMETER and i.requires_grad]
    costs = step_costs(optimizer, trained)
    return OptimizerSteps({value.storage: cost for value, cost in costs.items()})


def devices_of(request: PipelineRequest) -> Devices:
    """The devices of a request and their links, as partitions know them."""
    asked = request.requested_devices()
    return Devices(
        tuple(device.budget_bytes for device in asked),
        tuple(device.speed for device in asked),
        request.link_bytes_per_second(),
        _LINK_SECONDS,
    )


def plan_stages(
    captured: Captured, request: PipelineRequest, time_steps: Callable[[], Captured] | None = None
) -> Stages:
    """Plans the pipeline of a captured micro-batch.

    Args:
        captured: The micro-batch.
        request: What is asked of the pipeline, with nothing open.
        time_steps: Captures it with the time steps of LSTM layers in place of kernels, if these do not fit;
            None plans kernels alone.

    Raises:
        BudgetError: IRC486.
        TimeLimitError: IRC205.
        UnsupportedError: IRC508 for an optimizer that takes no steps parameter by parameter.
        UsageError: IRC485 for more stages than operations; as `PipelineRequest`.
    """
    started = time.thread_time()
    micro_batch = MicroBatch.measured(captured, request, time_steps)
    left = max(request.time_limit - (time.thread_time() - started), request.time_limit / 4)
    stages = micro_batch.plan(request, left)
    return replace(stages, plan=replace(stages.plan, planning_seconds=time.thread_time() - started))
