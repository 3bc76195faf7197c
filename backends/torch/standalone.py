"""A module that is made from a program and its weights, without the code of the original model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...ir import Delivery, Gradients, InputRole, IrcError, Plan, UsageError
from .deliver import deliver
from .live_forwards import LiveForwards
from .offload import TierConfig, Tiers
from .optimizer_hooks import guard_optimizer_calls
from .optimizer_in_backward import OptimizersInBackward, check_deliveries
from .program import Program
from .step import run_step

__all__ = ["StandaloneModule"]


class StandaloneModule(nn.Module):
    """Trains by a program; parameters and buffers have the original's names.

    Args:
        program: The compiled schedule.
        state: A tensor for each parameter and buffer of the program, by name; names of one tensor stay tied.
        deliveries: The recipe for each leaf of the flat result.
        plan: The program's certificate.
        tiers: The configs of the tiers that the program copies to. Offloaded parameters are moved there now.
        optimizer: Makes the optimizer of a list of parameters, for a program that applies gradients. It is
            called for each parameter by itself.

    Attributes:
        irc_optimizers: The optimizers that take their steps within backward, by the names of the parameters.

    Raises:
        TierError: IRC575 or IRC576 for a tier that is not made for the program's tensors, or not given;
            IRC570 to IRC572 and IRC577 when it has no room for the offloaded parameters.
        UnsupportedError: IRC510 for a module that returns parameters that are updated within backward.
        UsageError: IRC508 for a program that applies gradients if `optimizer` is missing.
    """

    def __init__(
        self,
        program: Program,
        state: Mapping[str, Tensor],
        deliveries: tuple[Delivery, ...],
        plan: Plan,
        tiers: Sequence[TierConfig] = (),
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    ) -> None:
        super().__init__()
        if program.kind is Gradients.APPLIED and optimizer is None:
            raise UsageError(
                "IRC508",
                "the program applies gradients by optimizers, and no optimizer is given",
                help="give StandaloneModule(..., optimizer=) what irc.optimize had as optimizer_in_backward=",
            )
        self.program = program
        self.deliveries = deliveries
        self.plan = plan
        self.irc_optimizers: dict[str, Optimizer] = {}
        self.live_forwards = LiveForwards()
        self.tiers = Tiers(tiers)
        self.tiers.check(program.copies)
        self._register(program, state)
        if program.kind is Gradients.APPLIED and optimizer is not None:
            check_deliveries(program, deliveries)
            self.irc_optimizers = {name: optimizer([self.get_parameter(name)]) for name in program.released}
        self.in_backward = OptimizersInBackward(self.irc_optimizers) if program.released else None
        if self.in_backward is not None and self.irc_optimizers:
            guard_optimizer_calls(map(self.get_parameter, self.irc_optimizers), self.in_backward)
        self.tiers.residents(program.copies, self._parameter, self.irc_optimizers)

    def _register(self, program: Program, state: Mapping[str, Tensor]) -> None:
        """Makes the parameters and buffers; names of one tensor get one parameter."""
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
        """Returns the original's result as a flat tuple, or its only tensor.

        Raises:
            IrcError: IRC506 outside of training: the program is only the training step.
        """
        if not self.training or not torch.is_grad_enabled():
            raise IrcError(
                "IRC506",
                "a written program holds only the training step",
                help="load its weights into the original model for evaluation",
            )
        inputs = [self._input(index, tensors) for index in range(len(self.program.statics))]
        outputs = run_step(self.program, inputs, self.in_backward, self.live_forwards, tiers=self.tiers)
        leaves = deliver(self.deliveries, inputs, outputs)
        return leaves[0] if len(leaves) == 1 else tuple(leaves)

    def _parameter(self, index: int) -> nn.Parameter:
        """Returns the parameter that a static input of the program binds."""
        return self.get_parameter(self.program.statics[index].target)

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
