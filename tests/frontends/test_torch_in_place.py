"""Writes in place: a tensor stays laid out as it is, though the functional form lays its result out anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import irc
from irc.torch_support.layouts import same_layout

FEW, ROW = torch.tensor([0, 2]), torch.zeros(2, 1, 8, dtype=torch.long)
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "masked_fill_": lambda y: y.masked_fill_(y > 0.5, 0.0),
    "masked_scatter_": lambda y: y.masked_scatter_(y.detach() > 0, y.tanh()),
    "index_add_": lambda y: y.index_add_(1, FEW, y[:, :2].tanh()),
    "index_copy_": lambda y: y.index_copy_(1, FEW, y[:, :2].tanh()),
    "scatter_": lambda y: y.scatter_(1, ROW, 1.0),
    "scatter_add_": lambda y: y.scatter_add_(1, ROW, y[:, :1].tanh()),
    "scatter_reduce_": lambda y: y.scatter_reduce_(1, ROW, y[:, :1].tanh(), "amax"),
    "tril_": lambda y: y.tril_(),
    "cumsum_": lambda y: y.cumsum_(1),
    "renorm_": lambda y: y.renorm_(2, 1, 1.0),
    "baddbmm_": lambda y: y.baddbmm_(torch.ones(2, 6, 3), torch.ones(2, 3, 8)),
}


class _Model(nn.Module):
    def __init__(self, write: Callable[[Tensor], Any], is_view: bool) -> None:
        super().__init__()
        self.write, self.is_view, self.scale = write, is_view, nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.scale).transpose(0, 1).contiguous()
        y = y if self.is_view else y.transpose(0, 1) * 1.5
        self.write(y.transpose(0, 1) if self.is_view else y)
        return y


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_leaves_a_tensor_laid_out_as_it_is(name: str, is_view: bool) -> None:
    torch.manual_seed(0)
    model, x = _Model(WRITES[name], is_view), torch.randn(2, 6, 8)
    expected = model(x)
    expected.square().sum().backward()
    gradient, model.scale.grad = model.scale.grad, None
    result = irc.optimize(model, (x,), "100%", costs="analytic", time_limit=1)(x)
    assert result.stride() == expected.stride()
    result.square().sum().backward()
    assert torch.equal(result, expected)
    assert gradient is not None and model.scale.grad is not None and torch.equal(model.scale.grad, gradient)


OUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cumsum": lambda x, out: torch.cumsum(x, 1, out=out),
    "mul": lambda x, out: torch.mul(x, 2, out=out),
    "sort": lambda x, out: torch.sort(x, out=(out, torch.empty(2, 6, 8, dtype=torch.long))),
}


@pytest.mark.parametrize("name", OUTS)
def test_a_result_in_a_tensor_that_is_given_for_it_is_laid_out_as_that(name: str) -> None:
    class Into(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            out = torch.empty(6, 2, 8).transpose(0, 1)
            returned = OUTS[name](x, out)
            first = returned if isinstance(returned, Tensor) else returned[0]
            return out * self.scale + first

    model, x = Into(), torch.randn(2, 6, 8)
    expected, result = model(x), irc.optimize(model, (x,), "100%", costs="analytic", time_limit=1)(x)
    assert result.stride() == expected.stride() == (8, 16, 1) and torch.equal(result, expected)


class _Beside(nn.Module):
    """A view of what is written after the view was made."""

    def __init__(self, is_detached: bool) -> None:
        super().__init__()
        self.is_detached = is_detached
        self.scale, self.norm = nn.Parameter(torch.ones(8)), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        base = self.norm((x * self.scale).transpose(1, 2)) * 1.5
        view = base.transpose(1, 2)
        (view.detach() if self.is_detached else base).add_(1)
        return view


@pytest.mark.parametrize("is_detached", [False, True])
def test_the_gradient_of_a_view_of_what_is_written_later_is_laid_out_as_the_view(is_detached: bool) -> None:
    torch.manual_seed(0)
    model, x = _Beside(is_detached), torch.randn(2, 6, 8)
    layout = torch.randn(8, 6, 2).permute(2, 1, 0)
    gradients: list[list[Tensor | None]] = []
    for trained in (
        model,
        irc.optimize(model, (x,), "100%", loss=lambda y: (y * layout).sum(), time_limit=1),
    ):
        (trained(x) * layout).sum().backward()
        gradients.append([parameter.grad for parameter in trained.parameters()])
        trained.zero_grad()
    for expected, gradient in zip(*gradients, strict=True):
        assert expected is not None and gradient is not None and torch.equal(expected, gradient)


def test_what_is_computed_in_inference_mode_counts_no_writes() -> None:
    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            with torch.inference_mode():
                y.mean().mul_(2)
            return y

    model, x = Measured(), torch.randn(2, 8)
    assert torch.equal(irc.optimize(model, (x,), "100%", costs="analytic")(x), model.layer(x))


def _read_under_no_grad(y: Tensor) -> Tensor:
    with torch.no_grad():
        view = y.view(2, 6, 8)
    return y.sub_(view.mean())


def _read_by(views_of: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def forward(y: Tensor) -> Tensor:
        views = views_of(y)
        total = views[0] + views[1]
        return y.mul_(1.5) + total.sum()

    return forward


def _written_as_list(y: Tensor) -> Tensor:
    view = y.transpose(0, 1)
    vars(torch)["_foreach_mul_"]([y], 3.0)
    return view


class _AsGiven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def _func_gradient(y: Tensor) -> Tensor:
    def total(z: Tensor) -> Tensor:
        written = z.square()
        view = written.transpose(0, 1)
        written.add_(1)
        return view.sum()

    return torch.func.grad(total)(y)


def _mapped(row: Tensor) -> Tensor:
    written = row * 1.5
    view = written.t()
    written.add_(1)
    return view


FORWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "t_": lambda y: y[0].t().t_(),
    "squeeze_": lambda y: y.transpose(0, 1)[None].squeeze_(0),
    "unsqueeze_": lambda y: y.transpose(0, 1).unsqueeze_(0),
    "as_strided_": lambda y: y.transpose(0, 1).as_strided_((2, 6, 8), (48, 8, 1)),
    "resize_": lambda y: y * y.detach().transpose(0, 1).clone().resize_(2, 6, 8),
    "bernoulli_": lambda y: y * torch.empty_strided((1, 2, 6, 8), (0, 8, 16, 1)).bernoulli_(0.5)[0],
    "a view under no_grad": _read_under_no_grad,
    "views by unbind": _read_by(lambda y: y.unbind()),
    "views by iteration": _read_by(list),
    "a view of a function of one's own": _read_by(_AsGiven.apply),  # pyright: ignore[reportArgumentType]
    "a list": _written_as_list,
    "torch.func": _func_gradient,
    "torch.vmap": lambda y: torch.vmap(_mapped)(y),
}


class _Scaled(nn.Module):
    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.linspace(0.5, 1.5, 8)), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale).tanh()


@pytest.mark.parametrize("name", FORWARDS)
def test_what_eager_writes_in_place_trains_with_its_numbers(name: str) -> None:
    torch.manual_seed(0)
    model, x = _Scaled(FORWARDS[name]), torch.randn(2, 6, 8)
    numbers = torch.randn(96)

    def loss(result: Tensor) -> Tensor:
        return (result.square() * numbers[: result.numel()].view(result.shape)).sum()

    results: list[Tensor] = []
    for trained in (model, irc.optimize(model, (x,), "100%", loss=loss, costs="analytic", time_limit=1)):
        torch.manual_seed(1)
        result = trained(x)
        loss(result).backward()
        assert model.scale.grad is not None
        results += [result.detach(), model.scale.grad]
        model.scale.grad = None
    expected, expected_gradient, result, gradient = results
    assert same_layout(result, expected.stride())
    assert torch.equal(result, expected) and torch.equal(gradient, expected_gradient)
