"""Small instances of the models of `transformers`: a configuration, random weights, and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .registry import Instance, enter, transformers_for

__all__ = ["BATCH", "SEQUENCE", "VOCABULARY", "Batch", "hub", "images", "padded", "random_tokens"]

VOCABULARY = 96
SEQUENCE = 32
BATCH = 8

Batch = Callable[[], dict[str, Any]]


def hub(
    name: str,
    config: str,
    model: str,
    settings: Mapping[str, Any],
    batch: Batch,
    *,
    backbone: Batch | None = None,
    **more: Any,
) -> None:
    """Enters an architecture of `transformers`, which is imported when it is made.

    Args:
        name: In the table.
        config: Class of the configuration.
        model: Class of the model.
        settings: Of the configuration.
        batch: Makes the keyword arguments of a step.
        backbone: Makes settings that hold configurations themselves.
        more: Settings besides.
    """

    def make() -> Instance:
        transformers = transformers_for(name)
        parts = {} if backbone is None else backbone()
        configuration = getattr(transformers, config)(**settings, **parts, **more)
        module: nn.Module = getattr(transformers, model)(configuration)
        return Instance(module, keywords=batch())

    enter(name, make)


def random_tokens(batch: int = BATCH, sequence: int = SEQUENCE, vocabulary: int = VOCABULARY) -> Tensor:
    """Token numbers [batch, sequence], from 4 on: the first four are left to special tokens."""
    return torch.randint(4, vocabulary, (batch, sequence))


def padded(batch: int = BATCH, sequence: int = SEQUENCE) -> Tensor:
    """An attention mask [batch, sequence] of sentences of which every other ends a quarter earlier."""
    mask = torch.ones(batch, sequence, dtype=torch.int64)
    mask[1::2, sequence * 3 // 4 :] = 0
    return mask


def images(size: int, batch: int = BATCH) -> Tensor:
    """Images [batch, 3, size, size]."""
    return torch.randn(batch, 3, size, size)
