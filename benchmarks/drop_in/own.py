"""Checks that bring a small model of their own and train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .models import Arguments
from .registry import check
from .steps import one_step, trains
from .trial import Trial

__all__ = ["Made", "trains_own"]

Made = Callable[[], tuple[nn.Module, Arguments]]
"""Makes a module and the arguments of a step."""


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

    run.__doc__ = promise
    check(row, name=name, refusable=refusable)(run)
