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
