"""Forwards that set `requires_grad` of arguments or parameters, as models of differential equations do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import Model
from torch import Tensor, nn

import irc


def net(m: Any, x: Tensor) -> Tensor:
    return m.last((m.first(x) * m.scale).tanh())


def residual(m: Any, x: Tensor) -> Tensor:
    u = net(m, x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return (slope - u).square().mean()


def by_method(m: Any, x: Tensor) -> Tensor:
    return residual(m, x.requires_grad_())


def by_attribute(m: Any, x: Tensor) -> Tensor:
    x.requires_grad = True
    return residual(m, x)


def if_it_has_none(m: Any, x: Tensor) -> Tensor:
    if not x.requires_grad:
        x.requires_grad_()
    return residual(m, x)


def after_use(m: Any, x: Tensor) -> Tensor:
    doubled = 2 * x
    x.requires_grad_()
    return (net(m, x) * doubled).mean()


def of_a_parameter(m: Any, x: Tensor) -> Tensor:
    m.scale.requires_grad_()
    return net(m, x).mean()


def taken_away(m: Any, x: Tensor) -> Tensor:
    x.detach_()
    return net(m, x).mean()


def of_a_copy(m: Any, x: Tensor) -> Tensor:
    return residual(m, x.detach().requires_grad_())


CASES = [by_method, by_attribute, if_it_has_none, after_use, of_a_parameter, taken_away, of_a_copy]


def model(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    scale = nn.Parameter(torch.ones(4), requires_grad=False)
    return Model(function, first=nn.Linear(1, 4), last=nn.Linear(4, 1), scale=scale)


def trained(module: nn.Module, calls: list[Tensor]) -> list[Any]:
    """The loss of each call, and what it leaves behind."""
    left: list[Any] = []
    for x in calls:
        loss = module(x)
        loss.backward()
        tensors = [x, *module.parameters()]
        left += [loss.detach(), *(None if t.grad is None else t.grad.clone() for t in tensors if t.is_leaf)]
        left.append([t.requires_grad for t in tensors])
    return left


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.equal(mine, its) if isinstance(mine, Tensor) else mine == its


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("function", CASES)
def test_a_forward_may_switch_requires_grad(
    function: Callable[[Any, Tensor], Tensor], requires_grad: bool
) -> None:
    module = model(function)
    original = copy.deepcopy(module)
    example = torch.rand(5, 1).requires_grad_(requires_grad)
    ours = irc.optimize(module, (example,), "1MiB", costs="analytic")
    assert example.requires_grad is requires_grad and example.grad is None
    same, other = torch.rand(5, 1), torch.rand(5, 1)
    calls = [[x.clone().requires_grad_(requires_grad) for x in (same, other)] for _ in range(2)]
    assert_equal(*(trained(each, [x, x, y]) for each, (x, y) in zip((ours, original), calls, strict=True)))
    assert len(ours.irc_plans) <= 2


def test_a_tensor_that_is_no_leaf_is_switched_as_in_eager() -> None:
    module = model(taken_away)
    ours = irc.optimize(
        copy.deepcopy(module), ((torch.rand(5, 1).requires_grad_() * 1),), "1MiB", costs="analytic"
    )
    x = torch.rand(5, 1).requires_grad_()
    assert_equal(trained(ours, [x * 1]), trained(module, [x * 1]))


def frozen_within(m: Any, x: Tensor) -> Tensor:
    m.first.weight.requires_grad_(False)
    return net(m, x).mean()


def test_what_takes_requires_grad_away_is_refused_and_its_cure_trains() -> None:
    module: Any = model(frozen_within)
    with pytest.raises(irc.UnsupportedError, match=r"(?s)IRC338.*takes requires_grad from.*frozen_within"):
        irc.optimize(module, (torch.rand(5, 1),), "1MiB", costs="analytic")
    assert module.first.weight.requires_grad
    module.first.weight.requires_grad_(False)
    ours, x = (
        irc.optimize(copy.deepcopy(module), (torch.rand(5, 1),), "1MiB", costs="analytic"),
        torch.rand(5, 1),
    )
    assert_equal(trained(ours, [x]), trained(module, [x]))
