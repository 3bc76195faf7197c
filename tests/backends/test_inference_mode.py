"""`torch.inference_mode`: planned under it as outside; what it makes is refused where it would train."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.torch_cases import Model
from torch import Tensor, nn

import irc

torch.set_num_threads(1)


def model() -> Any:
    torch.manual_seed(0)
    weights = torch.arange(4.0)
    return Model(lambda m, x: m.norm(m.lin(x)) * weights, lin=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))


def planned(module: nn.Module, x: Tensor) -> Any:
    return irc.optimize(module, x, "100%", costs="analytic", time_limit=1)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_a_module_is_planned_where_nothing_is_trained_as_elsewhere(context: Any) -> None:
    x, ours = torch.randn(6, 4), model()
    original: Any = copy.deepcopy(ours)
    with context():
        ours = planned(ours, x)
        assert torch.equal(ours(x), original(x))
    for _ in range(2):
        for each in (original, ours):
            each(x).square().sum().backward()
    assert torch.equal(ours.lin.weight.grad, original.lin.weight.grad)
    with context():
        assert torch.equal(ours(x[:2]), original(x[:2])) and len(ours.irc_plans) == 1
    assert torch.equal(ours.norm.running_mean, original.norm.running_mean)


def test_tensors_of_inference_mode_are_refused_by_name() -> None:
    x, ours = torch.randn(6, 4), model()
    with torch.inference_mode():
        made, given = model(), torch.randn(6, 4)
    with pytest.raises(irc.UnsupportedError, match=r"IRC557.*parameter lin.weight was made under torch"):
        planned(made, x)
    with pytest.raises(irc.UnsupportedError, match=r"IRC557.*input 0 was made under"):
        planned(ours, given)
    fitted = planned(ours, x)
    with pytest.raises(irc.UnsupportedError, match=r"IRC557.*input 0") as raised:
        fitted(given)
    assert raised.value.help is not None and "clone()" in raised.value.help
    fitted(given.clone()).sum().backward()
    with torch.no_grad():
        assert torch.equal(fitted.eval()(given), ours.eval()(given))
