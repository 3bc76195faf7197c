"""Layers that are used several times under autocast: parameters are cast once, as in eager."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import Model, fitted, recompute_some
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import irc
from irc.frontends.torch import capture
from irc.frontends.torch.cast_caches import CastCaches

torch.set_num_threads(1)


def loop(m: Any, x: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(m.lin(x))
    return x


def with_other_uses(m: Any, x: Tensor) -> Tensor:
    scaled = loop(m, x) * m.lin.weight.sum()
    return loop(m, scaled) + m.lin.bias.exp() * m.other(m.lin(x))


def through_views(m: Any, x: Tensor) -> Tensor:
    first, second = m.lin.weight.chunk(2)
    return torch.cat([x @ first.t(), x @ second.t()], 1) * m.lin(m.lin(x))


def of_the_input(m: Any, x: Tensor) -> Tensor:
    return (x @ x.t()) @ m.lin(x)


def by_its_own_casts(m: Any, x: Tensor) -> Tensor:
    x, w = x.bfloat16(), m.lin.weight
    return (x @ w.to(torch.bfloat16)) + (x @ w.bfloat16()).tanh() + (x @ w.type(torch.bfloat16)).sin()


def beside_uses_without_gradients(m: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = m.lin(x) * torch.no_grad()(m.lin)(x) + m.lin(x).detach()
    return x


def beside_a_cast_of_its_own(m: Any, x: Tensor) -> Tensor:
    return m.lin(m.lin(x)) @ m.lin.weight.to(torch.bfloat16) * m.lin(x)


def within_derivatives(m: Any, x: Tensor) -> Tensor:
    def twice(y: Tensor) -> Tensor:
        return m.lin(m.lin(y)).float().square().sum()

    tangents = torch.func.jvp(lambda y: m.lin(m.lin(y)).float(), (x,), (x.sin(),))[1]
    return m.lin(m.lin(x)) + torch.func.grad(twice)(x) + tangents + torch.func.vmap(m.lin)(m.lin(x))


def beside_a_copy(m: Any, x: Tensor) -> Tensor:
    return m.lin(m.lin(x)) @ m.lin.weight.clone()


def own_cast_before_no_grad(m: Any, x: Tensor) -> Tensor:
    weight = m.lin.weight.to(torch.bfloat16)
    with torch.no_grad():
        scale = m.lin(x)
    return x.to(torch.bfloat16) @ weight + m.lin(x) * scale


class _Product(torch.autograd.Function):
    """Casts in its backward, where its forward is cast by autocast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        return (gradient @ weight.t().to(gradient.dtype)).float(), (
            x.t().to(gradient.dtype) @ gradient
        ).float()


def beside_a_function(m: Any, x: Tensor) -> Tensor:
    return m.lin(m.lin(x)) + _Product.apply(x, m.lin.weight)  # pyright: ignore


def given_to_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    def block(y: Tensor, weight: Tensor) -> Tensor:
        return m.lin(y) * m.other(y) + functional.linear(functional.linear(y, weight), weight)

    result: Tensor = checkpoint(block, x * m.other.weight[0], m.lin.weight, use_reentrant=True)  # pyright: ignore
    return result


MODELS = [
    own_cast_before_no_grad,
    beside_a_function,
    given_to_a_checkpoint,
    beside_a_copy,
    loop,
    with_other_uses,
    through_views,
    of_the_input,
    by_its_own_casts,
    beside_uses_without_gradients,
    beside_a_cast_of_its_own,
    within_derivatives,
]


def model(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Model(forward, lin=nn.Linear(8, 8), other=nn.Linear(8, 8))


def gradients(module: nn.Module, x: Tensor, *, keeps: bool = True) -> list[Tensor | None]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps):
        result = module(x)
    result.float().square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


def assert_equal(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for mine, its in zip(ours, theirs, strict=True):
        assert mine is its or (mine is not None and its is not None and torch.equal(mine, its))


@pytest.mark.parametrize("forward", MODELS)
@pytest.mark.parametrize("keeps", [True, False])
def test_gradients_of_layers_that_are_used_again_are_eagers(
    forward: Callable[[Any, Tensor], Tensor], keeps: bool
) -> None:
    original, x = model(forward), torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps):
        example = x.clone().requires_grad_()
        ours = fitted(copy.deepcopy(original), example, schedule=lambda graph: recompute_some(graph, 0))
    for _ in range(2):
        assert_equal(gradients(ours, x, keeps=keeps), gradients(original, x, keeps=keeps))


def of_a_parameter(m: Any, x: Tensor) -> Tensor:
    loss = m.lin(m.lin(x)).float().square().sum()
    return m.lin(x) * torch.autograd.grad(loss, m.lin.weight, create_graph=True)[0].sum()


def of_a_leaf_of_its_own(m: Any, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    loss = (m.lin(leaf) * m.other(leaf)).float().square().sum()
    return m.lin(x) + torch.autograd.grad(loss, leaf, create_graph=True)[0]


def of_a_transform(m: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: (m.lin(y) * m.other(y)).float().square().sum())(x) + m.lin(x)


@pytest.mark.parametrize("forward", [of_a_parameter, of_a_leaf_of_its_own, of_a_transform])
def test_derivatives_that_a_forward_takes_under_autocast_are_named(forward: Callable[..., Tensor]) -> None:
    original, x = model(forward), torch.randn(8, 8)
    with region():
        ours: Any = irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic")
    (rounding,) = ours.plan.roundings
    assert "test_torch_autocast_cache.py" in str(rounding)
    pairs = zip(original.named_parameters(), gradients(ours, x)[1:], gradients(original, x)[1:], strict=True)
    differing = {name for (name, _), mine, its in pairs if its is not None and not torch.equal(mine, its)}  # pyright: ignore
    assert differing and all(ours.plan.may_differ(name) for name in differing)


def test_sums_that_the_code_writes_are_no_derivatives() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + m.lin(x).float()
        return x

    with region():
        assert (
            irc.optimize(model(forward), (torch.randn(8, 8),), "100%", costs="analytic").plan.roundings == ()
        )


def casts(module: nn.Module, x: Tensor) -> int:
    graph = capture(module, (x,)).graph
    return sum(node.op == "aten._to_copy.default" for node in graph.operations)


def test_a_parameter_is_cast_once_and_its_gradient_too() -> None:
    module, x = model(loop), torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert casts(module, x) == 1 + 2 + 2, "the input, two parameters, two gradients"
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert casts(module, x) == 1 + 4 * (2 + 2)


@pytest.mark.slow
def test_a_step_that_keeps_no_casts_has_another_plan() -> None:
    original, x = model(loop), torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        ours: Any = irc.optimize(copy.deepcopy(original), x, "400%", costs="analytic")
        alone = irc.optimize(copy.deepcopy(original), x, "400%", costs="analytic", plans=1)
    for keeps in (True, False, True):
        for each in (ours, original):
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps):
                result = each(x)
            result.float().square().sum().backward()
        assert_equal([p.grad for p in ours.parameters()], [p.grad for p in original.parameters()])
    assert len(ours.irc_plans) == 2
    with (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        pytest.raises(irc.IrcError, match=r"IRC502.*no casts kept"),
    ):
        alone(x)


def region(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return torch.autocast("cpu", dtype, **options)


def in_a_region(m: Any, x: Tensor) -> Tensor:
    with region():
        return loop(m, x)


def in_two_regions(m: Any, x: Tensor) -> Tensor:
    with region():
        y = loop(m, x)
    with region():
        return m.lin(m.lin(y.float())).float() + m.lin(x)


def in_nested_regions(m: Any, x: Tensor) -> Tensor:
    with region():
        y = m.lin(x)
        with region():
            y = m.lin(y)
        with region(enabled=False):
            y = m.lin(y.float())
        return m.lin(y)


def in_a_region_without_cache(m: Any, x: Tensor) -> Tensor:
    with region(cache_enabled=False):
        return loop(m, x)


def beside_a_region(m: Any, x: Tensor) -> Tensor:
    return loop(m, x) + in_a_region(m, x) * m.lin.weight.sum()


REGIONS = [in_a_region, in_two_regions, in_nested_regions, in_a_region_without_cache, beside_a_region]


@pytest.mark.parametrize("forward", REGIONS)
@pytest.mark.parametrize("around", [region, contextlib.nullcontext])
def test_regions_within_a_forward_keep_their_casts_as_in_eager(
    forward: Callable[[Any, Tensor], Tensor], around: Callable[[], Any]
) -> None:
    original, x = model(forward), torch.randn(8, 8)
    with around():
        ours = irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic", time_limit=2)
    assert ours.plan.roundings == ()
    for module in (ours, original):
        with around():
            result = module(x)
        result.float().square().sum().backward()
    assert_equal(*([p.grad for p in module.parameters()] for module in (ours, original)))


def test_a_region_casts_a_parameter_once() -> None:
    assert casts(model(in_a_region), torch.randn(8, 8)) == 1 + 2 + 2, (
        "the input, two parameters, two gradients"
    )
    assert torch.is_autocast_cache_enabled() and torch.clear_autocast_cache.__name__ == "clear_autocast_cache"


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU])
def test_recurrent_layers_in_a_region_have_the_bits_of_eager(kind: Any) -> None:
    torch.manual_seed(0)
    original, x = Model(lambda m, x: m.layer(x)[0], layer=kind(8, 8)), torch.randn(5, 2, 8)
    original = Model(in_region_of, layer=original)
    ours = irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic", time_limit=2)
    assert ours.plan.roundings == ()
    for module in (ours, original):
        module(x).square().sum().backward()
    assert_equal(*([p.grad for p in module.parameters()] for module in (ours, original)))


def in_region_of(m: Any, x: Tensor) -> Tensor:
    with region():
        return m.layer(x).float()


def test_another_thread_reads_its_own_setting_of_the_cache_meanwhile() -> None:
    settings: list[bool] = []

    def of_another_thread() -> None:
        torch.set_autocast_cache_enabled(False)
        settings.append(torch.is_autocast_cache_enabled())

    with CastCaches().counting():
        thread = threading.Thread(target=of_another_thread)
        thread.start()
        thread.join()
        assert torch.is_autocast_cache_enabled()
    assert settings == [False]
