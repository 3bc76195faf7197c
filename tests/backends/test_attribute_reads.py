"""Settings that a capture does not read may change at any time; those that it reads make other plans."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import irc
from irc.torch_support.attribute_reads import reads_all, recording_attribute_reads

torch.set_num_threads(1)


class Counting(nn.Module):
    """Counts its calls in eval(), as a layer with statistics of its own does."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.scale = 1.0
        self.calls = 0

    def factor(self) -> float:
        return self.scale

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.calls += 1
        return torch.tanh(self.lin(x)) * self.factor()


class Whole(Counting):
    def factor(self) -> float:
        return self.__dict__["scale"]


class Copying(Counting):
    def factor(self) -> float:
        return copy.copy(self).scale


class Asking(Counting):
    def factor(self) -> float:
        return 3.0 if hasattr(self, "warm") else self.scale


class Own(Counting):
    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


def planned(module: nn.Module, **options: Any) -> Any:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    return irc.optimize(module, x, "1MiB", costs="analytic", time_limit=1, **options)


def pair(kind: type[nn.Module], **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    original = nn.Sequential(kind(), nn.Dropout(0.0))
    return original, planned(copy.deepcopy(original), **options)


def agree(original: Any, ours: Any) -> bool:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    for model in (original, ours):
        model.zero_grad()
        model(x).square().sum().backward()
    return torch.equal(original[0].lin.weight.grad, ours[0].lin.weight.grad)


@pytest.mark.parametrize("plans", [1, 8])
def test_what_a_script_counts_in_submodules_makes_no_new_plans(plans: int) -> None:
    original, ours = pair(Counting, plans=plans)
    for epoch in range(4):
        for model in (original, ours):
            model.train()
            model[0].epoch = model[0].lin.epoch = epoch
            model[1].steps = [epoch]
        assert agree(original, ours)
        for model in (original, ours):
            model.eval()(torch.ones(3, 4))
    assert ours[0].calls == 4 and len(ours.irc_plans) == 1


@pytest.mark.parametrize("kind", [Counting, Whole, Copying, Asking, Own])
def test_a_setting_that_is_read_makes_another_plan(kind: type[nn.Module]) -> None:
    original, ours = pair(kind)
    for scale in (2.0, 0.5, 2.0, 1.0):
        for model in (original, ours):
            model[0].scale = scale
        assert agree(original, ours)
    assert len(ours.irc_plans) == 3


def test_an_attribute_that_was_asked_for_in_vain_counts() -> None:
    original, ours = pair(Asking)
    for model in (original, ours):
        model[0].warm = True
    assert agree(original, ours)
    assert "{} is now {'warm': True}" in ours.irc_plans[0].call


@pytest.mark.parametrize("kind", [Whole, Own])
def test_where_reads_cannot_be_told_apart_everything_counts(kind: type[nn.Module]) -> None:
    original, ours = pair(kind)
    for model in (original, ours):
        model[0].epoch = 1
        model[0].lin.epoch = 1
    assert agree(original, ours)
    assert [call.call for call in ours.irc_plans] == [
        "a setting of submodule '0' has changed since the plan: {} is now {'epoch': 1}",
        "the example arguments",
    ]


@pytest.mark.parametrize("kind", [Counting, Whole, Copying, Asking])
def test_of_the_root_what_is_read_counts_too(kind: type[nn.Module]) -> None:
    original: Any = kind()
    ours = planned(kind())
    ours.load_state_dict(original.state_dict())
    x = torch.ones(3, 4)
    for scale in (1.0, 2.0):
        original.scale = ours.scale = scale
        assert torch.equal(ours(x), original(x))


def test_the_message_names_what_counts() -> None:
    _, ours = pair(Counting, plans=1)
    ours[0].epoch, ours[0].lin.epoch, ours[0].scale = 1, 1, 2.0
    message = r"IRC507.*submodule '0' has changed since the plan: \{'scale': 1.0\} is now \{'scale': 2.0\}"
    with pytest.raises(irc.UsageError, match=message):
        ours(torch.ones(3, 4))


def test_copies_and_pickles_know_what_counts() -> None:
    original, ours = pair(Counting)
    for model in (original, ours):
        model[0].epoch = 1
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        twin[0].epoch = twin[0].lin.epoch = 2
        assert agree(original, twin) and len(twin.irc_plans) == 1
        twin[0].scale = 2.0
        twin(torch.ones(3, 4))
        assert len(twin.irc_plans) == 2


def test_reads_are_noted_while_it_is_open_and_not_after() -> None:
    model = nn.Sequential(Counting(), Own(), Counting())
    with recording_attribute_reads() as outer:
        with recording_attribute_reads() as inner:
            assert model[0].scale == 1.0
        with pytest.raises(ValueError, match="stop"), recording_attribute_reads():
            raise ValueError("stop")
        assert model[0].calls == 0
    _, first, lin, own, *_ = inner.of(model)
    assert first is not None and lin is not None and own is None
    assert "scale" in first and "calls" not in first and "scale" not in lin
    again = outer.of(model)[1]
    assert again is not None and "calls" in again
    assert "__getattribute__" not in vars(nn.Module)


def test_who_stood_in_the_way_of_reads_before_still_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noting(self: nn.Module, name: str) -> Any:
        seen.append(name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(nn.Module, "__getattribute__", noting, raising=False)
    module = nn.Linear(2, 2)
    with recording_attribute_reads() as readings:
        seen.clear()
        _ = module.in_features
        assert seen == ["in_features"]
    assert readings and vars(nn.Module)["__getattribute__"] is noting


@pytest.mark.parametrize("room", ["backends.torch.hooks", "compiler.compile", "frontends.torch.capture"])
def test_irc_itself_looks_at_whole_dicts_without_reading_all_settings(room: str) -> None:
    found: dict[str, Any] = {"sys": sys}
    for file, expected in (
        (importlib.import_module(f"irc.{room}").__file__, False),
        ("their_model.py", True),
    ):
        exec(compile("frame = sys._getframe()", str(file), "exec"), found)
        assert reads_all("__dict__", found["frame"]) is expected
