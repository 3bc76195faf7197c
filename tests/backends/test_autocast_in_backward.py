"""Backward runs under the autocast that is on where it is called, and not under the forward's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import Model, fitted, recompute_some
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import irc

torch.set_num_threads(1)

WIDTH = 16


class _Product(torch.autograd.Function):
    """A product whose backward leaves its precision to what is on when it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        g = gradients[0].float()
        return g @ w.t(), x.float().t() @ g


class _SameProduct(_Product):
    """The product with its backward under the autocast of its forward."""

    forward = staticmethod(torch.amp.custom_fwd(_Product.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(_Product.backward, device_type="cpu"))


class _Convolving(torch.autograd.Function):
    """The identity, with a convolution in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        g = gradients[0]
        return nn.functional.conv1d(g[None], g.new_ones(g.shape[0], g.shape[0], 1))[0]


def head_in_single_precision(m: Any, x: Tensor) -> Tensor:
    x = m.lin(x).relu()
    with torch.autocast("cpu", enabled=False):
        return m.head(x.float())


def attention_with_dropout(m: Any, x: Tensor) -> Tensor:
    q, k, v = (m.lin(x).view(1, 2, -1, 8).tanh() for _ in range(3))
    return m.head(nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1).flatten(0, 1))


def own_function(m: Any, x: Tensor) -> Tensor:
    return _Product.apply(m.lin(x), m.head.weight[:, :WIDTH])  # pyright: ignore[reportUnknownMemberType]


def own_function_that_restores_autocast(m: Any, x: Tensor) -> Tensor:
    return _SameProduct.apply(m.lin(x), m.head.weight[:, :WIDTH])  # pyright: ignore[reportUnknownMemberType]


def within_checkpoints(m: Any, x: Tensor) -> Any:
    x = checkpoint(m.lin, x, use_reentrant=False)
    return checkpoint(lambda y: head_in_single_precision(m, y), x, use_reentrant=False)


def plain(m: Any, x: Tensor) -> Tensor:
    return m.lin(m.lin(x).relu()) + m.other(x)


MODELS = [
    head_in_single_precision,
    attention_with_dropout,
    own_function,
    own_function_that_restores_autocast,
    within_checkpoints,
    plain,
]


def model(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    head = nn.Linear(8 if forward is attention_with_dropout else WIDTH, WIDTH)
    return Model(forward, lin=nn.Linear(WIDTH, WIDTH), head=head, other=nn.Linear(WIDTH, WIDTH))


def cast(dtype: torch.dtype = torch.bfloat16, *, is_on: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype, enabled=is_on)


def gradients(
    module: Any,
    x: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    scale: float = 1.0,
    in_backward: bool = False,
) -> list[Tensor | None]:
    """The gradients of a step whose forward runs under autocast, and whose backward runs outside of it."""
    module.zero_grad()
    torch.manual_seed(0)
    with cast(dtype):
        loss = module(x).float().square().sum() * scale
    with cast(dtype, is_on=in_backward):
        loss.backward()
    return [parameter.grad for parameter in module.parameters()]


def assert_equal(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for mine, its in zip(ours, theirs, strict=True):
        assert mine is its or (mine is not None and its is not None and torch.equal(mine, its))


@pytest.mark.parametrize("forward", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backward_outside_of_autocast_is_eagers(
    forward: Callable[[Any, Tensor], Tensor], dtype: torch.dtype
) -> None:
    original, x = model(forward), torch.randn(8, WIDTH)
    with cast(dtype):
        ours = fitted(copy.deepcopy(original), x, schedule=lambda graph: recompute_some(graph, 0))
    assert_equal(gradients(ours, x, dtype), gradients(original, x, dtype))


def test_gradients_beyond_half_precision_stay_finite() -> None:
    original, x = model(head_in_single_precision), torch.randn(8, WIDTH)
    original.get_parameter("head.weight").data.mul_(1e-3)
    with cast(torch.float16):
        ours = fitted(copy.deepcopy(original), x)
    scaled = gradients(ours, x, torch.float16, scale=1e5)
    assert max(float(g.abs().max()) for g in scaled if g is not None) > torch.finfo(torch.float16).max
    assert_equal(scaled, gradients(original, x, torch.float16, scale=1e5))


def test_a_backward_that_autocast_would_change_is_refused_and_its_cures_train() -> None:
    original, x = model(head_in_single_precision), torch.randn(8, WIDTH)
    with cast():
        ours = fitted(copy.deepcopy(original), x)
        with pytest.raises(irc.BackwardError, match=r"IRC528.*bfloat16 on cpu.*aten\.mm") as refused:
            gradients(ours, x, in_backward=True)
        assert "test_autocast_in_backward.py" in str(refused.value)
        ours.zero_grad()
        loss = ours(x).float().square().sum()
        with torch.autocast("cpu", enabled=False):
            loss.backward()
    within = [parameter.grad for parameter in ours.parameters()]
    assert_equal(within, gradients(original, x))
    assert_equal(gradients(ours, x), gradients(original, x))


def test_a_forward_without_autocast_and_a_backward_within_it_is_refused() -> None:
    ours = fitted(model(plain), torch.randn(8, WIDTH))
    loss = ours(torch.randn(8, WIDTH)).square().sum()
    with cast(), pytest.raises(irc.BackwardError, match="IRC528"):
        loss.backward()


def test_a_backward_that_autocast_leaves_alone_runs_within_it() -> None:
    original, x = model(plain), torch.randn(8, WIDTH)
    with cast():
        ours = fitted(copy.deepcopy(original), x)
    assert_equal(gradients(ours, x, in_backward=True), gradients(original, x, in_backward=True))


def test_a_convolution_in_backward_is_seen_as_autocast_sees_it() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return _Convolving.apply(x * m.scale.weight)  # pyright: ignore[reportUnknownMemberType]

    ours = fitted(Model(forward, scale=nn.Linear(WIDTH, 1, bias=False)), torch.randn(8, WIDTH))
    loss = ours(torch.randn(8, WIDTH)).sum()
    with cast(), pytest.raises(irc.BackwardError, match=r"IRC528.*aten\.convolution"):
        loss.backward()


def test_a_backward_within_whose_kernels_autocast_casts_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return m.bilinear(x, x)

    x = torch.randn(8, WIDTH)
    with cast():
        ours = fitted(Model(forward, bilinear=nn.Bilinear(WIDTH, WIDTH, 2)), x)
        with pytest.raises(irc.BackwardError, match=r"IRC528.*aten\._trilinear"):
            ours(x).sum().backward()


def test_a_backward_in_another_half_precision_is_refused() -> None:
    x = torch.randn(8, WIDTH)
    with cast():
        ours = fitted(model(plain), x)
        loss = ours(x).float().square().sum()
    with cast(torch.float16), pytest.raises(irc.BackwardError, match=r"IRC528.*float16 on cpu"):
        loss.backward()


def test_graphs_of_dynamo_run_backward_outside_of_autocast() -> None:
    original, x = model(head_in_single_precision), torch.randn(8, WIDTH)
    backend = irc.backend("1GiB", costs="analytic", time_limit=1.0)
    ours = torch.compile(copy.deepcopy(original), backend=backend)
    assert_equal(gradients(ours, x), gradients(original, x))
    assert backend.plans
