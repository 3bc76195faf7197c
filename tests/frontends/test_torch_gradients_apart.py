"""Functions whose backward sees which gradients are missing: None is no zeros."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.torch_cases import Model
from torch import Tensor, nn

import irc
from irc.ir import UnsupportedError


class Pair(torch.autograd.Function):
    """Two results, whose gradients count otherwise if one of them is missing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor:  # pyright: ignore
        if first is None:
            assert second is not None
            return second * 7
        return first * 5 if second is None else first * 2 + second


def model(forward: Any) -> nn.Module:
    torch.manual_seed(0)
    return Model(lambda m, x: forward(*Pair.apply(m.layer(x))), layer=nn.Linear(8, 8))


def own_loss(result: tuple[Tensor, ...]) -> Tensor:
    return result[0].square().sum()


def assert_alike(original: nn.Module, fitted: nn.Module, x: Tensor) -> None:
    for module in (original, fitted):
        own_loss(module(x)).backward()
    for ours, its in zip(fitted.parameters(), original.parameters(), strict=True):
        assert ours.grad is not None and its.grad is not None and torch.equal(ours.grad, its.grad)


@pytest.mark.parametrize("forward", [lambda y, z: (y, z), lambda y, z: (y, y + z)])
def test_it_is_refused_if_a_loss_may_use_one_alone_and_trains_with_the_loss(forward: Any) -> None:
    original, x = model(forward), torch.randn(4, 8)
    with pytest.raises(UnsupportedError) as refused:
        irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic", time_limit=1)
    assert refused.value.code == "IRC353"
    assert "test_torch_gradients_apart.py" in str(refused.value.at)
    assert refused.value.help is not None and "loss=" in refused.value.help

    fitted = irc.optimize(
        copy.deepcopy(original), (x,), "100%", costs="analytic", time_limit=1, loss=own_loss
    )
    assert_alike(original, fitted, x)


def normalized(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.native_group_norm(m.layer(x), None, None, 4, 8, 1, 2, 1e-5)[:2]


def test_a_group_norm_of_which_a_loss_may_use_the_means_alone_trains_with_the_loss() -> None:
    """Eager has no gradient at all for the means alone."""
    torch.manual_seed(0)
    original, x = Model(normalized, layer=nn.Linear(8, 8)), torch.randn(4, 8)
    with pytest.raises(UnsupportedError, match=r"(?s)IRC353.*NativeGroupNorm sees.*loss="):
        irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic")
    fitted = irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic", loss=own_loss)
    assert_alike(original, fitted, x)
    original.zero_grad()
    original(x)[1].sum().backward()
    assert all(p.grad is None for p in original.parameters())


@pytest.mark.parametrize("forward", [lambda y, z: (y,), lambda y, z: (y + z,), lambda y, z: (y, z.detach())])
def test_it_trains_if_its_gradients_come_together(forward: Any) -> None:
    original, x = model(forward), torch.randn(4, 8)
    fitted = irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic", time_limit=1)
    assert_alike(original, fitted, x)


def test_decompositions_of_which_a_loss_may_use_the_values_alone_are_named() -> None:
    torch.manual_seed(0)
    original = Model(lambda m, x: tuple(torch.linalg.eigh(m.layer(x).T @ m.layer(x))), layer=nn.Linear(8, 8))
    x = torch.randn(9, 8)
    without_loss, with_loss = (
        irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic", time_limit=1, loss=loss)
        for loss in (None, own_loss)
    )
    assert any("eigh" in str(rounding) for rounding in without_loss.plan.roundings)
    assert [each.tensors for each in without_loss.plan.roundings] == [("layer.weight", "layer.bias")]
    assert not any("eigh" in str(rounding) for rounding in with_loss.plan.roundings)
    assert_alike(original, with_loss, x)
