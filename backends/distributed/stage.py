"""A stage as the schedules of `torch.distributed.pipelining` drive it."""

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
from .p2p import Departures
from .results import Results
from .worker import StageWorker

__all__ = ["Boxes", "Stage"]


@dataclass(frozen=True)
class Boxes:
    """Through what a stage exchanges values; None where it has no neighbour.

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

    It computes by its own program instead of autograd, and exchanges values through its own boxes: memory for
    what it receives is allocated when the schedule asks for it and not for all micro-batches before, a
    value may have any element type, and backward comes in two parts where its program has a pause.
    The schedule decides what runs when.

    Args:
        worker: What computes.
        index: Which stage it is.
        count: How many there are.
        device: Where it runs.
        boxes: Through what it exchanges values.
        departures: What the rank has sent.
        results: The model's results and their gradients, where this is the last stage.
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
        mailboxes: Boxes,
        departures: Departures,
        results: Results | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(nn.Module(), index, count, device, group)
        self.worker = worker
        self.mailboxes = mailboxes
        self.departures = departures
        self.results = results
        self.arguments: Sequence[Sequence[Tensor]] = ()

    # ------------------------------------------------------------------ computing

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> None:
        """Runs forward for a micro-batch."""
        mailbox = Mailbox(fwd_chunk_id, self.mailboxes.activations_in, self.mailboxes.activations_out)
        inputs, outputs = self.worker.forward(fwd_chunk_id, self.arguments[fwd_chunk_id], mailbox)
        if self.results is not None:
            self.results.deliver(fwd_chunk_id, inputs, outputs)
        self.departures.end_action()

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: object = None, full_backward: bool = True, **_: Any
    ) -> None:
        """Runs backward for a micro-batch: all of it, or what the stage before waits for."""
        mailbox = Mailbox(bwd_chunk_id, self.mailboxes.gradients_in, self.mailboxes.gradients_out)
        tangents = [] if self.results is None else self.results.tangents(bwd_chunk_id)
        self.worker.backward(bwd_chunk_id, tangents, mailbox)
        if full_backward and self.worker.program.pauses:
            self.worker.finish(bwd_chunk_id)
        self.departures.end_action()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        """Runs the rest of the backward of a micro-batch."""
        self.worker.finish(bwd_chunk_id)
        self.departures.end_action()

    def perform_reduce_grad(self, *_: Any) -> None:
        """Does nothing: losses are scaled, and the pipeline adds up what stages share."""

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
        """Nothing: the program sends as it goes."""
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Nothing: the program sends as it goes."""
        return []

    def set_local_fwd_input(self, *_: Any) -> None:
        """Nothing: stages of one rank share a locker."""

    def set_local_bwd_input(self, *_: Any) -> None:
        """Nothing: stages of one rank share a locker."""

    def get_local_bwd_output(self, *_: Any) -> tuple[Tensor, ...]:
        """Nothing: stages of one rank share a locker."""
        return ()

    # ------------------------------------------------------------------ what the schedules prepare

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> Any:
        self.args_recv_info = {0: ()}
        return ()

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> Any:
        return ()

    def _create_grad_recv_info(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the boxes receive gradients")

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def clear_runtime_states(self) -> None:
        """Forgets the step before."""
        self.worker.give_up()
        if self.results is not None:
            self.results.give_up()
        self.output_chunks.clear()
