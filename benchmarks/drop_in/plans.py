"""The plans that every check runs under."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from irc.compiler.optimize import optimize
from irc.ir import BudgetError, TimeLimitError

from .models import Arguments

__all__ = ["PLANS", "PlanKind"]

_SECONDS = 1.0
"""For the search of a schedule: the models are small, and any schedule will do."""


@dataclass(frozen=True)
class PlanKind:
    """A way to fit a module.

    Args:
        name: As in the table.
        fit: The fitted module, from a module, the arguments of a step, and more options of `irc.optimize`.
        about: What it is, in words.
    """

    name: str
    fit: Callable[[nn.Module, Arguments, Mapping[str, Any]], nn.Module]
    about: str


def _optimize(module: nn.Module, arguments: Arguments, options: Mapping[str, Any]) -> nn.Module:
    """Without measuring operations unless asked for: the checks are about numbers and behaviour."""
    given: dict[str, Any] = {"costs": "analytic", "time_limit": _SECONDS, **options}
    budget = given.pop("budget")
    return optimize(module, arguments.args, budget, example_kwargs=arguments.kwargs, **given)


def _keep_all(module: nn.Module, arguments: Arguments, options: Mapping[str, Any]) -> nn.Module:
    return _optimize(module, arguments, {"budget": "200%", "strategy": "keep-all", **options})


def _sixty_percent(module: nn.Module, arguments: Arguments, options: Mapping[str, Any]) -> nn.Module:
    try:
        return _optimize(module, arguments, {"budget": "60%", **options})
    except (BudgetError, TimeLimitError):
        return _smallest(module, arguments, options)


def _smallest(module: nn.Module, arguments: Arguments, options: Mapping[str, Any]) -> nn.Module:
    options = {"strategy": "eviction", "time_limit": 20.0, **options}
    budget = 1
    while True:
        try:
            return _optimize(module, arguments, {**options, "budget": budget})
        except BudgetError as error:
            if error.minimum_bytes <= budget:
                raise
            budget = error.minimum_bytes


_ALL = [
    PlanKind("keep-all", _keep_all, "nothing runs twice"),
    PlanKind("60%", _sixty_percent, "60% of the baseline's peak, or the smallest budget where that is more"),
    PlanKind("min", _smallest, "the smallest budget that a schedule is found for"),
]

PLANS = {kind.name: kind for kind in _ALL}
"""The plans, by name. One more entry makes every check run under one more plan."""
