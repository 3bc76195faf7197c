"""What operations cost: signatures, the roofline model, and workspace bounds that hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import irc
from benchmarks import models
from irc.frontends.torch import capture
from irc.ir import Argument, Graph, Node, Storage, Value, values_in
from irc.passes.costs.machines import MACHINES, Machine
from irc.passes.costs.profiling import profile_costs
from irc.passes.costs.table import StepCost, analytic_costs, signature
from irc.passes.rewrites.release_gradients import release_gradients

torch.set_num_threads(1)


def _small_models() -> dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]]:
    return {
        "unet": lambda: models.unet(size=32, base=4),
        "gpt2": lambda: models.gpt2(batch=2, sequence=16, depth=1, width=32, heads=2),
        "lstm": lambda: models.lstm(batch=2, sequence=2, vocabulary=50, embedding=8, hidden=8),
        "wide": lambda: (_wide(), (torch.randn(2, 32, 16, 16),)),
        "transformer": lambda: (nn.TransformerEncoderLayer(64, 4, 128), (torch.randn(12, 2, 64),)),
        "others": lambda: (_others(), (torch.randn(2, 8, 16, 16),)),
        "relaid": lambda: (
            _Relaid(),
            (torch.randn(8, 32, 8, 8).to(memory_format=torch.channels_last), torch.rand(8, 32, 32, 32)),
        ),
    }


def _wide() -> nn.Module:
    """Convolutions of several kinds, large enough for the kernels that reorder."""
    return nn.Sequential(
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 64, 3, padding=1, groups=64),
        nn.Conv2d(64, 48, 1),
        nn.Conv2d(48, 48, 5, stride=2, dilation=2, padding=4),
        nn.ConvTranspose2d(48, 16, 2, 2),
        nn.GroupNorm(4, 16),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


class _Relaid(nn.Module):
    """Operations that copy what they read or make: images by channels, interpolation, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(32, 32, 7, padding=3, groups=32)
        self.norm = nn.LayerNorm(8)
        self.ups = nn.Sequential(
            nn.Upsample(scale_factor=2.0, mode="bilinear"), nn.Upsample(scale_factor=2.0)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        scores = self.ups(self.norm(self.depthwise(x)))
        return functional.binary_cross_entropy_with_logits(scores, target, reduction="sum")


def _others() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(8, 8, (3, 1)),
        nn.InstanceNorm2d(8, affine=True),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Upsample(scale_factor=2.0, mode="bilinear"),
        nn.PixelShuffle(2),
        nn.Softmax(1),
        nn.Flatten(2),
        nn.Conv1d(2, 4, 3),
        nn.LayerNorm(894),
        nn.GELU(),
        nn.MaxPool1d(3),
        nn.LogSoftmax(2),
    )


@functools.cache
def _graph(name: str) -> Graph:
    module, args = _small_models()[name]()
    return capture(module, args).graph


def _renamed(node: Node) -> Node:
    """The same operation over other values, in other storages, under other names."""
    new = {
        v: Value(f"{v.name}_x", v.type, Storage(f"{v.storage.name}_x", v.storage.nbytes))
        for v in node.operands
    }

    def rename(argument: Argument) -> Argument:
        if isinstance(argument, Value):
            return new[argument]
        return tuple(rename(item) for item in argument) if isinstance(argument, tuple) else argument

    keywords = tuple((key, rename(argument)) for key, argument in node.keywords)
    return replace(node, name="other", arguments=tuple(map(rename, node.arguments)), keywords=keywords)


def test_a_signature_does_not_depend_on_names() -> None:
    for node in _graph("others").operations:
        assert signature(_renamed(node)) == signature(node)


def test_a_signature_tells_apart_what_may_cost_differently() -> None:
    graph = _graph("gpt2")
    node = next(n for n in graph.operations if n.op == "aten.addmm.default")
    a, b = node.operands[0], node.operands[1]
    known = signature(node)
    wider = Value("w", replace(b.type, shape=(b.type.shape[0] * 2, b.type.shape[1])), b.storage)
    turned = Value("t", replace(b.type, strides=b.type.strides[::-1]), b.storage)
    for other in (wider, turned):
        assert signature(replace(node, arguments=(a, other, *node.arguments[2:]))) != known
    assert signature(replace(node, op="aten.mm.default")) != known
    assert signature(replace(node, keywords=(("alpha", 2),))) != known
    twice = replace(node, arguments=(a, b, b))
    twin = Value("twin", b.type, Storage("other", b.storage.nbytes))
    assert signature(twice) != signature(replace(node, arguments=(a, b, twin)))


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.default) for name in ("unet", "lstm"))]
)
def test_analytic_costs_are_positive_and_cover_every_operation(name: str, machine: Machine) -> None:
    graph = _graph(name)
    costs = analytic_costs(graph, machine)
    assert set(costs.seconds) == set(costs.workspace_bytes) == set(graph.operations)
    assert all(seconds >= machine.launch_seconds > 0 for seconds in costs.seconds.values())
    assert all(workspace_bytes >= 0 for workspace_bytes in costs.workspace_bytes.values())
    assert costs.source == f"analytic:{machine.name}"
    assert costs.step_seconds(graph) == pytest.approx(sum(costs.seconds.values()))


def test_a_matrix_product_takes_the_time_of_its_operations_or_of_its_bytes() -> None:
    module, x = nn.Linear(1024, 2048, bias=False), torch.randn(4096, 1024)
    graph = capture(module, (x,)).graph
    node = next(n for n in graph.operations if n.op == "aten.mm.default")
    flops, nbytes = 2 * 4096 * 1024 * 2048, 4 * (4096 * 1024 + 1024 * 2048 + 4096 * 2048)
    computing = Machine("computing", flops=1e9, bandwidth_bytes=1e15, launch_seconds=1e-6)
    moving = Machine("moving", flops=1e18, bandwidth_bytes=1e9, launch_seconds=1e-6)
    assert analytic_costs(graph, computing).seconds[node] == pytest.approx(1e-6 + flops / 1e9)
    assert analytic_costs(graph, moving).seconds[node] == pytest.approx(1e-6 + nbytes / 1e9)


def test_a_product_takes_what_the_machine_says_and_a_lookup_copies_no_table() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(5000, 64), nn.Linear(64, 2048)

        def forward(self, words: Tensor) -> Tensor:
            return self.layer(self.table(words))

    graph = capture(Words(), (torch.randint(0, 5000, (4, 512)),)).graph
    copying = Machine("copying", 1e12, 1e12, 1e-6)
    plain = replace(copying, product_workspace_bytes=1 << 20)
    by_op = [
        {node.op: nbytes for node, nbytes in analytic_costs(graph, machine).workspace_bytes.items()}
        for machine in (copying, plain)
    ]
    for op in ("aten.mm.default", "aten.addmm.default"):
        assert by_op[0][op] > by_op[1][op] == 1 << 20
    assert all(costs["aten.embedding.default"] < 5000 * 64 * 4 for costs in by_op)


@pytest.mark.default
@pytest.mark.parametrize("name", _small_models())
def test_the_workspace_bound_is_not_below_the_measurement(name: str) -> None:
    graph = _graph(name)
    bound = analytic_costs(graph, MACHINES["cpu"]).workspace_bytes
    measured = profile_costs(graph, repeats=1).workspace_bytes
    below = {
        signature(node): (bound[node], measured[node])
        for node in graph.operations
        if bound[node] < measured[node]
    }
    assert not below


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("scheme", ["nf4", "nf4, nested"])
def test_a_packed_product_unpacks_its_matrix(scheme: str, rows: int) -> None:
    packed_models = pytest.importorskip("support.packed_models")
    model, x = packed_models.packed_model(scheme, blocks=1), torch.randn(rows, 32)
    graph = capture(model, (x,), loss=lambda y: y.square().mean()).graph
    bounds, measured = analytic_costs(graph, MACHINES["cpu"]), profile_costs(graph, repeats=1)
    products = [node for node in graph.operations if node.op == "bitsandbytes.gemm_4bit.default"]
    assert len(products) == 2
    for node in graph.operations:
        assert measured.workspace_bytes[node] <= bounds.workspace_bytes[node]
    for node in products:
        assert measured.workspace_bytes[node] >= 32 * 64 * 4
    flops = replace(MACHINES["cpu"], flops=1.0)
    assert analytic_costs(graph, flops).seconds[products[0]] == pytest.approx(2 * rows * 32 * 64, rel=1e-3)


def test_every_value_of_an_operation_is_in_its_signature() -> None:
    for node in _graph("others").operations:
        values: list[Any] = [*values_in(node.arguments)]
        assert all(f"${index}:" in signature(node) for index in range(len(set(values))))


def test_releasing_a_gradient_takes_the_time_of_its_bytes() -> None:
    graph = capture(nn.Linear(100, 250, bias=False), (torch.randn(3, 100),)).graph
    (weight,) = (i.value for i in graph.inputs if i.requires_grad)
    moving = Machine("moving", flops=1e30, bandwidth_bytes=1e9, launch_seconds=1e-6)
    applied = release_gradients(graph, {weight: StepCost(200_000, 77, 9.0)})
    for released, nbytes, workspace_bytes in (
        (release_gradients(graph), 300_000, 0),
        (applied, 300_000 + 2 * 200_000, 77),
    ):
        costs = analytic_costs(released, moving)
        (node,) = released.releases
        assert costs.seconds[node] == pytest.approx(1e-6 + nbytes / 1e9)
        assert costs.workspace_bytes[node] == workspace_bytes
    assert StepCost.of(applied.releases[0]) == StepCost(200_000, 77, 9.0)


@pytest.mark.parametrize("costs", ["measured", "a100"])
def test_a_model_on_the_device_meta_is_planned_for_a_described_machine(costs: str) -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), torch.randn(8, 16)
    real = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    known = {"measured": "analytic"}.get(costs, costs)
    found = irc.optimize(model, (x,), "100%", costs=costs).plan
    assert found.peak_bytes == irc.optimize(real, (torch.randn(8, 16),), "100%", costs=known).plan.peak_bytes


def test_a_model_without_data_on_a_device_is_measured_on_that_device() -> None:
    def made() -> tuple[nn.Module, torch.Tensor]:
        return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), torch.randn(8, 16)

    with FakeTensorMode():
        fake, x = made()
    real, y = made()
    assert (
        irc.optimize(fake, (x,), "100%").plan.peak_bytes == irc.optimize(real, (y,), "100%").plan.peak_bytes
    )
