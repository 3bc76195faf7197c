"""Refusals whose help names what to do: it is done here, and the model trains as in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn import functional

import irc


def _loss(result: Tensor) -> Tensor:
    return result.square().mean()


def _gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_observers_that_have_seen_a_call_train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # pyright: ignore
    prepare: Any = vars(quantization)["prepare_qat"]  # which torch deprecates
    prepared, x = prepare(model), torch.randn(4, 8)
    with pytest.raises(irc.IrcError, match="IRC412") as raised:
        irc.optimize(prepared, (x,), "100%", loss=_loss)
    assert raised.value.help is not None and "call the module once before irc.optimize" in raised.value.help
    prepared(x)
    original = copy.deepcopy(prepared)
    fitted = irc.optimize(prepared, (x,), "100%", loss=_loss)
    _loss(fitted(x)).backward()
    _loss(original(x)).backward()
    assert all(map(torch.equal, _gradients(prepared), _gradients(original)))
    assert all(map(torch.equal, prepared.buffers(), original.buffers()))
    assert irc.measured_peak_bytes(fitted, (x,), loss=_loss) <= fitted.plan.peak_bytes


class FilledAtFirst(nn.Module):
    """Its first forward computes a buffer that all others use."""

    scale: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().abs().mean(0)
        return self.layer(x) * self.scale


def test_a_buffer_that_the_first_forward_fills_trains_after_one_call() -> None:
    torch.manual_seed(0)
    model, x = FilledAtFirst(), torch.randn(4, 4)
    with pytest.raises(irc.UnsupportedError, match=r"IRC338.*buffer scale by a tensor where") as raised:
        irc.optimize(model, (x,), "100%", loss=_loss, costs="analytic")
    assert raised.value.help is not None and "call the module once before" in raised.value.help
    assert model.scale is None
    model(x)
    original = copy.deepcopy(model)
    fitted = irc.optimize(model, (x,), "100%", loss=_loss, costs="analytic")
    for module in (fitted, original):
        _loss(module(x)).backward()
    assert all(map(torch.equal, _gradients(model), _gradients(original)))


class DroppedWeights(nn.Module):
    """The recurrent layer of AWD-LSTM: each forward assigns its hidden weights, with some dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 8)
        self.hidden = nn.Parameter(self.layer.weight_hh_l0.detach().clone())
        del self.layer._parameters["weight_hh_l0"]
        self.layer.weight_hh_l0 = self.hidden.detach()

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight_hh_l0 = functional.dropout(self.hidden, 0.5)
        return self.head(self.layer(x)[0])


def test_a_recurrent_layer_whose_weights_are_assigned_trains_with_eagers_bits() -> None:
    torch.manual_seed(0)
    original, x = DroppedWeights(), torch.randn(4, 6, 8)
    fitted = irc.optimize(copy.deepcopy(original), (x,), "100%", loss=_loss, costs="analytic")
    assert fitted.irc_plan.roundings == ()
    for step in range(2):
        for module in (original, fitted):
            torch.manual_seed(step)
            module.zero_grad()
            _loss(module(x)).backward()
        assert all(map(torch.equal, _gradients(fitted), _gradients(original)))
        assert torch.equal(fitted.layer.weight_hh_l0, original.layer.weight_hh_l0)


@pytest.mark.filterwarnings("ignore")
@torch._dynamo.config.patch(allow_rnn=True)  # pyright: ignore
def test_a_recurrent_layer_whose_weights_are_assigned_trains_through_dynamo() -> None:
    torch.manual_seed(0)
    model, x, budget_bytes = DroppedWeights(), torch.randn(4, 6, 8), 1 << 20
    original = copy.deepcopy(model)
    backend = irc.backend(budget_bytes, outside="measured", costs="analytic")
    compiled: Any = torch.compile(model, backend=backend)
    for module in (compiled, original):
        torch.manual_seed(1)
        _loss(module(x)).backward()
    assert 0 < backend.latest_peak_bytes <= budget_bytes
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(_gradients(model), _gradients(original), strict=True)
    )
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
