"""Numbers that may differ from eager's by rounding: named in the plan, and no others differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import irc


class _Net(nn.Module):
    """Two layers, and a function from its input, their results and a view of one to its result."""

    def __init__(self, result: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.result = result

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.first(x).tanh()
        return self.result(x, hidden, self.second(x) * hidden)


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (lambda x, hidden, y: (hidden, y), {}),
        (lambda x, hidden, y: (x.detach(), y), {}),
        (lambda x, hidden, y: (hidden, hidden[:, :4].detach(), y), {}),
        (lambda x, hidden, y: (y, y[:, :4], y.detach().sum()), {}),
        (lambda x, hidden, y: (x, hidden), {}),
        (lambda x, hidden, y: (x[:, :4], hidden), {}),
        (lambda x, hidden, y: (x, y), {"the gradient of input 0": ("input 0",)}),
        (lambda x, hidden, y: (x, x[:, :4], hidden), {"the gradient of input 0": ("input 0",)}),
        (
            lambda x, hidden, y: (hidden, hidden[:, :4], y),
            {"gradients through output 0": ("first.weight", "first.bias", "input 0")},
        ),
    ],
)
def test_what_may_round_is_named_and_nothing_else_differs(
    result: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]], named: dict[str, tuple[str, ...]]
) -> None:
    torch.manual_seed(0)
    model, x = _Net(result), torch.randn(8, 16, requires_grad=True)
    fitted = irc.optimize(model, (x,), "100%", costs="analytic", time_limit=2)
    roundings = fitted.plan.roundings
    assert {str(rounding).partition(",")[0]: rounding.tensors for rounding in roundings} == named
    assert irc.Plan.from_json(fitted.plan.to_json()).roundings == roundings
    assert all(str(rounding) in fitted.plan.summary() for rounding in roundings)
    gradients = list[list[Tensor]]()
    names = ("input 0", *dict(model.named_parameters()))
    for module in (model, fitted):
        leaves = (x, *model.parameters())
        loss = sum((y.square().sum() * k for k, y in enumerate(module(x), 1)), torch.zeros(()))
        gradients.append(list(torch.autograd.grad(loss, leaves, materialize_grads=True)))
    for name, ours, theirs in zip(names, *gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert fitted.plan.may_differ(name) or torch.equal(ours, theirs)


def test_recurrent_layers_with_the_bits_of_eager_are_not_named() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru, self.rnn = nn.LSTM(4, 4), nn.GRU(4, 4), nn.RNN(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(self.gru(self.lstm(x)[0])[0])[0]

    fitted = irc.optimize(Tagger(), (torch.randn(3, 2, 4),), "100%", costs="analytic", time_limit=2)
    assert fitted.plan.roundings == ()


def test_layers_without_gradients_are_named() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(3, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = self.layer(x)[0]
            return self.head(y)

    model, x = Around(), torch.randn(4, 2, 3)
    fitted = irc.optimize(model, (x,), "100%", costs="analytic", time_limit=2)
    (rounding,) = fitted.plan.roundings
    assert str(rounding).startswith("numbers of LSTM layers (test_torch_roundings.py:")
    assert rounding.tensors is not None and {*rounding.tensors} == {"head.weight", "head.bias", "output 0"}
    torch.testing.assert_close(fitted(x), model(x))


def test_a_model_that_must_be_told_that_it_is_compiled_is_named() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return self.layer(x)
            return self.layer(x) if bool((x > 0).any()) else x

    fitted = irc.optimize(Asks(), (torch.randn(3, 4),), "100%", costs="analytic", time_limit=2)
    (rounding,) = fitted.plan.roundings
    text = str(rounding)
    assert rounding.tensors is None
    assert text.startswith("all numbers: ") and "(x > 0).any()" in text and "test_torch_roundings.py:" in text
    assert "torch.compiler.is_compiling() is true" in text


@pytest.mark.parametrize("in_place", [False, True])
def test_a_part_that_is_written_in_place_is_named(in_place: bool) -> None:
    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.layer(x).tensor_split([12], 1)
            left = left.add_(1) if in_place else left + 1
            whole = right * 2
            whole += 1
            return left.sigmoid() * whole

    torch.manual_seed(0)
    model, x = Gates(), torch.randn(5, 8)
    fitted = irc.optimize(model, (x,), "100%", costs="analytic", time_limit=2)
    if not in_place:
        assert fitted.plan.roundings == ()
        assert torch.equal(fitted(x), model(x))
        return
    (rounding,) = fitted.plan.roundings
    assert "test_torch_roundings.py" in str(rounding) and "in place" in str(rounding)
    assert rounding.tensors is not None and {*rounding.tensors} == {"output 0", "layer.weight", "layer.bias"}
    torch.testing.assert_close(fitted(x), model(x))
