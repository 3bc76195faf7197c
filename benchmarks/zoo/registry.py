"""The table of architectures, and the wrapper that makes each of them the same at every call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from irc.compiler.model_source import training_loss

__all__ = ["ARCHITECTURES", "Instance", "Maker", "architecture", "enter", "loss_of"]


@dataclass(frozen=True)
class Instance:
    """A model in training mode with one batch.

    Args:
        module: The model.
        args: Positional arguments of a step.
        keywords: Keyword arguments of a step.
    """

    module: nn.Module
    args: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])


Maker = Callable[[], Instance]

ARCHITECTURES: dict[str, Maker] = {}
"""Every architecture by its name."""


def enter(name: str, make: Maker) -> None:
    """Enters an architecture under a name; it draws from a seed of its own, and trains."""

    @functools.wraps(make)
    def seeded() -> Instance:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = make()
            made.module.train()
            return made

    assert name not in ARCHITECTURES, name
    ARCHITECTURES[name] = seeded


def architecture(make: Maker) -> Maker:
    """Enters a function under its own name, with hyphens."""
    enter(make.__name__.strip("_").replace("_", "-"), make)
    return make


def loss_of(result: Any) -> Tensor:
    """The loss that a model computes where it is given labels, else what the tools train with."""
    found: object = cast("Mapping[str, object]", result).get("loss") if isinstance(result, Mapping) else None
    return found.sum() if isinstance(found, Tensor) else training_loss(result)
