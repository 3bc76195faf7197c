"""Operations within whose kernels autocast casts: some are refused, and train with autocast off."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import Model
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

import irc
from irc.ir import UnsupportedError


def bilinear(m: Any, x: Tensor) -> Tensor:
    return m.bilinear(x, x.flip(1))


def bilinear_by_keywords(m: Any, x: Tensor) -> Tensor:
    return functional.bilinear(input1=x, input2=x.flip(1), weight=m.bilinear.weight)


def inverse(m: Any, x: Tensor) -> Tensor:
    return x @ torch.linalg.pinv(m.w)


def grid_within_a_transform(m: Any, x: Tensor) -> Tensor:
    def total(theta: Tensor) -> Tensor:
        return functional.affine_grid(theta, [1, 1, 4, 8], align_corners=False).float().square().sum()

    return torch.func.grad(total)(m.w[:2, :3][None]).sum() + x


def model(function: Callable[..., Tensor], *, is_cast: bool) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = m.layer(x)
            with torch.autocast("cpu", enabled=is_cast):
                return m.layer(function(m, y.float())).float()

    torch.manual_seed(0)
    parts = {"layer": nn.Linear(8, 8), "bilinear": nn.Bilinear(8, 8, 8), "w": nn.Parameter(torch.randn(8, 8))}
    return Model(forward, **parts)


def assert_alike(original: nn.Module, fitted: nn.Module, x: Tensor) -> None:
    results = [module(x) for module in (original, fitted)]
    assert torch.equal(*results)
    for result in results:
        result.square().mean().backward()
    for ours, its in zip(fitted.parameters(), original.parameters(), strict=True):
        assert (ours.grad is None) == (its.grad is None)
        assert ours.grad is None or its.grad is None or torch.equal(ours.grad, its.grad)


@pytest.mark.parametrize("function", [bilinear, bilinear_by_keywords, inverse, grid_within_a_transform])
def test_they_are_refused_under_autocast_and_train_with_it_off(function: Callable[..., Tensor]) -> None:
    x = torch.randn(3, 4, 8)
    with pytest.raises(UnsupportedError) as refused:
        irc.optimize(model(function, is_cast=True), (x,), "100%", costs="analytic")
    assert refused.value.code == "IRC352" and "test_torch_casts_within.py" in str(refused.value.at)
    assert refused.value.help is not None and "enabled=False" in refused.value.help

    original = model(function, is_cast=False)
    fitted = irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic", time_limit=2)
    assert_alike(original, fitted, x)


def test_an_inverse_that_autocast_computes_in_full_precision_trains() -> None:
    original = model(lambda m, x: m.w.pinverse(), is_cast=True)
    x = torch.randn(3, 8, 8)
    fitted = irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic", time_limit=2)
    assert_alike(original, fitted, x)


@pytest.mark.parametrize(
    ("size", "is_cast"),
    [((4, 8), True), ((4, 8), False), ((2, 4, 4), True), ((2, 4, 4), False), ((1, 32), False)],
)  # eager's backward of a length of 1 raises in half precision
def test_a_grid_trains(size: tuple[int, ...], is_cast: bool) -> None:
    """Its base is made in full precision in the forward, and in half precision in the backward."""

    def grid(m: Any, x: Tensor) -> Tensor:
        dims = len(size)
        theta = (m.w[:dims, : dims + 1] * 0.1).expand(len(x), dims, dims + 1)
        moved = functional.affine_grid(theta, [len(x), 1, *size], align_corners=False)
        return functional.grid_sample(x.view(len(x), 1, *size), moved.float(), align_corners=False).view(
            -1, 8
        )

    original, x = model(grid, is_cast=is_cast), torch.randn(3, 4, 8)
    fitted = irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic", time_limit=2)
    assert_alike(original, fitted, x)


def test_a_grid_is_differentiated_forward() -> None:
    def moved(m: Any, x: Tensor) -> Tensor:
        theta = m.w[:2, :3].repeat(len(x), 1, 1)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(theta, theta.sin())
            grid = functional.affine_grid(dual, [len(x), 1, 4, 4], align_corners=False)
            parts: Any = forward_ad.unpack_dual(grid)
            return (parts.primal.float() + parts.tangent.float()).reshape(len(x), 4, 8)

    original, x = model(moved, is_cast=True), torch.randn(3, 4, 8)
    fitted = irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic", time_limit=2)
    assert_alike(original, fitted, x)
