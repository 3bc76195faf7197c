"""A module whose first call gives parameters other data is called once before it is captured."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import irc


class Casting(nn.Module):
    """Casts its bias in the first call, as layers of bitsandbytes do; counts, draws and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8, dtype=torch.bfloat16), nn.BatchNorm1d(8)
        self.layer.bias = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.layer.bias
        if bias.dtype != x.dtype:
            bias.data = bias.data.to(x.dtype)
        hidden = functional.linear(x, self.layer.weight, bias).float()
        return functional.dropout(self.norm(hidden), 0.5).square().mean()


class Clamping(nn.Module):
    """Gives its weight other data in each call, and writes into the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.full((8,), 9.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(-1, 1)
        self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        return (x @ self.weight * self.scale).sum()


def test_what_the_first_call_casts_is_cast_and_all_else_is_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    eager, x = Casting(), torch.randn(16, 8, dtype=torch.bfloat16)
    model = copy.deepcopy(eager)
    state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "irc"):
        fitted = irc.optimize(model, (x,), "100%", costs="analytic")
    assert "called twice, without gradients" in caplog.text and "test_torch_settled.py" in caplog.text
    assert model.layer.bias.dtype == torch.bfloat16 and torch.equal(torch.get_rng_state(), state)
    assert model.norm.num_batches_tracked is not None and model.norm.num_batches_tracked == 0
    for _ in range(2):
        losses: list[Tensor] = []
        for module in (eager, fitted):
            torch.manual_seed(1)
            losses.append(module(x))
            losses[-1].backward()
        assert torch.equal(*losses)
    pairs = zip(eager.state_dict().items(), model.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for (_, ours), theirs in pairs)
    assert model.layer.weight.grad is not None
    assert torch.equal(model.layer.weight.grad, eager.layer.weight.grad)  # pyright: ignore[reportArgumentType]


def test_a_module_that_assigns_in_each_call_is_refused_and_as_before() -> None:
    model = Clamping()
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict().items()}
    with pytest.raises(irc.UnsupportedError, match="IRC338"):
        irc.optimize(model, (torch.randn(4, 8),), "100%", costs="analytic")
    for name, tensor in model.state_dict().items():
        data, elements = before[name]
        assert torch.equal(tensor, elements) and tensor.data_ptr() == data.data_ptr()


MORE: dict[str, Callable[[Any], object]] = {
    "a buffer": lambda m: m.norm.running_mean.fill_(3),
    "an attribute": lambda m: setattr(m, "factor", 3.0),
    "an item": lambda m: m.factors.update(first=3.0),
    "elements": lambda m: m.layer.weight.mul_(3),
    "another parameter": lambda m: setattr(m.layer, "weight", nn.Parameter(m.layer.weight * 3)),
    "a hook": lambda m: m.norm.register_forward_hook(lambda module, args, output: output * 3),
    "a mode": lambda m: m.norm.eval(),
}


@pytest.mark.parametrize("name", MORE)
def test_a_first_call_that_does_more_than_to_cast_is_refused(name: str) -> None:
    class More(Casting):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.factors = 1.0, {"first": 1.0}

        def forward(self, x: Tensor) -> Tensor:
            if self.layer.bias.dtype != x.dtype:
                with torch.no_grad():
                    MORE[name](self)
            return super().forward(x) * self.factor * self.factors["first"]

    torch.manual_seed(0)
    model = More()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(irc.UnsupportedError, match="IRC338"):
        irc.optimize(model, (torch.randn(16, 8, dtype=torch.bfloat16),), "100%", costs="analytic")
    assert model.factor == model.factors["first"] == 1 and model.training == model.norm.training
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_a_first_call_that_fails_leaves_the_refusal() -> None:
    class Failing(Casting):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            if type(x) is Tensor:
                raise ValueError("only traced")
            return result

    model = Failing()
    with pytest.raises(irc.UnsupportedError, match="IRC338"):
        irc.optimize(model, (torch.randn(4, 8, dtype=torch.bfloat16),), "100%", costs="analytic")
    assert model.layer.bias.dtype == torch.float32
