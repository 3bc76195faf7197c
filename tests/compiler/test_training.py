"""A step of one's own is measured with what exists before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import irc


def loss(y: Tensor) -> Tensor:
    return y.square().mean()


def test_a_step_of_ones_own_is_measured_as_the_plan_counts_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(2048, 16)
    module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4))
    eager_peak = irc.measured_peak_bytes(module, (x,), loss=loss)
    ours: Any = irc.optimize(module, (x,), "90%", loss=loss, costs="analytic", time_limit=1)
    plan_peak = irc.measured_peak_bytes(ours, (x,), loss=loss)
    assert plan_peak <= ours.plan.peak_bytes
    for model, expected in ((module, eager_peak), (ours, plan_peak)):

        def step(model: nn.Module = model) -> Tensor:
            result = model(x)  # held until backward ends
            value = loss(result)
            value.backward()
            return value

        model.zero_grad()
        value, peak = irc.measured_step(model, step, x)
        assert torch.equal(value, loss(module(x))) and peak == expected
        gradient_bytes = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
        _, with_gradients = irc.measured_step(model, step, x)
        assert peak < with_gradients <= peak + gradient_bytes
