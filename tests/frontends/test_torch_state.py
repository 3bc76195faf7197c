"""What a forward does besides computing: buffers it assigns, lists it fills, generators it draws from."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.torch_cases import Model, fitted
from torch import Tensor, nn
from torch.nn import functional

from irc.frontends.torch import capture
from irc.frontends.torch.code import code_reach
from irc.ir import Trait, UnsupportedError

torch.set_num_threads(1)


def averaging(function: Callable[..., Any], **parts: Any) -> nn.Module:
    module = Model(function, lin=nn.Linear(4, 4), **parts)
    module.register_buffer("average", torch.zeros(4))
    return module


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 4)


def steps(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs, the generator's state, gradients and buffers of two steps without an update."""
    torch.manual_seed(3)
    found: list[Tensor] = []
    for _ in range(2):
        module.zero_grad()
        output: Tensor = module(x)
        output.sum().backward()
        found += [output.detach().clone(), torch.get_rng_state()]
        found += [p.grad.clone() for p in module.parameters() if p.grad is not None]
        found += [b.clone() for b in module.buffers()]
    return found


def assert_trains_the_same(module: nn.Module, x: Tensor) -> None:
    original = copy.deepcopy(module)
    planned = fitted(module, x)
    for ours, theirs in zip(steps(planned, x), steps(original, x), strict=True):
        assert torch.equal(ours, theirs)


def test_a_buffer_that_is_assigned_is_written(x: Tensor) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.average = 0.9 * m.average + 0.1 * x.mean(0)
        return m.lin(x) * m.average

    module = averaging(forward)
    held = module.get_buffer("average")
    assert_trains_the_same(module, x)
    assert module.get_buffer("average") is held and held.abs().max() > 0


def _grows(m: Any, x: Tensor) -> Tensor:
    m.average = torch.cat([m.average, x.mean(0)])
    return m.lin(x)


def _keeps_graph(m: Any, x: Tensor) -> Tensor:
    m.average = m.lin(x).mean(0)
    return m.lin(x)


def _vanishes(m: Any, x: Tensor) -> Tensor:
    m.average = None
    return m.lin(x)


def _replaces_parameter(m: Any, x: Tensor) -> Tensor:
    m.lin.bias = nn.Parameter(torch.zeros(4))
    return m.lin(x)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (_grows, "buffer average by a tensor of another type"),
        (_keeps_graph, "buffer average by a tensor that has a gradient"),
        (_vanishes, "buffer average by None"),
        (_replaces_parameter, "parameter lin.bias"),
    ],
)
def test_what_cannot_be_written_is_refused_and_stays(
    function: Callable[..., Any], named: str, x: Tensor
) -> None:
    module = averaging(function)
    before = [*module.parameters(), *module.buffers()]
    with pytest.raises(UnsupportedError) as raised:
        capture(module, (x,))
    assert raised.value.code == "IRC338" and named in raised.value.message
    assert "copy_" in str(raised.value.help)
    after = [*module.parameters(), *module.buffers()]
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_containers_that_the_forward_fills_are_refused_and_left_as_they_were(x: Tensor) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.states.append(m.lin(x))
        m.counts["calls"] = 1
        m.names.add("forward")
        return m.states[-1]

    states: list[Any] = [7]
    counts: dict[str, int] = {"others": 2}
    names: set[str] = {"init"}
    module = averaging(forward, states=states, counts=counts, names=names)
    with pytest.raises(UnsupportedError, match=r"IRC338.*attribute states"):
        capture(module, (x,))
    assert (states, counts, names) == ([7], {"others": 2}, {"init"})


@pytest.mark.parametrize("draw", [np.random.rand, random.random], ids=["numpy", "python"])
def test_a_draw_from_a_python_generator_is_refused_unless_the_forward_seeds_it(
    draw: Callable[[], float], x: Tensor
) -> None:
    random.seed(1)
    np.random.seed(1)
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    with pytest.raises(UnsupportedError, match=r"IRC338.*draws from (numpy\.)?random") as raised:
        capture(Model(lambda m, x: m.lin(x) * draw(), lin=nn.Linear(4, 4)), (x,))
    assert "torch.rand" in str(raised.value.help)
    assert draw() == expected  # the generator is as before

    def seeded(m: Any, x: Tensor) -> Tensor:
        np.random.seed(5)
        random.seed(5)
        return m.lin(x) * draw()

    assert_trains_the_same(Model(seeded, lin=nn.Linear(4, 4)), x)


def test_draws_that_nothing_reads_move_the_generator(x: Tensor) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        torch.rand(3)
        noise = torch.randn_like(x) * 2
        noise.normal_()
        functional.dropout(x, 0.5)
        return m.lin(x) + torch.rand(4)

    module = Model(forward, lin=nn.Linear(4, 4))
    graph = capture(module, (x,)).graph
    assert sum(Trait.RANDOM in node.traits for node in graph.nodes) == 5
    assert_trains_the_same(module, x)


collections = 0


def _collected() -> int:
    return collections


def test_what_a_callback_of_garbage_collection_counts_is_no_state_of_the_forward(x: Tensor) -> None:
    def count(phase: str, info: Any) -> None:
        global collections
        collections += 1

    def forward(m: Any, x: Tensor) -> Tensor:
        gc.collect(0)
        return m.lin(x) if _collected() >= 0 else x

    gc.callbacks.append(count)
    try:
        capture(Model(forward, lin=nn.Linear(4, 4)), (x,))
        assert gc.callbacks[-1] is count
    finally:
        gc.callbacks.remove(count)


def test_what_pytest_makes_of_an_assertion_leads_nowhere(x: Tensor) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        assert x.shape == (3, 4), "as pytest has compiled it, this names pytest's own state"
        return m.lin(x)

    assert len(code_reach(Model(forward, lin=nn.Linear(4, 4)), [])) < 100
