"""Optimizers as text, such as `adamw:lr=1e-3,betas=0.9/0.999`: for the command line and written folders."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from ..ir import UsageError

__all__ = ["OPTIMIZERS", "DescribedOptimizer", "parse_optimizer"]

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
}
"""Those of torch that step for a parameter by its gradient alone, whatever its shape, by their names here."""

Setting = bool | float | tuple[float, ...]
"""The value of an option."""


@dataclass(frozen=True, slots=True)
class DescribedOptimizer:
    """Makes optimizers of one kind; it prints as the text that `parse_optimizer` reads, and can be pickled.

    Args:
        name: Of `OPTIMIZERS`.
        settings: The options that are not left as torch has them, by their names there.
    """

    name: str
    settings: tuple[tuple[str, Setting], ...] = ()

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        """The optimizer of these parameters."""
        kind = cast(Callable[..., Optimizer], OPTIMIZERS[self.name])
        return kind(parameters, **dict(self.settings))

    def __str__(self) -> str:
        options = ",".join(f"{key}={_text(setting)}" for key, setting in self.settings)
        return f"{self.name}:{options}" if options else self.name


def parse_optimizer(text: str) -> DescribedOptimizer:
    """Parses the text of an optimizer, and tries it on a parameter of one element.

    Args:
        text: `NAME` or `NAME:KEY=VALUE,...`; a value is a number, `true` or `false`, or numbers as
            `0.9/0.999`.

    Raises:
        UsageError: IRC453 for an unknown optimizer; IRC454 for an option that it does not have, has twice or
            that has no value; IRC455 for a value of another kind; IRC456 if it refuses a value.
    """
    name, colon, options = text.partition(":")
    if name not in OPTIMIZERS:
        raise UsageError(
            "IRC453",
            f"there is no optimizer {name!r}",
            help=f"choose one of {', '.join(OPTIMIZERS)}; others from Python, by optimizer_in_backward=",
        )
    described = DescribedOptimizer(name, tuple(_settings(name, options)) if colon else ())
    try:
        described([nn.Parameter(torch.zeros(1))])
    except Exception as error:
        raise UsageError(
            "IRC456",
            f"{described} makes no optimizer: {type(error).__name__}: {error}",
            help=f"give values that torch.optim.{OPTIMIZERS[name].__name__} takes",
        ) from error
    return described


def _settings(name: str, options: str) -> Iterator[tuple[str, Setting]]:
    """Parses the settings behind the colon."""
    signature = inspect.signature(OPTIMIZERS[name]).parameters.values()
    known = {option.name: cast(object, option.default) for option in signature if option.name != "params"}
    advice = f"write {name}:KEY=VALUE,... with keys of {', '.join(known)}"
    seen: set[str] = set()
    for option in options.split(","):
        key, equals, value = (part.strip() for part in option.partition("="))
        if key not in known:
            raise UsageError("IRC454", f"{name} has no option {key!r}", help=advice)
        if not equals:
            raise UsageError("IRC454", f"option {key} of {name} has no value", help=advice)
        if key in seen:
            raise UsageError("IRC454", f"option {key} of {name} is given twice", help=advice)
        seen.add(key)
        yield key, _setting(name, key, value, known[key])


def _setting(name: str, key: str, text: str, default: object) -> Setting:
    """A value of the kind that the default has; what torch chooses unless it is said is true or false."""
    if default is None or isinstance(default, bool):
        found, wanted = {"true": True, "false": False}.get(text.lower()), "true or false"
    elif isinstance(default, tuple):
        count = len(cast(tuple[object, ...], default))
        found, wanted = _numbers(text, count), f"{count} numbers, as {'/'.join(['0.5'] * count)}"
    else:
        numbers = _numbers(text, 1)
        found, wanted = numbers[0] if numbers is not None else None, "a number"
    if found is None:
        raise UsageError("IRC455", f"{key}={text} of {name} is not {wanted}", help=f"give {key} {wanted}")
    return found


def _numbers(text: str, count: int) -> tuple[float, ...] | None:
    """Parses finite numbers with slashes between them."""
    try:
        found = tuple(map(float, text.split("/")))
    except ValueError:
        return None
    return found if len(found) == count and all(map(math.isfinite, found)) else None


def _text(setting: Setting) -> str:
    if isinstance(setting, tuple):
        return "/".join(map(repr, setting))
    return str(setting).lower() if isinstance(setting, bool) else repr(setting)
