"""A forward that gives a tensor other data is refused; one that writes into it is traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import irc


class Layer(nn.Module):
    def __init__(self, function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x)


def made(linear: nn.Linear, x: Tensor) -> Tensor:
    z = torch.zeros(8)
    z.data = x[0].detach()
    return linear(x) + z


def parameter(linear: nn.Linear, x: Tensor) -> Tensor:
    linear.weight.data = linear.weight.data.sign()
    return linear(x)


def written(linear: nn.Linear, x: Tensor) -> Tensor:
    z = torch.zeros(8)
    z.data.copy_(x[0].detach())
    return linear(x) + z


@pytest.mark.parametrize("function", [made, parameter])
def test_other_data_is_refused_with_the_line(function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    with pytest.raises(irc.UnsupportedError, match=r"IRC338.*assigns to the data") as caught:
        irc.optimize(Layer(function), (torch.randn(4, 8),), "100%", costs="analytic", time_limit=1)
    assert f"in {function.__name__}" in str(caught.value)


def test_data_that_is_written_into_is_traced() -> None:
    model, x = Layer(written), torch.randn(4, 8)
    fitted = irc.optimize(model, (x,), "100%", costs="analytic", time_limit=1)
    assert torch.equal(fitted(x), model(x))
