"""Convolutions taken apart: the same numbers, an own time for each half."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples
from torch import nn

import irc
from irc.frontends.torch import capture
from irc.ir import Graph, verify_graph
from irc.passes import Program, SplitConvolutions
from irc.passes.costs.profiling import profile_costs
from irc.passes.costs.table import signature

KINDS: dict[tuple[int, bool], Any] = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d,
    (2, True): nn.ConvTranspose2d,
}
KERNELS = {1: (1, 2, 3, 4, 7), 2: (1, 2, 3, 4, 7), 3: (1, 2, 3, 4)}


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, torch.Tensor]:
    """A convolution between two others, with an input that it fits.

    torch's own gradients of kernels of seven in three dimensions are wrong for small inputs.
    """
    dimensions, transposed = draw(st.sampled_from(sorted(KINDS)))
    groups = draw(st.sampled_from([1, 1, 1, 2]))
    channels = [groups * draw(st.sampled_from([1, 2, 5, 16])) for _ in range(2)]
    kernel, stride = draw(st.sampled_from(KERNELS[dimensions])), draw(st.sampled_from([1, 2, 3]))
    dilation = draw(st.sampled_from([1, 1, 2]))
    padding = draw(st.integers(0, kernel // 2))
    size = dilation * (kernel - 1) + 1 + draw(st.integers(0, 7))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]))
    torch.manual_seed(draw(st.integers(0, 1000)))
    one: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    kind = KINDS[dimensions, transposed]
    same = KINDS[dimensions, False](channels[0], channels[0], 1)
    model = nn.Sequential(same, kind(*channels, kernel, **one, bias=draw(st.booleans()))).to(dtype)
    return model, torch.randn(draw(st.integers(1, 3)), channels[0], *[size] * dimensions, dtype=dtype)


@pytest.mark.slow
@given(convolutions())
@examples(60)
def test_gradients_are_equal_bit_for_bit(case: tuple[nn.Module, torch.Tensor]) -> None:
    """Left out is what torch itself computes otherwise each time: it reads memory that nothing wrote."""
    model, x = case
    original, again = copy.deepcopy(model), copy.deepcopy(model)
    fitted = irc.optimize(model, (x,), "100%", costs="analytic", strategy="keep-all")
    for module in (fitted, original, again):
        module(x).double().pow(2).sum().backward()
    for one, other in zip(original.parameters(), again.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assume(one.grad.isfinite().all().item() and torch.equal(one.grad, other.grad))
    for mine, theirs in zip(fitted.parameters(), original.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert mine.grad.stride() == theirs.grad.stride()
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    ("channels", "shape", "kernel"),
    [((3, 8, 12), (1, 3, 52, 52), 3), ((3, 8, 12), (1, 3, 2500), 3), ((3, 8, 12), (4, 3, 40, 40), 3)],
)
def test_one_image_whose_two_gradients_would_take_other_kernels(
    channels: tuple[int, int, int], shape: tuple[int, ...], kernel: int
) -> None:
    """torch takes its own kernel for one small image, and oneDNN's for one that is not small."""
    kind: Any = nn.Conv2d if len(shape) == 4 else nn.Conv1d
    torch.manual_seed(0)
    model = nn.Sequential(kind(*channels[:2], kernel), nn.ReLU(), kind(*channels[1:], kernel))
    x = torch.randn(shape)
    original = copy.deepcopy(model)
    fitted = irc.optimize(model, (x,), "100%", costs="analytic")
    for module in (fitted, original):
        module(x).square().sum().backward()
    for mine, theirs in zip(fitted.parameters(), original.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 3, 24, 24), {"kernel_size": 5}),
        ((4, 3, 24, 24), {"kernel_size": 3, "stride": 2, "dilation": 2, "padding": 2}),
    ],
)
@pytest.mark.parametrize("strategy", ["auto", "keep-all"])
def test_the_baseline_is_always_enough(
    shape: tuple[int, ...], options: dict[str, Any], strategy: str
) -> None:
    """Halves may need more workspace than the whole: then it stays whole."""
    model = nn.Sequential(nn.Conv2d(3, 16, **options), nn.ReLU(), nn.Conv2d(16, 16, **options), nn.ReLU())
    plan = irc.optimize(model, (torch.randn(shape),), "100%", strategy=strategy, time_limit=5).plan
    assert plan.overhead == 0 and plan.proven_optimal
    assert (
        plan.peak_bytes <= plan.baseline_peak_bytes and plan.minimum_budget_bytes <= plan.baseline_peak_bytes
    )


@pytest.mark.parametrize("kernel", [1, 3])
def test_the_halves(kernel: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, kernel))
    before = Program(capture(model, (torch.randn(2, 3, 8, 8),), None).graph)
    after = SplitConvolutions().run(before)
    verify_graph(after.graph)
    assert after.original is before.graph
    assert SplitConvolutions().run(after) == after
    names = [node.name for node in after.graph.nodes if "backward" in node.name]
    halves = ["convolution_backward_input", "convolution_backward_weight"]
    assert names == [*(halves if kernel == 1 else reversed(halves)), "convolution_backward_1"]
    into_input = next(node for node in after.graph.nodes if node.name == halves[0])
    reads = {storage.nbytes for storage in after.graph.reads(into_input)}
    wide = 2 * 4 * 8 * 8 * 4
    assert (wide in reads) == (kernel == 1), "a transposed convolution does not read the input"


def test_runs_that_compare_kernels_are_measured_and_the_costs_need_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("irc.passes.rewrites.split_convolutions._compared", {})
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3))
    graph = capture(model, (torch.randn(2, 3, 12, 12),), None).graph
    measured = SplitConvolutions(measure=True).run(Program(graph)).measured
    assert not SplitConvolutions(measure=True).run(Program(graph)).measured, "they were compared before"
    joint = [node for node in graph.nodes if signature(node) in measured]
    assert len(measured) == 4 and len(joint) == 2
    apart = profile_costs(graph, repeats=1).workspace_bytes
    assert all(measured[signature(node)].workspace_bytes == apart[node] for node in joint)
    runs: list[str] = []
    monkeypatch.setattr("irc.passes.costs.profiling.runner", lambda node: runs.append(node.op))
    profile_costs(Graph((), tuple(joint), ()), measured=measured, with_times=False)
    assert not runs


def test_for_another_machine_nothing_is_run() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3))
    images = torch.empty(1, 3, 1, 1).expand(1 << 15, 3, 1 << 11, 1 << 11)  # no machine has room for these
    huge = Program(capture(model, (images,), None).graph)
    after = SplitConvolutions(transpose=False).run(huge)
    verify_graph(after.graph)
    assert {"convolution_backward_input", "convolution_backward_weight"} <= {
        n.name for n in after.graph.nodes
    }
    assert not any("convolution.default" in n.op and n.region.value == "backward" for n in after.graph.nodes)


def test_without_convolutions_nothing_changes() -> None:
    program = Program(capture(nn.Linear(2, 3), (torch.randn(4, 2),), None).graph)
    assert SplitConvolutions().run(program) is program
