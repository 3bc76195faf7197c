"""Pipelines from a module: what `irc.pipeline` and `irc optimize --stages` plan, and what ranks run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...backends.distributed import reaching
from ...frontends.torch import Captured
from ...ir import IrcError, UsageError, parse_program
from ...ir.pipeline.plan import PipelinePlan
from ...ir.pipeline.schedule import PipelineSchedule
from ...passes.costs.optimizer_costs import OptimizerFactory
from ...passes.remat.choice import GAP
from ..request import MEASURED, renamed_costs
from ..time_steps import has_kernels, seconds_to_capture
from .auto import Capture, Considered, choose
from .micro_batches import PlannedCall, batch_of, micro_batches_of
from .plan import baseline_bytes, captured_micro_batch, plan_stages
from .request import AUTO, PipelineRequest
from .trainer import PipelineLoss, PipelineTrainer, Stages, state_of

__all__ = ["Pipeline", "compile_pipeline", "pipeline"]


@dataclass(frozen=True)
class Pipeline:
    """A model with a planned pipeline; nothing of it runs yet.

    Args:
        model: Whose parameters it trains.
        captured: One micro-batch of the model as a graph.
        stages: What runs.
        loss: As in `irc.pipeline`.
        considered: What `auto` looked at; nothing if all was given.
    """

    model: nn.Module
    captured: Captured
    stages: Stages
    loss: PipelineLoss | None = None
    considered: tuple[Considered, ...] = ()

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
    stages: int | str,
    micro_batches: int | str = AUTO,
    schedule: str = "1f1b",
    chunks: int | None = None,
    loss: PipelineLoss | None = None,
    strategy: str = "auto",
    time_limit: float = 60.0,
    costs: str = MEASURED,
    checkpoint: str | None = None,
    optimizer: OptimizerFactory | None = None,
    link: int | str = "10GB",
    partition: str = "best",
    swap: str | Sequence[str] = (),
    gap: float = GAP,
    exact: bool | str = True,
    profile: bool | str | None = None,
) -> Pipeline:
    """Cuts a model into pipeline stages that fit their devices, for the shortest step.

    Under torchrun every rank calls it with the same arguments; the first one plans, and the others take its
    plan over. `start()` then gives the stages of each rank.

    Args:
        model: An `nn.Module`, in train() mode.
        example_args: Arguments of one training step of the whole batch.
        budget: Bytes of each device: `"4GiB"`, or one for each device, with its speed beside the one that
            costs are measured on if that differs: `["16GiB", "8GiB@0.5"]`. It covers parameters,
            gradients, buffers, the batch, activations of all micro-batches in flight, what is sent and
            received, workspaces, and the state and steps of `optimizer`. `"90%"` is of a device's equal share
            in the peak of the whole batch on one device, which keeps all. Different devices take their stages
            in the order that is best (`plan.device_names`, `plan.budget_bytes`).
        stages: How many devices; `auto` takes as many of those in `budget` as give the shortest step, or all
            ranks under torchrun.
        micro_batches: In how many parts a batch goes through; `auto` takes the best of those that divide it.
        schedule: `gpipe`, `1f1b`, `interleaved`, `zb-h1`, `zbv` or `dualpipev`; `auto` takes the best.
        chunks: Stages of each device, for `interleaved` (2).
        loss: A function from the model's result, and the arguments of a micro-batch, to a scalar: called as
            `loss(result, *args)`. Without it the result is the loss, if it is a scalar, else the mean of
            its squares.
        strategy: As in `irc.optimize`.
        time_limit: Seconds for planning.
        costs: As in `irc.optimize`.
        checkpoint: Instead of a plan for each stage: `always` computes all of a stage's forward again,
            `except_last` does so but for the last micro-batch, `never` keeps all.
        optimizer: Makes the optimizer of a list of parameters, such as
            `lambda params: torch.optim.AdamW(params, lr=1e-3)`: the budget covers its state and its steps,
            and `trainer.optimizer` is it.
        link: Bytes that go from one device to the next in a second.
        partition: Where the model is cut: `best`, or for comparison as many places in each stage (`uniform`),
            torchgpipe's balance (`time`, `size`) or PipeDream's (`pipedream`).
        swap: Tiers that each device's stages may copy to, as in `irc.optimize`: `"host:64GiB"`.
        gap: As in `irc.optimize`, for the plan of each stage.
        exact: As in `irc.optimize`: `"sums"` lets loss heads and wide layers run in tiles of rows.
        profile: The old name of `costs`, until the next version.

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
        renamed_costs(costs, profile),
        checkpoint,
        optimizer,
        link,
        partition,
        swap,
        gap,
        exact,
    )
    request.check()
    return compile_pipeline(lambda count: (model, arguments), request, loss)


def compile_pipeline(
    load: Callable[[int], tuple[nn.Module, tuple[Any, ...]]],
    request: PipelineRequest,
    loss: PipelineLoss | None = None,
) -> Pipeline:
    """Compiles a pipeline as a request asks, or the best of those that it leaves open.

    Args:
        load: The model for a number of micro-batches, with the arguments of a whole batch.
        request: What is asked, checked.
        loss: As in `irc.pipeline`.

    Raises:
        IrcError: As `irc.pipeline`.
    """

    def capture(count: int, *, stepwise: bool = False) -> Captured:
        model, args = load(count)
        limit = seconds_to_capture(request.time_limit) if stepwise else math.inf
        micro_batch = micro_batches_of(args, count)[0]
        return captured_micro_batch(model, micro_batch, loss, stepwise=stepwise, time_limit=limit)

    if request.has_percentages:
        request = request.of_shares(baseline_bytes(capture(1), request.optimizer))
    model, args = load(1 if request.micro_batches == AUTO else request.count_of_micro_batches)
    if dist.is_initialized() and dist.get_world_size() > 1:
        if request.devices == AUTO:
            request = replace(request, devices=dist.get_world_size())
        return _agreed(model, capture, request, batch_of(args), loss)
    if request.is_open:
        choice = choose(capture, request, batch_of(args))
        model, _ = load(choice.request.count_of_micro_batches)
        return Pipeline(model, choice.captured, choice.stages, loss, choice.considered)
    count = request.count_of_micro_batches
    captured = capture(count)
    stages = plan_stages(captured, request, partial(capture, count, stepwise=True))
    return Pipeline(model, captured, stages, loss)


def _agreed(
    model: nn.Module,
    capture: Capture,
    request: PipelineRequest,
    batch: int,
    loss: PipelineLoss | None,
) -> Pipeline:
    """The plan of the first rank, on all of them: plans may differ, as they depend on measured times."""
    said: list[Any] = [None]
    failure: IrcError | None = None
    captured: Captured | None = None if request.is_open else capture(request.count_of_micro_batches)
    considered: tuple[Considered, ...] = ()
    if dist.get_rank() == 0:
        try:
            if captured is None:
                choice = choose(capture, request, batch)
                captured, stages, considered = choice.captured, choice.stages, choice.considered
            else:
                again = partial(capture, request.count_of_micro_batches, stepwise=True)
                stages = plan_stages(captured, request, again)
            said = [(stages.texts(), stages.tier_configs, considered)]
        except IrcError as error:
            failure, said = error, [str(error)]
    with reaching(when="while the first one plans"):
        dist.broadcast_object_list(said)
    if failure is not None:
        raise failure
    if isinstance(said[0], str):
        raise UsageError("IRC484", f"planning failed on the first rank: {said[0]}")
    (plan_text, order_text, *texts), tier_configs, considered = said[0]
    plan = PipelinePlan.from_json(json.loads(plan_text))
    if captured is None:
        captured = capture(plan.micro_batches)
    order = PipelineSchedule.parse(order_text)
    schedules = tuple(map(parse_program, texts))
    if has_kernels(captured.graph) and not any(has_kernels(schedule.graph) for schedule in schedules):
        captured = capture(plan.micro_batches, stepwise=True)
    stages = Stages(
        order,
        schedules[: order.stages],
        schedules[order.stages :],
        captured.signature.deliveries,
        captured.constants,
        plan,
        request.optimizer,
        tier_configs,
    )
    return Pipeline(model, captured, stages, loss, considered)
