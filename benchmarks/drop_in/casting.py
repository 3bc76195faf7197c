"""Row 4: automatic casting, and gradient scalers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .cases import check_script, check_step, trains_own
from .models import Arguments, Calls
from .registry import check, every, having
from .steps import trains
from .trial import Pair, Side, Trial


def _cast(dtype: torch.dtype = torch.bfloat16, *, enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


def _planned_under_autocast(trial: Trial, dtype: torch.dtype = torch.bfloat16) -> Pair:
    with _cast(dtype):
        return trial.fit(trial.subject.make(), trial.subject.arguments())


def _forward_under_autocast(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """The usual loop: forward and loss under autocast, backward outside of it."""
    optimizer.zero_grad()
    with _cast():
        result = side()
        loss = side.lossy(result)
    loss.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in side.module.parameters()]
    optimizer.step()
    return loss.detach(), gradients


@check(4)
def a_layer_used_several_times_under_autocast(trial: Trial) -> None:
    """Its parameters are cast once, and their gradients summed in bfloat16, as in eager."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(m.lin(x))
        return x * m.lin.weight.sum()

    with _cast():
        pair = trial.fit(Calls(forward, lin=nn.Linear(8, 8)), Arguments((torch.randn(16, 8),)))
    trains(trial, pair, step=_forward_under_autocast)


@check(4, every())
def autocast_around_the_forward(trial: Trial) -> None:
    """Planned and run under bfloat16 autocast, backward outside: numbers and element types are eager's.

    Where the model's sums are in another order than eager's, they differ by bfloat16's rounding.
    """
    tolerance = 2.0**-7 if trial.subject.tolerance else 0.0
    trains(trial, _planned_under_autocast(trial), step=_forward_under_autocast, tolerance=tolerance)


_MODELS = (*having("batch norm", "dropout"), *having("ties"))


@check(4, _MODELS)
def autocast_around_everything(trial: Trial) -> None:
    """Backward and the optimizer's step within the autocast, too."""
    trains(trial, _planned_under_autocast(trial), around=_cast)


@check_step(4, _MODELS)
def autocast_switched_off_inside(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """autocast(enabled=False) within another: the step runs as without, in a model planned without."""
    optimizer.zero_grad()
    with _cast(), _cast(enabled=False):
        loss = side.loss()
    loss.backward()
    optimizer.step()
    return loss.detach()


@check_step(4, _MODELS, pair=_planned_under_autocast)
def autocast_within_autocast(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """One autocast within another of the same kind; evaluation without it in between."""
    optimizer.zero_grad()
    with _cast():
        with _cast():
            loss = side.loss()
        with torch.no_grad():
            seen = side()
    with torch.no_grad():
        unseen = side()
    loss.backward()
    optimizer.step()
    return loss.detach(), seen, unseen


@check(4, _MODELS)
def autocast_to_float16(trial: Trial) -> None:
    """Planned and run under float16 autocast on the CPU."""

    def step(side: Side, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad()
        with _cast(torch.float16):
            loss = side.loss()
        loss.backward()
        optimizer.step()
        return loss.detach()

    trains(trial, _planned_under_autocast(trial, torch.float16), step=step)


@check(4, _MODELS, refusable=True)
def autocast_after_planning_without(trial: Trial) -> None:
    """A model planned without autocast and run under it: as eager under autocast, or refused."""
    trains(trial, trial.pair(), step=_forward_under_autocast)


@check(4, _MODELS, refusable=True)
def no_autocast_after_planning_with(trial: Trial) -> None:
    """A model planned under autocast and run without it: as eager without, or refused."""
    trains(trial, _planned_under_autocast(trial))


@check_script(4, _MODELS, refusable=True, pair=_planned_under_autocast)
def another_autocast_than_planned(side: Side) -> Any:
    """A model planned under bfloat16 and run under float16: as eager under float16, or refused."""
    with _cast(torch.float16):
        return side.loss().detach()


@check_script(4, _MODELS, pair=_planned_under_autocast)
def a_gradient_scaler(side: Side) -> Any:
    """scale, backward, unscale_, clip, step, update; a step whose gradients overflow is skipped."""
    optimizer = torch.optim.SGD(side.module.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    seen: list[Any] = []
    for factor in (1.0, float("inf"), 1.0, 1.0):
        optimizer.zero_grad()
        with _cast():
            loss = side.loss() * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(side.module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        seen.append((norm, scaler.get_scale()))
    return seen


@check_step(4, _MODELS, pair=_planned_under_autocast)
def accumulation_within_one_autocast(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """Two forwards and backwards within one autocast region (whose cache of cast weights both use)."""
    optimizer.zero_grad()
    with _cast():
        losses = [side.loss(), side.loss()]
    for loss in losses:
        loss.backward()
    optimizer.step()
    return [loss.detach() for loss in losses]


def _regions() -> tuple[nn.Module, Arguments]:
    """A model that switches autocast itself: on for its layers, off for its softmax."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with _cast():
            h = torch.tanh(m.lin(x))
            with _cast(enabled=False):
                weights = (h.float() @ m.mix).softmax(-1)
            return m.out(h * weights.to(h.dtype)).float()

    parts = {"lin": nn.Linear(8, 16), "out": nn.Linear(16, 8), "mix": nn.Parameter(torch.randn(16, 16))}
    return Calls(forward, **parts), Arguments((torch.randn(16, 8),))


def _bfloat16() -> tuple[nn.Module, Arguments]:
    layers = (nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
    return nn.Sequential(*layers).bfloat16(), Arguments((torch.randn(16, 8, dtype=torch.bfloat16),))


trains_own(4, "a model that switches autocast itself", _regions, "The element types and numbers are eager's.")
trains_own(4, "a model in bfloat16", _bfloat16, "The element types and numbers are eager's.")
trains_own(
    4,
    "a model in float64",
    lambda: (
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double(),
        Arguments((torch.randn(16, 8, dtype=torch.float64),)),
    ),
    "The element types and numbers are eager's.",
)
