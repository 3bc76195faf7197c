"""Attention kernels of a GPU, captured without one: numbers among results, shared heads, seeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from irc.frontends.torch import capture
from irc.frontends.torch.fixups import fake_kernels
from irc.frontends.torch.fixups.fake_kernels import fake_kernels_of_eager
from irc.ir import Graph, Node
from irc.passes.costs.machines import machine_named
from irc.passes.costs.table import analytic_costs

LENGTH, WIDTH = 100, 64
FLASH, CUDNN = (f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "cudnn"))
ARGUMENTS: dict[str, tuple[Any, ...]] = {FLASH: (), CUDNN: (None, True)}


class Attention(nn.Module):
    """Calls one kernel of attention, with so many heads of keys and values."""

    def __init__(self, kernel: str, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16))
        self.kernel, self.heads = kernel, heads

    def forward(self, x: Tensor) -> Tensor:
        queries = x @ self.weight
        shared = queries[:, : self.heads]
        operation = getattr(torch.ops.aten, self.kernel)
        return operation(queries, shared, shared, *ARGUMENTS[self.kernel])[0].float().sum()


def captured(kernel: str, heads: int = 4) -> Graph:
    with FakeTensorMode():
        module = Attention(kernel, heads)
        x = torch.empty(2, 4, LENGTH, WIDTH, dtype=torch.bfloat16)
    return capture(module, (x,)).graph


def attention_of(graph: Graph, suffix: str = "") -> Node:
    return next(node for node in graph.operations if node.op.endswith(f"_attention{suffix}.default"))


@pytest.mark.parametrize("kernel", [FLASH, CUDNN])
def test_numbers_among_the_results_are_numbers_of_backward(kernel: str) -> None:
    graph = captured(kernel)
    assert attention_of(graph).results[4:6] == (None, None)
    assert [a for a in attention_of(graph, "_backward").arguments if a == LENGTH] == [LENGTH, LENGTH]


@pytest.mark.parametrize("kernel", [FLASH, CUDNN])
def test_the_operations_of_shared_heads_are_those_of_all(kernel: str) -> None:
    costs = [
        analytic_costs(graph, machine_named("h100")) for graph in (captured(kernel), captured(kernel, 2))
    ]
    for suffix in ("", "_backward"):
        seconds = [
            next(s for node, s in each.seconds.items() if node.op.endswith(f"_attention{suffix}.default"))
            for each in costs
        ]
        assert 0 < seconds[1] <= seconds[0]


def test_results_lie_on_the_devices_where_the_kernel_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = torch.device("meta")
    monkeypatch.setattr(fake_kernels, "_devices_of_results", lambda *_: {2: meta, 3: meta})
    mode = FakeTensorMode()
    with fake_kernels_of_eager(), mode:
        x = torch.empty(2, 4, LENGTH, WIDTH)
        results = torch.ops.aten._scaled_dot_product_efficient_attention(x, x, x, None, True)
    assert [result.device.type for result in results] == ["cpu", "cpu", "meta", "meta"]
