"""The table of benchmark models, and the wrapper that makes each of them the same at every call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "Example", "benchmark"]

_P = ParamSpec("_P")

Example = tuple[nn.Module, tuple[Tensor, ...]]
"""A module that returns its scalar loss, and the arguments of one step."""

MODELS: dict[str, Callable[..., Example]] = {}
"""Every benchmark model by its name. Without arguments a factory makes the size that is measured."""


def benchmark(factory: Callable[_P, Example]) -> Callable[_P, Example]:
    """Enters a factory under its name, and makes it draw from a seed of its own."""

    @functools.wraps(factory)
    def seeded(*args: _P.args, **kwargs: _P.kwargs) -> Example:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return factory(*args, **kwargs)

    MODELS[factory.__name__] = seeded
    return seeded
