"""What is replaced in torch while a model is traced: other threads keep torch's own; it is put back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, nop
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd import graph_compile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import FunctionCtx

import irc
from irc.frontends.torch.alive_bytes import AliveBytes, following_states
from irc.frontends.torch.fixups.tangent_layouts import tangent_layouts

torch.set_num_threads(1)


def elsewhere(run: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(60)


@pytest.mark.filterwarnings("ignore")
def test_another_thread_traces_gradients_in_torchs_layouts() -> None:
    def tangent_strides() -> list[tuple[int, ...]]:
        strides: list[tuple[int, ...]] = []

        def noting(gm: Any, example_inputs: Any) -> Any:
            strides.extend(tuple(each.stride()) for each in example_inputs if each.shape == (2, 3))
            return nop(gm, example_inputs)

        compiled: Any = aot_function(lambda x: x * 2.0, nop, noting)  # pyright: ignore[reportUnknownLambdaType]
        compiled(torch.ones(2, 3, requires_grad=True)).sum().backward()
        return strides

    with tangent_layouts({0: (1, 2)}):
        assert elsewhere(tangent_strides) == [(3, 1)]
        assert tangent_strides() == [(1, 2)]


def test_states_of_generators_that_another_thread_keeps_are_not_counted() -> None:
    with AliveBytes() as followed, following_states(followed):
        states = [elsewhere(torch.get_rng_state)]
        assert followed.alive_bytes == 0
        states.append(torch.get_rng_state())
        assert followed.alive_bytes >= states[1].nbytes


def test_two_threads_that_plan_at_once_leave_torch_as_it_was() -> None:
    def functions() -> list[Any]:
        graph: Any = fx.Graph
        modes: Any = FakeTensorMode
        aot: Any = graph_compile
        return [
            modes._dispatch_impl,
            aot.aot_dispatch_autograd_graph,
            graph.create_node,
            graph.eliminate_dead_code,
            FunctionCtx.set_materialize_grads,
            torch.get_rng_state,
        ]

    def plan(x: Tensor) -> int:
        begin.wait(60)
        return irc.optimize(nn.Linear(4, 4), (x,), "100%", costs="analytic").plan.peak_bytes

    before, begin = functions(), threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(plan, (torch.ones(2, 4), torch.ones(3, 4))))
    assert all(a is b for a, b in zip(functions(), before, strict=True))
