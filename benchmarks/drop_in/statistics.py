"""Row 1: running statistics of BatchNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .cases import Made, check_script, check_step, fitted, trains_own
from .models import Arguments, Calls
from .registry import check, having
from .steps import one_step, train, trains
from .trial import Side, Trial

_NORMED = having("batch norm")


def _norms(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:  # pyright: ignore[reportPrivateUsage]
    kind = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage]
    return [child for child in module.modules() if isinstance(child, kind)]


@check_step(1, _NORMED, pair=fitted)
def statistics_after_training(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """Running statistics and num_batches_tracked are bit-equal after each of the steps."""
    return one_step(side, optimizer), [buffer.clone() for buffer in side.module.buffers()]


@check_step(1, _NORMED)
def a_forward_without_backward_counts(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """A forward whose backward never runs updates the statistics once, as in eager."""
    first = side().detach()
    counted = [buffer.clone() for buffer in side.module.buffers()]
    return first, counted, one_step(side, optimizer), side().detach()


@check_step(1, _NORMED)
def evaluation_between_steps(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    """eval() normalises by the running statistics and leaves them alone; train() goes on as before."""
    trained = one_step(side, optimizer)
    side.module.eval()
    with torch.no_grad():
        seen = side()
    side.module.train()
    return trained, seen


@check(1, _NORMED)
def trained_in_eval_mode(trial: Trial) -> None:
    """A model that is fine-tuned in eval() keeps its statistics and gets eager's gradients."""
    module = trial.subject.make()
    with torch.no_grad():
        for norm in _norms(module):
            assert norm.running_mean is not None and norm.running_var is not None
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
    trains(trial, trial.fit(module.eval(), trial.subject.arguments()))


@check(1, _NORMED)
def one_norm_is_in_eval_mode(trial: Trial) -> None:
    """A BatchNorm that is in eval() when the model is planned keeps its statistics; the others go on."""
    module = trial.subject.make()
    _norms(module)[1].eval()
    trains(trial, trial.fit(module, trial.subject.arguments()))


@check(1, _NORMED)
def one_norm_is_frozen(trial: Trial) -> None:
    """A frozen BatchNorm (eval mode, no gradients) within a model that trains."""
    module = trial.subject.make()
    _norms(module)[0].eval().requires_grad_(False)
    trains(trial, trial.fit(module, trial.subject.arguments()))


@check_script(1, _NORMED, refusable=True)
def a_norm_is_frozen_after_planning(side: Side) -> Any:
    """A BatchNorm that goes into eval() after a step is honoured, or refused."""
    before = train("SGD", 1)(side)
    _norms(side.module)[1].eval()
    return before, train("SGD", 2)(side)


@check_script(1, _NORMED)
def statistics_are_reset(side: Side) -> Any:
    """reset_running_stats() between steps is seen by the next one."""
    seen = train("SGD", 2)(side)
    for norm in _norms(side.module):
        norm.reset_running_stats()
    return seen, train("SGD", 1)(side)


def _own(norm: nn.Module, x: Tensor, times: int = 1) -> tuple[nn.Module, Arguments]:
    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(times):
            x = torch.tanh(m.norm(x * m.gain))
        return x

    return Calls(forward, norm=norm, gain=nn.Parameter(torch.tensor(1.5))), Arguments((x,))


def _with_a_forward(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    return one_step(side, optimizer), side().detach()


_KINDS: dict[str, Made] = {
    "BatchNorm1d over a sequence": lambda: _own(nn.BatchNorm1d(4), torch.randn(8, 4, 6)),
    "BatchNorm3d": lambda: _own(nn.BatchNorm3d(2), torch.randn(4, 2, 3, 3, 3)),
    "BatchNorm without affine": lambda: _own(nn.BatchNorm1d(4, affine=False), torch.randn(16, 4)),
    "BatchNorm without statistics": lambda: _own(
        nn.BatchNorm1d(4, track_running_stats=False), torch.randn(16, 4)
    ),
    "one BatchNorm called twice": lambda: _own(nn.BatchNorm1d(4), torch.randn(16, 4), 2),
    "InstanceNorm with statistics": lambda: _own(
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True), torch.randn(8, 4, 6)
    ),
}
for _name, _make in _KINDS.items():
    trains_own(1, _name, _make, "It trains as in eager, also after a forward alone.", step=_with_a_forward)
trains_own(
    1,
    "BatchNorm that averages over all steps",
    lambda: _own(nn.BatchNorm1d(4, momentum=None), torch.randn(16, 4)),
    "momentum=None reads num_batches_tracked in Python: honoured, or refused.",
    refusable=True,
)
