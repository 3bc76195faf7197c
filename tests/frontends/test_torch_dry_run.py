"""What a user wrote is run on tensors without data: nothing of that stays in a loss, and flips are seen."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import irc
from irc.frontends.torch import capture
from irc.ir import IrcError, UnsupportedError


class _Centred:
    """A loss with a running centre, and a list of what it saw."""

    def __init__(self) -> None:
        self.center: Any = 0.0
        self.seen: list[Tensor] = []

    def __call__(self, result: Tensor) -> Tensor:
        random.random()
        self.center = 0.9 * self.center + 0.1 * result.mean(0)
        self.seen.append(self.center)
        return (result - self.center).square().mean()


class _Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", torch.ones(8))
        self.calls = 0

    def forward(self, result: Tensor) -> Tensor:
        self.calls += 1
        return (result * self.weight).square().mean()


def _held(loss: Any) -> Any:
    return vars(loss) if not isinstance(loss, nn.Module) else (loss.calls, list(loss.buffers()))


@pytest.mark.parametrize("make", [_Centred, _Weighted])
@pytest.mark.parametrize(
    "wrap", [lambda o: o, lambda o: o.__call__, lambda o: lambda y: o(y), functools.partial]
)
def test_a_loss_is_as_before(make: Callable[[], Any], wrap: Callable[[Any], Any]) -> None:
    holder, generator = make(), random.getstate()
    before = copy.deepcopy(_held(holder))
    fitted = irc.optimize(nn.Linear(4, 8), torch.randn(3, 4), "100%", costs="analytic", loss=wrap(holder))
    assert str(_held(holder)) == str(before) and random.getstate() == generator
    holder(fitted(torch.randn(3, 4))).backward()
    assert type(next(fitted.parameters()).grad) is Tensor


class _Stepping(nn.Module):
    """A loss with a buffer that counts its calls, as the warm-up of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, result: Tensor) -> Tensor:
        self.steps += 1
        return (result * self.steps).square().mean()


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: lambda y: o(y), lambda o: o.__call__])
def test_a_buffer_of_one_number_that_a_loss_counts_in_is_as_before(wrap: Callable[[Any], Any]) -> None:
    loss = _Stepping()
    irc.optimize(nn.Linear(4, 8), torch.randn(3, 4), "100%", costs="analytic", loss=wrap(loss))
    assert loss.steps == 0


def test_a_loss_is_looked_at_while_anomalies_are_detected() -> None:
    with torch.autograd.set_detect_anomaly(True):
        fitted = irc.optimize(
            nn.Linear(4, 8), torch.randn(3, 4), "100%", costs="analytic", loss=lambda y: y.square().mean()
        )
        assert torch.is_anomaly_enabled()
        fitted(torch.randn(3, 4)).square().mean().backward()


def test_an_unknown_loss_under_autocast_is_counted_in_full_precision() -> None:
    module, x = nn.Linear(64, 512), torch.randn(64, 64)
    plain = capture(module, (x,)).graph.loss_bytes
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = capture(module, (x,)).graph.loss_bytes
    scalars = 32
    assert plain == 2 * 64 * 512 * 4 + scalars and cast == 3 * 64 * 512 * 4 + scalars


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.GroupNorm(4, 16), nn.BatchNorm1d(16)])
def test_norms_under_autocast_are_measured_and_equal(norm: nn.Module) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), copy.deepcopy(norm), nn.ReLU(), nn.Linear(16, 5))
    original, x = copy.deepcopy(module), torch.randn(32, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fitted = irc.optimize(module, x, "100%")
        for each in (fitted, original):
            each(x).square().mean().backward()
    for p, q in zip(module.parameters(), original.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


class _Flipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.flip = False

    def forward(self, x: Tensor) -> Tensor:
        self.flip = not self.flip
        return self.lin(x) if self.flip else -self.lin(x)


def test_an_attribute_that_flips_in_each_forward_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"IRC338.*flip"):
        capture(_Flipping(), (torch.randn(3, 4),))


class _Switching(nn.Module):
    """Reads a buffer, and writes it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.mode: Tensor
        self.register_buffer("mode", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) if bool(self.mode) else -self.lin(x)
        self.mode.fill_(1)
        return y


def test_a_branch_is_checked_on_what_was_read_before_it_is_written() -> None:
    module, x = _Switching(), torch.randn(3, 4)
    fitted = irc.optimize(module, x, "100%", costs="analytic", specialize_branches=True)
    fitted(x).sum().backward()
    with torch.no_grad():
        module.mode.zero_()
    with pytest.raises(IrcError, match="IRC347"):
        fitted(x)


def test_a_forward_that_was_set_on_the_fitted_module_is_not_what_is_planned() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.alpha = nn.Linear(4, 4), 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x) * self.alpha

    module, x = Scaled(), torch.randn(3, 4)
    fitted: Any = irc.optimize(module, x, "200%", costs="analytic")
    planned = fitted.forward
    fitted.forward = lambda *args: planned(*args)  # as launchers wrap a module for automatic casting
    assert torch.equal(fitted(x[:2]), module.lin(x[:2]))
    fitted.alpha = 3.0
    assert torch.equal(fitted(x[:2]), module.lin(x[:2]) * 3.0)


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.lin(x) * self.steps


def test_a_hook_of_the_users_hides_no_counter() -> None:
    module = _Counting()
    module.register_forward_pre_hook(lambda m, args: None)
    with pytest.raises(UnsupportedError, match=r"IRC338.*steps"):
        capture(module, (torch.randn(3, 4),))
