"""The LSTM kernel of oneDNN, which eager runs on the CPU, as an operation that a program can hold."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["LSTM_KERNEL", "lstm_workspace_bytes", "run_lstm_kernel"]

LSTM_KERNEL = "aten.mkldnn_rnn_layer.default"
"""One layer in one direction. Without gradients it returns no workspace, which its backward reads."""


def run_lstm_kernel(*args: Any) -> tuple[Tensor, ...]:
    """Runs the kernel as in training, without an autograd graph."""
    plain = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*plain)


@lru_cache(maxsize=256)
def lstm_workspace_bytes(steps: int, batch: int, size: int, hidden: int, dtype: torch.dtype) -> int:
    """Measures the workspace of the LSTM kernel, which oneDNN does not tell before the kernel has run."""
    shapes = (steps, batch, size), (4 * hidden, size), (4 * hidden, hidden), (4 * hidden,), (batch, hidden)
    x, w, r, bias, state = (torch.zeros(shape, dtype=dtype) for shape in shapes)
    numbers = (False, [], 2, hidden, 1, True, False, False, True)
    return run_lstm_kernel(x, w, r, bias, bias, state, state, *numbers)[-1].numel()
