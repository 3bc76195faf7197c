"""The models of all benchmarks by name, each made the same at every call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from irc.compiler.model_source import training_loss
from irc.ir import UsageError

__all__ = [
    "ARCHITECTURES",
    "MODELS",
    "Example",
    "Instance",
    "Maker",
    "architecture",
    "benchmark",
    "enter",
    "loss_of",
    "transformers_for",
]

_P = ParamSpec("_P")
_Made = TypeVar("_Made")

Example = tuple[nn.Module, tuple[Tensor, ...]]
"""A module that returns its scalar loss, and the arguments of one step."""


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

MODELS: dict[str, Callable[..., Example]] = {}
"""The models that are measured. Without arguments a factory makes the size that is measured."""

ARCHITECTURES: dict[str, Maker] = {}
"""The small instances of known architectures."""


def _seeded(make: Callable[_P, _Made]) -> Callable[_P, _Made]:
    """The same function with a seed of its own; the caller's generator is left as it is."""

    @functools.wraps(make)
    def seeded(*args: _P.args, **kwargs: _P.kwargs) -> _Made:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make(*args, **kwargs)

    return seeded


def benchmark(factory: Callable[_P, Example]) -> Callable[_P, Example]:
    """Enters a factory among the measured models under its name."""
    MODELS[factory.__name__] = seeded = _seeded(factory)
    return seeded


def enter(name: str, make: Maker) -> None:
    """Enters an architecture under a name; the model is made in training mode."""

    def trained() -> Instance:
        made = make()
        made.module.train()
        return made

    assert name not in ARCHITECTURES, name
    ARCHITECTURES[name] = _seeded(trained)


def architecture(make: Maker) -> Maker:
    """Enters a function among the architectures under its own name, with hyphens."""
    enter(make.__name__.strip("_").replace("_", "-"), make)
    return make


def loss_of(result: Any) -> Tensor:
    """The loss that a model computes if it is given labels, else what the tools train with."""
    found: object = cast("Mapping[str, object]", result).get("loss") if isinstance(result, Mapping) else None
    return found.sum() if isinstance(found, Tensor) else training_loss(result)


def transformers_for(name: str) -> ModuleType:
    """The package `transformers`, which is imported when a model of it is made.

    Raises:
        UsageError: IRC349 when it cannot be imported.
    """
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "IRC349",
            f"architecture {name} comes from the package transformers, which cannot be imported: {error}",
            help="pip install transformers, or name others with --only",
        ) from error
    return transformers
