"""Runs all stages of a pipeline in one process, one micro-batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...ir import Delivery
from ..torch.offload import Tiers
from ..torch.program import Program
from .mailbox import LocalExchange, Mailbox
from .results import Results
from .worker import StageWorker

__all__ = ["SingleProcessPipeline"]


class SingleProcessPipeline:
    """Runs the stages of a pipeline on one device, each micro-batch forward and backward before the next.

    Args:
        programs: The programs of all stages.
        last_programs: The programs for the last micro-batch; empty if they are the same.
        tiers: The tiers that the programs copy to; None if they copy nothing.
        micro_batches: The number of micro-batches of a step.
        state: The model's parameters and buffers by name.
        deliveries: The recipe for each leaf of the model's result, from the last stage's outputs.
        rebuild: Nests the leaves of the result as the model does.
        loss: A function from the model's result and the number of a micro-batch to a scalar.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        micro_batches: int,
        state: Mapping[str, Tensor],
        *,
        last_programs: Sequence[Program] = (),
        tiers: Tiers | None = None,
        deliveries: Sequence[Delivery],
        rebuild: Callable[[list[Any]], Any],
        loss: Callable[[Any, int], Tensor],
    ) -> None:
        self.micro_batches = micro_batches
        others = [{micro_batches - 1: program} for program in last_programs] or [{} for _ in programs]
        self.workers = [
            StageWorker(program, state, special, tiers)
            for program, special in zip(programs, others, strict=True)
        ]
        self.results = Results(programs[-1], deliveries, rebuild, loss, 1 / micro_batches)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters, by the model's names."""
        return {name: p for worker in self.workers for name, p in worker.parameters.items()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """All buffers, by the model's names."""
        return {name: b for worker in self.workers for name, b in worker.buffers.items()}

    def step(self, arguments: Sequence[Sequence[Tensor]]) -> list[float]:
        """Runs one step: adds the gradients of the mean of all losses to `.grad`.

        Args:
            arguments: The model's tensor arguments of each micro-batch.

        Returns:
            The loss of each micro-batch.
        """
        try:
            return [self._micro_batch(number, given) for number, given in enumerate(arguments)]
        finally:
            self.results.give_up()
            for worker in self.workers:
                worker.give_up()

    def _micro_batch(self, number: int, arguments: Sequence[Tensor]) -> float:
        forth = [LocalExchange() for _ in self.workers[1:]]
        back = [LocalExchange() for _ in self.workers[1:]]
        last = len(self.workers) - 1
        for stage, worker in enumerate(self.workers):
            mailbox = Mailbox(
                number, forth[stage - 1] if stage else None, forth[stage] if stage < last else None
            )
            inputs, outputs = worker.forward(number, arguments, mailbox)
            if stage == last:
                self.results.deliver(number, inputs, outputs)
        loss = self.results.loss(number).item()
        for stage in reversed(range(last + 1)):
            mailbox = Mailbox(
                number, back[stage] if stage < last else None, back[stage - 1] if stage else None
            )
            tangents = self.results.tangents(number) if stage == last else []
            self.workers[stage].backward(number, tangents, mailbox)
            if self.workers[stage].program.pauses:
                self.workers[stage].finish(number)
        return loss
