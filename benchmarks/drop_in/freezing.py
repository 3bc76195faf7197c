"""Row 8: which parameters and inputs require gradients, at planning and later."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from .models import Arguments
from .registry import check, every, having, the
from .steps import train, trains
from .trial import Pair, Side, Trial

_MODELS = the("convolution", "transformer", "structures")


def _pattern(trial: Trial, seed: int) -> Pair:
    """A model of which about half of the parameters and of the float inputs require gradients."""
    draw = random.Random(seed)
    module, arguments = trial.subject.make(), trial.subject.arguments()
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.requires_grad_(draw.random() < 0.5)
    for tensor in arguments.tensors:
        if tensor.is_floating_point():
            tensor.requires_grad_(draw.random() < 0.5)
    parameters[draw.randrange(len(parameters))].requires_grad_(True)
    return trial.fit(module, arguments)


def _enter_pattern(seed: int) -> None:
    def run(trial: Trial) -> None:
        trains(trial, _pattern(trial, seed))

    check(
        8,
        _MODELS,
        name=f"freeze pattern {seed}",
        promise="The same parameters and inputs have None for a gradient, and the others eager's.",
    )(run)


for _seed in (1, 2, 3):
    _enter_pattern(_seed)


@check(8, _MODELS)
def the_head_alone_trains(trial: Trial) -> None:
    """Everything is frozen but the last two parameters, as in fine-tuning."""
    module = trial.subject.make().requires_grad_(False)
    for parameter in list(module.parameters())[-2:]:
        parameter.requires_grad_(True)
    trains(trial, trial.fit(module, trial.subject.arguments()))


@check(8, having("tensor"))
def the_input_alone_has_a_gradient(trial: Trial) -> None:
    """Every parameter is frozen and the input asks for a gradient, as in saliency maps."""
    module, arguments = trial.subject.make().requires_grad_(False), trial.subject.arguments()
    arguments.args[0].requires_grad_(True)

    def script(side: Side) -> Any:
        side.loss().backward()
        side.loss().backward()

    trial.same(trial.fit(module, arguments), script)


@check(8, having("tensor"), refusable=True)
def nothing_asks_for_a_gradient(trial: Trial) -> None:
    """A model that is frozen altogether gives results without gradients, or is refused."""
    pair = trial.fit(trial.subject.make().requires_grad_(False), trial.subject.arguments())
    trial.same(pair, lambda side: side())


def _flip(name: str, promise: str, flip: Any, *, back: bool = False) -> None:
    """Enters a check that flips requires_grad between steps."""

    def run(trial: Trial) -> None:
        def script(side: Side) -> Any:
            before = train("SGD", 1)(side)
            flip(side, False)
            side.module.zero_grad()
            middle = None if back else train("SGD", 2)(side)
            if back:
                flip(side, True)
            return before, middle, train("SGD", 1)(side)

        trial.same(trial.pair(), script)

    check(8, every(), name=name, refusable=not back, promise=promise)(run)


def _flip_first(side: Side, trains_on: bool) -> None:
    next(side.module.parameters()).requires_grad_(trains_on)


def _flip_half(side: Side, trains_on: bool) -> None:
    for parameter in list(side.module.parameters())[::2]:
        parameter.requires_grad_(trains_on)


def _flip_inputs(side: Side, trains_on: bool) -> None:
    for tensor in side.arguments.tensors:
        if tensor.is_floating_point():
            tensor.requires_grad_(not trains_on)


_EQUAL_OR_REFUSED = "The next step has the gradients of the new pattern, or is refused."
_flip("a parameter is frozen after planning", _EQUAL_OR_REFUSED, _flip_first)
_flip("half of the parameters are frozen after planning", _EQUAL_OR_REFUSED, _flip_half)
_flip("inputs ask for gradients after planning", _EQUAL_OR_REFUSED, _flip_inputs)
_flip(
    "a parameter is frozen and thawed between steps",
    "Once it is as planned, training goes on.",
    _flip_first,
    back=True,
)


@check(8, _MODELS, refusable=True)
def a_layer_is_thawed_after_planning(trial: Trial) -> None:
    """Planned with the first parameters frozen; gradual unfreezing gives them gradients, or is refused."""
    module = trial.subject.make()
    for parameter in list(module.parameters())[:2]:
        parameter.requires_grad_(False)

    def script(side: Side) -> Any:
        before = train("SGD", 1)(side)
        side.module.requires_grad_(True)
        return before, train("SGD", 2)(side)

    trial.same(trial.fit(module, trial.subject.arguments()), script)


@check(8, refusable=True)
def a_layer_is_replaced_after_planning(trial: Trial) -> None:
    """A layer that the script replaces by another trains, or the next step is refused."""

    def script(side: Side) -> Any:
        before = train("SGD", 1)(side)
        side.module[2] = nn.Sequential(side.module[2], nn.Tanh())
        return before, train("SGD", 2)(side)

    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    trial.same(trial.fit(module, Arguments((torch.randn(8, 4),))), script)
