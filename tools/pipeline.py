"""Pipelines from a module: what `irc.pipeline` and `irc optimize --stages` plan, and what ranks run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..backends.distributed import PipelineAlone, PipelineRank
from ..backends.torch import compile_program
from ..frontends.torch import Captured, capture
from ..ir import (
    Delivery,
    InputRole,
    IrcError,
    Schedule,
    UnsupportedError,
    UsageError,
    parse_budget,
    parse_program,
    print_program,
)
from ..ir.nesting import flatten
from ..ir.pipeline import PipelineSchedule
from ..ir.pipeline_plan import PipelinePlan
from ..passes import Cost, Program, SplitConvolutions
from ..passes.pipeline import Devices, PipelineOptions, PlannedPipeline, pipeline_schedule, plan_pipeline
from .loading import training_loss
from .pipeline_call import PlannedCall, check_tensors
from .pipeline_results import own_results
from .pipeline_summary import plan_of

__all__ = [
    "Pipeline",
    "PipelineLoss",
    "PipelineRequest",
    "PipelineTrainer",
    "Stages",
    "captured_micro_batch",
    "micro_batches_of",
    "pipeline",
    "plan_stages",
    "state_of",
]

PipelineLoss = Callable[..., Tensor]
"""A function from the model's result, and the arguments of a micro-batch, to a scalar."""

_LINK_BYTES_PER_SECOND = 10e9
_LINK_SECONDS = 20e-6
"""What is assumed of the link between two devices."""


@dataclass(frozen=True)
class PipelineRequest:
    """What a pipeline is asked to be.

    Args:
        devices: How many devices it runs on.
        micro_batches: In how many parts a batch goes through it.
        budget: Bytes of each device, as `"4GiB"`; one for all, or one for each.
        schedule: `gpipe`, `1f1b`, `interleaved`, `zb-h1`, `zbv` or `dualpipev`.
        chunks: Stages of each device, for `interleaved`.
        strategy: What stages compute again, as in `irc.optimize`.
        time_limit: Seconds for planning.
        profile: As in `irc.optimize`.
    """

    devices: int
    micro_batches: int
    budget: int | str | Sequence[int | str]
    schedule: str = "1f1b"
    chunks: int | None = None
    strategy: str = "auto"
    time_limit: float = 60.0
    profile: bool | str | None = None

    def order(self) -> PipelineSchedule:
        """The order of work.

        Raises:
            UsageError: IRC467 or IRC468.
        """
        return pipeline_schedule(self.schedule, self.devices, self.micro_batches, self.chunks)

    def budgets_bytes(self) -> tuple[int, ...]:
        """The budget of each device.

        Raises:
            UsageError: IRC401 for what is no number of bytes; IRC482 for another number of budgets than
                devices, or a part of something.
        """
        given = self.budget
        texts = [given] * self.devices if isinstance(given, int | str) else list(given)
        if len(texts) != self.devices:
            raise UsageError(
                "IRC482",
                f"{len(texts)} budgets for {self.devices} devices",
                help="give one budget for all devices, or one for each",
            )
        for text in texts:
            if isinstance(text, str) and text.strip().endswith("%"):
                raise UsageError(
                    "IRC482",
                    f"the budget of a device is {text}: a part of what, is not clear where there are several",
                    help="give bytes, as 4GiB",
                )
        return tuple(parse_budget(text, 0) for text in texts)


@dataclass(frozen=True)
class Stages:
    """A planned pipeline as it runs, whatever model it came from.

    Args:
        order: In which order each device works.
        schedules: Of the stages.
        deliveries: How the leaves of the model's result are made.
        constants: Tensors that the model's code creates from nothing.
        plan: The certificate.
    """

    order: PipelineSchedule
    schedules: tuple[Schedule, ...]
    deliveries: tuple[Delivery, ...]
    constants: Mapping[str, Tensor]
    plan: PipelinePlan

    def texts(self) -> list[str]:
        """Plan, order and schedules as texts."""
        return [json.dumps(self.plan.to_json()), str(self.order), *map(print_program, self.schedules)]


class PipelineTrainer:
    """The stages of one rank of a pipeline, or all of them in one process, ready to train.

    Args:
        stages: What runs.
        state: The model's parameters and buffers by name.
        rebuild: Nests the leaves of the model's result as the model does.
        loss: From the result, and the arguments of a micro-batch; None takes the result where it is a scalar,
            else the mean of its squares.
        device: Of this rank.
        group: The ranks, one for each device of the plan; None for all ranks. In a process that belongs to
            no group all stages run here.
        call: How the model was called at planning; None where that is not known.
        saved: The names in the model's `state_dict`; None for all.

    Raises:
        UsageError: IRC488 for another number of ranks than devices.
    """

    def __init__(
        self,
        stages: Stages,
        state: Mapping[str, Tensor],
        *,
        rebuild: Callable[[list[Any]], Any],
        loss: PipelineLoss | None = None,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        call: PlannedCall | None = None,
        saved: Sequence[str] | None = None,
    ) -> None:
        self.stages = stages
        self.state = state
        self.saved = saved
        self.call = call
        self.of_result = loss
        self._batches: list[tuple[Any, ...]] = []
        self.programs = [compile_program(schedule, stages.constants) for schedule in stages.schedules]
        devices = stages.plan.devices
        self.is_alone = not dist.is_initialized()
        self._own: Sequence[int] = range(stages.order.stages)
        if self.is_alone:
            self.rank: PipelineAlone | PipelineRank = PipelineAlone(
                self.programs,
                stages.plan.micro_batches,
                state,
                deliveries=stages.deliveries,
                rebuild=rebuild,
                loss=self._loss,
            )
            return
        if (ranks := dist.get_world_size(group)) != devices:
            raise UsageError(
                "IRC488",
                f"the pipeline is planned for {devices} devices, and {ranks} processes run it",
                help=f"start it with torchrun --nproc_per_node={devices}, or in one process without torchrun",
            )
        self._own = stages.order.stages_on(dist.get_rank(group))
        graphs = [schedule.graph for schedule in stages.schedules]
        self.rank = PipelineRank(
            stages.order,
            self.programs,
            graphs,
            state,
            deliveries=stages.deliveries,
            rebuild=rebuild,
            loss=self._loss,
            device=torch.device(device),
            group=group,
        )

    def step(self, *args: Any) -> list[float]:
        """One training step: the gradients of the mean loss of all micro-batches are added to `.grad`.

        Args:
            args: The model's arguments for the whole batch, alike on every rank.

        Returns:
            The loss of each micro-batch, on the rank of the last stage; nothing on the others.

        Raises:
            UsageError: IRC487 for a batch that does not divide, or is of another size or type than planned;
                IRC490 for another call than the planned one; IRC491 where a step has failed before on some
                rank.
        """
        if not torch.is_grad_enabled():
            raise UsageError(
                "IRC490",
                "a step is called without gradients enabled",
                help="call it outside of torch.no_grad() and inference_mode()",
            )
        batches = micro_batches_of(args, self.stages.plan.micro_batches)
        if self.call is not None:
            self.call.check(batches[0])
        tensors = [[leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor)] for batch in batches]
        check_tensors(tensors[0], [schedule.graph for schedule in self.stages.schedules], self._own)
        self._batches = batches
        try:
            return self.rank.step(tensors)
        finally:
            self._batches = []  # the caller's next batch takes its place

    def parameters(self) -> list[nn.Parameter]:
        """What this rank trains: the parameters of its stages, each once."""
        found = {id(parameter): parameter for parameter in self.rank.parameters.values()}
        return [parameter for parameter in found.values() if parameter.requires_grad]

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters and buffers of this rank's stages, by all names that the model saves them under.

        The first stage's rank has those that no stage reads, too: all ranks together have the model's.
        """
        own = self.rank.parameters | self.rank.buffers
        if 0 in self._own:
            read = {
                id(self.state[entry.target])
                for program in self.programs
                for entry in program.statics
                if entry.target in self.state and entry.role in (InputRole.PARAMETER, InputRole.BUFFER)
            }
            own |= {name: tensor for name, tensor in self.state.items() if id(tensor) not in read}
        found = {id(tensor): tensor for tensor in own.values()}
        names = own if self.saved is None else self.saved
        kept = {name: found.get(id(self.state[name])) for name in names}
        return {name: tensor.detach() for name, tensor in kept.items() if tensor is not None}

    def _loss(self, result: Any, number: int) -> Tensor:
        if self.of_result is None:
            return training_loss(result)
        return self.of_result(result, *self._batches[number])


def micro_batches_of(args: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
    """The arguments of each micro-batch: tensors with the batch as their first dimension are split.

    Args:
        args: Of a whole batch. The first dimension of the first tensor is the batch; other arguments are the
            same for all micro-batches.
        count: How many micro-batches.

    Raises:
        UsageError: IRC487 when the batch does not divide, or there is none.
    """
    leaves, tree = flatten(tuple(args))
    sizes = (leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
    batch = next(sizes, None)
    if not batch or batch % count:
        raise UsageError(
            "IRC487",
            f"a batch of {batch or 'no size'} does not divide into {count} micro-batches",
            help="give a batch that is a multiple of the number of micro-batches (drop_last=True of a "
            "DataLoader)",
        )
    size = batch // count
    parts: list[Sequence[Any]] = [
        leaf.split(size)
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch
        else (leaf,) * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([part[k] for part in parts], tree) for k in range(count)]


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


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module under all of their names."""
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


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
) -> Pipeline:
    """Cuts a model into pipeline stages that fit their devices, for the shortest step.

    Under torchrun every rank calls it with the same arguments; the first one plans, and the others take its
    plan over. `start()` then gives the stages of each rank.

    Args:
        model: An `nn.Module`, in train() mode.
        example_args: Arguments of one training step of the whole batch.
        budget: Bytes of each device: `"4GiB"`, or one for each device. It covers parameters, gradients,
            buffers, the batch, activations of all micro-batches in flight, what is sent and received, and
            workspaces.
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

    Raises:
        BudgetError: IRC486 when no partition was found that fits.
        UnsupportedError: The model uses what is not supported.
        UsageError: An argument is malformed.
    """
    arguments = (example_args,) if isinstance(example_args, Tensor) else tuple(example_args)
    request = PipelineRequest(stages, micro_batches, budget, schedule, chunks, strategy, time_limit, profile)
    request.order()
    request.budgets_bytes()
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
        UsageError: IRC485 for more stages than operations; as `PipelineRequest`.
    """
    started = time.monotonic()
    order, budgets = request.order(), request.budgets_bytes()
    planned = _planned(captured, request, order, budgets, started)
    return Stages(
        order,
        tuple(stage.schedule for stage in planned.stages),
        captured.signature.deliveries,
        captured.constants,
        replace(plan_of(planned, budgets), planning_seconds=time.monotonic() - started),
    )


def _planned(
    captured: Captured,
    request: PipelineRequest,
    order: PipelineSchedule,
    budgets: tuple[int, ...],
    started: float,
) -> PlannedPipeline:
    profile = request.profile
    if isinstance(profile, str):
        split, cost = SplitConvolutions(transpose=profile == "cpu"), Cost(profile=profile)
    else:
        cost = Cost(profile="cpu") if profile is False else Cost(repeats=8 if profile else 3)
        split = SplitConvolutions()
    program = cost.run(replace(split.run(Program(captured.graph)), original=None))
    left = max(request.time_limit - (time.monotonic() - started), request.time_limit / 4)
    devices = Devices(budgets, (1.0,) * request.devices, _LINK_BYTES_PER_SECOND, _LINK_SECONDS)
    return plan_pipeline(program, order, PipelineOptions(devices, request.strategy, left), cost.run)


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
    plan, order, *schedules = cast("list[str]", said[0])
    return Stages(
        PipelineSchedule.parse(order),
        tuple(map(parse_program, schedules)),
        captured.signature.deliveries,
        captured.constants,
        PipelinePlan.from_json(json.loads(plan)),
    )
