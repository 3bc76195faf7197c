"""Numbers that change between the steps of a compiled model: one plan takes them, with eager's bits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import irc
from irc.passes.costs.allocations import peak_bytes

# Dynamo looks at `.grad` of what a graph break hands on, and warns of what it leaves to Python.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*Dynamo"),
]


@pytest.fixture(autouse=True)
def _fresh() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]


class Net(nn.Module):
    """Two layers, and a function of their result and the numbers of a call."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = 0.5
        self.calls, self.rate = 1, 1.0
        self.functions = (function,)

    def forward(self, x: Tensor, *numbers: Any) -> Tensor:
        (function,) = self.functions
        return function(self, self.out(torch.tanh(self.lin(x))), *numbers)


def broken(_: Net, h: Tensor, t: float) -> Tensor:
    h = h * t
    torch._dynamo.graph_break()  # pyright: ignore[reportPrivateUsage]
    return h.sin() / t


def counting(net: Net, h: Tensor) -> Tensor:
    net.calls += 1
    return h / net.calls


def decaying(net: Net, h: Tensor) -> Tensor:
    net.rate = net.rate * 0.9
    return h * net.rate


def same(ours: Tensor | None, eagers: Tensor | None) -> bool:
    return (
        ours is not None and eagers is not None and torch.equal(ours.nan_to_num(7.0), eagers.nan_to_num(7.0))
    )


@pytest.mark.parametrize(
    ("function", "calls", "plans"),
    [
        (lambda _, h, t: h * t, [(t,) for t in (1.0, 0.9, 0.8, -0.0, math.inf, math.nan)], 3),
        (lambda _, h, t, u: h / max(t, 0.5) - t * u, [(1.0, 2.0), (0.9, 2.0), (0.8, 2.5), (0.3, 2.6)], 3),
        (lambda _, h, n: h * n + n // 2, [(2,), (3,), (4,), (5,)], 2),
        (lambda net, h, k: h * net.weight + k, [(1,), (1,), (1,)], 2),
        (lambda _, h, t: h * t if t > 0.75 else h + t, [(1.0,), (0.9,), (0.5,), (0.4,), (0.8,)], 3),
        (lambda _, h, n: h[:, :n] * n, [(2,), (3,), (4,)], 3),
        (lambda _, h, t: h.clamp(-t, t), [(1.0,), (0.9,), (0.8,)], 3),
        (counting, [(), (), ()], 3),  # Dynamo takes whole numbers of modules for constants
        (decaying, [(), (), (), ()], 2),
        (broken, [(1.0,), (0.9,), (0.8,), (0.7,)], 5),
    ],
    ids=[
        "scale",
        "several",
        "whole",
        "attribute",
        "branch",
        "slice",
        "clamp",
        "counter",
        "decay",
        "graph-break",
    ],
)
def test_a_number_that_changes_is_an_input_of_the_plan(
    function: Callable[..., Tensor], calls: list[tuple[Any, ...]], plans: int
) -> None:
    model = Net(function)
    twin = copy.deepcopy(model)
    backend = irc.backend("1MiB", outside=0, costs="analytic")
    run: Any = torch.compile(model, backend=backend)
    for step, numbers in enumerate(calls):
        x = torch.randn(4, 8)
        for one in (twin, run):
            one.zero_grad()
            setattr(one, "weight", 0.5 + 0.1 * step)  # noqa: B010
            one(x, *numbers).sum().backward()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        assert all(same(parameter.grad, other.grad) for parameter, other in pairs), numbers
    assert (model.calls, model.rate) == (twin.calls, twin.rate)
    assert len(backend.plans) == plans


def test_the_rate_of_dropout_is_open_with_dynamic_and_draws_as_eager_does() -> None:
    model = Net(lambda net, h: nn.functional.dropout(h, net.weight).square())
    twin = copy.deepcopy(model)
    backend = irc.backend("1MiB", costs="analytic")
    run: Any = torch.compile(model, backend=backend, dynamic=True)
    for rate in (0.25, 0.25, 0.5):
        x = torch.randn(4, 8)
        for one in (twin, run):
            torch.manual_seed(7)
            setattr(one, "weight", rate)  # noqa: B010
            one.zero_grad()
            one(x).sum().backward()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        assert all(same(parameter.grad, other.grad) for parameter, other in pairs)
    assert len(backend.plans) == 2


def test_the_budget_holds_when_a_number_changes() -> None:
    def deep(_: Net, h: Tensor, t: float) -> Tensor:
        for _layer in range(8):
            h = torch.sin(h)
        return h * t

    model, x = Net(deep), torch.randn(4096, 8)

    def step(run: Any, t: float) -> None:
        model.zero_grad()
        run(x, t).sum().backward()

    static = sum(tensor.nbytes for tensor in (*model.parameters(), x))
    step(model, 1.0)
    eager = peak_bytes(lambda: step(model, 1.0)) + static
    backend = irc.backend(int(eager * 0.7), outside=0)  # with the workspaces that operations take
    run: Any = torch.compile(model, backend=backend)
    for t in (1.0, 0.9, 0.8):
        step(run, t)
    model.zero_grad()
    assert peak_bytes(lambda: step(run, 0.7)) + static <= backend.latest_peak_bytes <= 0.7 * eager


def test_a_graph_without_backward_counts_though_it_takes_a_number() -> None:
    @torch.compile(backend=irc.backend("1MiB", costs="analytic"))
    def scaled(x: Tensor, t: float) -> Tensor:
        return x * t

    x = torch.randn(4, 8)
    for t in (1.0, 0.9, 0.8):
        assert torch.equal(scaled(x, t), x * t)


def test_a_counter_of_a_module_that_dynamo_compiles_too_often_is_refused_and_the_cure_works() -> None:
    model, x = Net(counting), torch.randn(4, 8)
    config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
    with config.patch(recompile_limit=2):
        backend = irc.backend("1MiB", outside="measured", costs="analytic")
        run: Any = torch.compile(model, backend=backend)
        with pytest.raises(irc.UnsupportedError, match="IRC545") as raised:
            for _ in range(3):
                run(x).sum().backward()
        assert raised.value.help is not None and "allow_unspec_int_on_nn_module = True" in raised.value.help
        torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
        with config.patch(allow_unspec_int_on_nn_module=True):
            model, backend = Net(counting), irc.backend("1MiB", outside=0, costs="analytic")
            run = torch.compile(model, backend=backend)
            for calls in range(2, 7):
                assert torch.equal(run(x), model.out(torch.tanh(model.lin(x))) / calls)
            assert len(backend.plans) == 2 and model.calls == 6
