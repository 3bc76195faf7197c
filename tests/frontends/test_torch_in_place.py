"""What is written in place stays laid out as it is, though the functional form lays its result out anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import irc

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
    "index_put_": lambda y: y.index_put_((torch.tensor([0, 1]),), torch.zeros(6, 8)),
    "sub_": lambda y: y.sub_(y.mean(1, keepdim=True)),
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
