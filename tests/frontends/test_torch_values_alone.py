"""Values of decompositions: without a gradient, eager takes an algorithm that rounds otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.torch_cases import Model
from torch import Tensor, nn

import irc

VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "svdvals": torch.linalg.svdvals,
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x @ x.mT),
    "nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "svd": lambda x: torch.linalg.svd(x, full_matrices=False)[1],
}


@pytest.mark.parametrize("name", VALUES)
def test_values_have_the_bits_of_eager_with_a_gradient_and_without(name: str) -> None:
    torch.manual_seed(0)
    values, x = VALUES[name], torch.randn(2, 6, 8)
    original = Model(lambda m, x: (m.layer(x), values(x), values(m.layer(x))), layer=nn.Linear(8, 8))
    fitted = irc.optimize(copy.deepcopy(original), (x,), "100%", costs="analytic", time_limit=1)
    results = [module(x) for module in (original, fitted)]
    for result in results:
        (result[0].square().mean() + result[2].sum()).backward()
    assert all(torch.equal(ours, its) for ours, its in zip(*results, strict=True))
    pairs = zip(original.parameters(), fitted.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)
