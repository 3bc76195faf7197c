"""Training loops as scripts write them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from .trial import Pair, Script, Side, Trial

__all__ = ["OPTIMIZERS", "one_step", "train", "trains"]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
}


def one_step(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """One ordinary training step; the loss and every gradient."""
    optimizer.zero_grad()
    loss = side.loss()
    loss.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in side.module.parameters()]
    optimizer.step()
    return loss.detach(), gradients


def train(
    optimizer: str = "SGD",
    steps: int = 3,
    *,
    step: Callable[[Side, torch.optim.Optimizer], Any] = one_step,
    around: Callable[[], Any] = contextlib.nullcontext,
) -> Script:
    """A loop over some steps; what each returns, and the optimizer's state.

    Args:
        optimizer: Its name.
        steps: How many.
        step: One of them.
        around: A context for each step.
    """

    def script(side: Side) -> Any:
        made = OPTIMIZERS[optimizer]([p for p in side.module.parameters() if p.requires_grad])
        seen: list[Any] = []
        for _ in range(steps):
            with around():
                seen.append(step(side, made))
        return seen, made.state_dict()["state"]

    return script


def trains(trial: Trial, pair: Pair, *, tolerance: float | None = None, **options: Any) -> None:
    """Three steps of SGD on a deep copy of both modules, then three of AdamW on the two themselves.

    Args:
        trial: The check's.
        pair: What trains.
        tolerance: As in `Trial.same`.
        options: Those of `train`.
    """
    trial.same(trial.twin(pair), train("SGD", **options), tolerance=tolerance)
    trial.same(pair, train("AdamW", **options), tolerance=tolerance)
