"""Copies and pickles of modules that plan other calls: they go on with the plans they had, and plan more."""

from __future__ import annotations

import copy
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import assert_same, outcome, slow_among
from torch import Tensor, nn
from torch.nn.utils import parametrize

import irc

torch.set_num_threads(1)


def by_file(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": by_file,
    "deepcopy": copy.deepcopy,
}
every_way = pytest.mark.parametrize("way", WAYS)


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 4))


def rows(count: int) -> tuple[Tensor]:
    return (torch.randn(count, 4),)


def planned(module: nn.Module, count: int = 6, **options: Any) -> Any:
    return irc.optimize(module, rows(count), "1GiB", costs="analytic", strategy="eviction", **options)


def assert_steps_agree(ours: nn.Module, original: nn.Module, *args: Tensor) -> None:
    ours.zero_grad()
    original.zero_grad()
    wanted = outcome(original, args, {})
    assert_same(outcome(ours, args, {}), wanted)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.message for record in caplog.records if record.name == "irc"]
    caplog.clear()
    return found


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("pickle", {}),
        ("pickle", {"dynamic": "batch"}),
        ("pickle", {"accumulate_gradients": True}),
        ("torch.save", {}),
        ("deepcopy", {}),
        ("deepcopy", {"accumulate_gradients": True}),
    ],
)
def test_a_copy_goes_on_with_all_plans_and_plans_more(
    way: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    module = layers()
    ours, original = planned(module, **options), copy.deepcopy(module)
    for count in (6, 3):
        assert_steps_agree(ours, original, *rows(count))
    caplog.clear()
    twin, its = WAYS[way](ours), copy.deepcopy(original)
    assert twin.irc_plans == ours.irc_plans and len(twin.irc_plans) == 2 and twin.plan == ours.plan
    for count in (3, 6):
        assert_steps_agree(twin, its, *rows(count))
    assert not logged(caplog)
    assert_steps_agree(twin, its, *rows(5))
    (line,) = logged(caplog)
    assert line.startswith("planned again") and "(plan 3 of at most 8)" in line
    assert {plan.budget_bytes for _, plan in twin.irc_plans} == {1 << 30}
    if options == {"dynamic": "batch"}:
        assert twin.irc_plans[0].plan.strategy.endswith("carried over")
    assert len(ours.irc_plans) == 2 and all(p.grad is None for p in ours.parameters()) is False
    assert_steps_agree(ours, original, *rows(6))


@every_way
def test_a_copy_has_the_plans_for_modes_that_it_is_not_in(way: str, caplog: pytest.LogCaptureFixture) -> None:
    ours = planned(layers())
    ours[1].eval()
    ours(*rows(6)).sum().backward()
    ours[1].train()
    caplog.clear()
    twin, original = WAYS[way](ours), layers()
    original.load_state_dict(ours.state_dict())
    for model in (twin, original):
        model[1].eval()
    assert_steps_agree(twin, original, *rows(6))
    for model in (twin, original):
        model[1].train()
    assert_steps_agree(twin, original, *rows(6))
    assert not logged(caplog)


class Streaming(nn.Module):
    """Holds what no pickle holds, and reads it in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.stream: Any = iter(())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "stream"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.stream = iter(())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) if self.stream is not None else x


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
@pytest.mark.parametrize("make", [Streaming, lambda: nn.Sequential(Streaming())], ids=["root", "part"])
def test_what_a_module_leaves_out_of_its_pickle_is_not_looked_for(
    way: str, make: Callable[[], nn.Module]
) -> None:
    ours: Any = planned(make(), plans=1)
    twin = WAYS[way](ours)
    assert_same(outcome(twin, (x := rows(6)), {}), outcome(ours, x, {}))


# ---------------------------------------------------------------------- what plans other calls


def total(result: Tensor) -> Tensor:
    return result.sum()


class Trainer:
    """Has the model, and a loss that is a method."""

    def __init__(self) -> None:
        self.model: Any = None

    def loss(self, result: Tensor) -> Tensor:
        return result.square().mean()


@pytest.mark.slow
def test_a_loss_that_is_pickled_plans_other_calls_and_one_that_is_not_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = pickle.loads(pickle.dumps(planned(layers(), loss=total)))
    ours(*rows(3)).sum().backward()
    assert len(ours.irc_plans) == 2
    caplog.clear()
    ours = planned(layers(), loss=lambda result: result.sum())
    twin = pickle.loads(pickle.dumps(ours))
    (line,) = logged(caplog)
    assert "without what plans other calls" in line and "lambda" in line
    twin(*rows(6)).sum().backward()
    with pytest.raises(irc.UsageError, match="IRC501"):
        twin(*rows(3))
    copy.deepcopy(ours)(*rows(3)).sum().backward()


def test_a_loss_whose_owner_has_the_fitted_module_is_pickled_with_it() -> None:
    trainer = Trainer()
    trainer.model = planned(layers(), loss=trainer.loss)
    read: Trainer = pickle.loads(pickle.dumps(trainer))
    read.model(*rows(3)).sum().backward()
    assert len(read.model.irc_plans) == 2
    twin: Any = pickle.loads(pickle.dumps(trainer.model))
    twin(*rows(3)).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("way", slow_among(WAYS, "torch.save"))
def test_a_copy_plans_for_itself_under_other_optimizers(way: str) -> None:
    ours = planned(layers(), optimizer_in_backward=torch.optim.AdamW)
    ours[0].requires_grad_(False)
    ours(*rows(3)).sum().backward()
    twin = WAYS[way](ours)
    assert len(twin.irc_plans) == len(ours.irc_plans)
    for model in (ours, twin):
        model[0].requires_grad_(True)
        torch.manual_seed(0)
        for count in (6, 3, 5):
            model(*rows(count)).square().sum().backward()
    assert_same(dict(twin.state_dict()), dict(ours.state_dict()))
    for name, optimizer in twin.irc_optimizers.items():
        assert optimizer.param_groups[0]["params"][0] is twin.get_parameter(name)


# ---------------------------------------------------------------------- what was changed


def halved(part: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, part.weight, part.bias) / 2


def third(part: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, part.weight, part.bias) / 3


def test_a_forward_that_is_set_on_a_part_is_planned_and_known_in_a_copy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, original = planned(layers()), layers()
    for forward in (halved, third):
        for model in (ours, original):
            model[0].forward = types.MethodType(forward, model[0])
        assert_steps_agree(ours, original, *rows(6))
    assert len(ours.irc_plans) == 3
    caplog.clear()
    assert_steps_agree(copy.deepcopy(ours), copy.deepcopy(original), *rows(6))
    assert not logged(caplog)


class Squared(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.square()


def test_a_module_whose_class_was_changed_is_not_planned_again() -> None:
    ours = planned(nn.Linear(4, 4))
    parametrize.register_parametrization(ours, "weight", Squared())
    message = r"IRC530.*planned again: its class was changed to ParametrizedLinear"
    with pytest.raises(irc.UsageError, match=message):
        ours(*rows(6))
    with pytest.raises(irc.UsageError, match=message):
        planned(ours)
    with torch.no_grad():
        ours(*rows(6))


def test_a_changed_module_that_is_copied_is_planned_anew() -> None:
    ours, original = planned(layers()), layers()
    for model in (ours, original):
        model[2] = nn.ReLU()
        model[3].p = 0.5
    for way in WAYS.values():
        twin = way(ours)
        assert not twin.irc_plans
        assert_steps_agree(twin, copy.deepcopy(original), *rows(6))
    ours[2].inplace = True
    ours(*rows(6)).sum().backward()
