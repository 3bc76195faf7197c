"""The largest batch: what it says fits runs within the budget, and one more is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import irc
from irc.compiler.estimate import largest_batch
from irc.compiler.estimate.largest_batch import Trial
from irc.ir import BudgetError, Node, UsageError
from irc.passes.costs import profiling


class Stack(nn.Module):
    """Rows of features, with a scale that does not grow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())))

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        return self.layers(x).mul(1.0 if scale is None else scale).square().mean()


class Attending(nn.Module):
    """Sequences, whose memory grows with the square of their length."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        return ((x @ x.mT).softmax(-1) @ x).square().mean()


class Normed(nn.Module):
    """Rows that are normed over the batch, which takes two of them, with dropout.

    Args:
        most: The most rows that it takes.
    """

    def __init__(self, most: int = 1 << 20) -> None:
        super().__init__()
        self.most = most
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise ValueError("too many rows")
        return self.layers(x).square().mean()


CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...], dict[str, Any], str]] = {
    "rows": (Stack(), (torch.randn(4, 32),), {"scale": torch.ones(32)}, "batch"),
    "images": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)),
        (torch.randn(2, 3, 12, 12),),
        {},
        "batch",
    ),
    "sequence": (Attending(), (torch.randn(2, 8, 16),), {}, "sequence"),
}


BUDGET_BYTES = 150_000


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_largest_size_runs_and_one_more_is_refused(name: str) -> None:
    model, args, kwargs, axis = CASES[name]
    found = irc.max_batch(
        model, args, BUDGET_BYTES, axis=axis, example_kwargs=kwargs, costs="cpu", time_limit=1, measure=True
    )
    assert found.size > 0 and found.plan is not None
    assert found.plan.peak_bytes <= found.budget_bytes == BUDGET_BYTES
    assert found.holds and found.measured_peak_bytes is not None
    assert found.measured_peak_bytes <= found.plan.peak_bytes
    tried = {trial.size: trial for trial in found.trials}
    assert tried[found.size].overhead is not None and tried[found.size + 1].overhead is None
    shape = list(args[0].shape)
    shape[0 if axis == "batch" else 1] = found.size + 1
    with pytest.raises(BudgetError):
        irc.optimize(
            model, torch.randn(shape), BUDGET_BYTES, example_kwargs=kwargs, costs="cpu", time_limit=1
        )
    assert f"largest {axis}" in found.summary() and "none fits" in found.summary()
    assert found.to_json()["size"] == found.size


def test_not_even_one_fits() -> None:
    found = irc.max_batch(Stack(), torch.randn(4, 32), 5000, costs="cpu")
    assert found.size == 0 and found.plan is None and found.items_per_second == 0


def test_a_model_without_data_is_planned_but_not_measured() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(32, 32), torch.randn(4, 32)
    assert irc.max_batch(model, x, 200_000, costs="cpu", time_limit=0.3).size > 0
    with pytest.raises(UsageError, match=r"IRC403.*without data"):
        irc.max_batch(model, x, 200_000, costs="cpu", measure=True)


@pytest.mark.slow
def test_tensors_of_a_fake_mode_are_resized() -> None:
    with FakeTensorMode():
        model, x = Normed(), torch.randn(4, 32, requires_grad=True)
    fake, real = (
        irc.max_batch(m, y, 130_000, costs="cpu")
        for m, y in ((model, x), (Normed(), torch.randn(4, 32, requires_grad=True)))
    )
    assert 4 < fake.size == real.size


def test_the_largest_size_is_one_that_the_model_takes() -> None:
    found = irc.max_batch(Normed(most=6), torch.randn(4, 32), "1MiB", costs="cpu")
    not_taken = [trial.size for trial in found.trials if not trial.minimum_bytes]
    assert found.size == 6 and 7 in not_taken and "does not take it" in found.summary()
    none = irc.max_batch(Normed(), torch.randn(3, 32), 1000, costs="cpu")
    tried = {trial.size: trial.minimum_bytes for trial in none.trials}
    assert none.size == 0 and tried[1] == 0
    assert irc.max_batch(Normed(), torch.randn(3, 32), tried[2], costs="cpu").size == 2
    with pytest.raises(UsageError, match=r"IRC349.*too many rows"):
        irc.max_batch(Normed(most=3), torch.randn(4, 32), "1MiB", costs="cpu")


def test_measuring_leaves_model_arguments_and_generator_as_they_were() -> None:
    model, x = Normed(), torch.randn(4, 32, requires_grad=True)
    before = copy.deepcopy(model.state_dict()), x.detach().clone(), torch.get_rng_state()
    found = irc.max_batch(model, x, 130_000, costs="cpu", measure=True)
    assert found.holds and found.measured_per_second is not None
    after = model.state_dict(), x.detach(), torch.get_rng_state()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert x.grad is None and all(parameter.grad is None for parameter in model.parameters())


def test_wrong_use_is_refused() -> None:
    with pytest.raises(UsageError, match=r"IRC401.*grows with the batch"):
        irc.max_batch(Stack(), torch.randn(4, 32), "60%", costs="cpu")
    with pytest.raises(UsageError, match="IRC585"):
        irc.max_batch(Stack(), torch.randn(4, 32), "1MiB", axis="depth", costs="cpu")
    with pytest.raises(UsageError, match="IRC585"):
        irc.max_batch(Stack(), (torch.tensor(1.0),), "1MiB", axis="sequence", costs="cpu")


@given(st.integers(1, 3000), st.integers(0, 5000), st.integers(1, 97), st.integers(0, 2), st.integers(1, 64))
@examples(60)
def test_the_border_is_found_in_few_trials(
    border: int, static: int, slope: int, power: int, start: int
) -> None:
    """Whatever the bytes grow like, the two sizes at the border are tried."""

    def nbytes(size: int) -> int:
        return static + slope * size + power * size * size

    budget = nbytes(border)
    trials: dict[int, Trial] = {}
    fits, fails, size = 0, 1 << 20, start
    while fails - fits > 1:
        does_fit = nbytes(size) <= budget
        trials[size] = Trial(size, nbytes(size), 0.0 if does_fit else None, 0.0)
        fits, fails = (size, fails) if does_fit else (fits, size)
        size = largest_batch.next_size(trials, budget, fits, fails)
        assert fits < size < fails or fails - fits == 1
    assert fits == border and len(trials) <= 40


def test_no_operation_runs_that_is_over_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes hardly grow from one row to two, so that the next size that is tried is far too large."""
    ran: list[int] = []
    measure = profiling._measure  # pyright: ignore[reportPrivateUsage]

    def spy(nodes: dict[str, Node], *others: Any) -> Any:
        for node in nodes.values():
            ran.append(sum({v.storage: v.storage.nbytes for v in (*node.operands, *node.values)}.values()))
        return measure(nodes, *others)

    monkeypatch.setattr(profiling, "_measure", spy)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    found = irc.max_batch(model, torch.randn(1, 32), 3_000_000, costs="measured")
    assert found.size and max(trial.size for trial in found.trials) > found.size
    assert ran and max(ran) <= 3_000_000
