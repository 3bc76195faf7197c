"""Traces recurrent modules as operations that a plan can hold."""

# The switch for oneDNN has no public interface without side effects.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ....ir import TimeLimitError
from ..source_lines import user_line

__all__ = ["RecurrentLayers"]

_LSTM = 2
"""oneDNN's number for an LSTM."""

_LEAST_SECONDS = 0.02
"""Tracing a time step takes this long, or several times as long."""


class RecurrentLayers(TorchFunctionMode):
    """Traces an LSTM as the kernels that eager runs, and other recurrent layers as their time steps.

    torch's own decomposition of several layers leaves out the dropout between them, so each layer is
    traced by itself.

    Args:
        has_kernels: Whether kernels are traced as such. As time steps an LSTM is slower; a plan can keep
            less of it and run more of it again.
        writes_in_place: Whether gates are written in place, as eager does. A graph cannot hold that.
        time_limit: Seconds. Layers of so many time steps that tracing them would take longer are refused.

    Attributes:
        rounding: The lines that call layers that differ from eager's numbers by rounding, by the function: an
            LSTM's kernel sums in another order than its time steps, and without gradients than in training; a
            GRU's gates, written in place, go through other vectors of the processor if its sequences are
            packed.
    """

    def __init__(
        self, *, has_kernels: bool = True, writes_in_place: bool = False, time_limit: float = math.inf
    ) -> None:
        super().__init__()
        self.has_kernels = has_kernels
        self.writes_in_place = writes_in_place
        self.time_limit = time_limit
        self.rounding: dict[str, set[str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "gru_cell" and not kwargs and self._traces_gates(args[0]):
            return _gru_cell(functional.linear(args[0], args[2], *args[4:5]), args[1], args[3], *args[5:])
        if name not in ("lstm", "gru", "rnn_tanh", "rnn_relu") or kwargs:
            return func(*args, **(kwargs or {}))
        runs_kernel = name == "lstm" and _runs_kernel(args)
        if runs_kernel and self.has_kernels:
            if not torch.is_grad_enabled():
                self._note(name)
            return _by_kernel(*args)
        _check_steps(args, self.time_limit)
        layer = _gru_layer if name == "gru" and not _is_packed(args) and self._traces_gates(args[0]) else func
        if runs_kernel or (name == "gru" and layer is func):
            self._note(name)
        enabled = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            return _in_the_kernels_type(layer, args) if runs_kernel else _layer_by_layer(layer, args)
        finally:
            torch._C._set_mkldnn_enabled(enabled)

    def _note(self, name: str) -> None:
        line = user_line(sys._getframe(2))
        self.rounding.setdefault(name, set()).add(line or "a library")

    def _traces_gates(self, data: Tensor) -> bool:
        return not self.writes_in_place and data.device.type in _ON_HOST


_ON_HOST = ("cpu", "meta")
"""The types of devices where eager composes the time steps of recurrent layers of operations."""


def _is_packed(args: tuple[Any, ...]) -> bool:
    """Whether the sequences of a recurrent layer are packed, which come with other arguments."""
    return not isinstance(args[3], bool)


class _Stack(NamedTuple):
    """The arguments of a stack of recurrent layers whose sequences are not packed; an LSTM has two states."""

    x: Tensor
    states: Any
    weights: list[Tensor]
    has_biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def timed(self, data: Tensor) -> Tensor:
        """Exchanges time and batch, if the batch comes first."""
        return data.transpose(0, 1) if self.batch_first else data

    def weights_of(self, place: int) -> list[Tensor]:
        """The weights of one direction of a layer."""
        count = len(self.weights) // (self.layers * self.directions)
        return self.weights[count * place : count * (place + 1)]

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """The output of a layer, from those of its directions."""
        return torch.cat(outputs, -1) if self.bidirectional else outputs[0]

    def dropped_before(self, layer: int, data: Tensor) -> Tensor:
        """Returns what a layer reads: the output of the layer before it, after dropout."""
        return torch.dropout(data, self.dropout, True) if layer and self.dropout and self.train else data


def _gru_layer(*args: Any) -> tuple[Tensor, Tensor]:
    """The output of one layer of a GRU, and its final states, by the operations of eager in their order."""
    stack = _Stack(*args)
    x = stack.timed(stack.x)
    outputs: list[Tensor] = []
    final: list[Tensor] = []
    for place, state in enumerate(stack.states.unbind(0)):
        w, r, *biases = stack.weights_of(place)
        steps = functional.linear(x, w, *biases[:1]).unbind(0)
        hidden: list[Tensor] = []
        for gates in reversed(steps) if place else steps:
            state = _gru_cell(gates, state, r, *biases[1:])
            hidden.append(state)
        outputs.append(torch.stack(hidden[::-1] if place else hidden))
        final.append(state)
    output = stack.joined(outputs)
    if stack.batch_first:
        output.transpose_(0, 1)  # as eager does: its output is no view, whose writes autograd would copy
    return output, torch.stack(final)


def _gru_cell(gates: Tensor, hidden: Tensor, r: Tensor, bias: Tensor | None = None) -> Tensor:
    """The next state of a GRU, from what the input gives to its gates, with the bits of eager.

    Eager writes the first two gates in place, side by side in a row with the third: its sigmoids go through
    the processor's vectors row by row, and so do these.
    """
    size = hidden.shape[1]
    split = (2 * size, size)
    of_input, new_of_input = gates.split(split, 1)
    of_state, new_of_state = functional.linear(hidden, r, bias).split(split, 1)
    reset, update = (part.sigmoid() for part in (of_state + of_input).split(size, 1))
    new = (new_of_input + new_of_state * reset).tanh()
    return (hidden - new) * update + new


def _check_steps(args: tuple[Any, ...], time_limit: float) -> None:
    """Refuses layers that cannot be traced within a time limit.

    Raises:
        TimeLimitError: IRC205.
    """
    if _is_packed(args):
        steps, layers, bidirectional = args[1].shape[0], args[5], args[8]
    else:
        stack = _Stack(*args)
        steps, layers, bidirectional = stack.timed(stack.x).shape[0], stack.layers, stack.bidirectional
    least = steps * layers * (2 if bidirectional else 1) * _LEAST_SECONDS
    if least > time_limit:
        raise TimeLimitError(
            "IRC205",
            f"a recurrent layer of {steps} time steps takes {least:.0f} s at least to trace, step by step, "
            f"over the time limit of {time_limit:g} s",
            help="train on shorter sequences (truncated backpropagation through time), or raise the time "
            "limit; an LSTM in float32 on the CPU is one operation and has no such limit",
        )


def _runs_kernel(args: tuple[Any, ...]) -> bool:
    """Whether eager runs an LSTM by oneDNN: on the CPU, in batches of one length, not projected."""
    if _is_packed(args) or not torch._C._get_mkldnn_enabled():
        return False
    x, states, weights = args[:3]
    tensors = (x, *states, *weights)
    runs = all(t.device.type == "cpu" for t in tensors) and _has_kernel(_computed_types(tensors))
    projected = states[0].shape[2] != states[1].shape[2]
    return runs and not projected and x.numel() > 0


def _computed_types(tensors: Iterable[Tensor]) -> set[torch.dtype]:
    """The types of numbers in which a kernel on the CPU computes with tensors."""
    if torch.is_autocast_enabled("cpu"):
        return {torch.get_autocast_dtype("cpu")}
    return {tensor.dtype for tensor in tensors}


def _has_kernel(dtypes: set[torch.dtype]) -> bool:
    """Whether oneDNN has an LSTM for these types of numbers, with a backward, on this processor."""
    in_halves = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtypes == {torch.float32} or (dtypes == {torch.bfloat16} and in_halves)


def _by_kernel(*args: Any) -> tuple[Tensor, ...]:
    """Calls oneDNN's LSTM for each layer and direction, as torch does in eager."""
    stack = _Stack(*args)
    x = stack.timed(stack.x).contiguous()
    h, c = (state.contiguous() for state in stack.states)
    flags = (stack.has_biases, stack.bidirectional, stack.batch_first, stack.train)
    numbers = ([], _LSTM, h.shape[2], stack.layers, *flags)
    final: list[tuple[Tensor, Tensor]] = []
    for layer in range(stack.layers):
        x = stack.dropped_before(layer, x)
        outputs: list[Tensor] = []
        for place in range(stack.directions * layer, stack.directions * (layer + 1)):
            own = list(stack.weights_of(place))
            own += [] if stack.has_biases else [torch.zeros_like(weight) for weight in own]
            reverse = place > stack.directions * layer
            y, *after, _ = torch.ops.aten.mkldnn_rnn_layer.default(
                x, *own, h[place], c[place], reverse, *numbers
            )
            outputs.append(y)
            final.append((after[0], after[1]))
        x = stack.joined(outputs)
    return (stack.timed(x), *(torch.stack(parts) for parts in zip(*final, strict=True)))


def _steps_of_eager(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Lets torch trace the operations that eager runs for a time step: its decomposition has more of them.

    A GPU's kernels for a whole layer cannot be traced, so the decomposition stays there.
    """
    return torch._C._DisablePythonDispatcher() if device.type in _ON_HOST else contextlib.nullcontext()


def _in_the_kernels_type(func: Any, args: tuple[Any, ...]) -> Any:
    """Calls `_layer_by_layer` in the type that autocast gives a kernel; it would cast within the steps."""
    x, states, weights, *flags = args
    (dtype,) = _computed_types((x, *states, *weights))
    parts = (each.to(dtype) for each in (x, *states, *weights))
    with torch.autocast("cpu", enabled=False):
        x, h, c, *weights = parts
        return _layer_by_layer(func, (x, (h, c), weights, *flags))


def _layer_by_layer(func: Any, args: tuple[Any, ...]) -> Any:
    """Calls `func` once for each of a stack of recurrent layers, and joins the results.

    Args:
        func: `torch.lstm` or another of its kind.
        args: Those of `_Stack`. Packed sequences are passed on.
    """
    if _is_packed(args):
        return func(*args)
    stack = _Stack(*args)
    x = stack.x
    states = [stack.states] if isinstance(stack.states, Tensor) else list(stack.states)
    final: list[list[Tensor]] = [[] for _ in states]
    for layer in range(stack.layers):
        places = range(stack.directions * layer, stack.directions * (layer + 1))
        own = [state[places.start : places.stop] for state in states]
        one = stack._replace(
            x=stack.dropped_before(layer, x),
            states=own[0] if isinstance(stack.states, Tensor) else tuple(own),
            weights=[weight for place in places for weight in stack.weights_of(place)],
            layers=1,
            dropout=0.0,
        )
        with _steps_of_eager(x.device):
            x, *after = func(*one)
        for parts, part, state in zip(final, after, own, strict=True):
            # before torch 2.13 the decomposition of a layer returned its final states with one axis more
            parts.append(part if part.shape == state.shape else part.reshape(state.shape))
    return (x, *(torch.cat(parts) for parts in final))
