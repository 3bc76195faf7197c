"""Takes gradients within backward, one by one: adds them to `.grad`, or lets an optimizer apply them."""

# The autograd engine has no public way to its state.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...ir import Delivery, Gradients, IrcError, Origin, UnsupportedError, UsageError
from ...torch_support.optimizer_state import moving_state
from .offload import State
from .program import Program

__all__ = ["OptimizersInBackward", "check_backward", "check_deliveries", "check_parameters", "exclusive"]

GradientSink = Callable[..., None]
"""Takes a gradient: (name, parameter, gradient), and the optimizer's state if that is offloaded to a tier.

If the parameter itself is offloaded, `parameter` is a copy of it on the device."""


class OptimizersInBackward:
    """Takes the gradients of a program's parameters within backward.

    Args:
        optimizers: For gradients that are applied: one optimizer for each parameter, by its name.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        self.pending: weakref.WeakSet[Any] = weakref.WeakSet()
        """The steps (autograd nodes) whose backward has not run yet."""
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return OptimizersInBackward, (self.optimizers,)

    def sink(
        self,
        program: Program,
        inputs: Sequence[Tensor],
        given: frozenset[int],
        written: frozenset[int] = frozenset(),
    ) -> GradientSink:
        """Returns the function that takes the gradients of one backward.

        Args:
            program: The program whose backward runs.
            inputs: Its static inputs, in order.
            given: The outputs that the loss uses. A gradient that comes only from others is dropped, as in
                eager.
            written: The inputs that were written since forward; their copies on the device are older.
        """

        def take(name: str, parameter: Tensor, gradient: Tensor, state: State | None = None) -> None:
            released = program.released[name]
            is_frozen = not inputs[released.index].requires_grad  # since forward: the engine leaves it alone
            if is_frozen or (released.depends and not released.depends & given):
                return
            if program.kind is Gradients.APPLIED:
                if released.index in written and parameter is not inputs[released.index]:
                    parameter.copy_(inputs[released.index].data)
                self._apply(name, parameter, gradient, state)
            else:
                _accumulate(inputs[released.index], gradient)

        return take

    def _apply(self, name: str, parameter: Tensor, gradient: Tensor, state: State | None) -> None:
        """Takes the step. Offloaded tensors then have their new values here, until those are copied back."""
        optimizer = self.optimizers[name]
        held = _held(optimizer)
        if held is not parameter:
            held.data = parameter
        if state is not None and state.tensors:  # an optimizer may ask whether it has any
            state.into(optimizer.state[held])
        held.grad = gradient
        try:
            optimizer.step()
        finally:
            held.grad = None
        if held is not parameter and held.data_ptr() != parameter.data_ptr():  # it has other data
            parameter.copy_(held.data)
            held.data = parameter
        if state is not None:
            state.tensors = moving_state(optimizer, held)


def exclusive(in_backward: OptimizersInBackward | None) -> contextlib.AbstractContextManager[Any]:
    """Keeps other threads from reading or updating parameters that are updated within backward."""
    return (
        in_backward.lock if in_backward is not None and in_backward.optimizers else contextlib.nullcontext()
    )


_accumulating = threading.Lock()


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Adds a gradient that nobody else holds to `.grad`, as the autograd engine does."""
    with _accumulating:  # two threads may be in backward at once
        if parameter.grad is None:
            parameter.grad = gradient.detach()
        else:
            parameter.grad.add_(gradient)


def check_parameters(
    program: Program, tensor_of: Callable[[int], Tensor], in_backward: OptimizersInBackward
) -> None:
    """Refuses parameters for which somebody waits for a gradient that never reaches the autograd engine.

    Args:
        program: The program that releases the gradients.
        tensor_of: Returns the tensor that a static input of the program binds.
        in_backward: The object that takes the gradients.

    Raises:
        UnsupportedError: IRC509 for a parameter with hooks, one that is computed from others, or a step
            within DistributedDataParallel.
        UsageError: IRC507 for a parameter that is not the one that its optimizer was made for, or that is not
            one tensor any more under all the names that it had at planning.
    """
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise _unnoticed("DistributedDataParallel would wait for the gradients")
    for name, released in program.released.items():
        parameter = tensor_of(released.index)
        if not parameter.is_leaf:
            raise _unnoticed(f"parameter {name} is computed from other tensors")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # pyright: ignore[reportAttributeAccessIssue]
            raise _unnoticed(f"parameter {name} has a hook, which would not be called")
        replaced = program.kind is Gradients.APPLIED and _held(in_backward.optimizers[name]) is not parameter
        if replaced or any(tensor_of(index) is not parameter for index in released.tied):
            raise UsageError(
                "IRC507",
                f"parameter {name} is not the one of planning, or shares its memory with another parameter",
                help="call irc.optimize again, or write into the parameter with copy_()",
            )


def check_deliveries(program: Program, deliveries: Iterable[Delivery]) -> None:
    """Refuses a module that returns parameters which are updated within backward.

    Raises:
        UnsupportedError: IRC510.
    """
    if program.kind is not Gradients.APPLIED:
        return
    updated = {k: name for name, at in program.released.items() for k in (at.index, *at.tied)}
    for delivery in deliveries:
        if delivery.origin is Origin.INPUT and delivery.index in updated:
            raise _not_all(
                f"the module returns parameter {updated[delivery.index]}, whose gradient then comes from "
                "outside of it too"
            )


def _held(optimizer: Optimizer) -> nn.Parameter:
    return optimizer.param_groups[0]["params"][0]


def _unnoticed(why: str) -> UnsupportedError:
    return UnsupportedError(
        "IRC509",
        f"gradients are released within backward, but {why}",
        help="plan without accumulate_gradients and optimizer_in_backward",
    )


def check_backward(node: Any, program: Program, inputs: list[Tensor], *, keeps_graph: bool) -> None:
    """Refuses a backward that asks for anything but all gradients once, before any gradient is released.

    Args:
        node: The autograd node that runs.
        program: The program whose backward it runs.
        inputs: The static inputs of that step.
        keeps_graph: Whether the caller retains the graph.

    Raises:
        UnsupportedError: IRC509 as in `check_parameters`; IRC510 for `torch.autograd.grad` and for
            `backward(inputs=...)` without all parameters, and, if gradients are applied, for a retained graph
            and for a second step of the same parameters in one backward.
        IrcError: IRC511 for a parameter that has a gradient already, which its optimizer would not take.
    """
    in_backward: OptimizersInBackward = node.in_backward
    check_parameters(program, inputs.__getitem__, in_backward)
    _check_asked(node, program)
    if program.kind is not Gradients.APPLIED:
        return
    if keeps_graph:
        raise _not_all(
            "retain_graph=True asks for a second backward, through parameters updated by the first"
        )
    for other in in_backward.pending:
        if other is not node and torch._C._will_engine_execute_node(other):
            raise _not_all("the module ran forward twice, and both are part of this backward")
    parameters = {name: inputs[released.index] for name, released in program.released.items()}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            raise IrcError(
                "IRC511",
                f"parameter {name} has a gradient already, and its optimizer applies another within backward",
                help="call zero_grad() before backward; gradients cannot be accumulated over several steps",
            )
    engine: Any = torch.autograd.Variable
    engine._execution_engine.queue_callback(lambda: _check_nothing_else(parameters))


def _check_asked(node: Any, program: Program) -> None:
    """Refuses a backward in which the engine would not accumulate a gradient into each parameter."""
    position = {index: k for k, index in enumerate(program.differentiable)}
    for name, released in program.released.items():
        accumulates = node.next_functions[position[released.index]][0]
        try:
            asked = torch._C._will_engine_execute_node(accumulates)
        except RuntimeError:  # torch.autograd.grad() asks for this very gradient
            asked = False
        if not asked:
            raise _not_all(f"torch.autograd.grad() or backward(inputs=...) does not ask for {name}.grad")


def _check_nothing_else(parameters: Mapping[str, Tensor]) -> None:
    """Refuses, after backward, a gradient that came from outside of the module."""
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            raise _not_all(
                f"parameter {name} has a gradient from outside of the module as well, which its optimizer "
                "did not see (the parameters are updated already)"
            )


def _not_all(why: str) -> UnsupportedError:
    return UnsupportedError(
        "IRC510",
        f"gradients are released within backward, and this backward is another: {why}",
        help="call loss.backward() once for each forward, or plan without accumulate_gradients and "
        "optimizer_in_backward",
    )
