"""Traces recurrent modules as operations that a plan can hold."""

# The switch for oneDNN has no public interface without side effects.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["StepwiseRNN"]


class StepwiseRNN(TorchFunctionMode):
    """Traces recurrent layers one by one, and on the CPU as their time steps.

    oneDNN's fused LSTM has no place in a plan: the size of its workspace is not known before it runs,
    and without gradients it makes none. torch's own decomposition of several layers leaves out the
    dropout between them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in ("lstm", "gru", "rnn_tanh", "rnn_relu") or kwargs:
            return func(*args, **(kwargs or {}))
        enabled = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            return _layer_by_layer(func, args)
        finally:
            torch._C._set_mkldnn_enabled(enabled)


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
        x, *after = func(x, own_state, own_weights, biases, 1, 0.0, train, bidirectional, batch_first)
        for parts, part, given in zip(final, after, own, strict=True):
            # before torch 2.13 the decomposition of one layer returned its final states with one axis more
            parts.append(part if part.shape == given.shape else part.reshape(given.shape))
    return (x, *(torch.cat(parts) for parts in final))
