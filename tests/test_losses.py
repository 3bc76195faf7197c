"""A plan's peak with the caller's loss in it is the one that is measured, whatever the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import irc
from irc.frontends.torch.loss import loss_bytes
from irc.frontends.torch.loss_run import as_result
from irc.passes import Cost
from irc.passes.costs.allocations import peak_bytes

from .support.examples import examples
from .support.losses import COLUMNS, PARTS, ROWS, WHOLES, losses

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WITHOUT_HALF = {"multi margin", "multi margin, weight", "several labels, margin", "own distances", "CTC"}
"""Losses that torch has no kernels for in half precision on a CPU."""

BOUNDED_BYTES = {"CTC": 16}
"""What losses whose memory depends on values may take less than predicted."""

CASES = [
    pytest.param(name, kind, id=f"{name}, {kind}")
    for kind in TYPES
    for name in losses(torch.float32)
    if kind == "float32" or name not in WITHOUT_HALF
]


def beyond_measured(loss: Callable[[Tensor], Tensor], dtype: torch.dtype) -> int:
    """The predicted peak less the measured one of a step of a model of one wide output."""
    model = nn.Sequential(nn.Linear(16, COLUMNS), nn.Sigmoid()).to(dtype)
    x = torch.randn(ROWS, 16, dtype=dtype)
    fitted: Any = irc.optimize(model, (x,), "100%", time_limit=1, loss=loss)

    def step() -> None:
        loss(fitted(x)).backward()

    step()
    fitted.zero_grad()
    return fitted.plan.peak_bytes - fitted.plan.static_bytes - peak_bytes(step)


@pytest.mark.parametrize("name", ["triplet", "cross entropy, smooth chances", "Gaussian, full"])
def test_the_peak_with_a_loss_is_the_measured_one(name: str) -> None:
    assert beyond_measured(losses(torch.bfloat16)[name], torch.bfloat16) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_peak_with_each_loss_is_the_measured_one(name: str, kind: str) -> None:
    found = beyond_measured(losses(TYPES[kind])[name], TYPES[kind])
    assert 0 <= found <= BOUNDED_BYTES.get(name, 0)


@st.composite
def composed(draw: st.DrawFn) -> Callable[[Tensor], Tensor]:
    """A sum of terms, each of some functions one after another and one to a scalar."""
    parts = st.lists(st.sampled_from(sorted(PARTS)), max_size=3)
    terms = draw(st.lists(st.tuples(parts, st.sampled_from(sorted(WHOLES))), min_size=1, max_size=3))
    factors = [draw(st.sampled_from([None, 0.5])) for _ in terms]

    def loss(y: Tensor) -> Tensor:
        found: list[Tensor] = []
        for (names, whole), factor in zip(terms, factors, strict=True):
            value = y
            for name in names:
                value = PARTS[name](value)
            term = WHOLES[whole](value)
            found.append(term if factor is None else factor * term)
        return torch.stack(found).sum() if len(found) > 2 else sum(found[1:], found[0])

    loss.__doc__ = repr((terms, factors))
    return loss


@pytest.mark.slow
@given(composed(), st.sampled_from(sorted(TYPES)))
@examples(40)
def test_the_peak_with_a_loss_of_several_terms_is_the_measured_one(
    loss: Callable[[Tensor], Tensor], kind: str
) -> None:
    assert beyond_measured(loss, TYPES[kind]) == 0, loss.__doc__


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_a_loss_is_modelled_to_take_is_not_less_than_measured(name: str, kind: str) -> None:
    leaves, tree = pytree.tree_flatten(torch.rand(ROWS, COLUMNS, dtype=TYPES[kind], requires_grad=True))
    loss = losses(TYPES[kind])[name]
    modelled = loss_bytes(loss, leaves, tree)
    measured = loss_bytes(loss, leaves, tree, Cost().measure)
    assert all(model >= real for model, real in zip(modelled, measured, strict=True))


def write(y: Tensor, change: Callable[[Tensor, Tensor], Any], seen: Tensor) -> Tensor:
    change(seen, y.detach())
    return y.square().mean()


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "whole": lambda seen, y: seen.add_(1),
    "rows": lambda seen, y: seen[:2].copy_(y[:2]),
    "an item": lambda seen, y: seen.__setitem__((0, 0), 1.0),
    "transposed": lambda seen, y: seen.t().mul_(0.5).add_(1),
    "as data": lambda seen, y: seen.data.add_(1),
    "several": lambda seen, y: torch._foreach_add_([seen, seen], 1.0),  # pyright: ignore[reportPrivateUsage]
    "out": lambda seen, y: torch.mul(y, 2, out=seen),
    "statistics": lambda seen, y: nn.functional.batch_norm(y, seen[0], seen[1], training=True),
    "statistics of instances": lambda seen, y: nn.functional.instance_norm(
        y[:, None], seen[0, :1], seen[1, :1]
    ),
}


def test_a_loss_that_changes_tensors_or_draws_by_itself_never_runs_beside_the_steps() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawing(y: Tensor) -> Tensor:
        return (y * torch.rand(4, generator=generator)).sum()

    def counted(loss: Callable[[Tensor], Tensor]) -> int:
        """Returns how often the loss runs on data."""
        count = 0

        def counting(y: Tensor) -> Tensor:
            nonlocal count
            count += type(y) is Tensor
            return loss(y)

        loss_bytes(counting, leaves, tree, Cost().measure)
        return count

    leaves, tree = pytree.tree_flatten(torch.rand(3, 4, requires_grad=True))
    before = generator.get_state(), torch.get_rng_state()
    assert counted(lambda y: nn.functional.dropout(y).sum()) == 3
    assert counted(drawing) == 0
    for name, change in WRITES.items():
        seen = torch.zeros(3, 4)
        assert counted(lambda y: write(y, change, seen)) == 0 and not seen.any(), name  # noqa: B023
    assert all(map(torch.equal, (generator.get_state(), torch.get_rng_state()), before))


def test_a_loss_is_modelled_if_there_is_no_room_to_measure_it() -> None:
    leaves, tree = pytree.tree_flatten(torch.rand(ROWS, COLUMNS, requires_grad=True))
    levels = [loss_bytes(Tensor.prod, leaves, tree, Cost(most_bytes=most).measure) for most in (0, 1 << 30)]
    assert levels[0] == loss_bytes(Tensor.prod, leaves, tree) != levels[1]
    assert Cost(profile="cpu").measure is None


def test_a_loss_is_measured_while_a_profiler_is_on() -> None:
    leaves, tree = pytree.tree_flatten(torch.rand(ROWS, COLUMNS, requires_grad=True))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        nbytes = loss_bytes(Tensor.prod, leaves, tree, Cost().measure)
        torch.ones(3).erfinv()
    assert (
        nbytes
        == loss_bytes(Tensor.prod, leaves, tree, Cost().measure)
        != loss_bytes(Tensor.prod, leaves, tree)
    )
    assert "aten::erfinv" in {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize("is_cast", [False, True])
def test_the_bytes_of_a_loss_with_parameters_are_those_of_its_step(is_cast: bool) -> None:
    """Their gradients count, and under autocast the casts of each of its regions; others are as before."""
    head, made = nn.Linear(COLUMNS, COLUMNS), torch.rand(ROWS, COLUMNS, requires_grad=True)
    leaves, tree = pytree.tree_flatten(made)

    def loss(y: Tensor) -> Tensor:
        return (head(y) @ y.t()).float().square().mean()

    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        measured = loss_bytes(loss, leaves, tree, Cost().measure)
        modelled = loss_bytes(loss, leaves, tree)
    assert all(parameter.grad is None for parameter in head.parameters())

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            scalar = loss(as_result(leaves, tree))
        scalar.backward()

    assert measured[0] == peak_bytes(step) - made.nbytes
    assert all(model >= real for model, real in zip(modelled, measured, strict=True))


def test_hooks_of_a_loss_leave_nothing_of_planning() -> None:
    seen: list[Tensor] = []

    def loss(y: Tensor) -> Tensor:
        y.register_hook(seen.append)
        return y.square().mean()

    irc.optimize(nn.Linear(4, 4), (torch.rand(3, 4),), "100%", time_limit=1, loss=loss)
    assert not seen
