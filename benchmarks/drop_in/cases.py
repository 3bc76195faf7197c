"""Checks that are a script, a training step, or a small model that trains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .models import Arguments
from .registry import OWN, check
from .steps import one_step, trains
from .trial import Pair, Script, Trial

__all__ = ["Made", "check_script", "check_step", "fitted", "trains_own"]

Made = Callable[[], tuple[nn.Module, Arguments]]
"""Makes a module and the arguments of a step."""
Step = Callable[..., Any]
"""A training step, from a side and an optimizer; what it returns is compared."""


def fitted(trial: Trial) -> Pair:
    """The subject, planned for this check alone."""
    return trial.fit(trial.subject.make(), trial.subject.arguments())


def check_script(
    row: int,
    models: tuple[str, ...] = (OWN,),
    *,
    pair: Callable[[Trial], Pair] = Trial.pair,
    raises: type[Exception] | None = None,
    **options: Any,
) -> Callable[[Script], Script]:
    """Enters a script as a check: what it returns and leaves behind is the original's.

    Args:
        row: As in `Check`.
        models: As in `Check`.
        pair: Makes the two modules.
        raises: As in `Trial.same`.
        options: More of `check`.
    """

    def enter(script: Script) -> Script:
        @functools.wraps(script)
        def run(trial: Trial) -> None:
            trial.same(pair(trial), script, raises=raises)

        check(row, models, **options)(run)
        return script

    return enter


def check_step(
    row: int,
    models: tuple[str, ...] = (OWN,),
    *,
    pair: Callable[[Trial], Pair] = Trial.pair,
    **options: Any,
) -> Callable[[Step], Step]:
    """Enters a training step as a check: it is taken as `trains` takes it.

    Args:
        row: As in `Check`.
        models: As in `Check`.
        pair: Makes the two modules.
        options: More of `check`.
    """

    def enter(step: Step) -> Step:
        @functools.wraps(step)
        def run(trial: Trial) -> None:
            trains(trial, pair(trial), step=step)

        check(row, models, **options)(run)
        return step

    return enter


def trains_own(
    row: int,
    name: str,
    make: Made,
    promise: str = "It trains as in eager.",
    *,
    loss: Callable[[Any], Tensor] | None = None,
    step: Callable[..., Any] = one_step,
    refusable: bool = False,
    tolerance: float | None = None,
) -> None:
    """Enters a check: a model of its own takes three steps of SGD and three of AdamW as in eager.

    Args:
        row: As in `Check`.
        name: As in `Check`.
        make: The model.
        promise: As in `Check`.
        loss: From the model's result; the mean square where it is None.
        step: As in `train`.
        refusable: As in `Check`.
        tolerance: As in `Trial.same`.
    """

    def run(trial: Trial) -> None:
        module, arguments = make()
        trains(trial, trial.fit(module, arguments, loss), step=step, tolerance=tolerance)

    check(row, name=name, refusable=refusable, promise=promise)(run)
