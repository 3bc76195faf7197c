"""Attributes of Python on tensors: what a forward reads counts, and what it sets is not lost in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import Model
from torch import Tensor, nn

import irc

READS: list[Callable[[Any, Tensor], Tensor]] = [
    lambda m, x: m.lin(x) * getattr(x, "scale", 1.0),
    lambda m, x: m.lin(x) * getattr(m.lin.weight, "scale", 1.0),
    lambda m, x: m.lin(x) * (2.0 if hasattr(m.shift, "scale") else 1.0),
]


def model(function: Callable[[Any, Tensor], Any]) -> Any:
    torch.manual_seed(0)
    module = Model(function, lin=nn.Linear(4, 4))
    module.register_buffer("shift", torch.ones(4))
    return module


def planned(module: nn.Module, x: Tensor) -> Any:
    return irc.optimize(module, (x,), "1MiB", costs="analytic")


def set_scale(module: Any, x: Any, scale: float | None) -> None:
    for tensor in (x, module.lin.weight, module.shift):
        vars(tensor).clear()
        if scale is not None:
            tensor.scale = scale


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("function", READS)
def test_attributes_that_a_forward_reads_are_compared(
    function: Callable[[Any, Tensor], Tensor], scale: float | None
) -> None:
    module, x = model(function), torch.randn(2, 4)
    set_scale(module, x, scale)
    original = copy.deepcopy(module)
    ours = planned(module, x)
    for other in (scale, None, 2.0, 3.0, scale):
        y = torch.randn(2, 4)
        set_scale(ours, y, other)
        set_scale(original, y, other)
        assert torch.equal(ours(y), original(y))
    assert len(ours.irc_plans) == 3


def masked(m: Any, x: Any) -> Tensor:
    return m.lin(x) * x.mask


def test_a_tensor_in_an_attribute_is_refused_and_its_cure_trains() -> None:
    x: Any = torch.randn(2, 4)
    x.mask = torch.ones(4)
    with pytest.raises(irc.UnsupportedError, match=r"(?s)IRC343.*attribute mask of input 0.*as an argument"):
        planned(model(masked), x)
    cured = model(lambda m, x, mask: m.lin(x) * mask)  # pyright: ignore
    ours = irc.optimize(copy.deepcopy(cured), (x, x.mask), "1MiB", costs="analytic")
    assert torch.equal(ours(x, 2 * x.mask), cured(x, 2 * x.mask))


def sets_one_of_an_argument(m: Any, x: Any) -> Tensor:
    x.scale = 2.0
    return m.lin(x)


def sets_one_of_a_result(m: Any, x: Any) -> Tensor:
    y = m.lin(x)
    y.scale = 2.0
    return y


def sets_one_within(m: Any, x: Any) -> Tensor:
    y = m.lin(x)
    y.scale = 2.0
    return y * y.scale


def test_attributes_that_would_be_lost_are_refused() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(irc.UnsupportedError, match=r"IRC556.*sets the attribute scale of input 0"):
        planned(model(sets_one_of_an_argument), x)
    with pytest.raises(irc.UnsupportedError, match=r"(?s)IRC342.*an attribute scale.*in a tuple"):
        planned(model(sets_one_of_a_result), x)
    assert torch.equal(planned(model(sets_one_within), x)(x), model(sets_one_within)(x))
