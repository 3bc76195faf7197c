"""The results of the model at the end of a pipeline, its loss, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ir import Delivery
from ...torch_support.autocast import without_autocast
from ..torch.deliver import deliver_leaf
from ..torch.program import Program
from ..torch.step import arriving

__all__ = ["Results"]


@dataclass
class _LiveMicrobatch:
    """The outputs and the result of a micro-batch between its forward and its backward."""

    outputs: list[Tensor]
    value: Any
    loss: Tensor | None = None


class Results:
    """Hands results to the loss, micro-batch by micro-batch, and takes their gradients from it.

    Args:
        program: The program of the last stage.
        deliveries: The recipe for each leaf of the model's result.
        rebuild: Nests the leaves as the model does.
        loss: A function from the model's result, and the number of the micro-batch, to a scalar.
        scale: The weight of each loss in the gradients: one over the number of micro-batches for their mean.
    """

    def __init__(
        self,
        program: Program,
        deliveries: Sequence[Delivery],
        rebuild: Callable[[list[Any]], Any],
        loss: Callable[[Any, int], Tensor],
        scale: float,
    ) -> None:
        self.program = program
        self.deliveries = deliveries
        self.rebuild = rebuild
        self.of_result = loss
        self.scale = scale
        self._live_microbatches: dict[int, _LiveMicrobatch] = {}

    def deliver(self, micro_batch: int, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Makes the model's result of the outputs of a micro-batch."""
        for output, tangent in zip(outputs, self.program.tangents, strict=True):
            if tangent is not None:
                output.requires_grad_()
        leaves = [deliver_leaf(delivery, inputs, tuple(outputs)) for delivery in self.deliveries]
        self._live_microbatches[micro_batch] = _LiveMicrobatch(outputs, self.rebuild(leaves))

    def loss(self, micro_batch: int) -> Tensor:
        """Computes the loss of a micro-batch; returns a copy of it without its history.

        All copies stay until the step ends, the loss itself until its backward: `mse_loss` and others leave a
        scalar in memory of the size of their input.
        """
        live = self._live_microbatches[micro_batch]
        with torch.enable_grad():
            live.loss = self.of_result(live.value, micro_batch)
        live.value = None
        return live.loss.detach().clone()

    def tangents(self, micro_batch: int) -> list[Tensor]:
        """Computes the gradients of a micro-batch's loss by the outputs that have a tangent."""
        live = self._live_microbatches.pop(micro_batch)
        assert live.loss is not None, "the loss comes before backward"
        pairs = zip(live.outputs, self.program.tangents, strict=True)
        wanted = [(output, tangent) for output, tangent in pairs if tangent is not None]
        seed = torch.full_like(live.loss, self.scale)
        outputs = [output for output, _ in wanted]
        with without_autocast():  # as a training loop calls backward() after its autocast
            gradients = torch.autograd.grad(live.loss, outputs, seed, allow_unused=True)
        return [arriving(each, tangent) for each, (_, tangent) in zip(gradients, wanted, strict=True)]

    def give_up(self) -> None:
        """Drops the micro-batches whose backward has not run."""
        self._live_microbatches.clear()
