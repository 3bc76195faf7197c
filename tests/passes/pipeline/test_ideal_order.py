"""Branches that run in turns are cut from each other where that is better, but not where numbers change."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import Sample, graphs
from torch import Tensor, nn

from irc.ir import Graph, Region
from irc.passes import Costs
from irc.passes.pipeline import PARTITIONS, Devices, LinearOrder, pipeline_schedule
from irc.passes.pipeline.ideal_order import ideal_order

if TYPE_CHECKING:
    from irc.compiler.pipeline.api import Pipeline


class Towers(nn.Module):
    """Two towers that take turns and meet at the end."""

    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.right = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.dropout = nn.Dropout(0.5 if draws else 0.0)
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        left = right = x
        for one, other in zip(self.left, self.right, strict=True):
            left, right = torch.tanh(one(left)), torch.tanh(other(right))
            if self.draws:
                right = self.dropout(right)
        return (left.mean(1) + right.mean(1)).square().mean()


def planned(model: nn.Module, x: Tensor, partition: str = "best") -> Pipeline:
    from irc.compiler.pipeline.api import pipeline

    return pipeline(
        model,
        (x,),
        "64MiB",
        stages=2,
        micro_batches=4,
        costs="cpu",
        time_limit=4,
        link="10MB",
        partition=partition,
    )


def stage_parameters(pipe: Pipeline) -> list[set[str]]:
    """For each stage the towers that it has weights of."""
    return [
        {entry.target.split(".")[0] for entry in schedule.graph.inputs if "weight" in entry.target}
        for schedule in pipe.stages.schedules
    ]


@pytest.mark.default
def test_a_slow_link_parts_towers_that_run_in_turns() -> None:
    from irc.compiler.pipeline.micro_batches import micro_batches_of

    torch.manual_seed(0)
    model, x = Towers(), torch.randn(64, 64)
    twin = copy.deepcopy(model)
    pipe = planned(model, x)
    assert stage_parameters(pipe) in ([{"left"}, {"right"}], [{"right"}, {"left"}])
    crossing = pipe.plan.stages[0].forward_bytes
    assert crossing <= 16 * 64 * 4
    trainer = pipe.start()
    losses = trainer.step(x)
    for part in micro_batches_of((x,), 4):
        (twin(*part) / 4).backward()
    assert len(losses) == 4
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


@pytest.mark.slow
def test_no_other_way_of_cutting_is_better() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    best = planned(Towers(), x).plan
    for name in PARTITIONS[1:]:
        other = planned(Towers(), x, partition=name).plan
        assert other.step_seconds >= best.step_seconds
        assert other.step_seconds >= other.bound_seconds
        assert other.bound_seconds == pytest.approx(best.bound_seconds)
    assert planned(Towers(), x, partition="uniform").plan.step_seconds > 1.2 * best.step_seconds


@pytest.mark.default
@pytest.mark.parametrize("draws", [False, True])
def test_random_numbers_keep_their_order(draws: bool) -> None:
    from irc.compiler.pipeline.plan import captured_micro_batch

    torch.manual_seed(0)
    graph = captured_micro_batch(Towers(draws=draws), (torch.randn(16, 64),), None).graph
    equal = Devices((1 << 40,) * 2, (1.0, 1.0), 1e3)
    order = ideal_order(line_with(graph), pipeline_schedule("1f1b", 2, 4), equal, 30.0)
    assert (order is None) == draws


def line_with(graph: Graph) -> LinearOrder:
    """With made-up costs."""
    seconds = {node: 1.0 + len(node.name) for node in graph.operations}
    return LinearOrder(
        graph, Costs(seconds=seconds, workspace_bytes=dict.fromkeys(seconds, 0), source="made up")
    )


def devices(count: int) -> Devices:
    return Devices((1 << 40,) * count, (1.0, 0.5, 1.0)[:count], 10.0)


@given(graphs(zero_sizes=False), st.integers(2, 3), st.integers(1, 4))
def test_orders_of_random_graphs_follow_what_is_read(sample: Sample, count: int, micro_batches: int) -> None:
    graph, line = sample.graph, line_with(sample.graph)
    order = ideal_order(line, pipeline_schedule("1f1b", count, micro_batches), devices(count), 30.0)
    if order is None:
        return
    assert sorted(order, key=line.operations.index) == list(line.operations) and order != line.operations
    place = {node: k for k, node in enumerate(order)}
    for node in order:
        assert node.region is Region.FORWARD
        for storage in graph.reads(node):
            maker = graph.producers.get(storage)
            assert maker not in place or place[maker] <= place[node]
