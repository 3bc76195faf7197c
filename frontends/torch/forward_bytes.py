"""Measures the memory of a forward without backward, without computing anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from .alive_bytes import AliveBytes

__all__ = ["forward_bytes"]


def forward_bytes(function: Callable[..., Any], args: Sequence[Any]) -> int:
    """The most that `function(*args)` has alive at once without gradients, beside its arguments, in bytes.

    It runs on tensors without data. Workspaces of operations are not counted.

    Args:
        function: The function that runs; it must not look at values.
        args: Its arguments.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    alive = AliveBytes()
    given = [fake.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
    for arg in given:
        if isinstance(arg, Tensor):
            alive.ignore(arg)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), fake, alive:
        function(*given)
    return alive.peak_bytes
