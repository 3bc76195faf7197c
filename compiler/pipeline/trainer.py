"""Trains the stages of one rank of a planned pipeline, or all of them in one process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...backends.distributed import PipelineRank, SingleProcessPipeline
from ...backends.torch import TierConfig, Tiers, compile_program
from ...ir import Delivery, InputRole, Schedule, UsageError, print_program
from ...ir.pipeline.plan import PipelinePlan
from ...ir.pipeline.schedule import PipelineSchedule
from ...passes.costs.optimizer_costs import OptimizerFactory, optimizer_of
from ...torch_support.pytree import flatten
from ..model_source import training_loss
from .agreement import first_failure
from .checkpoint import load_checkpoint, load_state, save_checkpoint
from .micro_batches import PlannedCall, check_tensors, micro_batches_of

__all__ = ["PipelineLoss", "PipelineTrainer", "Stages", "state_of"]

PipelineLoss = Callable[..., Tensor]
"""A function from the model's result, and the arguments of a micro-batch, to a scalar."""


@dataclass(frozen=True)
class Stages:
    """A planned pipeline as it runs, whatever model it came from.

    Args:
        order: In which order each device works.
        schedules: Of the stages.
        last_schedules: Of the stages for the last micro-batch, if they differ; else none.
        deliveries: How the leaves of the model's result are made.
        constants: Tensors that the model's code creates from nothing.
        plan: The certificate.
        optimizer: Makes the optimizer that the plan counts; None if it counts none.
        tier_configs: The configurations of the tiers that stages copy to.
    """

    order: PipelineSchedule
    schedules: tuple[Schedule, ...]
    last_schedules: tuple[Schedule, ...]
    deliveries: tuple[Delivery, ...]
    constants: Mapping[str, Tensor]
    plan: PipelinePlan
    optimizer: OptimizerFactory | None = None
    tier_configs: tuple[TierConfig, ...] = ()

    def texts(self) -> list[str]:
        """Plan, order and schedules as texts."""
        schedules = map(print_program, self.schedules + self.last_schedules)
        return [json.dumps(self.plan.to_json()), str(self.order), *schedules]


class PipelineTrainer:
    """The stages of one rank of a pipeline, or all of them in one process, ready to train.

    Args:
        stages: What runs.
        state: The model's parameters and buffers by name.
        rebuild: Nests the leaves of the model's result as the model does.
        loss: From the result, and the arguments of a micro-batch; None takes the result if it is a scalar,
            else the mean of its squares.
        device: Of this rank.
        group: The ranks, one for each device of the plan; None for all ranks. In a process that belongs to
            no group all stages run here.
        call: How the model was called at planning; None if that is not known.
        saved: The names in the model's `state_dict`; None for all.

    Raises:
        UsageError: IRC488 for another number of ranks than devices, or processes that do not know each other.
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
        self.group = group
        self.of_result = loss
        self._batches: list[tuple[Any, ...]] = []
        self.programs, last_programs = (
            [compile_program(schedule, stages.constants) for schedule in schedules]
            for schedules in (stages.schedules, stages.last_schedules)
        )
        tiers = Tiers(stages.tier_configs)
        for program in (*self.programs, *last_programs):
            tiers.check(program.copies)
        devices = stages.plan.devices
        self.is_alone = not dist.is_initialized()
        if self.is_alone and (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise UsageError(
                "IRC488",
                f"{processes} processes were started without a process group: each would run all stages",
                help="call torch.distributed.init_process_group() before irc.pipeline",
            )
        self._own: Sequence[int] = range(stages.order.stages)
        if self.is_alone:
            self.rank: SingleProcessPipeline | PipelineRank = SingleProcessPipeline(
                self.programs,
                stages.plan.micro_batches,
                state,
                last_programs=last_programs,
                tiers=tiers,
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
            last_programs=last_programs,
            tiers=tiers,
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
            UsageError: IRC487 for a batch that does not divide, or is of another size or type than planned,
                on any rank; IRC490 for another call than the planned one; IRC491 if a step has failed
                before on some rank. No rank has begun its step then.
        """
        refusal: UsageError | None = None
        batches: list[tuple[Any, ...]] = []
        try:
            batches = self._checked(args)
        except UsageError as error:
            refusal = error
        if isinstance(self.rank, PipelineRank) and not self.rank.has_failed:
            failure = first_failure("" if refusal is None else refusal.message, self.group)
            if refusal is None and failure:
                refusal = UsageError(
                    "IRC487",
                    f"another rank refuses its step: {failure}",
                    help="call step on every rank with the same batch",
                )
        if refusal is not None:
            raise refusal
        self._batches = batches
        try:
            return self.rank.step(list(map(_tensors, batches)))
        finally:
            self._batches = []  # the caller's next batch takes its place

    def _checked(self, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """The micro-batches of a call.

        Raises:
            UsageError: IRC487 or IRC490.
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
        graphs = [schedule.graph for schedule in self.stages.schedules]
        check_tensors(_tensors(batches[0]), graphs, self._own)
        return batches

    @cached_property
    def optimizer(self) -> Optimizer:
        """The planned optimizer of this rank's parameters; it takes its steps parameter by parameter.

        `foreach` is off even if it was asked for: the budget is that of one parameter's step. On a rank
        that trains nothing it has no parameters, and does nothing.

        Raises:
            UsageError: IRC496 if the pipeline was planned without one; IRC508 when none can be made.
        """
        if self.stages.optimizer is None:
            raise UsageError(
                "IRC496",
                "the pipeline was planned without an optimizer",
                help="plan it with one (optimizer=, --optimizer), or make one of trainer.parameters()",
            )
        parameters = self.parameters()
        if not parameters:
            return torch.optim.SGD([{"params": []}])  # of an empty list torch makes none
        made = optimizer_of(self.stages.optimizer, parameters)
        for group in made.param_groups:
            if "foreach" in group:
                group["foreach"] = False  # lists of parameters would take as much again as all of them
        return made

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
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

    def load_state_dict(self, given: Mapping[str, Tensor]) -> None:
        """Takes values over from a state dict of the whole model, or of a part that has this rank's tensors.

        Raises:
            UsageError: IRC497 when one is missing, of another shape or unknown; nothing is changed then.
        """
        load_state(self.state_dict(), frozenset(self.state), given)

    def save(self, folder: str | Path) -> None:
        """Writes a checkpoint: parameters, buffers and the optimizer's state, by the model's names.

        All ranks call it, between steps. Any number of stages loads it; the format is that of
        `torch.distributed.checkpoint`.

        Raises:
            UsageError: IRC430 when it cannot be written.
        """
        named = {name: parameter for name, parameter in self._named().items() if parameter.requires_grad}
        first = {id(parameter): name for name, parameter in reversed(named.items())}
        trained = {first[id(parameter)]: parameter for parameter in self.parameters()}
        save_checkpoint(Path(folder), self.state_dict(), trained, self._planned_optimizer, self.group)

    def load(self, folder: str | Path) -> None:
        """Takes over what `save` wrote, under whatever cut and schedule; all ranks call it, between steps.

        Raises:
            UsageError: IRC497 when it is not a checkpoint, is damaged, or is one of another model or
                optimizer; nothing is changed then.
        """
        tensors, named = self.state_dict(), self._named()
        optimizer, factory = self._planned_optimizer, self.stages.optimizer
        names = frozenset(self.state)
        load_checkpoint(Path(folder), tensors, named, optimizer, factory, names, self.group)

    @property
    def _planned_optimizer(self) -> Optimizer | None:
        return None if self.stages.optimizer is None else self.optimizer

    def _named(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by all of their names."""
        own = {id(self.state[name]): parameter for name, parameter in self.rank.parameters.items()}
        return {name: own[id(tensor)] for name, tensor in self.state.items() if id(tensor) in own}

    def _loss(self, result: Any, number: int) -> Tensor:
        if self.of_result is None:
            return training_loss(result)
        return self.of_result(result, *self._batches[number])


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [leaf for leaf in flatten(arguments)[0] if isinstance(leaf, Tensor)]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module under all of their names."""
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))
