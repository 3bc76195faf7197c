"""What planning again takes in the middle of training: one operation at a time, and nothing that stays."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import irc
from irc.frontends.torch.alive_bytes import AliveBytes
from irc.ir import Node, TensorType
from irc.passes.costs import profiling as profile

torch.set_num_threads(1)


class Measuring:
    """Follows the memory of what `profile_costs` measures.

    Attributes:
        operations: How many were measured.
        most_bytes: The most that was alive at once.
        left_bytes: What is alive afterwards.
        largest_bytes: What the largest operation takes: its operands and its results.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.operations = self.most_bytes = self.left_bytes = self.largest_bytes = 0
        self._measure = vars(profile)["_measure"]
        monkeypatch.setenv("IRC_CACHE_DIR", str(folder))
        monkeypatch.setattr(profile, "_measure", self)

    def __call__(self, missing: Mapping[str, Node], *rest: Any) -> Any:
        nodes = missing.values()
        alive = AliveBytes()
        with alive:
            found = self._measure(missing, *rest)
        self.operations += len(nodes)
        self.most_bytes = max(self.most_bytes, alive.peak_bytes)
        self.left_bytes += alive.alive_bytes
        self.largest_bytes = max([self.largest_bytes, *map(_bytes, nodes)])
        return found


MARK_BYTES = 1_000_003


def _bytes(node: Node) -> int:
    return sum(_reach_bytes(value.type) for value in {*node.operands, *node.values})


def _reach_bytes(type: TensorType) -> int:
    return (
        1 + sum((n - 1) * step for n, step in zip(type.shape, type.strides, strict=True))
    ) * type.dtype.itemsize


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(8 * 32 * 32, 64),
    )


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 32, 32)


def test_operations_are_measured_one_by_one_in_the_middle_of_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = irc.optimize(model(), images(16), "200%", time_limit=1)
    optimizer = torch.optim.AdamW(ours.parameters())
    ours(images(16)).square().mean().backward()
    optimizer.step()
    measuring = Measuring(monkeypatch, tmp_path)
    gradients = copy.deepcopy([parameter.grad for parameter in ours.parameters()])
    ours(images(12))
    assert len(ours.irc_plans) == 2 and measuring.operations > 5
    assert measuring.largest_bytes > MARK_BYTES
    assert measuring.most_bytes <= measuring.largest_bytes + MARK_BYTES and measuring.left_bytes == 0
    for parameter, gradient in zip(ours.parameters(), gradients, strict=True):
        assert gradient is not None and parameter.grad is not None and torch.equal(parameter.grad, gradient)


def test_of_a_call_that_cannot_fit_only_operations_that_do_are_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = irc.optimize(model(), images(16), "100%", time_limit=1)
    measuring = Measuring(monkeypatch, tmp_path)
    with pytest.raises(irc.BudgetError, match="IRC520") as raised:
        ours(images(96))
    assert 0 < measuring.largest_bytes <= ours.plan.budget_bytes < raised.value.minimum_bytes
    ours(images(12))
    assert measuring.operations > 5


def test_the_smallest_budget_of_a_refused_call_whose_operations_fit_is_that_of_the_call_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("IRC_CACHE_DIR", str(tmp_path))
    made = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Linear(8, 4)) for _ in "abc"]
    least = irc.optimize(made[0], (torch.randn(5, 8),), "100%").plan.minimum_budget_bytes
    ours, x = irc.optimize(made[1], (torch.randn(5, 8),), least).double(), torch.randn(5, 8).double()
    with pytest.raises(irc.BudgetError, match="IRC520") as raised:
        ours(x)
    alone = irc.optimize(made[2].double(), (x,), "100%").plan
    assert raised.value.minimum_bytes == alone.minimum_budget_bytes
