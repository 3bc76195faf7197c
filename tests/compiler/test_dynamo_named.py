"""The backend of `torch.compile` by its name."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import irc
from irc.compiler.dynamo import named

# Dynamo looks at `.grad` of what a graph break hands on.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _fresh() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    yield
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]


class Net(nn.Module):
    """Layers that a break of the graph divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.first(x).tanh().exp().sin()
        torch._dynamo.graph_break()  # pyright: ignore[reportPrivateUsage]
        for _ in range(3):
            x = self.last(x).tanh().exp().sin()
        return x.square().mean()


def test_it_trains_within_the_budget_of_its_options_by_name() -> None:
    model, x = Net(), torch.randn(512, 32)
    expected = copy.deepcopy(model)
    expected(x).backward()
    options: dict[str, Any] = {"budget": 768 << 10, "costs": "analytic"}
    compiled = torch.compile(model, backend="irc", options=options)
    compiled(x).backward()
    for mine, its in zip(model.parameters(), expected.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None and torch.equal(mine.grad, its.grad)
    found = next(made for given, made in named._made.values() if given == options)  # pyright: ignore[reportPrivateUsage]
    assert len(found.plans) == 2, "both graphs share one budget"
    assert found.peak_bytes <= 768 << 10 and any(plan.overhead for plan in found.plans)


def test_a_step_over_the_budget_is_refused() -> None:
    compiled = torch.compile(Net(), backend="irc", options={"budget": "4KiB"})
    with pytest.raises(irc.BudgetError, match="IRC540"):
        compiled(torch.randn(512, 32))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"options": {"budgt": "4GiB"}}, r"options \['budgt'\]"),
        ({"options": {"budget": "4GiB", "strategy": "auto"}}, r"options \['strategy'\]"),
        ({"options": {"costs": "analytic"}}, "no budget"),
        ({"mode": "max-autotune"}, "mode 'max-autotune'"),
        ({}, "no budget"),
    ],
)
def test_other_options_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=rf"IRC548.* was given {what}") as caught:
        torch.compile(Net(), backend="irc", **options)(torch.randn(8, 32))
    assert "outside, time_limit" in str(caught.value)
