"""Fused operations: the original's numbers up to rounding, planned bytes, and fewer of them to keep."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from torch import Tensor, nn
from torch.nn import functional

import irc
from irc.compiler.training import measured_peak_bytes
from irc.frontends.torch import capture
from irc.ir import (
    FUSED,
    Graph,
    Kernel,
    Node,
    Region,
    Step,
    Symbol,
    VerificationError,
    fused_arguments,
    liveness,
    overwritten,
    parse_graph,
    print_graph,
    same_graph,
    steps_of,
    verify_graph,
    verify_schedule,
    with_frees,
    with_overwritten,
)
from irc.passes import FuseOperations, PassManager, Program, ReplayDraws, SplitConvolutions
from irc.passes.rewrites import fuse_operations
from irc.torch_support import kernels
from irc.torch_support.fusible import DIVISIONS

WIDTH = 8


def _eager(computation: Kernel) -> kernels.Compiled:
    """A kernel that no compiler makes: it runs its operations one by one, and takes more workspace."""
    body = kernels.Body(computation)
    return lambda operands: body(*operands)


class Layers(nn.Module):
    """Layers by their names, each from [rows, WIDTH] to the same."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = list(names)
        made = (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.4))
        kinds: dict[str, nn.Module] = dict(zip(("linear", "norm", "batch", "dropout"), made, strict=True))
        self.layers = nn.ModuleList(copy.deepcopy(kinds.get(name, nn.Identity())) for name in names)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for name, layer in zip(self.names, self.layers, strict=True):
            match name:
                case "gelu":
                    x = functional.gelu(x)
                case "relu":
                    x = torch.relu(x)
                case "gate":
                    left, right = x.chunk(2, -1)
                    x = torch.cat([functional.silu(left) * right, left + 1], -1)
                case "add":
                    x = x + first
                case "softmax":
                    x = torch.log_softmax(x, -1)
                case "turn":
                    x = x.t().reshape(x.shape[0], -1) * 0.5
                case "sum":
                    x = x - x.pow(2).mean(0, keepdim=True)
                case _:
                    x = layer(x)
        return functional.cross_entropy(x, torch.arange(x.shape[0]) % WIDTH)


NAMES = ("linear", "norm", "batch", "dropout", "gelu", "relu", "gate", "add", "softmax", "turn", "sum")


def _program(module: nn.Module, *args: Any) -> Program:
    found = capture(module, args)
    return PassManager([ReplayDraws(), SplitConvolutions()]).run(Program(found.graph, eager=found.eager))


def _fused(module: nn.Module, *args: Any) -> Graph:
    return PassManager([FuseOperations(measure=False)]).run(_program(module, *args)).graph


def _kernels(graph: Graph) -> list[Node]:
    return [node for node in graph.operations if node.op == FUSED]


def _step(module: nn.Module, *args: Any) -> tuple[list[Tensor], Tensor]:
    module.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = module(*args)
    loss.backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return [loss.detach(), *grads, *module.buffers()], torch.get_rng_state()


# ---------------------------------------------------------------------- numbers and bytes


@pytest.mark.slow
@examples(9)
@given(st.lists(st.sampled_from(NAMES), min_size=2, max_size=8), st.sampled_from(["200%", "100%", "75%"]))
def test_any_layers_have_the_numbers_of_eager_within_what_was_planned(names: list[str], budget: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compiled", _eager)
        patch.setattr(kernels, "_known", {})
        patch.setattr(fuse_operations, "_NOISE", math.inf)
        torch.manual_seed(0)
        module = Layers(["linear", *names]).double()
        x = torch.randn(6, WIDTH, dtype=torch.float64)
        try:
            fitted = irc.optimize(copy.deepcopy(module), (x,), budget, compiler="inductor")
        except irc.BudgetError:
            return
        expected, state = _step(module, x)
        found, state_after = _step(fitted, x)
        assert torch.equal(state, state_after)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
        fitted.zero_grad(set_to_none=True)
        peak = measured_peak_bytes(fitted, (x,), fitted.plan.static_bytes)
        assert peak <= fitted.plan.peak_bytes


@pytest.mark.slow
@examples(25)
@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=8))
def test_fused_graphs_are_well_formed_and_read_back_from_their_text(names: list[str]) -> None:
    graph = _fused(Layers(["linear", *names]), torch.randn(6, WIDTH))
    verify_graph(graph)
    assert same_graph(parse_graph(print_graph(graph)), graph)
    for node in _kernels(graph):
        kernel = Kernel.of(node)
        assert Kernel.parse(kernel.text) == kernel


def test_equal_layers_share_one_kernel() -> None:
    layers = [name for _ in range(4) for name in ("linear", "gelu", "dropout", "add", "norm")]
    found = _kernels(_fused(Layers(layers), torch.randn(6, WIDTH)))
    forward = [Kernel.of(node).text for node in found if node.region is Region.FORWARD]
    assert len(forward) == 4
    assert len(set(forward[:3])) == 1  # the last one also makes the loss


# ---------------------------------------------------------------------- what is never in memory


def test_log_probabilities_are_made_again_from_logits_in_the_kernel_of_backward() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, 500), _Loss())
    before, after = _program(module, torch.randn(6, WIDTH)).graph, _fused(module, torch.randn(6, WIDTH))
    wide = 6 * 500 * 4
    assert sum(s.nbytes == wide for s in before.storages) == 4
    made = [s for s in after.storages if s.nbytes == wide]
    assert len(made) == 2  # the logits and their gradient
    (backward,) = [node for node in _kernels(after) if overwritten(node)]
    assert [value.storage for value in overwritten(backward)] == [made[0]]


class _Loss(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits, torch.arange(logits.shape[0]))


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 64) for _ in range(2))
        self.down = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x)).square().mean()


def test_a_kernel_of_backward_reads_less_where_it_can_make_a_factor_again() -> None:
    graph = _fused(_Gated(), torch.randn(6, WIDTH))
    steps = [
        step.op for node in _kernels(graph) for step in steps_of(node)[0] if node.region is Region.BACKWARD
    ]
    assert "aten.silu.default" in steps
    (forward,) = [n for n in _kernels(graph) if "aten.silu.default" in {s.op for s in steps_of(n)[0]}][:1]
    assert len(forward.values) == 1  # the product alone: not what silu returns


def test_what_is_overwritten_takes_no_bytes_afterwards() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, 500), _Loss())
    graph = _fused(module, torch.randn(6, WIDTH))
    halves = [[n for n in graph.operations if n.region is region] for region in Region]
    schedule = with_frees(graph, *halves)
    taken = {node: -sum(v.storage.nbytes for v in overwritten(node)) for node in graph.operations}
    peak = liveness(schedule, taken).peak_bytes
    wide = 6 * 500 * 4
    assert peak < graph.static_bytes + 2 * wide + sum(p.nbytes for p in module.parameters())


class _Two(nn.Module):
    """Two outputs, of which the second has an infinite derivative at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scaled = x * self.weight
        return (scaled + 1).square(), torch.sqrt(scaled * 2) * 3


def test_an_output_without_a_gradient_adds_nothing_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compiled", _eager)
    monkeypatch.setattr(kernels, "_known", {})
    monkeypatch.setattr(fuse_operations, "_NOISE", math.inf)
    module, x = _Two(), torch.ones(4, WIDTH)
    fitted = irc.optimize(copy.deepcopy(module), (x,), "300%", compiler="inductor", loss=_sum_of_both)
    assert fitted.plan.fused_operations
    for each in (module, fitted):
        each(x)[0].sum().backward()
    assert torch.equal(module.weight.grad, fitted.weight.grad)  # pyright: ignore[reportArgumentType]


def _sum_of_both(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return outputs[0].sum() + outputs[1].sum()


# ---------------------------------------------------------------------- refused


def _changed(graph: Graph, node: Node, **changes: Any) -> Graph:
    return replace(graph, nodes=tuple(replace(n, **changes) if n is node else n for n in graph.nodes))


@pytest.mark.parametrize(
    ("steps", "returns"),
    [
        ([Step("aten.relu.default", (Symbol("result", "1"),))], ["0"]),
        ([Step("aten.relu.default", (1.0,))], ["3"]),
        ([Step("aten.relu.default", (1.0,))], ["0", "0"]),
        ([Step("aten.relu.default", (1.0,)), Step("aten.relu.default", (2.0,))], ["0", "1"]),
    ],
)
def test_a_fused_node_that_holds_no_operations_is_refused(steps: list[Step], returns: list[str]) -> None:
    graph = _fused(_Gated(), torch.randn(6, WIDTH))
    node = _kernels(graph)[0]
    arguments, keywords = fused_arguments(steps, [Symbol("result", each) for each in returns])
    with pytest.raises(VerificationError) as caught:
        verify_graph(_changed(graph, node, arguments=arguments, keywords=keywords))
    assert caught.value.code == "IRC145"


def test_reading_what_a_kernel_has_overwritten_is_refused() -> None:
    graph = _fused(nn.Sequential(nn.Linear(WIDTH, 500), _Loss()), torch.randn(6, WIDTH))
    (taker,) = [node for node in _kernels(graph) if overwritten(node)]
    operand = next(iter(overwritten(taker)))
    late = replace(operand, name="late", storage=replace(operand.storage, name="late"))
    node = Node("late", "aten.relu.default", (operand,), (late,), region=Region.BACKWARD)
    broken = replace(graph, nodes=(*graph.nodes, node))
    halves = [[n for n in broken.operations if n.region is region] for region in Region]
    with pytest.raises(VerificationError) as caught:
        verify_schedule(with_frees(broken, *halves), {})
    assert caught.value.code == "IRC120"
    assert "has overwritten" in caught.value.message


def test_a_result_that_overwrites_two_operands_or_a_gradient_is_refused() -> None:
    graph = _fused(nn.Sequential(nn.Linear(WIDTH, 500), _Loss()), torch.randn(6, WIDTH))
    (taker,) = [node for node in _kernels(graph) if overwritten(node)]
    ((operand, index),) = overwritten(taker).items()
    other = next(value for value in taker.operands if value is not operand)
    tied = with_overwritten(taker, {operand: index, other: index})
    for changed in (tied, with_overwritten(taker, {operand: 7}), with_overwritten(taker, {other: index})):
        broken = replace(graph, nodes=tuple(changed if n is taker else n for n in graph.nodes))
        with pytest.raises(VerificationError) as caught:
            verify_graph(broken)
        assert caught.value.code == "IRC145"
    weight = next(entry.value for entry in graph.inputs if entry.value.type == operand.type or entry)
    release = Node("release", "irc.accumulate_grad", (weight, operand), (), region=Region.BACKWARD)
    with pytest.raises(VerificationError) as caught:
        verify_graph(replace(graph, nodes=(*graph.nodes, release)))
    assert caught.value.code == "IRC145"
    assert "which is released" in caught.value.message


def test_whole_numbers_are_not_divided_in_a_kernel() -> None:
    class Divided(nn.Module):
        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            return (x * (torch.remainder(by * 3, by - 1) + 1).float()).relu().square().sum()

    x = torch.randn(6, WIDTH, requires_grad=True)
    graph = _fused(Divided(), x, torch.randint(2, 9, (6, WIDTH)))
    assert _kernels(graph)
    assert not any(step.op in DIVISIONS for node in _kernels(graph) for step in steps_of(node)[0])


def test_a_text_with_another_operation_is_not_compiled() -> None:
    text = '{"operands":[],"steps":[["aten.from_file.default",["x"],[]]],"returns":[],"results":[],'
    text += '"overwrites":[]}'
    for each in (text, "{", "[]", '{"operands": 3}'):
        with pytest.raises(irc.UnsupportedError) as caught:
            kernels.kernel(each)
        assert caught.value.code == "IRC470"


def test_options_that_exclude_a_compiler_are_refused_by_name() -> None:
    x = torch.randn(4, WIDTH)
    module = nn.Linear(WIDTH, WIDTH)
    lengths = {0: {0: (2, 4)}}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"compiler": "nvcc"}, "no compiler 'nvcc'"),
        ({"compiler": "inductor", "costs": "analytic"}, "described machine"),
        ({"compiler": "inductor", "dynamic": lengths}, "exclude each other"),
    ]
    for options, said in refused:
        with pytest.raises(irc.UsageError) as caught:
            irc.optimize(module, (x,), "100%", **options)
        assert said in str(caught.value)
