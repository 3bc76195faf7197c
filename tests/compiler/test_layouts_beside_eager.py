"""Steps over tensors that are laid out in many ways: the bits are those of eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from torch import Tensor, nn
from torch.nn import functional

import irc

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "first axis last": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "every second": lambda x: x.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, ::2, ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
}
"""From a tensor [4, 6, 8] to one of the same shape."""


class Layer(nn.Module):
    """A layer between two that train and one that is frozen; all see a tensor in some layout."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], layout: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 3, bias=False), nn.Linear(3, 8, bias=False)
        self.scale = nn.Parameter(torch.rand(()))
        self.function, self.layout = function, layout

    def forward(self, x: Tensor) -> Tensor:
        x = self.layout(x)
        adapted = self.frozen(x) + self.up(self.down(x))
        return self.function(self, self.layout(self.into(x) * self.scale + adapted)).square().mean()


def assert_trains_as_eager(module: nn.Module, *args: Tensor, steps: int = 2) -> None:
    """Compares losses and gradients with eager's, bit for bit."""
    fitted = irc.optimize(copy.deepcopy(module), args, "100%", costs="analytic")
    assert fitted.irc_plan.roundings == ()
    for _ in range(steps):
        losses: list[Tensor] = []
        for each in (module, fitted):
            each.zero_grad()
            losses.append(each(*args))
            losses[-1].backward()
        assert torch.equal(*losses)
        for (name, theirs), ours in zip(module.named_parameters(), fitted.parameters(), strict=True):
            if theirs.grad is not None:
                assert ours.grad is not None and torch.equal(theirs.grad, ours.grad), name


PRODUCTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda m, x: m.down(x),
    "frozen": lambda m, x: m.frozen(x),
    "frozen without bias": lambda m, x: functional.linear(x, m.frozen.weight),
    "einsum": lambda m, x: torch.einsum("abc,dc->adb", x, m.into.weight),
    "tensordot": lambda m, x: torch.tensordot(x, m.into.weight, 1),
    "from the left": lambda m, x: m.frozen.weight @ x.mT,
    "vector": lambda m, x: x @ m.frozen.bias,
    "batches": lambda m, x: x @ m.layout(x).mT,
    "bilinear": lambda m, x: functional.bilinear(x, x, m.into.weight[:6, :, None].expand(6, 8, 8)),
}


@examples(12)
@given(layout=st.sampled_from(sorted(LAYOUTS)), product=st.sampled_from(sorted(PRODUCTS)))
def test_products_fold_their_operands_as_eager_does(layout: str, product: str) -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(Layer(PRODUCTS[product], LAYOUTS[layout]), torch.randn(4, 6, 8))


ACTIVATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "elu": lambda m, x: functional.elu(x),
    "selu": lambda m, x: functional.selu(x),
    "celu": lambda m, x: functional.celu(x),
    "softplus": lambda m, x: functional.softplus(x),
    "hardsigmoid": lambda m, x: functional.hardsigmoid(x),
    "hardtanh": lambda m, x: functional.hardtanh(x),
    "hardswish": lambda m, x: functional.hardswish(x),
    "gelu": lambda m, x: functional.gelu(x),
    "silu": lambda m, x: functional.silu(x),
    "mish": lambda m, x: functional.mish(x),
    "prelu": lambda m, x: functional.prelu(x, m.scale),
    "leaky relu": lambda m, x: functional.leaky_relu(x),
    "logsigmoid": lambda m, x: functional.logsigmoid(x),
    "softshrink": lambda m, x: functional.softshrink(x),
    "glu": lambda m, x: functional.glu(x),
    "softmax": lambda m, x: x.softmax(1),
    "threshold": lambda m, x: functional.threshold(x, 0.1, 0.0),
}
REDUCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layer norm": lambda m, x: functional.layer_norm(x, (8,), m.into.bias),
    "group norm": lambda m, x: functional.group_norm(x, 2),
    "batch norm": lambda m, x: functional.batch_norm(x, None, None, training=True),
    "instance norm": lambda m, x: functional.instance_norm(x),
    "rms norm": lambda m, x: functional.rms_norm(x, (8,), m.into.bias),
    "prod": lambda m, x: x.prod(1),
    "cumprod": lambda m, x: x.cumprod(2),
    "logcumsumexp": lambda m, x: x.logcumsumexp(1),
    "var": lambda m, x: x.var(1),
    "largest": lambda m, x: x.norm(float("inf"), 2),
    "logsumexp": lambda m, x: x.logsumexp((0, 2)),
    "distances": lambda m, x: torch.cdist(x, x.flip(1) + 1),
    "attention": lambda m, x: functional.scaled_dot_product_attention(x, x, x),
    "interpolation": lambda m, x: functional.interpolate(x, scale_factor=2, mode="linear"),
    "added at places": lambda m, x: x.index_put((torch.tensor([0, 0, 1]),), x[:3], accumulate=True),
    "batches of products": lambda m, x: torch.baddbmm(x, x[:, :, :6], x),
}


@examples(8)
@given(layout=st.sampled_from(sorted(LAYOUTS)), name=st.sampled_from(sorted(ACTIVATIONS)))
def test_activations_of_tensors_in_any_layout_have_the_bits_of_eager(layout: str, name: str) -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(Layer(ACTIVATIONS[name], LAYOUTS[layout]), torch.randn(4, 6, 8))


@examples(8)
@given(layout=st.sampled_from(sorted(LAYOUTS)), name=st.sampled_from(sorted(REDUCTIONS)))
def test_reductions_of_tensors_in_any_layout_have_the_bits_of_eager(layout: str, name: str) -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(Layer(REDUCTIONS[name], LAYOUTS[layout]), torch.randn(4, 6, 8))


class ImagesOfOneChannel(nn.Module):
    """Two norms of images whose dimensions of size one have strides that a trace does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(8, 8), nn.BatchNorm2d(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for _ in range(2):
            x = self.norm(x[:, None].to(memory_format=torch.channels_last)).squeeze(1)
        return x.square().mean()


def test_norms_of_one_channel_sum_as_in_eager() -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(ImagesOfOneChannel(), torch.randn(1, 6, 8))


class Result(nn.Module):
    """A layer whose result is laid out otherwise."""

    def __init__(self, layout: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.norm, self.scale = nn.Linear(8, 8), nn.BatchNorm1d(6), nn.Parameter(torch.rand(()))
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        return self.layout(self.norm(self.layer(x)) * self.scale)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda y: y.square().mean(),
    "tanh": lambda y: y.tanh().mean(),
    "sum of exponentials": lambda y: y.logsumexp(-1).mean(),
    "elu": lambda y: functional.elu(y).sum(1).square().mean(),
}


@examples(8)
@given(layout=st.sampled_from(sorted(LAYOUTS)), name=st.sampled_from(sorted(LOSSES)))
def test_gradients_of_results_come_as_the_loss_lays_them_out(layout: str, name: str) -> None:
    torch.manual_seed(0)
    module, loss, x = Result(LAYOUTS[layout]), LOSSES[name], torch.randn(4, 6, 8)
    fitted = irc.optimize(copy.deepcopy(module), (x,), "100%", costs="analytic", loss=loss)
    for each in (module, fitted):
        loss(each(x)).backward()
    assert fitted.irc_plan.roundings == ()
    for (parameter, theirs), ours in zip(module.named_parameters(), fitted.parameters(), strict=True):
        assert theirs.grad is not None and ours.grad is not None, parameter
        assert torch.equal(theirs.grad, ours.grad), parameter


class WrittenGRU(nn.Module):
    """Writes into the output of a GRU, from where a gradient in another layout comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layer, self.last = (nn.GRU(8, 8, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        y, _ = self.layer(x)
        y += x
        return self.last(y)[0].square().mean()


def test_what_is_written_into_the_output_of_a_gru_is_laid_out_as_in_eager() -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(WrittenGRU(), torch.randn(2, 6, 8))
