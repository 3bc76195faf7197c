"""Operations within whose kernels autocast casts train with eager's bits, where eager has a backward."""

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


def bilinear_of_slices(m: Any, x: Tensor) -> Tensor:
    weight = m.bilinear.weight.transpose(1, 2)
    return functional.bilinear(input1=x.transpose(0, 1), input2=x.flip(1).transpose(0, 1), weight=weight)


def penalty(m: Any, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(m.bilinear(x, x.flip(1)).square().sum(), x, create_graph=True)
    return gradient


def penalty_in_full_precision(m: Any, x: Tensor) -> Tensor:
    y = m.bilinear(x, x.flip(1)).square().sum()
    with torch.autocast("cpu", enabled=False):
        gradients = torch.autograd.grad(y, (x, m.bilinear.weight), create_graph=True)
    return gradients[0] + gradients[1][0, 0]


def gradients_of_samples(m: Any, x: Tensor) -> Tensor:
    def total(first: Tensor, second: Tensor) -> Tensor:
        return m.bilinear(first, second).square().sum()

    return torch.func.vmap(torch.func.grad(total))(x, x.flip(1))


def tangent(m: Any, x: Tensor) -> Tensor:
    return torch.func.jvp(m.bilinear, (x, x.flip(1)), (x.sin(), x.cos()))[1]


def dual(m: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        parts: Any = forward_ad.unpack_dual(m.bilinear(forward_ad.make_dual(x, x.sin()), x.flip(1)))
        return parts.primal + parts.tangent


def inverse(m: Any, x: Tensor) -> Tensor:
    return x @ torch.linalg.pinv(m.w)


def constant_inverse(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        constant = torch.linalg.pinv(m.w)
    return x @ constant


def gradient_of_a_grid(m: Any, x: Tensor) -> Tensor:
    def total(theta: Tensor) -> Tensor:
        return functional.affine_grid(theta, [1, 1, 4, 8], align_corners=False).float().square().sum()

    return torch.func.grad(total)(m.w[:2, :3][None]).sum() + x


def tangent_of_a_grid(m: Any, x: Tensor) -> Tensor:
    def grid(theta: Tensor) -> Tensor:
        return functional.affine_grid(theta, [len(x), 1, 4, 4], align_corners=False)

    theta = m.w[:2, :3].repeat(len(x), 1, 1)
    return torch.func.jvp(grid, (theta,), (theta.sin(),))[1].reshape(len(x), 4, 8)


def model(
    function: Callable[..., Tensor], *, is_cast: bool, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            y = m.layer(x)
            with torch.autocast("cpu", enabled=is_cast):
                return m.layer(function(m, y.float())).float()

    torch.manual_seed(0)
    parts = {"layer": nn.Linear(8, 8), "bilinear": nn.Bilinear(8, 8, 8), "w": nn.Parameter(torch.randn(8, 8))}
    return Model(forward, **parts)


def fitted(original: nn.Module, x: Tensor) -> nn.Module:
    return irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic", time_limit=0.5)


def assert_alike(original: nn.Module, planned: nn.Module, x: Tensor) -> None:
    results = [module(x) for module in (original, planned)]
    assert torch.equal(*results)
    for result in results:
        result.square().mean().backward()
    for ours, its in zip(planned.parameters(), original.parameters(), strict=True):
        assert (ours.grad is None) == (its.grad is None)
        assert ours.grad is None or its.grad is None or torch.equal(ours.grad, its.grad)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch.func.vmap of bilinear says so
@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (bilinear, torch.bfloat16),
        (bilinear, torch.float16),
        (bilinear_of_slices, torch.float16),
        (penalty, torch.bfloat16),
        (penalty_in_full_precision, torch.float16),
        (gradients_of_samples, torch.bfloat16),
        (tangent, torch.float16),
        (dual, torch.bfloat16),
        (constant_inverse, torch.bfloat16),
        (gradient_of_a_grid, torch.bfloat16),
        (tangent_of_a_grid, torch.float16),
    ],
)
def test_they_train_under_autocast(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    original, x = model(function, is_cast=True, dtype=dtype), torch.randn(2, 4, 8)
    assert_alike(original, fitted(original, x), x)


@pytest.mark.parametrize("trained", ["layer", "bilinear.weight", "bilinear.bias"])
@pytest.mark.parametrize("shape", [(1, 8), (3, 4, 8), (2, 1, 4, 8)])
def test_a_bilinear_layer_of_half_precision_trains_in_part(trained: str, shape: tuple[int, ...]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return m.bilinear(m.layer(x).bfloat16(), x).float()

    torch.manual_seed(0)
    original = Model(forward, layer=nn.Linear(8, 8), bilinear=nn.Bilinear(8, 8, 4)).bfloat16()
    for name, parameter in original.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    x = torch.randn(shape, dtype=torch.bfloat16)
    assert_alike(original, fitted(original, x), x)


def test_a_bilinear_layer_trains_by_the_backend() -> None:
    original, x = model(bilinear, is_cast=True), torch.randn(3, 4, 8)
    backend: Any = irc.backend("1GiB", costs="analytic", time_limit=0.5)
    compiled: Any = torch.compile(copy.deepcopy(original), backend=backend)
    assert_alike(original, compiled, x)


def test_an_inverse_is_refused_where_eager_has_no_backward_and_trains_with_autocast_off() -> None:
    original, x = model(inverse, is_cast=True), torch.randn(3, 4, 8)
    with pytest.raises(RuntimeError, match="same dtype"):
        original(x).sum().backward()
    with pytest.raises(UnsupportedError) as refused:
        irc.optimize(original, (x,), "100%", costs="analytic")
    assert refused.value.code == "IRC352" and "test_torch_casts_within.py" in str(refused.value.at)
    assert refused.value.help is not None and "enabled=False" in refused.value.help

    original = model(inverse, is_cast=False)
    assert_alike(original, fitted(original, x), x)


def test_an_inverse_that_autocast_computes_in_full_precision_trains() -> None:
    original = model(lambda m, x: m.w.pinverse(), is_cast=True)
    x = torch.randn(3, 8, 8)
    assert_alike(original, fitted(original, x), x)


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
    assert_alike(original, fitted(original, x), x)


def test_a_grid_is_differentiated_forward() -> None:
    def moved(m: Any, x: Tensor) -> Tensor:
        theta = m.w[:2, :3].repeat(len(x), 1, 1)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(theta, theta.sin())
            grid = functional.affine_grid(dual, [len(x), 1, 4, 4], align_corners=False)
            parts: Any = forward_ad.unpack_dual(grid)
            return (parts.primal.float() + parts.tangent.float()).reshape(len(x), 4, 8)

    original, x = model(moved, is_cast=True), torch.randn(3, 4, 8)
    assert_alike(original, fitted(original, x), x)
