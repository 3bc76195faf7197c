"""A module made from a program and its weights alone, without the code of the original model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...ir import Delivery, Gradients, InputRole, IrcError, Plan, UsageError
from .deliver import deliver
from .in_flight import InFlight
from .program import Program
from .release import Release
from .step import run_step
from .swap import TierPlace, Tiers

__all__ = ["StandaloneModule"]


class StandaloneModule(nn.Module):
    """Trains by a program; parameters and buffers have the original's names.

    Args:
        program: The compiled schedule.
        state: A tensor for each parameter and buffer of the program, by name; names of one and the same
            tensor stay tied.
        deliveries: How the flat result is made.
        plan: The program's certificate.
        tiers: Where the tiers are that the program copies to.

    Raises:
        TierError: IRC575 or IRC576 for a tier that is not made for the program's tensors, or not given.
        UsageError: IRC508 for a program that applies gradients by optimizers.
    """

    def __init__(
        self,
        program: Program,
        state: Mapping[str, Tensor],
        deliveries: tuple[Delivery, ...],
        plan: Plan,
        tiers: Sequence[TierPlace] = (),
    ) -> None:
        super().__init__()
        if program.kind is Gradients.APPLIED:
            raise UsageError(
                "IRC508",
                "the program applies gradients by optimizers, which are not written with it",
                help="use irc.optimize(..., optimizer_in_backward=...) from Python",
            )
        self.program = program
        self.deliveries = deliveries
        self.plan = plan
        self.release = Release({}) if program.released else None
        self.in_flight = InFlight()
        self.tiers = Tiers(tiers)
        self.tiers.check(program.copies)
        parameters: dict[int, nn.Parameter] = {}
        for static in program.statics:
            if static.role in (InputRole.PARAMETER, InputRole.BUFFER):
                path, _, name = static.target.rpartition(".")
                owner = self._owner(path)
                if static.role is InputRole.PARAMETER:
                    tensor = state[static.target]
                    if id(tensor) not in parameters:
                        parameters[id(tensor)] = nn.Parameter(tensor, static.requires_grad)
                    owner.register_parameter(name, parameters[id(tensor)])
                else:
                    owner.register_buffer(name, state[static.target])

    def _owner(self, path: str) -> nn.Module:
        owner: nn.Module = self
        for name in filter(None, path.split(".")):
            child = owner._modules.get(name)  # pyright: ignore[reportPrivateUsage]
            if child is None:
                child = nn.Module()
                owner.add_module(name, child)
            owner = child
        return owner

    def forward(self, *tensors: Tensor) -> Any:
        """The original's result as a flat tuple, or the only tensor of it.

        Raises:
            IrcError: IRC506 outside of training: the folder holds the training step alone.
        """
        if not self.training or not torch.is_grad_enabled():
            raise IrcError(
                "IRC506",
                "a written program holds the training step alone",
                help="load its weights into the original model for evaluation",
            )
        inputs = [self._input(index, tensors) for index in range(len(self.program.statics))]
        outputs = run_step(self.program, inputs, self.release, self.in_flight, tiers=self.tiers)
        leaves = deliver(self.deliveries, inputs, outputs)
        return leaves[0] if len(leaves) == 1 else tuple(leaves)

    def _input(self, index: int, tensors: tuple[Tensor, ...]) -> Tensor:
        static = self.program.statics[index]
        match static.role:
            case InputRole.PARAMETER:
                return self.get_parameter(static.target)
            case InputRole.BUFFER:
                return self.get_buffer(static.target)
            case InputRole.INPUT:
                return tensors[int(static.target)]
            case _:
                return self.program.constants[static.target]
