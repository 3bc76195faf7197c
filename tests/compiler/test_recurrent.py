"""Tests of recurrent layers: the kernel that eager runs, and the time steps that take its place."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.torch_cases import keep_all, recompute_some
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import irc
from irc.backends.torch import bind_program, compile_program, emit_source
from irc.frontends.torch import capture
from irc.ir import BudgetError, Graph, TimeLimitError, verify_schedule
from irc.passes.costs.allocations import peak_bytes
from irc.passes.costs.profiling import profile_costs

KERNEL = "aten.mkldnn_rnn_layer.default"
_RUNS_IN_HALVES: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # pyright: ignore[reportPrivateUsage]


class Recurrent(nn.Module):
    """A recurrent layer behind a linear one; all of its results count."""

    def __init__(self, kind: Callable[..., nn.RNNBase], size: int, hidden: int, **options: Any) -> None:
        super().__init__()
        self.into = nn.Linear(size, size)
        self.layer = kind(size, hidden, **options)

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        (state, *cells) = states
        y, after = self.layer(self.into(x), (state, *cells) if cells else state)
        ends = after if isinstance(after, tuple) else (after,)
        return torch.stack([(k + 2) * t.square().sum() for k, t in enumerate((y, *ends))]).sum() + y.sum()


def _states(module: Recurrent, batch: int) -> list[Tensor]:
    layer = module.layer
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or layer.hidden_size]
    sizes += [layer.hidden_size] * isinstance(layer, nn.LSTM)
    return [torch.randn(rows, batch, size, requires_grad=True) for size in sizes]


def _step(module: nn.Module, args: list[Tensor]) -> list[Tensor]:
    """A step's loss and gradients, from a generator in a known state."""
    torch.manual_seed(3)
    leaves = [arg.detach().requires_grad_(arg.requires_grad) for arg in args]
    loss = module(*leaves)
    loss.backward()
    found = [leaf.grad for leaf in (*module.parameters(), *leaves) if leaf.grad is not None]
    return [loss.detach(), *found]


def _same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _graph(module: nn.Module, *args: Tensor) -> Graph:
    return capture(module, args).graph


_SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(2, 6))
_FLAGS = st.fixed_dictionaries(
    {"bias": st.booleans(), "bidirectional": st.booleans(), "batch_first": st.booleans()}
)


def _trains_as_eager(
    kind: Callable[..., nn.RNNBase], sizes: tuple[int, int, int, int], trains: bool, **options: Any
) -> Graph:
    """Compares two steps with eager, and returns the graph."""
    steps, batch, size, hidden = sizes
    module = Recurrent(kind, size, hidden, dropout=0.4 * (options["num_layers"] > 1), **options)
    module.layer.train(trains)
    shape = (batch, steps, size) if options["batch_first"] else (steps, batch, size)
    args = [torch.randn(shape), *_states(module, batch)]
    captured = capture(module, tuple(args))
    program = compile_program(keep_all(captured.graph), captured.constants)
    ours = bind_program(copy.deepcopy(module), program, captured.signature)
    for _ in range(2):
        assert _same(_step(ours, args), _step(module, args))
    return captured.graph


@examples(4)
@given(sizes=_SIZES, layers=st.integers(1, 2), flags=_FLAGS, trains=st.booleans())
def test_an_lstm_is_one_kernel_for_each_layer_and_direction_with_the_bits_of_eager(
    sizes: tuple[int, int, int, int], layers: int, flags: dict[str, bool], trains: bool
) -> None:
    graph = _trains_as_eager(nn.LSTM, sizes, trains, num_layers=layers, **flags)
    kernels = sum(node.op == KERNEL for node in graph.nodes)
    assert kernels == layers * (1 + flags["bidirectional"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@examples(12)
@given(
    kind=st.sampled_from(["projected", "tanh", "relu", "gru"]),
    sizes=_SIZES,
    layers=st.integers(1, 2),
    flags=_FLAGS,
    trains=st.booleans(),
)
def test_time_steps_have_the_bits_of_eager(
    kind: str, sizes: tuple[int, int, int, int], layers: int, flags: dict[str, bool], trains: bool
) -> None:
    options: dict[str, Any] = {"num_layers": layers, **flags}
    if kind == "projected":
        graph = _trains_as_eager(nn.LSTM, sizes, trains, proj_size=sizes[-1] - 1, **options)
    elif kind == "gru":
        graph = _trains_as_eager(nn.GRU, sizes, trains, **options)
    else:
        graph = _trains_as_eager(nn.RNN, sizes, trains, nonlinearity=kind, **options)
    assert all(node.op != KERNEL for node in graph.nodes)


class Cells(nn.Module):
    """A cell of a recurrent layer, step by step."""

    def __init__(self, kind: Callable[..., nn.RNNCellBase], size: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.cell = kind(size, hidden, bias=bias)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        states: list[Tensor] = [state, state.cos()] if isinstance(self.cell, nn.LSTMCell) else [state]
        outputs: list[Tensor] = []
        for part in x:
            after = self.cell(part, tuple(states) if len(states) > 1 else states[0])
            states = list(after) if isinstance(after, tuple) else [after]
            outputs.append(states[0])
        return torch.stack(outputs).float().square().mean()


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
@pytest.mark.parametrize("hidden", [5, 33])
@pytest.mark.parametrize("casts", [False, True])
def test_cells_have_the_bits_of_eager(kind: Callable[..., nn.RNNCellBase], hidden: int, casts: bool) -> None:
    """Of sizes that are no multiple of the processor's vectors too."""
    torch.manual_seed(0)
    module = Cells(kind, 4, hidden, bias=not casts)
    args = [torch.randn(3, 2, 4), torch.randn(2, hidden)]
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        fitted = irc.optimize(copy.deepcopy(module), tuple(args), "100%", costs="analytic")
        assert not fitted.irc_plan.roundings
        assert _same(_step(fitted, args), _step(module, args))


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.skipif(not _RUNS_IN_HALVES, reason="oneDNN has no LSTM in bfloat16 for this processor")
def test_an_lstm_in_half_precision_is_the_kernel_with_the_bits_of_eager(casts: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if casts else torch.bfloat16
    module = Recurrent(nn.LSTM, 5, 9, num_layers=2, bidirectional=True).to(dtype)
    args = [torch.randn(4, 3, 5, dtype=dtype), *(state.to(dtype).detach() for state in _states(module, 3))]
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        fitted = irc.optimize(copy.deepcopy(module), tuple(args), "100%", costs="analytic")
        assert sum(node.op == KERNEL for node in _graph(module, *args).nodes) == 4
        assert not fitted.irc_plan.roundings
        assert _same(_step(fitted, args), _step(module, args))


class _First(nn.Module):
    def forward(self, results: tuple[Tensor, ...]) -> Tensor:
        return results[0]


class _Operations(TorchDispatchMode):
    """Counts the operations that eager runs, those in place with the others."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._schema.name.removeprefix("aten::").rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize(
    "layer",
    [
        *(nn.GRU(3, 4, bidirectional=True), nn.RNN(3, 4), nn.LSTM(3, 4, proj_size=2)),
        *(nn.LSTM(3, 4).double(), nn.RNN(3, 4, nonlinearity="relu", bias=False)),
    ],
)
def test_time_steps_have_no_operation_that_eager_does_not_run(layer: nn.RNNBase) -> None:
    x = torch.randn(3, 2, 3, dtype=next(layer.parameters()).dtype)
    module = nn.Sequential(layer, _First())
    graph = _graph(module, x)
    ours = Counter(node.op.split(".")[1] for node in graph.nodes if not node.is_view)
    with _Operations() as eager:
        module(x).square().mean().backward()
    gates = Counter(cat=2 * len(x)) if isinstance(layer, nn.GRU) else Counter[str]()
    assert not ours - eager.count - gates, "a GRU's first two gates are split once more"


@pytest.mark.slow
@examples(6)
@given(steps=st.integers(1, 40), batch=st.integers(1, 5), hidden=st.integers(1, 20), seed=st.integers(0, 9))
def test_a_kernel_takes_what_is_predicted_also_when_it_runs_again(
    steps: int, batch: int, hidden: int, seed: int
) -> None:
    module = Recurrent(nn.LSTM, 3, hidden, num_layers=2)
    args = [torch.randn(steps, batch, 3), *(state.detach() for state in _states(module, batch))]
    captured = capture(module, tuple(args), loss=lambda result: result)
    costs = profile_costs(captured.graph, repeats=1)
    schedule = recompute_some(captured.graph, seed)
    predicted = verify_schedule(schedule, costs.workspace_bytes).peak_bytes - captured.graph.static_bytes
    program = compile_program(schedule, captured.constants)
    ours = bind_program(copy.deepcopy(module), program, captured.signature)
    assert _same(_step(ours, args), _step(module, args))
    ours.zero_grad()
    assert peak_bytes(lambda: ours(*args).backward()) == predicted


class _Started(nn.Module):
    """A layer whose two states are views of one tensor."""

    def __init__(self, start: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.layer, self.start = nn.LSTM(16, 16, batch_first=True), start

    def forward(self, x: Tensor, both: Tensor) -> Tensor:
        return self.layer(x, self.start(both))[0]


@pytest.mark.parametrize(
    "start",
    [lambda both: (both[:1], both[:1]), lambda both: (both[:1], both[1:]), lambda both: both.split(1)],
)
def test_a_layer_whose_states_share_a_tensor_takes_what_is_predicted(start: Any) -> None:
    x, both = torch.randn(4, 12, 16), torch.zeros(2, 4, 16)
    fitted = irc.optimize(_Started(start), (x, both), "100%", loss=_mean_square)
    measured = irc.measured_peak_bytes(fitted, (x, both), loss=_mean_square)
    assert 0 <= fitted.plan.peak_bytes - measured <= 64


@pytest.mark.parametrize("count", [1, 2])
def test_a_layer_that_is_called_with_one_tensor_as_both_states_takes_what_is_predicted(count: int) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(16, 16, batch_first=True)

        def forward(self, x: Tensor, *states: Tensor) -> Tensor:
            return self.layer(x, states)[0]

    states = [torch.zeros(1, 4, 16) for _ in range(count)]
    args = torch.randn(4, 12, 16), states[0], states[-1]
    fitted = irc.optimize(Layer(), args, "100%", loss=_mean_square)
    assert 0 <= fitted.plan.peak_bytes - irc.measured_peak_bytes(fitted, args, loss=_mean_square) <= 64


def _mean_square(result: Tensor) -> Tensor:
    return result.square().mean()


def test_a_long_lstm_is_as_few_operations_as_a_short_one() -> None:
    module = nn.LSTM(3, 4)
    short, long = (len(_graph(module, torch.randn(steps, 2, 3)).nodes) for steps in (2, 3000))
    assert short == long


@pytest.mark.slow
def test_a_budget_below_the_kernels_is_met_by_time_steps() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0].square().mean()

    module, x = Last(), torch.randn(5, 3, 4)
    original = copy.deepcopy(module)
    whole = irc.optimize(copy.deepcopy(module), (x,), "100%", costs="analytic", time_limit=5)
    budget_bytes = whole.irc_plan.minimum_budget_bytes - 1
    fitted = irc.optimize(module, (x,), budget_bytes, costs="analytic", time_limit=5)
    plan = fitted.irc_plan
    assert plan.peak_bytes <= budget_bytes < plan.baseline_peak_bytes
    assert plan.baseline_peak_bytes == whole.irc_plan.baseline_peak_bytes
    assert plan.lower_bound_overhead <= plan.overhead
    planned_seconds = plan.step_seconds * (1 + plan.overhead)
    assert planned_seconds > 1.5 * whole.irc_plan.step_seconds, "time steps take longer than the kernel"
    for ours, its in zip(_step(fitted, [x]), _step(original, [x]), strict=True):
        torch.testing.assert_close(ours, its)
    with pytest.raises(BudgetError):
        irc.optimize(original, (x,), plan.static_bytes + 1, costs="analytic", time_limit=5)


@pytest.mark.skipif(not _RUNS_IN_HALVES, reason="the kernel in bfloat16 needs AVX-512")
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "bias": False}])
def test_time_steps_under_autocast_compute_in_the_type_of_the_kernels(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(8, 8, **options), torch.randn(12, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        kernels, steps = (capture(layer, (x,), stepwise=stepwise).graph for stepwise in (False, True))
        results = layer(x)
        with pytest.raises(BudgetError) as refused:
            irc.optimize(copy.deepcopy(layer), (x,), 1, costs="analytic")
        fitted = irc.optimize(copy.deepcopy(layer), (x,), refused.value.minimum_bytes, costs="analytic")
        others = fitted(x)
    assert KERNEL in {node.op for node in kernels.nodes} and KERNEL not in {node.op for node in steps.nodes}
    pairs = zip((results[0], *results[1]), (others[0], *others[1]), strict=True)
    for result, other in pairs:
        torch.testing.assert_close(other, result, rtol=0, atol=0.02)  # of the same type, too


def test_sequences_that_nobody_can_wait_for_are_refused_at_once() -> None:
    x = torch.randn(1, 1 << 20, 2)
    for layer in (nn.GRU(2, 2, batch_first=True), nn.LSTM(2, 3, proj_size=2, batch_first=True)):
        with pytest.raises(TimeLimitError, match="1048576 time steps takes 20972 s at least"):
            irc.optimize(layer, (x,), "100%", costs="analytic")


def test_a_budget_that_is_too_small_is_refused_as_such_if_time_steps_take_too_long_to_trace() -> None:
    module, x = nn.LSTM(2, 3), torch.randn(1 << 16, 1, 2)
    with pytest.raises(BudgetError, match="65536 time steps takes 1311 s at least") as refused:
        irc.optimize(module, (x,), 1 << 20, costs="analytic", time_limit=5)
    assert refused.value.code == "IRC204"
    assert refused.value.minimum_bytes > 1 << 20
    fitted = irc.optimize(module, (x,), refused.value.minimum_bytes, costs="analytic", time_limit=5)
    assert fitted.irc_plan.peak_bytes <= refused.value.minimum_bytes


def test_the_source_of_time_steps_derives_each_view_once() -> None:
    def calls(steps: int) -> tuple[int, int]:
        module = nn.GRU(3, 4)
        graph = _graph(module, torch.randn(steps, 2, 3))
        source = emit_source(keep_all(graph))
        views = sum(source.count(f"{name}(") for name in ("aten_view", "aten_narrow", "aten_select_int"))
        assert not any(name in source for name in ("unbind_int(", "split_Tensor(", "detach("))
        return views, len([node for node in graph.nodes if node.is_view])

    (few, _), (many, views) = calls(4), calls(8)
    assert many <= 2 * few and many < views
