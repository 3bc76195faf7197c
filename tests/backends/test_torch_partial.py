"""A loss on some of the outputs: what comes from the others alone is zero, and not computed."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.torch_cases import keep_all, recompute_some
from torch import Tensor, nn

import irc
from irc.backends.torch import compile_program
from irc.compiler.training import measured_peak_bytes
from irc.frontends.torch import capture
from irc.ir import Graph, Schedule, verify_schedule

torch.set_num_threads(1)

SUBSETS = [k for n in (1, 2, 3) for k in itertools.combinations(range(3), n)]


def recomputing(graph: Graph) -> Schedule:
    return recompute_some(graph, 1)


class InfiniteTails(nn.Module):
    """Three outputs of shared features; the derivatives of the last two are infinite at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.GELU())))
        self.second = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared = torch.relu(self.first(x))
        middle = torch.relu(self.second(shared))
        normed = self.norm(shared)
        return normed.sum(1), (middle * 0).sum(1).sqrt(), (shared * 0).sum().pow(0.25) + middle.mean()


def gradients(module: nn.Module, x: Tensor, used: tuple[int, ...]) -> list[Tensor | None]:
    module.zero_grad()
    results = module(x)
    torch.stack([(results[k] * (k + 1)).sum() for k in used]).sum().backward()
    return [p.grad for p in module.parameters()]


def assert_equal(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
        else:
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.fixture(scope="module")
def tight() -> tuple[nn.Module, Any, Tensor]:
    """A module, the same planned for less memory, and its example."""
    original, x = InfiniteTails(), torch.randn(512, 6)
    return original, irc.optimize(copy.deepcopy(original), x, "70%", costs="analytic", time_limit=5), x


@pytest.mark.slow
def test_an_ignored_output_with_an_infinite_derivative_changes_nothing() -> None:
    original, x = InfiniteTails(), torch.randn(512, 6)
    assert_ignored(original, irc.optimize(copy.deepcopy(original), x, "100%", costs="analytic"), x)


@pytest.mark.slow
def test_an_ignored_output_changes_nothing_where_things_run_twice(
    tight: tuple[nn.Module, Any, Tensor],
) -> None:
    _, fitted, _ = tight
    assert any(decision.runs_again for decision in fitted.plan.decisions)
    assert_ignored(*tight)


def assert_ignored(original: nn.Module, fitted: nn.Module, x: Tensor) -> None:
    for used in SUBSETS * 2:
        assert_equal(gradients(fitted, x, used), gradients(original, x, used))
    of_all, of_one = (gradients(fitted, x, used) for used in [(0, 1, 2), (0,)])
    assert not all(gradient is None or gradient.isfinite().all() for gradient in of_all)
    assert all(gradient is None or gradient.isfinite().all() for gradient in of_one)


@pytest.mark.parametrize("schedule", [keep_all, recomputing])
def test_what_comes_from_an_ignored_output_is_not_computed(schedule: Callable[[Graph], Schedule]) -> None:
    captured = capture(InfiniteTails(), (torch.randn(512, 6),))
    chosen = schedule(captured.graph)
    verify_schedule(chosen, {})
    program = compile_program(chosen, captured.constants)
    assert program.is_partial
    assert "backward(inputs, saved, tangents, given)" in program.source
    assert " if given & 2 else " in program.source and " if given & 4 else " in program.source
    assert " if given & 7 else " not in program.source


def test_a_module_with_one_output_has_a_backward_of_one_piece() -> None:
    captured = capture(nn.Linear(3, 3), (torch.randn(2, 3),))
    program = compile_program(keep_all(captured.graph), captured.constants)
    assert not program.is_partial
    assert "given" not in program.source


@pytest.mark.slow
def test_released_gradients_and_pickles_know_the_outputs_too() -> None:
    original, x = InfiniteTails(), torch.randn(512, 6)
    fitted: Any = irc.optimize(
        copy.deepcopy(original), x, "100%", costs="analytic", accumulate_gradients=True
    )
    for module in (fitted, pickle.loads(pickle.dumps(fitted))):
        for used in SUBSETS:
            assert_equal(gradients(module, x, used), gradients(original, x, used))


def test_a_loss_on_some_outputs_stays_within_the_predicted_peak(tight: tuple[nn.Module, Any, Tensor]) -> None:
    _, fitted, x = tight
    fitted.zero_grad()
    plan = fitted.plan
    fitted(x)
    for used in SUBSETS:

        def loss(results: Any, used: tuple[int, ...] = used) -> Tensor:
            return torch.stack([results[k].sum() for k in used]).sum()

        assert measured_peak_bytes(fitted, (x,), plan.static_bytes, loss=loss) <= plan.peak_bytes


class _Uneven(torch.autograd.Function):
    """Two results, whose backward is no linear function of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        first, second = gradients
        return first * x.cos() + (second + 1) * x.sin() + torch.where(first == 0, second, 5 * first)


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = _Uneven.apply(self.lin(x))  # pyright: ignore[reportGeneralTypeIssues]
        return first, second, self.lin(x)


def test_a_backward_that_is_not_linear_in_its_gradients_runs_whole() -> None:
    original, x = Uneven(), torch.randn(64, 6)
    fitted = irc.optimize(copy.deepcopy(original), x, "100%", costs="analytic")
    for used in [(0,), (1,), (0, 1), (0, 1, 2)]:
        assert_equal(gradients(fitted, x, used), gradients(original, x, used))
