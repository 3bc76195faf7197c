"""Traces recurrent modules as operations that a plan can hold."""

# The switch for oneDNN has no public interface without side effects.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....ir import TimeLimitError

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
        time_limit: Seconds. Layers of so many time steps that tracing them would take longer are refused.

    Attributes:
        rounding: The functions of the layers that differ from eager's numbers by rounding: an LSTM's kernel
            sums in another order than its time steps, and without gradients than in training; a GRU's gates,
            written in place, go through other vectors; under autocast gradients of weights are summed in
            another order.
    """

    def __init__(self, *, has_kernels: bool = True, time_limit: float = math.inf) -> None:
        super().__init__()
        self.has_kernels = has_kernels
        self.time_limit = time_limit
        self.rounding: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in ("lstm", "gru", "rnn_tanh", "rnn_relu") or kwargs:
            return func(*args, **(kwargs or {}))
        runs_kernel = func.__name__ == "lstm" and _runs_kernel(args)
        as_kernel = self.has_kernels and runs_kernel
        if as_kernel and not torch.is_grad_enabled():
            self.rounding.add(func.__name__)
        if as_kernel:
            return _by_kernel(*args)
        _check_steps(args, self.time_limit)
        kind = args[0].device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        if runs_kernel or casts or func.__name__ == "gru":
            self.rounding.add(func.__name__)
        enabled = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            return _layer_by_layer(func, args)
        finally:
            torch._C._set_mkldnn_enabled(enabled)


def _check_steps(args: tuple[Any, ...], time_limit: float) -> None:
    """Refuses layers that cannot be traced within a time limit.

    Raises:
        TimeLimitError: IRC205.
    """
    if not isinstance(args[3], bool):  # packed sequences
        steps, layers, bidirectional = args[1].shape[0], args[5], args[8]
    else:
        steps, layers, bidirectional = args[0].shape[1 if args[8] else 0], args[4], args[7]
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
    """Whether eager runs an LSTM by oneDNN: float32 on the CPU, in batches of one length, not projected."""
    if not isinstance(args[3], bool) or not torch._C._get_mkldnn_enabled():
        return False
    x, states, weights = args[:3]
    tensors = (x, *states, *weights)
    plain = all(t.device.type == "cpu" and t.dtype is torch.float32 for t in tensors)
    projected = states[0].shape[2] != states[1].shape[2]
    return plain and not projected and x.numel() > 0 and not torch.is_autocast_enabled("cpu")


def _by_kernel(
    x: Tensor,
    states: tuple[Tensor, Tensor],
    weights: list[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Calls oneDNN's LSTM for each layer and direction, as torch does in eager."""
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    h, c = (state.contiguous() for state in states)
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    final: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        if layer and dropout and train:
            x = torch.dropout(x, dropout, True)
        outputs: list[Tensor] = []
        for place in range(directions * layer, directions * (layer + 1)):
            own = list(weights[each * place : each * (place + 1)])
            own += [] if has_biases else [torch.zeros_like(weight) for weight in own]
            numbers = ([], _LSTM, h.shape[2], layers, has_biases, bidirectional, batch_first, train)
            reverse = place > directions * layer
            y, *after, _ = torch.ops.aten.mkldnn_rnn_layer.default(
                x, *own, h[place], c[place], reverse, *numbers
            )
            outputs.append(y)
            final.append((after[0], after[1]))
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
    return (
        x.transpose(0, 1) if batch_first else x,
        *(torch.stack(parts) for parts in zip(*final, strict=True)),
    )


def _steps_of_eager(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Lets torch trace the operations that eager runs for a time step: its decomposition has more of them.

    A GPU's kernels for a whole layer cannot be traced, so the decomposition stays there.
    """
    on_host = device.type in ("cpu", "meta")
    return torch._C._DisablePythonDispatcher() if on_host else contextlib.nullcontext()


def _layer_by_layer(func: Any, args: tuple[Any, ...]) -> Any:
    """Calls `func` once for each of a stack of recurrent layers, and joins the results.

    Args:
        func: `torch.lstm` or another of its kind.
        args: input, state (a tensor, or for LSTM two), weights, has biases, layers, dropout, train,
            bidirectional, batch first. Packed sequences come with other arguments and are passed on.
    """
    if not isinstance(args[3], bool):
        return func(*args)
    x, state, weights, biases, layers, dropout, train, bidirectional, batch_first = args
    states = [state] if isinstance(state, Tensor) else list(state)
    directions = 2 if bidirectional else 1
    each = len(weights) // layers
    final: list[list[Tensor]] = [[] for _ in states]
    for layer in range(layers):
        if layer and dropout and train:
            x = torch.dropout(x, dropout, True)
        own = [s[directions * layer : directions * (layer + 1)] for s in states]
        own_state = own[0] if isinstance(state, Tensor) else tuple(own)
        own_weights = weights[each * layer : each * (layer + 1)]
        with _steps_of_eager(x.device):
            x, *after = func(x, own_state, own_weights, biases, 1, 0.0, train, bidirectional, batch_first)
        for parts, part, given in zip(final, after, own, strict=True):
            # before torch 2.13 the decomposition of a layer returned its final states with one axis more
            parts.append(part if part.shape == given.shape else part.reshape(given.shape))
    return (x, *(torch.cat(parts) for parts in final))
