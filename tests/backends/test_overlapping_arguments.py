"""Arguments that lie in one tensor, one of which the forward writes: eager's numbers, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import Model
from torch import Tensor, nn

import irc
from irc.torch_support.overlaps import overlap


def writing(m: Any, a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    return m.lin(a) * b.tanh()


def twice(view: Tensor) -> tuple[Tensor, Tensor]:
    return view, view


def halves(rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
    wide = rows[:8].view(4, 16)
    return wide[:, :8], wide[:, first : first + 8]


APART: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "two tensors": lambda rows: (rows[:4].clone(), rows[4:8].clone()),
    "parts": lambda rows: (rows[:4], rows[4:8]),
    "parts in turns": lambda rows: (rows[0:8:2], rows[1:9:2]),
    "columns": lambda rows: halves(rows, 8),
    "one tensor": lambda rows: twice(rows[:4]),
}
OVERLAPPING: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "overlapping parts": lambda rows: (rows[:4], rows[2:6]),
    "overlapping columns": lambda rows: halves(rows, 4),
}


@pytest.mark.parametrize("example", APART)
def test_parts_of_one_tensor_take_no_plan_of_parts_that_lie_otherwise(example: str) -> None:
    torch.manual_seed(0)
    module = Model(writing, lin=nn.Linear(8, 8))
    rows = torch.randn(12, 8)
    ours = irc.optimize(copy.deepcopy(module), APART[example](rows.clone()), "1MiB", costs="analytic")
    for parts in APART.values():
        left: list[list[Tensor]] = []
        for each in (ours, module):
            each.zero_grad()
            given = rows.clone()
            loss = each(*parts(given)).square().sum()
            loss.backward()
            left.append([given, loss.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
        assert all(map(torch.equal, *left))
    for parts in OVERLAPPING.values():
        with pytest.raises(irc.UnsupportedError, match=r"(?s)IRC334.*views of one tensor.*pass copies"):
            ours(*parts(rows.clone()))


def averaging(m: Any, x: Tensor) -> Tensor:
    m.mean.mul_(0.5)
    return m.mean[:2] * m.lin(x[:2])


@pytest.mark.parametrize("is_example", [False, True])
def test_an_argument_that_is_a_buffer_which_is_written_has_a_plan_of_its_own(is_example: bool) -> None:
    module: Any = Model(averaging, lin=nn.Linear(4, 4))
    module.register_buffer("mean", torch.rand(4, 4))
    ours = copy.deepcopy(module)
    ours = irc.optimize(ours, (ours.mean if is_example else torch.ones(4, 4),), "1MiB", costs="analytic")
    other = torch.rand(4, 4)
    for _ in range(2):
        assert torch.equal(ours(ours.mean), module(module.mean))
        assert torch.equal(ours(other), module(other))
        assert torch.equal(ours.mean, module.mean)
    with pytest.raises(irc.UnsupportedError, match="IRC334"):
        ours(ours.mean[1:])


def test_overlaps_are_told_by_elements() -> None:
    rows = torch.zeros(12, 8)
    assert not any(overlap(*parts(rows)) for name, parts in APART.items() if name != "one tensor")
    assert all(overlap(*parts(rows)) for parts in OVERLAPPING.values())
    assert overlap(rows, rows) and overlap(rows[:4].t(), rows[3:])
