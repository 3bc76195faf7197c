"""Parameters whose gradients come from code that Dynamo left to Python."""

# The engine's number of a backward has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ...backends.torch import PendingBackward
from ...ir import UnsupportedError

__all__ = ["EagerParameters", "outside_of_graphs"]


class EagerParameters:
    """Refuses gradients of parameters that no graph of the step has read.

    Code that runs in eager behind the last graph, or in a model of which Dynamo makes no graph, hands no
    graph its results: the gradients of its parameters are what shows it. What Dynamo leaves to Python is
    settled when it compiles, so that the first gradient after that is enough.

    Args:
        measure: Measures a step in which nothing is planned: it is called with the first gradient of a
            parameter in each backward, if no graph was planned since Dynamo compiled, and returns whether it
            is to be called again. Such gradients are not refused then, unless Dynamo gave up compiling.
            None if what runs outside of graphs is not measured.

    Attributes:
        gave_up: Whether Dynamo has given up compiling a frame: calls of it that no graph is for run in eager
            from then on, and every backward in which no graph runs is refused.
    """

    def __init__(self, measure: Callable[[Tensor, str], bool] | None) -> None:
        self._measure = measure
        self.gave_up = False
        self._waiting: weakref.WeakSet[PendingBackward] = weakref.WeakSet()
        self._backward = self._measured_backward = -1
        self._watched = WeakIdKeyDictionary()
        self._read: set[int] = set()

    def watch(self, module: nn.Module) -> None:
        """Refuses the next gradient of each parameter of a module, unless a graph reads it until then."""
        for name, parameter in module.named_parameters():
            can_have_gradient = parameter.requires_grad and not is_lazy(parameter)
            if can_have_gradient and parameter not in self._watched:
                full_name = f"{name} of {type(module).__name__}"
                check = partial(_check, weakref.ref(self), weakref.ref(parameter), full_name)
                self._watched[parameter] = parameter.register_hook(check)

    def check(self, parameter: Tensor, name: str) -> None:
        """Refuses the gradient of a parameter that no graph has read; lets go of it, unless Dynamo gave up.

        Raises:
            UnsupportedError: IRC542, IRC545.
        """
        is_read = id(parameter) in self._read
        if self.gave_up:
            if not ((self._measure is not None or is_read) and self._has_graph()):
                raise given_up(name)
            return
        if self._measure is not None:
            self._measure_once(self._measure, parameter, name)
            return
        handle = self._watched.pop(parameter, None)
        if handle is None:
            return
        handle.remove()
        if not is_read:
            self.let_go()
            raise outside_of_graphs(f"the gradient of parameter {name} comes from what")

    def _measure_once(self, measure: Callable[[Tensor, str], bool], parameter: Tensor, name: str) -> None:
        """Calls `measure` with the first gradient of a backward."""
        backward = torch._C._current_graph_task_id()
        if backward != self._measured_backward:
            self._measured_backward = backward
            if not measure(parameter, name):
                self.let_go()

    def follow(self, run: PendingBackward) -> None:
        """Takes down that a graph has run, whose backward is to come."""
        self._waiting.add(run)
        run.call_around(self._note_backward, lambda: None)

    def _note_backward(self) -> None:
        self._backward = torch._C._current_graph_task_id()

    def _has_graph(self) -> bool:
        """Whether a graph's backward is part of the backward that runs now, or waits."""
        is_here = self._backward == torch._C._current_graph_task_id()
        return is_here or any(run.is_pending for run in self._waiting)

    def let_go(self) -> None:
        """Refuses nothing more: the step ends with an error, or has a graph."""
        if self.gave_up:
            return
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    def begin_step(self) -> None:
        """Forgets what the graphs of the last step have read."""
        self._read.clear()

    def read(self, inputs: Iterable[Tensor]) -> None:
        """Takes down that a graph reads these tensors."""
        if self._measure is not None:
            self.let_go()
        self._read.update(id(tensor) for tensor in inputs if tensor.is_leaf and tensor.requires_grad)


def _check(
    eager_parameters: weakref.ref[EagerParameters], parameter: weakref.ref[Tensor], name: str, _: Tensor
) -> None:
    watcher, watched = eager_parameters(), parameter()
    if watcher is not None and watched is not None:
        watcher.check(watched, name)


def outside_of_graphs(subject: str) -> UnsupportedError:
    """The refusal of what a step computes outside of its graphs.

    Args:
        subject: The words before "was computed outside".
    """
    return UnsupportedError(
        "IRC542",
        f"{subject} was computed outside of compiled graphs, with autograd: how much memory that takes is "
        "not known, and the budget could not be kept",
        help='let the first steps measure it, with outside="measured" of irc.backend; or say how many bytes '
        "it takes (outside=0 if it is nothing to speak of), or compile what Dynamo left out: "
        "TORCH_LOGS=graph_breaks names it",
    )


def given_up(name: str) -> UnsupportedError:
    """The refusal of a step that has no graph since Dynamo compiled the model too often.

    Args:
        name: The parameter whose gradient came from there, and its module.
    """
    most = torch._dynamo.config.recompile_limit
    return UnsupportedError(
        "IRC545",
        f"Dynamo made no graph of the step from which the gradient of parameter {name} comes (it compiles a "
        f"frame {most} times, and runs it in eager after that): nothing was planned, and the budget could "
        "not be kept",
        help="keep the sizes, or the numbers, that change from step to step to a few, give torch.compile "
        f"dynamic=True, or raise torch._dynamo.config.recompile_limit above {most}; for a counter in an "
        "attribute of a module set torch._dynamo.config.allow_unspec_int_on_nn_module = True; "
        "TORCH_LOGS=recompiles names what changed",
    )
