"""What a plan promises of the caller's loss: the peak is the one that is measured, whatever the loss."""

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


def test_a_loss_that_changes_tensors_or_draws_by_itself_never_runs_beside_the_steps() -> None:
    seen, generator = torch.zeros(4), torch.Generator().manual_seed(0)

    def writing(y: Tensor) -> Tensor:
        seen.add_(1)
        return y.square().mean()

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
    assert counted(writing) == counted(drawing) == 0 and not seen.any()
    assert all(map(torch.equal, (generator.get_state(), torch.get_rng_state()), before))


def test_a_loss_is_modelled_if_there_is_no_room_to_measure_it() -> None:
    leaves, tree = pytree.tree_flatten(torch.rand(ROWS, COLUMNS, requires_grad=True))
    levels = [loss_bytes(Tensor.prod, leaves, tree, Cost(most_bytes=most).measure) for most in (0, 1 << 30)]
    assert levels[0] == loss_bytes(Tensor.prod, leaves, tree) != levels[1]
    assert Cost(profile="cpu").measure is None
