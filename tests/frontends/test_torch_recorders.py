"""Hooks that record outputs within a forward, and what a traced forward must not leave behind."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import cached_tables
from support.torch_cases import Model, fitted
from torch import Tensor, nn

import irc
from irc.frontends.torch import capture
from irc.frontends.torch.fixups.function_caches import caches_of
from irc.ir import UnsupportedError

torch.set_num_threads(1)


@functools.cache
def _bert() -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=30,
        max_position_embeddings=16,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return transformers.BertModel(config)


TOKENS = torch.arange(10).reshape(2, 5)
STATES = {"output_hidden_states": True}


def loss(result: Any) -> Tensor:
    total: Tensor = result.last_hidden_state.sum()
    for state in result.hidden_states:
        total = total + state.square().mean()
    return total


def step(module: nn.Module) -> list[Tensor]:
    module.zero_grad()
    result = module(TOKENS, **STATES)
    loss(result).backward()
    return [state.detach() for state in result.hidden_states] + [
        p.grad for p in module.parameters() if p.grad is not None
    ]


def assert_same(some: list[Tensor], others: list[Tensor]) -> None:
    assert len(some) == len(others)
    assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def hooks(module: nn.Module) -> list[int]:
    return [len(vars(child)["_forward_hooks"]) for child in module.modules()]


@pytest.mark.parametrize("ran_before", [False, True])
def test_a_model_that_records_its_outputs_trains_as_the_original(ran_before: bool) -> None:
    module: Any = copy.deepcopy(_bert()).train()
    original: Any = copy.deepcopy(module)
    if ran_before:
        module(TOKENS, **STATES)
    before = hooks(module), set(vars(module)) - {"_compiled_call_impl"}
    ours: Any = irc.optimize(module, (TOKENS,), "100%", costs="analytic", loss=loss, example_kwargs=STATES)
    assert (hooks(module), set(vars(module)) - {"_compiled_call_impl"}) == before
    assert_same(step(ours), step(original))
    ours.eval()(TOKENS, **STATES)  # as the original runs: its first call installs the hooks
    assert sum(hooks(ours)) > 0
    assert_same(step(ours.train()), step(original))


def test_a_part_whose_outputs_a_model_around_it_collects_is_refused() -> None:
    module: Any = copy.deepcopy(_bert()).train()
    module(TOKENS, **STATES)
    module.encoder = irc.optimize(module.encoder, (torch.randn(2, 5, 16),), "100%", costs="analytic")
    with pytest.raises(UnsupportedError, match=r"IRC505.*layer\.0") as caught:
        module(TOKENS, **STATES)
    assert "around" in caught.value.message and caught.value.help


def test_hooks_that_a_forward_leaves_are_refused_and_taken_away() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.lin.register_forward_hook(lambda *_: None)
        return m.lin(x)

    module = Model(forward, lin=nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match=r"IRC338.*lin\._forward_hooks"):
        capture(module, (torch.randn(3, 4),))
    assert sum(hooks(module)) == 0


class Positions(nn.Module):
    """Computes its positions once for each size, as models of images do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def few(self, size: int) -> Tensor:
        return torch.arange(size).sin()

    @functools.cache  # noqa: B019
    def all(self, size: int) -> tuple[Tensor, int]:
        return torch.arange(size).cos(), size

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * self.few(4) * self.all(4)[0]


def test_caches_of_functions_do_not_keep_traced_tensors() -> None:
    module, x = Positions(), torch.randn(3, 4)
    ours = fitted(module, x)
    expected = module(x)  # would fail on a tensor without data
    assert torch.equal(ours(x), expected)
    capture(module, (x,))  # with the tensors of that run in the caches
    assert torch.equal(module(x), expected)


def _imported(m: Any) -> Tensor:
    from support.cached_tables import table

    return table(4)


CACHED: dict[str, Callable[[Any], Tensor]] = {
    "file": lambda m: cached_tables.table(4),
    "import in the forward": _imported,
    "result in an object": lambda m: cached_tables.box(4).table,
    "result in a function": lambda m: cached_tables.closure(4)(),
    "object of a file": lambda m: cached_tables.TABLES.of_object(4),
    "object of the module": lambda m: m.tables.of_object(4),
    "class": lambda m: cached_tables.Tables.of_class(4),
    "container": lambda m: cached_tables.BY_NAME["table"](),
}


@pytest.mark.parametrize("kind", CACHED)
def test_caches_that_code_names_do_not_keep_traced_tensors(kind: str) -> None:
    module = Model(
        lambda m, x: m.lin(x) * CACHED[kind](m), lin=nn.Linear(4, 4), tables=cached_tables.Tables()
    )
    x = torch.randn(3, 4)
    ours = fitted(module, x)
    assert torch.equal(ours(x), module(x))


@pytest.mark.parametrize(("items", "is_searched"), [(9_999, True), (10_000, False)])
def test_a_list_of_data_is_not_searched_for_caches(items: int, is_searched: bool) -> None:
    module, cache = nn.Identity(), functools.cache(lambda: None)
    module.items = [cache, *range(items)]  # pyright: ignore
    assert (cache in caches_of(module)) is is_searched
