"""Plans for a range of lengths: the original's numbers and the budget for each, and few plans."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.torch_cases import Model, assert_same, outcome
from torch import Tensor, nn
from torch.nn import functional as F

import irc
from irc.compiler.training import measured_peak_bytes

torch.set_num_threads(1)

FIRST, LAST = 8, 60
WORDS = 50
"""A dimension of the test models that no length equals by its size alone."""


class LanguageModel(Model):
    """A small language model with the next token as the target; its function computes what the head reads."""

    def forward(self: Any, ids: Tensor) -> Tensor:
        logits = self.head(self.function(self, self.embedding(ids), ids))
        return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1))


def language_model(states: Callable[[Any, Tensor, Tensor], Tensor], **parts: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    common = {"embedding": nn.Embedding(WORDS, 16), "linear": nn.Linear(16, 16), "head": nn.Linear(16, WORDS)}
    return LanguageModel(states, **common, dropout=nn.Dropout(0.3), **parts)


def attention(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    heads = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True, dropout_p=0.1)
    return m.linear(x + mixed.transpose(1, 2).reshape(x.shape))


def masked(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    size = ids.shape[1]
    above = torch.ones(size, size, dtype=torch.bool).triu(1)
    scores = (x @ x.transpose(1, 2) / math.sqrt(16)).masked_fill(above, -1e9).softmax(-1)
    return m.linear(m.dropout(scores @ x)) / size


def rotary(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    angles = torch.arange(ids.shape[1])[:, None] * torch.exp(-torch.arange(8) / 8)
    return m.linear(F.layer_norm(x * torch.cat([angles.cos(), angles.sin()], -1), (16,)))


def branching(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return m.linear(x.tanh() if ids.shape[1] > 40 else x)


def reading(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return m.linear(x.tanh() if torch.arange(ids.shape[1]).max() > 30 else x)


def splitting(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    first, last = m.linear(x).split([ids.shape[1] - 3, 3], 1)
    return torch.cat([last.tanh(), first], 1).flip(1).cumsum(1)


def halving(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    half = ids.shape[1] // 2
    return torch.cat([m.linear(x[:, :half]), x[:, half:]], 1)


def padding(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return m.linear(F.pad(x, (0, 0, 0, -x.shape[1] % 8)))[:, : x.shape[1]]


def convolving(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return m.norm(m.convolution(x.transpose(1, 2))).transpose(1, 2)


def looping(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    states = [x[:, 0]]
    for k in range(1, x.shape[1]):
        states.append(torch.tanh(m.linear(states[-1] + x[:, k])))
    return torch.stack(states, 1)


def positioned(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return m.linear(x + m.positions(m.position_ids[:, : ids.shape[1]])).tanh()


def tokens(length: int, rows: int = 3) -> tuple[Tensor]:
    return (torch.randint(0, WORDS, (rows, length)),)


def fitted(module: nn.Module, budget: Any = "75%", rows: int = 3, **options: Any) -> Any:
    """A copy of a model within a budget, for its lengths."""
    settings: dict[str, Any] = {
        "costs": "analytic",
        "time_limit": 20,
        "dynamic": {"ids": {1: (FIRST, LAST)}},
        **options,
    }
    try:
        return irc.optimize(copy.deepcopy(module), tokens(20, rows), budget, **settings)
    except irc.BudgetError as error:
        return irc.optimize(copy.deepcopy(module), tokens(20, rows), error.minimum_bytes, **settings)


def assert_agree(ours: Any, original: nn.Module, *args: Tensor) -> None:
    ours.zero_grad()
    original.zero_grad()
    assert_same(outcome(ours, args, {}), outcome(original, args, {}))


STATES = [attention, masked, rotary, branching, reading, splitting]


@pytest.mark.slow
@pytest.mark.parametrize("states", STATES)
def test_each_length_has_the_numbers_of_the_original_and_no_plan_of_its_own(
    states: Callable[..., Tensor],
) -> None:
    module = language_model(states)
    ours = fitted(module)
    planned = len(ours.irc_plans)
    assert 1 < planned <= 14
    for length in (LAST, FIRST, 9, 30, 31, 32, 40, 41, 51, 57):
        assert_agree(ours, module, *tokens(length))
    assert len(ours.irc_plans) == planned


@pytest.mark.slow
@pytest.mark.parametrize("states", [attention, masked, convolving])
def test_no_length_takes_more_than_the_budget(states: Callable[..., Tensor]) -> None:
    parts = {"convolution": nn.Conv1d(16, 16, 3, padding=1), "norm": nn.BatchNorm1d(16)}
    module = language_model(states, **parts if states is convolving else {})
    ours = fitted(module, costs="measured")
    planned = len(ours.irc_plans)
    for length in range(FIRST, LAST + 1, 3):
        (args,) = tokens(length)
        ours(args)
        plan: irc.Plan = ours.irc_plans[0].plan
        static_bytes = sum(t.nbytes for t in (*ours.parameters(), *ours.buffers())) + args.nbytes
        assert measured_peak_bytes(ours, (args,), static_bytes) <= plan.peak_bytes <= plan.budget_bytes
    assert len(ours.irc_plans) == planned


@pytest.mark.slow
@pytest.mark.parametrize("states", [halving, padding, looping])
def test_lengths_that_decide_more_than_sizes_are_planned_one_by_one(
    states: Callable[..., Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    module = language_model(states)
    ours = fitted(module, "100%", dynamic={"ids": {1: (FIRST, 20)}})
    assert "dimension 1 of argument ids is planned for each length by itself: " in caplog.text
    assert [each.call for each in ours.irc_plans] == ["the example arguments"]
    for length in (13, 20):
        assert_agree(ours, module, *tokens(length))
    assert len(ours.irc_plans) == 2


@pytest.mark.slow
def test_another_batch_has_plans_for_its_lengths_too() -> None:
    module = language_model(attention)
    ours = fitted(module, "1GiB", plans=2)
    planned = len(ours.irc_plans)
    assert_agree(ours, module, *tokens(33, rows=2))
    twice = len(ours.irc_plans)
    assert twice > planned
    for length, rows in ((FIRST, 2), (LAST, 3), (50, 2), (21, 3)):
        assert_agree(ours, module, *tokens(length, rows))
    assert len(ours.irc_plans) == twice, "the plans for the lengths of a batch count as one"
    assert_agree(ours, module, *tokens(LAST + 1))
    assert ours.irc_plans[0].call.startswith("input 0 is int64[3, 61]"), "longer than the range"


def deep(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    for _ in range(4):
        x = F.gelu(x)
    return m.dropout(x)


@functools.cache
def deep_model() -> tuple[nn.Module, Any]:
    """A model, and a copy within a budget in which lengths have several plans even with fewer rows."""
    module = language_model(deep)
    return module, fitted(module, 1, dynamic={"ids": {1: (FIRST, 20)}}, rows=5)


@pytest.mark.slow
@examples(16)
@given(st.sampled_from([(5, False), (4, False), (5, True)]), st.integers(FIRST, 20), st.booleans())
def test_calls_of_any_rows_under_any_autocast_have_plans_for_their_lengths(
    kind: tuple[int, bool], length: int, trains: bool
) -> None:
    (rows, is_cast), (module, ours) = kind, deep_model()
    args = tokens(length, rows)
    for each in (module, ours):
        each.train(trains)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        assert_agree(ours, module, *args)
    kinds = [each.call for each in ours.irc_plans]
    assert all(each.startswith("dimension 1 of argument ids of ") for each in kinds)
    assert len(set(kinds)) > 1, "one plan would be for all lengths"


class Positioned(nn.Module):
    """Adds a table of 16 positions: longer calls are not valid."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 4)
        self.positions = nn.Parameter(torch.randn(1, 16, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids) + self.positions[:, : ids.shape[1]]).mean()


def test_lengths_that_the_model_refuses_are_named_and_raise_as_in_eager(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = Positioned()
    settings: dict[str, Any] = {"costs": "analytic", "dynamic": {"ids": {1: (FIRST, 40)}}}
    ours = irc.optimize(copy.deepcopy(module), tokens(12), "1MiB", **settings)
    assert "a call with dimension 1 of argument ids of 40 is not valid, as the model raises" in caplog.text
    assert_agree(ours, module, *tokens(12))
    with pytest.raises(RuntimeError, match="The size of tensor a") as raised:
        ours(*tokens(40))
    assert not isinstance(raised.value, irc.IrcError)
    settings["dynamic"]["ids"] = {1: (3, 15)}
    ours = irc.optimize(copy.deepcopy(module), tokens(12), "1MiB", **settings)
    for length in (3, 15):
        assert_agree(ours, module, *tokens(length))
    assert len(ours.irc_plans) == 1  # pyright: ignore


@pytest.mark.slow
def test_sequences_of_any_length_are_planned_up_to_the_longest_that_came() -> None:
    module = language_model(rotary)
    ours = fitted(module, "1GiB", dynamic="sequence")
    assert [each.call for each in ours.irc_plans] == ["dimension 1 of input 0 of 3 to 20"]
    for length in (20, 3, 11, 31, 25, 21, 40, 33):
        assert_agree(ours, module, *tokens(length))
    assert {each.call for each in ours.irc_plans} == {
        "dimension 1 of input 0 of 3 to 20",
        "dimension 1 of input 0 of 21 to 31",
        "dimension 1 of input 0 of 32 to 40",
    }


@pytest.mark.slow
def test_arguments_that_have_the_length_move_along() -> None:
    class Weighted(Model):
        def forward(self: Any, ids: Tensor, *, weights: Tensor, scores: Tensor) -> Tensor:
            found = self.embedding(ids) * weights[..., None] * scores.mean(-1)[..., None]
            return found.mean(1).square().sum()

    def call(length: int) -> dict[str, Tensor]:
        weights = torch.rand(3, length, requires_grad=True)
        return {"weights": weights, "scores": torch.rand(3, length, length)}

    torch.manual_seed(0)
    module = Weighted(print, embedding=nn.Embedding(WORDS, 16))
    dynamic = {"ids": {1: (FIRST, LAST)}, "scores": {1: (FIRST, LAST), 2: (FIRST, LAST)}}
    ours = irc.optimize(
        copy.deepcopy(module), tokens(9), "1GiB", example_kwargs=call(9), costs="analytic", dynamic=dynamic
    )
    for length in (9, 60, 31):
        args, kwargs = tokens(length), call(length)
        assert_same(outcome(ours, args, kwargs), outcome(module, args, kwargs))
    assert len(ours.irc_plans) == 1


@pytest.mark.slow
def test_plans_for_lengths_travel_with_the_module() -> None:
    module = language_model(attention)
    ours = fitted(module)
    planned = sorted(each.call for each in ours.irc_plans)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        for length in (11, 58):
            assert_agree(twin, module, *tokens(length))
        assert sorted(each.call for each in twin.irc_plans) == planned


@pytest.mark.slow
def test_results_of_any_length_train() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 7)
    )
    ours = fitted(module, dynamic={0: {1: (FIRST, LAST)}}, loss=lambda out: out.square().mean())
    for length in (60, 8, 33):
        assert_agree(ours, module, *tokens(length))
    assert all(each.plan.peak_bytes <= each.plan.budget_bytes for each in ours.irc_plans)


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ("length", "dynamic is 'length'"),
        ({}, "dynamic is {}"),
        ({"ids": 1}, "dynamic is {'ids': 1}"),
        ({"ids": {1: 5}}, "the sizes 5 for dimension 1"),
        ({"ids": {1: (1, 5)}}, r"the sizes \(1, 5\)"),
        ({"ids": {1: (9, 5)}}, r"the sizes \(9, 5\)"),
        ({"ids": {1: (2, 5.0)}}, r"the sizes \(2, 5.0\)"),
        ({"ids": {-1: (2, 5)}}, "dimension -1"),
        ({"ids": {True: (2, 5)}}, "dimension True"),
        ({"ids": {1: (2, 5)}, "w": {1: (2, 6)}}, "2 ranges of sizes"),
        ({"other": {1: (2, 50)}}, "argument other, which is not a tensor"),
        ({"ids": {2: (2, 50)}}, r"dimension 2 of argument ids, whose shape is \[3, 20\]"),
        ({"ids": {1: (2, 19)}}, "argument ids has the size 20 in this call, and dynamic names 2 to 19"),
        ({"ids": {0: (2, 50), 1: (2, 50)}}, r"2 sizes in this call, \[3, 20\]"),
    ],
)
def test_what_names_no_length_is_refused(dynamic: Any, message: str) -> None:
    with pytest.raises(irc.UsageError, match=f"IRC406.*{message}"):
        irc.optimize(language_model(rotary), tokens(20), "1GiB", dynamic=dynamic)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap": "disk:/tmp:1GiB"}, "swap="),
        ({"exact": "sums"}, "exact="),
        ({"specialize_branches": True}, "specialize_branches="),
        ({"plans": 1}, "more than one plan"),
    ],
)
def test_options_that_lengths_exclude_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(irc.UsageError, match=f"IRC406.*{message}"):
        fitted(language_model(rotary), **options)


def test_the_longest_call_has_to_fit() -> None:
    with pytest.raises(irc.BudgetError, match="IRC204"):
        irc.optimize(
            language_model(rotary), tokens(9), "24KiB", dynamic={"ids": {1: (8, 60)}}, costs="analytic"
        )


@pytest.mark.slow
def test_optimizers_in_backward_step_at_every_length() -> None:
    module = language_model(attention)
    ours = fitted(module, "90%", optimizer_in_backward=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    planned = len(ours.irc_plans)
    for length in (LAST, FIRST, 33, 51):
        (ids,) = tokens(length)
        for each in (ours, module):
            torch.manual_seed(length)
            each(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), module.parameters(), strict=True))
    assert len(ours.irc_plans) == planned


@pytest.mark.slow
def test_the_length_of_a_whole_table_is_planned_by_itself() -> None:
    module = language_model(positioned, positions=nn.Embedding(LAST, 16))
    module.register_buffer("position_ids", torch.arange(LAST).expand((1, -1)))
    ours = fitted(module)
    planned = [each.call for each in ours.irc_plans]
    assert planned[0] == f"dimension 1 of argument ids of {LAST}"
    assert f"dimension 1 of argument ids of {FIRST} to " in " ".join(planned)
    for length in (LAST, FIRST, LAST - 1, 31):
        assert_agree(ours, module, *tokens(length))
    assert len(ours.irc_plans) == len(planned)
