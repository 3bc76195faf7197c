"""Results that share memory: values, gradients and what asks for one are eager's, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.torch_cases import Model, fitted, fitted_from, keep_all
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import irc
from irc.frontends.torch import capture

torch.set_num_threads(1)


class _Reversal(torch.autograd.Function):
    """A view whose gradient is reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -gradients[0]


class _AsItIs(torch.autograd.Function):
    """Its argument, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0] * 3


def reversed_(x: Tensor) -> Tensor:
    return _Reversal.apply(x)  # pyright: ignore[reportUnknownMemberType]


def as_it_is(x: Tensor) -> Tensor:
    return _AsItIs.apply(x)  # pyright: ignore[reportUnknownMemberType]


def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return x


def without_grad(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.no_grad()(function)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "first": lambda t: t[:2],
    "rows": lambda t: t.reshape(-1),
    "unbind": lambda t: t.unbind(0)[0],
    "reversal": reversed_,
    "as it is": as_it_is,
    "reversed rows": lambda t: reversed_(t).view(-1),
    "hook": hooked,
    "hook of a view": lambda t: hooked(t.view_as(t)),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "no grad": without_grad(lambda t: t.view_as(t)),
    "first without grad": without_grad(lambda t: t[:1]),
    "leaf": lambda t: t.detach().requires_grad_(),
    "expand": lambda t: t[:1].expand(2, *t.shape[1:]),
    "relu": lambda t: t.relu(),
}

Recipe = tuple[str, Sequence[tuple[int, str]], Sequence[int], bool]
"""What is computed first, the operations on earlier tensors, the results, and whether they nest."""


def compute(recipe: Recipe) -> Callable[[Any, Tensor], Any]:
    def forward(m: Any, x: Tensor) -> Any:
        start, steps, results, nests = recipe
        y = m.lin(x.view(2, 2, 8)).flatten(0, 1) if start == "view" else m.lin(x)
        tensors = [y.relu() if start == "relu" else y, x, m.lin.weight]
        for source, name in steps:
            tensor = tensors[source % len(tensors)]
            stays = name == "hook" and tensor is m.lin.weight
            tensors.append(OPERATIONS["hook of a view" if stays else name](tensor))
        found = [tensors[0], *(tensors[place % len(tensors)] for place in results)]
        return {"first": found[:1], "others": tuple(found[1:])} if nests else tuple(found)

    return forward


def leaves(result: Any) -> list[Tensor]:
    return pytree.tree_leaves(result)


def loss(result: Any) -> Tensor:
    trained = [leaf for leaf in leaves(result) if leaf.requires_grad]
    return torch.stack([((k + 1) * leaf).square().sum() for k, leaf in enumerate(trained)]).sum()


def step(module: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
    """The results of a step, and its gradients."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    result = module(x)
    value = loss(result)
    value.backward()
    return leaves(result), [x.grad, *(parameter.grad for parameter in module.parameters())]


def model(forward: Callable[[Any, Tensor], Any]) -> nn.Module:
    torch.manual_seed(0)
    return Model(forward, lin=nn.Linear(8, 8))


def assert_eagers(forward: Callable[[Any, Tensor], Any]) -> tuple[str, ...]:
    """Compares two steps with eager's; returns the roundings, without which gradients must be bit-equal."""
    original, x = model(forward), torch.randn(4, 8)
    example = x.clone().requires_grad_()
    twin = copy.deepcopy(original)
    captured = capture(twin, (example,))
    roundings, ours = tuple(map(str, captured.roundings)), fitted_from(captured, twin, keep_all)
    for _ in range(2):
        (found, gradients), (expected, theirs) = step(ours, x), step(original, x)
        assert [leaf.requires_grad for leaf in found] == [leaf.requires_grad for leaf in expected]
        assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))
        for mine, its in zip(gradients, theirs, strict=True):
            assert (mine is None) == (its is None)
            if mine is not None and its is not None:
                tolerance = 2e-6 if roundings else 0
                torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)
    return roundings


RECIPES = st.tuples(
    st.sampled_from(["linear", "relu", "view"]),
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from(sorted(OPERATIONS))), min_size=1, max_size=4),
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.booleans(),
)


@examples(10)
@given(RECIPES)
def test_results_that_share_memory_have_eagers_gradients(recipe: Recipe) -> None:
    assert_eagers(compute(recipe))


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: (y := m.lin(x).relu(), reversed_(y)),
        lambda m, x: (r := reversed_(m.lin(x)), r[0]),
        lambda m, x: (y := m.lin(x), reversed_(y), reversed_(y)[:2], y),
        lambda m, x: (y := hooked(m.lin(x)), y[-1]),
        lambda m, x: (y := m.lin(x), hooked(y.view(-1))[:8], y[1]),
        lambda m, x: (hooked(x), m.lin(x)),
        lambda m, x: (m.lin(x), reversed_(x)[0]),
        lambda m, x: (m.lin(x), reversed_(m.lin.weight)[0]),
        lambda m, x: (y := m.lin(x).relu(), without_grad(lambda t: t[:2])(y)),
        lambda m, x: (m.lin(x), without_grad(lambda t: t[:2])(m.lin.weight)),
        lambda m, x: (y := m.lin(x), y.detach().requires_grad_()),
    ],
)
def test_nothing_rounds_where_the_graph_takes_each_gradient(forward: Callable[[Any, Tensor], Any]) -> None:
    assert assert_eagers(forward) == ()


@pytest.mark.parametrize(
    "forward",
    [
        lambda y: (y, y.detach()),
        lambda y: (y.detach(), y),
        lambda y: [y, {"a": y.detach(), "b": y.data}, y.detach()[0]],
        lambda y: (y, y, y.detach(), y.view_as(y).detach()),
        lambda y: (y.sum(), y.detach(), y.detach().view(-1)),
        lambda y: (y.view(-1), y.view(-1)[:8], y.detach()),
        lambda y: (y.transpose(0, 1), y.transpose(0, 1).detach(), y[0]),
    ],
)
def test_results_beside_their_detached_selves(forward: Callable[[Tensor], Any]) -> None:
    def of_linear(m: Any, x: Tensor) -> Any:
        return forward(m.lin(x.view(2, 2, 8)))

    assert_eagers(of_linear)


def test_inputs_parameters_and_buffers_are_returned_detached() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.lin(x), x.detach(), x.data, m.lin.weight.detach(), m.lin.weight.data[0]

    assert assert_eagers(forward) == ()


def test_a_result_with_a_gradient_of_its_own_is_not_written_in_place() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return (y := m.lin(x), reversed_(y))

    original = model(forward)
    ours, x = fitted(copy.deepcopy(original), torch.randn(4, 8)), torch.randn(4, 8)
    for module in (original, ours):
        with pytest.raises(RuntimeError, match="custom Function"):
            module(x)[1].mul_(2)


def test_a_hook_that_stays_on_a_parameter_is_refused_and_trains_outside_of_the_forward() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.lin.weight.register_hook(halve)
        return m.lin(x)

    def halve(gradient: Tensor) -> Tensor:
        return gradient * 0.5

    with pytest.raises(irc.UnsupportedError, match=r"IRC536.*where it stays"):
        fitted(model(forward), torch.randn(4, 8))
    original, ours = (model(lambda m, x: m.lin(x)) for _ in range(2))
    for module in (original, ours):
        module.get_parameter("lin.weight").register_hook(halve)
    ours, x = fitted(ours, torch.randn(4, 8).requires_grad_()), torch.randn(4, 8)
    for mine, its in zip(step(ours, x)[1][1:], step(original, x)[1][1:], strict=True):
        assert mine is not None and its is not None and torch.equal(mine, its)


@pytest.mark.parametrize("costs", ["analytic", "measured"])
def test_results_of_one_storage_have_a_gradient_each_in_the_predicted_peak(costs: str) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.lin(x)
        return y, reversed_(y), reversed_(y)[:, :2], reversed_(x), reversed_(m.lin.weight)

    def loss(results: Any) -> Tensor:
        return torch.stack([result.square().mean() for result in results]).sum()

    model, x = Model(forward, lin=nn.Linear(8, 8)), torch.randn(64, 8).requires_grad_()
    fitted_model: Any = irc.optimize(model, (x,), "100%", loss=loss, costs=costs)
    measured_bytes = irc.measured_peak_bytes(fitted_model, (x,), loss=loss)
    assert measured_bytes <= fitted_model.plan.peak_bytes
