"""Dropout and other random operations: the numbers and the generator's state are eager's, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.torch_cases import assert_same, fitted, outcome
from torch import Tensor, nn
from torch.nn import functional

import irc

torch.set_num_threads(1)

SHAPE = (2, 4, 6, 6)
RATES = (0.0, 0.025, 0.1, 0.15, 0.45, 0.5, 1 / 7, 0.9)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_Forward = Callable[[Any, Tensor, float], Tensor]

FORWARDS: dict[str, _Forward] = {
    "dropout": lambda m, x, p: functional.dropout(x, p),
    "of everything": lambda m, x, p: functional.dropout(x, 1.0),
    "of a transposed tensor": lambda m, x, p: functional.dropout(x.mT, p),
    "of an expanded tensor": lambda m, x, p: functional.dropout(x[:1].expand(3, 4, 6, 6), p),
    "in place": lambda m, x, p: functional.dropout(x * 1, p, inplace=True),
    "in place of a transposed tensor": lambda m, x, p: functional.dropout((x * 1).mT, p, inplace=True),
    "in place of a part": lambda m, x, p: functional.dropout((x * 1)[:, 1:, ::2], p, inplace=True),
    "drawn in rows": lambda m, x, p: x.mT * torch.bernoulli(x.mT.detach(), p),
    "alpha of a transposed tensor": lambda m, x, p: functional.alpha_dropout(x.mT, p, True),
    "with its mask": lambda m, x, p: torch.native_dropout(x, p, True)[0],
    "alpha": lambda m, x, p: functional.alpha_dropout(x, p, True),
    "alpha of channels": lambda m, x, p: functional.feature_alpha_dropout(x, p, True),
    "1d": lambda m, x, p: functional.dropout1d(x[0], p),
    "2d": lambda m, x, p: functional.dropout2d(x, p),
    "2d in place": lambda m, x, p: functional.dropout2d(x * 1, p, inplace=True),
    "3d": lambda m, x, p: functional.dropout3d(x, p),
    "bernoulli": lambda m, x, p: x * torch.bernoulli(x.detach().sigmoid()),
    "drop path": lambda m, x, p: x * x.new_empty(2, 1, 1, 1).bernoulli_(1 - p).div_(1 - p),
    "attention": lambda m, x, p: functional.scaled_dot_product_attention(x, x, x, dropout_p=p),
    "causal attention": lambda m, x, p: functional.scaled_dot_product_attention(x, x, x, None, p, True),
}
FULL: dict[str, _Forward] = {
    "rrelu": lambda m, x, p: functional.rrelu(x, 0.1, 0.3, True),
    "attention module": lambda m, x, p: m.attention(x[0], x[0], x[0])[0],
    "attention module, no weights": lambda m, x, p: m.attention(x[0], x[0], x[0], need_weights=False)[0],
    "encoder layer": lambda m, x, p: m.encoder(x[0]),
}


class Model(nn.Module):
    def __init__(self, forward: _Forward, rate: float, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(SHAPE))
        self.attention = nn.MultiheadAttention(6, 2, rate)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, rate)
        self.function, self.rate = forward, rate
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x * self.weight, self.rate)


def assert_draws_the_same(forward: _Forward, rate: float, dtype: torch.dtype) -> None:
    module = Model(forward, rate, dtype)
    x = torch.randn(SHAPE, dtype=dtype)
    original = copy.deepcopy(module)
    assert_same(outcome(fitted(module, x), (x,), {}), outcome(original, (x,), {}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORWARDS)
def test_the_numbers_are_those_of_eager(name: str, dtype: torch.dtype) -> None:
    assert_draws_the_same(FORWARDS[name], 0.15, dtype)


@pytest.mark.parametrize("name", FORWARDS)
def test_nothing_may_be_dropped(name: str) -> None:
    assert_draws_the_same(FORWARDS[name], 0.0, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FULL)
def test_the_numbers_within_modules_are_those_of_eager(name: str, dtype: torch.dtype) -> None:
    assert_draws_the_same(FULL[name], 0.15, dtype)


def test_the_gradient_of_rrelu_without_noise_is_laid_out_as_its_operand() -> None:
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.linspace(0.5, 1.5, SHAPE[-1])), torch.randn(SHAPE)
    module = Model(lambda m, x, p: functional.rrelu((x * m.weight).transpose(0, 1)), 0.0, torch.float32)
    module.weight = weight
    gradients: list[Tensor | None] = []
    for trained in (module, fitted(module, x)):
        trained(x).square().sum().backward()
        gradients.append(weight.grad)
        weight.grad = None
    assert gradients[0] is not None and gradients[1] is not None and torch.equal(gradients[0], gradients[1])


def test_rrelu_of_a_transposed_tensor_is_laid_out_as_by_eager() -> None:
    module = Model(lambda m, x, p: functional.rrelu(x.mT, 0.1, 0.3, True), 0.0, torch.float32)
    x = torch.randn(SHAPE)
    assert fitted(module, x)(x).stride() == module(x).stride() == module(x).contiguous().stride()


@examples(6)
@given(rate=st.sampled_from(RATES) | st.floats(0, 1), dtype=st.sampled_from(DTYPES))
def test_dropout_at_any_rate_is_that_of_eager(rate: float, dtype: torch.dtype) -> None:
    assert_draws_the_same(FORWARDS["dropout"], rate, dtype)


class Scheduled(nn.Module):
    """A model whose rate of dropout changes, without operations that take a workspace."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))
        self.dropout = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(functional.gelu(self.dropout(functional.gelu(x * self.weight))))


def smallest_budget(rate: float, dtype: torch.dtype) -> tuple[Scheduled, Tensor, int]:
    module, x = Scheduled(rate).to(dtype), torch.randn(512, 64, dtype=dtype)
    with pytest.raises(irc.BudgetError) as refused:
        irc.optimize(module, (x,), 1, costs="analytic")
    return module, x, refused.value.minimum_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_needs_the_same_memory_at_every_rate(dtype: torch.dtype) -> None:
    """Eager's factor is that of the kernel which keeps a mask at some rates alone (0.1, and not 0.15)."""
    _, _, budget = smallest_budget(0.1, dtype)
    module, x, minimum = smallest_budget(0.15, dtype)
    assert minimum == budget
    ours: Any = irc.optimize(copy.deepcopy(module), (x,), budget, costs="analytic")
    for rate in (0.15, 0.1, 0.3):
        ours.dropout.p = module.dropout.p = rate
        ours.zero_grad()
        module.zero_grad()
        assert_same(outcome(ours, (x,), {}), outcome(module, (x,), {}))
