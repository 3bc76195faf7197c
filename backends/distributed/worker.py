"""Runs the program of one pipeline stage, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...ir import Input, InputRole
from ...torch_support.autocast import without_autocast
from ..torch.offload import Session, Tiers
from ..torch.optimizer_in_backward import OptimizersInBackward
from ..torch.program import Program
from .mailbox import Mailbox

__all__ = ["StageWorker"]


@dataclass
class _LiveMicrobatch:
    """A micro-batch whose backward has not ended."""

    inputs: list[Tensor]
    saved: list[Any]
    copies: Session | None
    rest: Generator[None, None, object] | None = None


class StageWorker:
    """Runs the program of a stage; gradients of parameters are added to their `.grad`.

    Args:
        program: The stage's program; it releases its gradients by accumulation.
        state: Parameters and buffers by name; names of one tensor stay tied.
        others: Programs of the same stage for single micro-batches, by their numbers. They keep and recompute
            other values.
        tiers: The tiers that the programs copy to; None if they copy nothing.

    Attributes:
        parameters: The parameters that the stage trains or reads, by name.
        buffers: Its buffers, by name.
    """

    def __init__(
        self,
        program: Program,
        state: Mapping[str, Tensor],
        others: Mapping[int, Program],
        tiers: Tiers | None,
    ) -> None:
        self.program = program
        self.others = others
        self.tiers = tiers or Tiers()
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        made: dict[int, nn.Parameter] = {}
        for entry in program.statics:
            if entry.role is InputRole.PARAMETER:
                tensor = state[entry.target]
                if id(tensor) not in made:
                    is_one = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = tensor if is_one else nn.Parameter(tensor, entry.requires_grad)
                self.parameters[entry.target] = made[id(tensor)]
            elif entry.role is InputRole.BUFFER:
                self.buffers[entry.target] = state[entry.target]
        self._release = OptimizersInBackward({})
        self._live_microbatches: dict[int, _LiveMicrobatch] = {}

    def forward(
        self, micro_batch: int, arguments: Sequence[Tensor], mailbox: Mailbox
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Runs forward for a micro-batch.

        Args:
            micro_batch: The number of the micro-batch.
            arguments: The model's tensor arguments of this micro-batch.
            mailbox: Sends and receives.

        Returns:
            The program's static inputs, and the model's outputs in the last stage.
        """
        inputs = [self._bound(entry, arguments) for entry in self.program.statics]
        program = self._program(micro_batch)
        copies = self.tiers.session(program.copies) if program.copies else None
        more = [mailbox] if program.exchanges else []
        try:
            with torch.no_grad(), without_autocast():
                outputs, saved = program.forward(inputs, *more, *([] if copies is None else [copies]))
        except BaseException:
            if copies is not None:
                copies.close()
            raise
        self._live_microbatches[micro_batch] = _LiveMicrobatch(inputs, saved, copies)
        return inputs, outputs

    def backward(self, micro_batch: int, tangents: Sequence[Tensor], mailbox: Mailbox) -> None:
        """Runs backward for a micro-batch: all of it, or up to its pause.

        Args:
            micro_batch: The number of the micro-batch.
            tangents: The gradients of the outputs that have a tangent, in the last stage.
            mailbox: Sends and receives.
        """
        live = self._live_microbatches[micro_batch]
        program = self._program(micro_batch)
        given = frozenset(k for k, tangent in enumerate(program.tangents) if tangent is not None)
        more: list[Any] = [sum(1 << index for index in given)] if program.is_partial else []
        if program.released:
            more.append(self._release.sink(program, live.inputs, given))
        if program.exchanges:
            more.append(mailbox)
        if live.copies is not None:
            more.append(live.copies)
        with torch.no_grad(), without_autocast():
            running = program.backward(live.inputs, live.saved, list(tangents), *more)
            if program.pauses:
                next(running)
                live.rest = running
            else:
                self._end(micro_batch)

    def finish(self, micro_batch: int) -> None:
        """Runs the rest of a micro-batch's backward, after its pause."""
        rest = self._live_microbatches[micro_batch].rest
        assert rest is not None, "nothing was left"
        with torch.no_grad(), without_autocast():
            for _ in rest:
                raise AssertionError("a backward pauses once")
        self._end(micro_batch)

    def give_up(self) -> None:
        """Drops the micro-batches whose backward has not ended."""
        for micro_batch in list(self._live_microbatches):
            self._end(micro_batch)

    def _end(self, micro_batch: int) -> None:
        """Drops a micro-batch and its copies in tiers."""
        copies = self._live_microbatches.pop(micro_batch).copies
        if copies is not None:
            copies.close()

    def _program(self, micro_batch: int) -> Program:
        return self.others.get(micro_batch, self.program)

    def _bound(self, entry: Input, arguments: Sequence[Tensor]) -> Tensor:
        match entry.role:
            case InputRole.PARAMETER:
                return self.parameters[entry.target]
            case InputRole.BUFFER:
                return self.buffers[entry.target]
            case InputRole.INPUT:
                return arguments[int(entry.target)]
            case _:
                return self.program.constants[entry.target]
