"""Convolutions taken apart: the same numbers, an own time for each half."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import irc
from irc.frontends.torch import capture
from irc.ir import verify_graph
from irc.passes import Program, SplitConvolutions

KINDS: dict[tuple[int, bool], Any] = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d,
    (2, True): nn.ConvTranspose2d,
}


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, torch.Tensor]:
    """A convolution between two others, with an input that it fits."""
    dimensions, transposed = draw(st.sampled_from(sorted(KINDS)))
    groups = draw(st.sampled_from([1, 1, 1, 2]))
    channels = [groups * draw(st.sampled_from([1, 2, 5, 16])) for _ in range(2)]
    kernel, stride = draw(st.sampled_from([1, 2, 3, 4, 7])), draw(st.sampled_from([1, 2, 3]))
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


@given(convolutions())
@settings(max_examples=60, deadline=None)
def test_gradients_are_equal_bit_for_bit(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, x = case
    original = copy.deepcopy(model)
    fitted = irc.optimize(model, (x,), "100%", profile=False, strategy="keep-all")
    fitted(x).double().pow(2).sum().backward()
    original(x).double().pow(2).sum().backward()
    for mine, theirs in zip(fitted.parameters(), original.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert mine.grad.stride() == theirs.grad.stride()
        assert torch.equal(mine.grad, theirs.grad)


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


def test_without_convolutions_nothing_changes() -> None:
    program = Program(capture(nn.Linear(2, 3), (torch.randn(4, 2),), None).graph)
    assert SplitConvolutions().run(program) is program
