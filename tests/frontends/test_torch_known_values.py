"""Python code that reads values which depend on no input, parameter, buffer or random draw."""

# Tensors without data have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.torch_cases import Model
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional

import irc
from irc.frontends.torch import Captured, capture
from irc.frontends.torch.known_values import known_values
from irc.ir import UnsupportedError

torch.set_num_threads(1)

WIDTH = 8
GLOBAL = torch.ones(WIDTH)
Forward = Callable[[Any, Tensor], Tensor]


def captured(forward: Forward) -> Captured:
    torch.manual_seed(0)
    model = Model(forward, lin=nn.Linear(WIDTH, WIDTH), norm=nn.BatchNorm1d(WIDTH))
    return capture(model, (torch.randn(4, WIDTH),), with_eager=True)


def linear_if(read: Callable[[Any, Tensor], Any]) -> Forward:
    """A model that is a linear layer if what it reads is true, and trains nothing if it is not."""
    return lambda m, x: m.lin(x) if read(m, x) else x


# ---------------------------------------------------------------------- what is known

KNOWN: dict[str, Callable[[Any, Tensor], Any]] = {
    "positions": lambda m, x: (torch.arange(5).diff() == 1).all(),
    "literal": lambda m, x: torch.tensor([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]],
    "ones like an input": lambda m, x: torch.ones_like(x).cumsum(-1)[0, -1] == WIDTH,
    "filled": lambda m, x: x.new_full((2, 2), 3.0).sum().item() == 12.0,
    "compared": lambda m, x: torch.equal(torch.linspace(1, 3, 3), torch.tensor([1.0, 2.0, 3.0])),
    "part written": lambda m, x: written(torch.zeros(3), lambda z: z[1:].add_(1)).sum() == 2,
    "counted": lambda m, x: len(torch.unique(torch.arange(6) // 2)) == 3,
    "found": lambda m, x: torch.triu(torch.ones(3, 3)).nonzero().shape == (6, 2),
}


def written(tensor: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    write(tensor)
    return tensor


@pytest.mark.parametrize("read", KNOWN.values(), ids=KNOWN)
def test_what_depends_on_nothing_is_read(read: Callable[[Any, Tensor], Any]) -> None:
    found = captured(linear_if(read))
    assert not found.signature.branches
    assert found.eager is not None


def test_places_that_depend_on_nothing_are_indices() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.lin(x)[:, (torch.arange(WIDTH) % 2 == 0).nonzero()[:, 0]]

    torch.manual_seed(0)
    model, x = Model(forward, lin=nn.Linear(WIDTH, WIDTH)), torch.randn(4, WIDTH)
    fitted = irc.optimize(model, (x,), "100%", time_limit=2)
    assert torch.equal(fitted(x), model(x))


# ---------------------------------------------------------------------- what is not known

NOT_KNOWN: dict[str, Callable[[Any, Tensor], Any]] = {
    "input": lambda m, x: x.sum() > -1e9,
    "parameter": lambda m, x: m.lin.weight.sum() > -1e9,
    "buffer": lambda m, x: m.norm.running_var.sum() > 0,
    "global": lambda m, x: GLOBAL.sum() > 0,
    "draw": lambda m, x: torch.rand(3).sum() >= 0,
    "draw like known": lambda m, x: torch.rand_like(torch.zeros(3)).sum() >= 0,
    "draw of known": lambda m, x: torch.bernoulli(torch.full((3,), 0.5)).sum() >= 0,
    "dropout of known": lambda m, x: functional.dropout(torch.ones(3)).sum() >= 0,
    "not written": lambda m, x: torch.empty_like(torch.zeros(3)).sum() * 0 == 0,
    "part drawn": lambda m, x: written(torch.zeros(3), lambda z: z[1:].uniform_()).sum() >= 0,
    "part copied": lambda m, x: written(torch.zeros(3), lambda z: z[0].copy_(x[0, 0])).sum() > -1e9,
    "output": lambda m, x: written(torch.zeros(WIDTH), lambda z: torch.add(x[0], 1, out=z)).sum() > -1e9,
    "in a list": lambda m, x: (
        written(torch.zeros(WIDTH), lambda z: torch._foreach_add_([z], [x[0]])).sum() > -1e9
    ),
    "place of an input": lambda m, x: (
        written(torch.zeros(WIDTH), lambda z: z.index_fill_(0, x.argmax(-1), 1)).sum() > 0
    ),
    "large": lambda m, x: torch.zeros(1001, 1000).sum() == 0,
}


@pytest.mark.parametrize("read", NOT_KNOWN.values(), ids=NOT_KNOWN)
def test_what_depends_on_something_is_refused(read: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(UnsupportedError) as raised:
        captured(linear_if(read))
    assert raised.value.code == "IRC332"


# ---------------------------------------------------------------------- chains of operations

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda t: t.view(-1),
    "part": lambda t: t[..., 1:] if t.shape[-1] > 1 else t,
    "transpose": lambda t: t.transpose(0, -1),
    "add in place": lambda t: t.add_(3),
    "write a part": lambda t: written(t, lambda z: z[..., 0].mul_(2)),
    "cumsum": lambda t: t.cumsum(0),
    "copy": lambda t: t.clone(),
    "split": lambda t: t.split(2)[0],
    "less": lambda t: t.where(t < 5, torch.full_like(t, 7)),
    "shape": lambda t: t.squeeze_().unsqueeze_(0),
}


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=8))
@examples(20)
def test_known_values_are_those_of_data(steps: list[str]) -> None:
    """Every tensor on the way reads as it does on data, after all writes."""

    def run() -> list[tuple[Tensor, ...]]:
        tensors = [torch.arange(24).reshape(2, 3, 4)]
        for step in steps:
            if step != "view" or tensors[-1].is_contiguous():
                tensors.append(STEPS[step](tensors[-1]))
        return [tensor.reshape(-1)[::5].unbind() for tensor in tensors]

    def numbers(found: list[tuple[Tensor, ...]]) -> list[list[float]]:
        return [[value.item() for value in values] for values in found]

    expected = numbers(run())
    with torch._subclasses.FakeTensorMode(), known_values():
        found = run()
        assert isinstance(found[0][0], FakeTensor)
        assert numbers(found) == expected


# ---------------------------------------------------------------------- attention


class GroupedAttention(nn.Module):
    """Attention of fewer keys than queries, without a mask where positions ask for none.

    As transformers' models do: they build the mask wherever a tensor has no data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        positions = torch.arange(steps).unsqueeze(0).expand(batch, -1)
        packed = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        asks = torch.compiler.is_compiling() or isinstance(packed, torch._subclasses.FakeTensor)
        q = self.q(x).view(batch, steps, 4, 8).transpose(1, 2)
        k, v = self.kv(x).view(batch, steps, 2, 2, 8).permute(2, 0, 3, 1, 4)
        if not asks and (packed[:, -1] == 0).all():
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mask = torch.ones(steps, steps, dtype=torch.bool).tril().expand(batch, 1, -1, -1)
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, mask)


def gradients(model: nn.Module, step: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    step(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(model: nn.Module, fitted: nn.Module, step: Callable[[Any], Tensor]) -> None:
    expected, found = gradients(model, step), gradients(fitted, step)
    assert expected
    assert not [name for name in expected if not torch.equal(expected[name], found[name])]


def test_attention_whose_mask_depends_on_nothing_is_that_of_eager() -> None:
    torch.manual_seed(0)
    model, x = GroupedAttention(), torch.randn(4, 64, 32)
    fitted = irc.optimize(model, (x,), "100%", time_limit=2)
    assert_same_gradients(model, fitted, lambda m: m(x).square().sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_models_of_transformers_without_a_mask_are_those_of_eager(name: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=100,
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        use_cache=False,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    tokens = torch.randint(0, 100, (4, 128))
    example = {"input_ids": tokens, "labels": tokens.clone()}
    fitted = irc.optimize(model, (), "100%", example_kwargs=example, time_limit=5)
    assert_same_gradients(model, fitted, lambda m: m(**example).loss)


def test_the_baseline_has_no_mask_that_eager_does_not_build() -> None:
    x = torch.randn(4, 64, 32)
    found = capture(GroupedAttention(), (x,), with_eager=True)
    assert found.eager is not None
    assert not {"bitwise_and", "tril"} & {node.op.split(".")[1] for node in found.graph.nodes}
    assert not any("tril" in name for name, _ in found.eager.alive_bytes)
