"""Graphs of Dynamo, captured: names, places, sizes, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from support.torch_cases import Model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import irc
from irc.frontends.torch import (
    CapturedGraph,
    capture_graph,
    compiled_frame,
    forward_bytes,
    graph_name,
    lifted_names,
)
from irc.ir import InputRole, UnsupportedError
from irc.passes.costs.allocations import peak_bytes

# Dynamo looks at `.grad` of what a graph break hands on.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _fresh() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    yield
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.scale


def traced(function: Any, *args: Any, **options: Any) -> list[tuple[Any, list[Any]]]:
    """The graphs that Dynamo makes, each with its arguments in the call."""
    found: list[tuple[Any, list[Any]]] = []

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            found.append((graph, list(given)))
            return graph(*given)

        return run

    torch.compile(function, backend=backend, **options)(*args)
    return found


def captured(graph: Any, args: list[Any]) -> CapturedGraph:
    found = capture_graph(graph, args, lifted_names(graph))
    assert found is not None
    return found


def test_parameters_and_buffers_have_the_names_that_they_have_in_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Inner())
    x = torch.randn(3, 4)
    ((graph, args),) = traced(model, x)
    found = captured(graph, args)
    inputs = [i for i in found.captured.graph.inputs if i.role is not InputRole.TANGENT]
    by_name = dict(model.named_parameters()) | dict(model.named_buffers())
    for static, binding in zip(inputs, found.bindings, strict=True):
        assert isinstance(binding, int)
        given = args[binding]
        if static.role is InputRole.INPUT:
            assert given is x
        else:
            assert given is by_name.pop(static.target)
            assert static.role is (
                InputRole.PARAMETER if isinstance(given, nn.Parameter) else InputRole.BUFFER
            )
    assert not by_name


def test_operations_have_the_line_and_the_module_of_the_model_s_code() -> None:
    def breaks(x: Tensor) -> Tensor:
        y = model(x)
        print(end="")
        return y.exp()

    model = Inner()
    (first, second) = traced(breaks, torch.randn(3, 4))
    assert graph_name(first[0]).startswith("test_torch_dynamo.py:")
    assert graph_name(second[0]).endswith("in breaks")  # not the function that Dynamo resumes
    nodes = captured(*first).captured.graph.nodes
    norm = next(node for node in nodes if "batch_norm" in node.op)
    assert norm.at is not None and norm.at.module is not None and norm.at.module.endswith("norm")
    assert norm.at.source is not None and norm.at.source.endswith("in forward")


def test_nothing_to_differentiate_is_not_captured() -> None:
    x = torch.randn(3, 4)
    ((graph, args),) = traced(lambda x: (x * 2, x.argmax()), x)
    assert capture_graph(graph, args, lifted_names(graph)) is None
    ((graph, args),) = traced(Inner(), x)
    with torch.no_grad():
        assert capture_graph(graph, args, lifted_names(graph)) is None


def test_a_size_that_is_left_open_is_captured_as_it_is_in_the_call() -> None:
    linear = nn.Linear(4, 4)
    (graph, args), *_ = traced(lambda x: linear(x).reshape(-1, 2).sum(), torch.randn(6, 4), dynamic=True)
    assert any(isinstance(arg, int) for arg in args)
    found = captured(graph, args).captured.graph
    assert any(i.value.type.shape == (6, 4) for i in found.inputs)


def test_what_the_capture_looked_at_is_let_go() -> None:
    x = torch.randn(3, 4)
    ((graph, args),) = traced(Inner(), x)
    versions = [tensor._version for tensor in args if isinstance(tensor, Tensor)]
    captured(graph, args)
    assert versions == [tensor._version for tensor in args if isinstance(tensor, Tensor)]
    assert all(tensor.grad is None for tensor in args if isinstance(tensor, Tensor))


def test_an_argument_that_is_no_tensor_and_no_number_is_refused() -> None:
    ((graph, args),) = traced(Inner(), torch.randn(3, 4))
    with pytest.raises(irc.UnsupportedError, match=r"IRC543.*test_torch_dynamo.py:\d+.*type object"):
        capture_graph(graph, [object(), *args[1:]], lifted_names(graph))


def test_what_cannot_be_captured_is_refused_by_name() -> None:
    def writes(x: Tensor, y: Tensor) -> Tensor:
        y.mul_(x)
        return y.sum()

    x = torch.randn(3, requires_grad=True)
    ((graph, args),) = traced(lambda x, z: writes(x, z * 1), x, torch.zeros(3))
    assert captured(graph, args).captured.graph.nodes  # a tensor of its own may be written
    compiled = torch.compile(writes, backend=irc.backend(1 << 30, costs="analytic"))
    with pytest.raises(irc.UnsupportedError, match="IRC336"):
        compiled(x, torch.zeros(3, requires_grad=True) * 1)


def test_the_frame_that_is_compiled_shows_its_modules_its_tensors_and_its_backend() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4), Inner()), list[Any]()

    def backend(graph: Any, _: Any) -> Any:
        seen.append(compiled_frame())
        return graph

    for function in (model, lambda x: model(x), _through_a_global):
        torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
        x = torch.randn(3, 4)
        torch.compile(function, backend=backend)(x)
        found, variables = seen.pop()
        modules = [variable for variable in variables if isinstance(variable, nn.Module)]
        assert found is backend and modules == [_GLOBAL if function is _through_a_global else model]
        assert any(variable is x for variable in variables)
    assert compiled_frame() is None


_GLOBAL = nn.Linear(4, 4)


def _through_a_global(x: Tensor) -> Tensor:
    return _GLOBAL(x)


def test_a_forward_without_backward_takes_what_the_allocator_hands_out() -> None:
    def forward(x: Tensor) -> Tensor:
        wide = torch.cat([x.sin(), x.cos(), x])
        return (wide.softmax(0) * wide[0]).T.relu().sum(0)

    x = torch.randn(64, 32)
    nbytes = forward_bytes(forward, [x])
    forward(x)
    assert nbytes == peak_bytes(lambda: forward(x)) > 3 * x.nbytes


@pytest.mark.parametrize("options", [{}, {"preserve_rng_state": True}])
def test_a_checkpoint_with_dropout_draws_what_it_draws_in_eager(options: dict[str, Any]) -> None:
    original, x = in_checkpoint(options), torch.randn(4, 8)
    planned = copy.deepcopy(original)
    step = torch.compile(planned, backend=irc.backend("1MiB", costs="analytic", time_limit=1))
    for module in (original, step):
        torch.manual_seed(1)
        module(x).square().sum().backward()
    for ours, its in zip(planned.parameters(), original.parameters(), strict=True):
        assert ours.grad is not None and its.grad is not None and torch.equal(ours.grad, its.grad)


def test_a_checkpoint_that_draws_anew_is_refused_in_a_graph() -> None:
    model = in_checkpoint({"preserve_rng_state": False})
    step = torch.compile(model, backend=irc.backend("1MiB", costs="analytic", time_limit=1))
    with pytest.raises(UnsupportedError, match=r"IRC339.*preserve_rng_state=False"):
        step(torch.randn(4, 8))


def in_checkpoint(options: dict[str, Any]) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return checkpoint(m.part, x, use_reentrant=False, **options)

    torch.manual_seed(0)
    return Model(forward, part=nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)))


class _Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        y.mul_(3)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        tripled = gradient.clone()
        tripled.mul_(3)
        return tripled


def _written_copy(x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(2)
    y.clamp_(-0.5, 0.5)
    return y.tanh()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["checkpoint", "function"])
def test_writes_within_a_graph_of_a_graph_are_run(kind: str) -> None:
    """Nothing reads what such a line returns in Dynamo's graph of a checkpoint, or of a custom function."""

    def forward(m: Any, x: Tensor) -> Any:
        x = m.linear(x)
        return _Tripled.apply(x) if kind == "function" else checkpoint(_written_copy, x, use_reentrant=False)

    module = Model(forward, linear=nn.Linear(4, 4))
    twin, x = copy.deepcopy(module), torch.randn(3, 4)
    compiled: Any = torch.compile(module, backend=irc.backend(1 << 30, costs="analytic"))
    results = [run(x) for run in (compiled, twin)]
    for result in results:
        result.sin().sum().backward()
    assert torch.equal(*results)
    gradients = zip((p.grad for p in module.parameters()), (p.grad for p in twin.parameters()), strict=True)
    assert all(mine is not None and its is not None and torch.equal(mine, its) for mine, its in gradients)
