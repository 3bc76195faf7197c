"""What a plan promises on models that scripts really have: the peak, the numbers, and no silent change."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import irc
from irc.passes.costs.allocations import peak_bytes


class Calls(nn.Module):
    """Calls a function with itself and the arguments."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def planned(module: nn.Module, *args: Tensor, budget: int | str = "100%", **options: Any) -> Any:
    return irc.optimize(module, args, budget, time_limit=2, **options)


def square(result: Any) -> Tensor:
    return result.square().mean()


OUTSIDE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[Any], Tensor]]] = {
    "attention": (
        lambda: Calls(
            lambda m, x: m.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(32, 4, batch_first=True)
        ),
        lambda: torch.randn(4, 16, 32),
        square,
    ),
    "channels last": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)),
        lambda: torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last),
        square,
    ),
    "GRU": (
        lambda: Calls(lambda m, x: m.a(x)[0], a=nn.GRU(8, 8, batch_first=True)),
        lambda: torch.randn(3, 5, 8),
        square,
    ),
    "slice": (
        lambda: Calls(lambda m, x: m.a(x).relu()[:, ::2], a=nn.Linear(32, 32)),
        lambda: torch.randn(16, 32),
        square,
    ),
    "integers beside": (
        lambda: Calls(lambda m, x: m.a(x).sort(-1), a=nn.Linear(32, 32)),
        lambda: torch.randn(16, 32),
        lambda result: square(result[0]),
    ),
    "aliases": (
        lambda: Calls(lambda m, x: (y := m.a(x).relu(), y.view(-1)), a=nn.Linear(32, 32)),
        lambda: torch.randn(16, 32),
        lambda result: result[0].mean() + result[1].square().mean(),
    ),
    "sum": (lambda: nn.Linear(32, 32), lambda: torch.randn(16, 32), lambda result: result.sum()),
    "relaid error": (
        lambda: nn.Linear(32, 256),
        lambda: torch.randn(64, 32),
        lambda result: functional.mse_loss(result.t(), torch.zeros(256, 64)),
    ),
    "logits": (
        lambda: nn.Linear(32, 256),
        lambda: torch.randn(64, 32),
        lambda result: functional.binary_cross_entropy_with_logits(result, torch.zeros(64, 256)),
    ),
    "mask": (
        lambda: nn.Linear(32, 256),
        lambda: torch.randn(64, 32),
        lambda result: result.mul(result > 0).sum() / (result > 0).sum(),
    ),
    "masked sum": (
        lambda: nn.Linear(32, 256),
        lambda: torch.randn(64, 32),
        lambda result: (torch.eye(64, 256, dtype=torch.bool) * result).sum(),
    ),
    "mean in half precision": (
        lambda: nn.Linear(32, 256).bfloat16(),
        lambda: torch.randn(64, 32).bfloat16(),
        lambda result: result.mean(),
    ),
}


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("name", OUTSIDE)
def test_the_peak_holds_with_a_loss_outside_of_the_module(name: str, tells: bool) -> None:
    make, draw, loss = OUTSIDE[name]
    x = draw()
    fitted = planned(make(), x, loss=loss if tells else None)

    def step() -> None:
        loss(fitted(x)).backward()

    step()
    fitted.zero_grad()
    assert peak_bytes(step) + fitted.plan.static_bytes <= fitted.plan.peak_bytes


@pytest.mark.parametrize("loss", [Tensor.max, Tensor.median, lambda y: y.max() - y.min()])
def test_the_peak_holds_with_the_largest_element_as_the_loss(loss: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(64, 32)
    fitted = planned(nn.Linear(32, 256), x, loss=loss)

    def step() -> None:
        loss(fitted(x)).backward()

    step()
    fitted.zero_grad()
    assert 0 <= fitted.plan.peak_bytes - peak_bytes(step) - fitted.plan.static_bytes <= 16


def test_a_scaled_loss_inside_of_the_module_stays_within_the_peak() -> None:
    x = torch.randn(16, 32)
    fitted = planned(Calls(lambda m, x: m.a(x).square().mean(), a=nn.Linear(32, 32)), x)

    def step() -> None:
        (fitted(x) / 4).backward()

    step()
    fitted.zero_grad()
    assert peak_bytes(step) + fitted.plan.static_bytes <= fitted.plan.peak_bytes


def test_a_module_under_two_names_is_left_whole_and_trains_the_same() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
            self.dec = self.enc

        def forward(self, x: Tensor) -> Tensor:
            return square(self.dec(self.enc(x).relu()))

    torch.manual_seed(0)
    model, x = Shared(), torch.randn(4, 8)
    kept = dict(model.named_parameters())
    fitted = planned(model, x)
    assert all(kept[name] is parameter for name, parameter in model.named_parameters())
    assert type(model.enc[1].running_mean) is Tensor
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(x).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.load_state_dict(statistics, strict=False)
    model.zero_grad()
    fitted(x).backward()
    for name, parameter in fitted.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, expected[name]), name  # type: ignore[arg-type]
    assert all(torch.equal(after[name], buffer) for name, buffer in fitted.named_buffers())


def test_an_output_that_the_loss_does_not_use_leaves_its_parameters_without_gradients() -> None:
    model = Calls(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    x = torch.randn(4, 8)
    fitted = planned(model, x)
    fitted(x)[0].mean().backward()
    found = {name: parameter.grad is None for name, parameter in fitted.named_parameters()}
    assert found == {"a.weight": False, "a.bias": False, "b.weight": True, "b.bias": True}


def test_what_changes_after_planning_is_refused_where_it_is_not_planned_anew() -> None:
    x = torch.randn(4, 8)
    fitted = planned(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), x, plans=1)
    fitted(x)
    fitted[1].p = 0.0
    with pytest.raises(irc.UsageError, match=r"IRC507.*setting of submodule '1'.*'p': 0.5.*'p': 0.0"):
        fitted(x)
    fitted[1].p = 0.5
    fitted(x)
    fitted[0] = nn.Linear(8, 8)
    with pytest.raises(irc.UsageError, match=r"IRC507.*the module has other submodules"):
        fitted(x)


def test_python_state_that_the_forward_changes_is_refused() -> None:
    x = torch.randn(4, 8)

    def counts(module: Any, x: Tensor) -> Tensor:
        module.steps += 1
        return module.a(x) / module.steps

    counting = Calls(counts, a=nn.Linear(8, 8))
    counting.steps = 0  # type: ignore[assignment]
    with pytest.raises(irc.UnsupportedError, match=r"IRC338.*Python state: steps"):
        planned(counting, x)
    assert counting.steps == 0
    before = random.getstate()
    drawing = Calls(lambda m, x: m.a(x) if random.random() < 2 else x, a=nn.Linear(8, 8))
    with pytest.raises(irc.UnsupportedError, match=r"IRC338.*Python's generator"):
        planned(drawing, x)
    assert random.getstate() == before


@pytest.mark.parametrize("loss", [lambda y: y, lambda y: 1.0, lambda y: y.nothing])
def test_a_loss_that_is_none_is_refused(loss: Callable[[Any], Any]) -> None:
    with pytest.raises(irc.UsageError, match="IRC341"):
        planned(nn.Linear(8, 8), torch.randn(4, 8), loss=loss)


@pytest.mark.parametrize("options", [{"loss": 3}, {"example_kwargs": [1]}])
def test_arguments_of_the_wrong_type_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(irc.UsageError, match="IRC406"):
        planned(nn.Linear(8, 8), torch.randn(4, 8), **options)


@pytest.mark.parametrize("options", [{"time_limit": "5"}, {"strategy": 3}])
def test_options_of_the_wrong_type_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(irc.UsageError, match="IRC403"):
        irc.optimize(nn.Linear(8, 8), (torch.randn(4, 8),), "100%", **options)


def test_an_operation_whose_results_are_larger_than_traced_is_refused() -> None:
    bag = nn.EmbeddingBag(50, 32, mode="max")
    model = Calls(lambda m, i: functional.relu(m.a(i)).mean(), a=bag)
    indices = torch.randint(50, (8, 16))
    try:
        fitted = planned(model, indices)
    except irc.UnsupportedError as refused:
        assert refused.code == "IRC412"
        return

    def step() -> None:
        fitted(indices).backward()

    step()
    fitted.zero_grad()
    assert peak_bytes(step) + fitted.plan.static_bytes <= fitted.plan.peak_bytes
