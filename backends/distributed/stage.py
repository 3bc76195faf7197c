"""A stage in the form that the schedules of `torch.distributed.pipelining` drive."""

# The schedules' protocol for stages has no public base class; its arguments differ between releases of torch.
# pyright: reportPrivateUsage=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.stage import _PipelineStageBase

from .mailbox import Inbox, Mailbox, Outbox
from .p2p import PendingSends
from .results import Results
from .worker import StageWorker

__all__ = ["Stage", "StageMailboxes"]


@dataclass(frozen=True)
class StageMailboxes:
    """The inboxes and outboxes of a stage; None for a neighbour that does not exist.

    Args:
        activations_in: From the stage before it.
        activations_out: To the stage after it.
        gradients_in: From the stage after it.
        gradients_out: To the stage before it.
    """

    activations_in: Inbox | None = None
    activations_out: Outbox | None = None
    gradients_in: Inbox | None = None
    gradients_out: Outbox | None = None


class Stage(_PipelineStageBase):
    """One stage of a pipeline, on one rank.

    It computes by its own program instead of autograd, and exchanges values through its own mailboxes: memory
    for received values is allocated when the schedule asks for it and not before for all micro-batches, a
    value may have any element type, and backward has two parts if its program has a pause. The schedule
    decides the order.

    Args:
        worker: The worker that runs its program.
        index: The index of the stage.
        count: The number of stages.
        device: The device of the stage.
        mailboxes: The inboxes and outboxes to the neighbours.
        pending_sends: The values that the rank has sent.
        results: The model's results and their gradients, if this is the last stage.
        group: The ranks of the pipeline.

    Attributes:
        arguments: The model's tensor arguments of each micro-batch of the step.
    """

    def __init__(
        self,
        worker: StageWorker,
        index: int,
        count: int,
        device: torch.device,
        mailboxes: StageMailboxes,
        pending_sends: PendingSends,
        results: Results | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(nn.Module(), index, count, device, group)
        self.worker = worker
        self.mailboxes = mailboxes
        self.pending_sends = pending_sends
        self.results = results
        self.arguments: Sequence[Sequence[Tensor]] = ()

    # ------------------------------------------------------------------ computing

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> None:
        """Runs forward for a micro-batch."""
        mailbox = Mailbox(fwd_chunk_id, self.mailboxes.activations_in, self.mailboxes.activations_out)
        inputs, outputs = self.worker.forward(fwd_chunk_id, self.arguments[fwd_chunk_id], mailbox)
        if self.results is not None:
            self.results.deliver(fwd_chunk_id, inputs, outputs)
        self.pending_sends.end_action()

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: object = None, full_backward: bool = True, **_: Any
    ) -> None:
        """Runs backward for a micro-batch: all of it, or the part that the stage before waits for."""
        mailbox = Mailbox(bwd_chunk_id, self.mailboxes.gradients_in, self.mailboxes.gradients_out)
        tangents = [] if self.results is None else self.results.tangents(bwd_chunk_id)
        self.worker.backward(bwd_chunk_id, tangents, mailbox)
        if full_backward and self.worker.program.pauses:
            self.worker.finish(bwd_chunk_id)
        self.pending_sends.end_action()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        """Runs the rest of the backward of a micro-batch."""
        self.worker.finish(bwd_chunk_id)
        self.pending_sends.end_action()

    def perform_reduce_grad(self, *_: Any) -> None:
        """Does nothing: losses are scaled, and the pipeline adds up the gradients of shared parameters."""

    # ------------------------------------------------------------------ exchanging

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Begins to receive the activations of a micro-batch."""
        if self.mailboxes.activations_in is not None:
            self.mailboxes.activations_in.expect(fwd_chunk_id)
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Begins to receive the gradients of a micro-batch."""
        if self.mailboxes.gradients_in is not None:
            self.mailboxes.gradients_in.expect(bwd_chunk_id)
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns nothing: the program sends as it runs."""
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns nothing: the program sends as it runs."""
        return []

    def set_local_fwd_input(self, *_: Any) -> None:
        """Does nothing: stages of one rank share a `LocalExchange`."""

    def set_local_bwd_input(self, *_: Any) -> None:
        """Does nothing: stages of one rank share a `LocalExchange`."""

    def get_local_bwd_output(self, *_: Any) -> tuple[Tensor, ...]:
        """Returns nothing: stages of one rank share a `LocalExchange`."""
        return ()

    # ------------------------------------------------------------------ preparation by the schedules

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> Any:
        self.args_recv_info = {0: ()}
        return ()

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> Any:
        return ()

    def _create_grad_recv_info(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the mailboxes receive gradients")

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def clear_runtime_states(self) -> None:
        """Drops the state of the step before."""
        self.worker.give_up()
        if self.results is not None:
            self.results.give_up()
        self.output_chunks.clear()
