"""One rank of a pipeline under `torch.distributed`."""

# The schedules' runtime takes an order of actions only through a private function.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from ...ir import Delivery, Graph, Region, UsageError
from ...ir.pipeline.exchange import Expect, send_lag, sent_values, with_expectations
from ...ir.pipeline.schedule import Action, PipelineSchedule
from ..torch.offload import Tiers
from ..torch.program import Program
from .mailbox import LocalExchange
from .p2p import P2PInbox, P2PLink, P2POutbox, PendingSends
from .results import Results
from .shared_parameters import SharedParameters, new_group
from .stage import Stage, StageMailboxes
from .worker import StageWorker

__all__ = ["PipelineRank"]


class PipelineRank:
    """The stages of one rank, and the schedule that drives them together with the other ranks.

    Args:
        schedule: The rank of each stage, and the order in which each rank works.
        programs: The programs of all stages.
        graphs: The graphs of all stages.
        last_programs: The programs of all stages for the last micro-batch; empty if they are the same.
        tiers: The tiers that the programs copy to; None if they copy nothing.
        state: The model's parameters and buffers by name, at least those of this rank's stages.
        deliveries: The recipe for each leaf of the model's result, from the last stage's outputs.
        rebuild: Nests the leaves of the result as the model does.
        loss: A function from the model's result and the number of a micro-batch to a scalar.
        device: The device of this rank.
        group: The ranks of the pipeline, one for each device of the schedule; None for all.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        programs: Sequence[Program],
        graphs: Sequence[Graph],
        state: Mapping[str, Tensor],
        *,
        last_programs: Sequence[Program] = (),
        tiers: Tiers | None = None,
        deliveries: Sequence[Delivery],
        rebuild: Callable[[list[Any]], Any],
        loss: Callable[[Any, int], Tensor],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.schedule = schedule
        self.group = group
        self.has_failed = False
        self.rank = dist.get_rank(group)
        self.device = device
        links = _P2PLinks(schedule, graphs, group)
        local_exchanges = _LocalExchanges()
        self.pending_sends = PendingSends(send_lag(schedule))
        last = schedule.stages - 1
        self.stages: list[Stage] = []
        for index in schedule.stages_on(self.rank):
            others = {schedule.micro_batches - 1: last_programs[index]} if last_programs else {}
            worker = StageWorker(programs[index], state, others, tiers)
            results = None
            if index == last:
                scale = 1 / schedule.micro_batches
                results = Results(programs[index], deliveries, rebuild, loss, scale)
            mailboxes = _mailboxes(schedule, index, links, local_exchanges, device, self.pending_sends)
            self.stages.append(
                Stage(worker, index, last + 1, device, mailboxes, self.pending_sends, results, group)
            )
        self.shared = SharedParameters(schedule, programs, self.parameters, group)
        self.runtime = _PipelineScheduleRuntime(
            self.stages, schedule.micro_batches, loss_fn=self._loss, scale_grads=False
        )
        self.runtime._prepare_schedule_with_comms(
            {rank: [_engine(item) for item in line] for rank, line in enumerate(with_expectations(schedule))},
            format="compute_comms",
        )

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank's stages, by the model's names."""
        return {name: p for stage in self.stages for name, p in stage.worker.parameters.items()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers of this rank's stages, by the model's names."""
        return {name: b for stage in self.stages for name, b in stage.worker.buffers.items()}

    def step(self, arguments: Sequence[Sequence[Tensor]]) -> list[float]:
        """Runs one step of the pipeline: adds the gradients of the mean of all losses to `.grad`.

        Args:
            arguments: The model's tensor arguments of each micro-batch.

        Returns:
            The loss of each micro-batch on the rank of the last stage; an empty list on the others.

        Raises:
            UsageError: IRC491 if a step has failed before.
        """
        if self.has_failed:
            raise UsageError(
                "IRC491",
                "a step has failed before, and the ranks wait for each other at different places",
                help="end all ranks, and start them again",
            )
        for stage in self.stages:
            stage.arguments = arguments
        losses: list[Tensor] = []
        numbers = torch.arange(self.schedule.micro_batches)
        self.has_failed = True  # until the step has ended
        try:
            with self.shared.added_up():
                self.runtime.step(target=numbers, losses=losses, return_outputs=False)
                self.pending_sends.end()
        finally:
            for stage in self.stages:
                stage.arguments = ()
                stage.clear_runtime_states()
        self.has_failed = False
        return [loss.item() for loss in losses]

    def _loss(self, _: Any, number: Tensor) -> Tensor:
        results = self.stages[-1].results
        assert results is not None, "the last stage has the loss"
        return results.loss(int(number))


_ENGINE = {work.value: work for work in _ComputationType}


def _engine(item: Action | Expect) -> _Action:
    """Converts an action to the runtime's."""
    if isinstance(item, Expect):
        work = _ComputationType.RECV_F if item.is_forward else _ComputationType.RECV_B
        return _Action(item.stage, work, item.micro_batch)
    return _Action(item.stage, _ENGINE[item.work.value], item.micro_batch)


# ---------------------------------------------------------------------- neighbours


class _P2PLinks:
    """The links between stages on different ranks. Every rank makes all of them, in the same order."""

    def __init__(
        self, schedule: PipelineSchedule, graphs: Sequence[Graph], group: dist.ProcessGroup | None
    ) -> None:
        self.of: dict[tuple[int, bool], tuple[int, dist.ProcessGroup | None]] = {}
        self.graphs = graphs
        self.schedule = schedule
        self.group = group
        own_groups = dist.get_backend(group) == "nccl"  # which has no tags
        for index in range(schedule.stages - 1):
            ranks = [self.world_rank(index), self.world_rank(index + 1)]
            for is_forward in (True, False):
                tag = 2 * index + is_forward
                own = new_group(sorted(ranks)) if own_groups and ranks[0] != ranks[1] else group
                self.of[index, is_forward] = tag, own

    def world_rank(self, stage: int) -> int:
        rank = self.schedule.device_of[stage]
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def between(self, first: int, *, is_forward: bool, sends: bool) -> P2PLink:
        """Makes one end of the link across the boundary after stage `first`."""
        tag, group = self.of[first, is_forward]
        peer = first + 1 if is_forward == sends else first
        source = self.graphs[first if is_forward else first + 1]
        values = sent_values(source, Region.FORWARD if is_forward else Region.BACKWARD)
        return P2PLink(values, self.world_rank(peer), tag, group)


class _LocalExchanges:
    """The exchanges between stages on this rank."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, bool], LocalExchange] = {}

    def between(self, first: int, *, is_forward: bool) -> LocalExchange:
        return self.of.setdefault((first, is_forward), LocalExchange())


def _mailboxes(
    schedule: PipelineSchedule,
    index: int,
    links: _P2PLinks,
    local_exchanges: _LocalExchanges,
    device: torch.device,
    pending_sends: PendingSends,
) -> StageMailboxes:
    def inbox(first: int, *, is_forward: bool) -> P2PInbox | LocalExchange:
        if schedule.device_of[first] == schedule.device_of[first + 1]:
            return local_exchanges.between(first, is_forward=is_forward)
        return P2PInbox(links.between(first, is_forward=is_forward, sends=False), device)

    def outbox(first: int, *, is_forward: bool) -> P2POutbox | LocalExchange:
        if schedule.device_of[first] == schedule.device_of[first + 1]:
            return local_exchanges.between(first, is_forward=is_forward)
        return P2POutbox(links.between(first, is_forward=is_forward, sends=True), pending_sends)

    has_before, has_after = index > 0, index + 1 < schedule.stages
    return StageMailboxes(
        activations_in=inbox(index - 1, is_forward=True) if has_before else None,
        activations_out=outbox(index, is_forward=True) if has_after else None,
        gradients_in=inbox(index, is_forward=False) if has_after else None,
        gradients_out=outbox(index - 1, is_forward=False) if has_before else None,
    )
