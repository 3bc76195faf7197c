"""Attributes of classes, and globals, that a forward reads or writes: compared in each call, or refused."""

from __future__ import annotations

import copy
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import Model
from torch import Tensor, nn

import irc


class Settings:
    scale = 1.0
    sizes = (1, [2.0])
    calls = 0

    class Inner:
        scale = 1.0
        calls = 0


settings = types.ModuleType("irc_tests_settings")
settings.scale, settings.calls = 1.0, 0  # pyright: ignore[reportAttributeAccessIssue]
sys.modules[settings.__name__] = settings
scale_here: float = 1.0
calls: int = 0


def set_scale(scale: float) -> None:
    global scale_here
    any_settings: Any = settings
    scale_here = Settings.scale = Settings.Inner.scale = any_settings.scale = scale
    Settings.sizes[1][0] = scale  # pyright: ignore[reportIndexIssue]


READS: list[Callable[[Any, Tensor], Tensor]] = [
    lambda m, x: m.lin(x) * Settings.scale,
    lambda m, x: m.lin(x) * Settings.Inner.scale,
    lambda m, x: m.lin(x) * Settings.sizes[1][0],  # pyright: ignore
    lambda m, x: m.lin(x) * settings.scale,  # pyright: ignore
    lambda m, x: m.lin(x) * scale_here,
]


def model(function: Callable[[Any, Tensor], Tensor]) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    module = Model(function, lin=nn.Linear(4, 4))
    return irc.optimize(copy.deepcopy(module), (torch.ones(2, 4),), "1MiB", costs="analytic"), module


@pytest.mark.parametrize("function", READS)
def test_what_code_reads_of_classes_and_globals_is_compared(
    function: Callable[[Any, Tensor], Tensor],
) -> None:
    set_scale(1.0)
    ours, module = model(function)
    x = torch.randn(2, 4)
    for scale in (1.0, 3.0, 1.0):
        set_scale(scale)
        assert torch.equal(ours(x), module(x))
    assert len(ours.irc_plans) == 2
    assert "which the forward's code names, has changed since the plan: " in ours.irc_plans[1].call


def of_a_class(m: Any, x: Tensor) -> Tensor:
    Settings.calls += 1
    return m.lin(x) * Settings.calls


def of_a_class_within(m: Any, x: Tensor) -> Tensor:
    Settings.Inner.calls += 1
    return m.lin(x) * Settings.Inner.calls


def of_a_file(m: Any, x: Tensor) -> Tensor:
    settings.calls += 1  # pyright: ignore
    return m.lin(x) * settings.calls  # pyright: ignore


def of_this_file(m: Any, x: Tensor) -> Tensor:
    global calls
    calls += 1
    return m.lin(x) * calls


@pytest.mark.parametrize("function", [of_a_class, of_a_class_within, of_a_file, of_this_file])
def test_what_code_counts_in_classes_and_globals_is_refused(
    function: Callable[[Any, Tensor], Tensor],
) -> None:
    with pytest.raises(
        irc.UnsupportedError, match=r"(?s)IRC338.*changes Python state: \S*calls.*in a buffer"
    ):
        model(function)
    assert Settings.calls == Settings.Inner.calls == calls == settings.calls == 0  # pyright: ignore


def in_a_buffer(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.lin(x) * m.calls


def test_a_count_in_a_buffer_trains() -> None:
    torch.manual_seed(0)
    module = Model(in_a_buffer, lin=nn.Linear(4, 4))
    module.register_buffer("calls", torch.zeros(()))
    ours = irc.optimize(copy.deepcopy(module), (torch.ones(2, 4),), "1MiB", costs="analytic")
    x = torch.randn(2, 4)
    for _ in range(3):
        for each in (ours, module):
            each(x).sum().backward()
    assert torch.equal(ours.lin.weight.grad, module.lin.weight.grad)  # pyright: ignore
    assert ours.calls == module.calls == 3


def test_copies_and_pickles_compare_what_code_reads() -> None:
    set_scale(1.0)
    ours, module = model(lambda_of_settings)
    x = torch.randn(2, 4)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        for scale in (3.0, 1.0):
            set_scale(scale)
            assert torch.equal(twin(x), module(x))


def lambda_of_settings(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) * Settings.scale * scale_here
