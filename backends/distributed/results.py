"""The model's results at the end of a pipeline, its loss, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ir import Delivery
from ..torch.deliver import deliver_leaf
from ..torch.program import Program
from ..torch.step import in_layout

__all__ = ["Results"]


@dataclass
class _Result:
    """What is held of a micro-batch between its forward and its backward."""

    outputs: list[Tensor]
    value: Any
    loss: Tensor | None = None


class Results:
    """Hands results to the loss, micro-batch by micro-batch, and takes their gradients from it.

    Args:
        program: The last stage's.
        deliveries: How each leaf of the model's result is made.
        rebuild: Nests the leaves as the model does.
        loss: A function from the model's result, and the number of the micro-batch, to a scalar.
        scale: What each loss counts in the gradients: one part in the number of micro-batches for their mean.
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
        self._waiting: dict[int, _Result] = {}

    def deliver(self, micro_batch: int, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Takes the outputs of a micro-batch, and makes the model's result of them."""
        for output, tangent in zip(outputs, self.program.tangents, strict=True):
            if tangent is not None:
                output.requires_grad_()
        leaves = [deliver_leaf(delivery, inputs, tuple(outputs)) for delivery in self.deliveries]
        self._waiting[micro_batch] = _Result(outputs, self.rebuild(leaves))

    def loss(self, micro_batch: int) -> Tensor:
        """The loss of a micro-batch, without its history: that stays here until backward."""
        waiting = self._waiting[micro_batch]
        with torch.enable_grad():
            waiting.loss = self.of_result(waiting.value, micro_batch)
        waiting.value = None
        return waiting.loss.detach()

    def tangents(self, micro_batch: int) -> list[Tensor]:
        """The gradients of a micro-batch's loss by the outputs that backward takes one of."""
        waiting = self._waiting.pop(micro_batch)
        assert waiting.loss is not None, "the loss comes before backward"
        pairs = zip(waiting.outputs, self.program.tangents, strict=True)
        wanted = [(output, tangent) for output, tangent in pairs if tangent is not None]
        seed = torch.full_like(waiting.loss, self.scale)
        outputs = [output for output, _ in wanted]
        found = torch.autograd.grad(waiting.loss, outputs, seed, allow_unused=True)
        return [in_layout(gradient, tangent) for gradient, (_, tangent) in zip(found, wanted, strict=True)]

    def give_up(self) -> None:
        """Forgets what waits for its backward."""
        self._waiting.clear()
