"""Small models of the kinds that training scripts hold, each with the arguments and the loss of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

__all__ = ["MODELS", "Arguments", "Calls", "Subject", "the"]


@dataclass
class Arguments:
    """The arguments of one call.

    Args:
        args: By position.
        kwargs: By name.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among them, in order."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def copied(self) -> Arguments:
        """The same with tensors of their own, which require gradients where these do."""
        args, kwargs = pytree.tree_map_only(Tensor, _copied, (self.args, self.kwargs))
        return Arguments(args, kwargs)


def _copied(tensor: Tensor) -> Tensor:
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return twin.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class Subject:
    """A small model that checks run on.

    Args:
        name: Of its kind.
        make: The module with weights drawn from the default generator.
        draw: The arguments of one step: (examples in the batch, positions in a sequence).
        loss: A scalar from the module's result.
        traits: What is in it; `tensor` where one float tensor comes in and one goes out.
        batch: Examples in the batch, unless a check asks for another.
        length: Positions in a sequence, likewise.
        tolerance: How far numbers may be off, as a share of the largest of their tensor; 0 is bit for bit.
        because: Why it is not 0.
    """

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[int, int], Arguments]
    loss: Callable[[Any], Tensor]
    traits: frozenset[str]
    batch: int
    length: int = 6
    tolerance: float = 0.0
    because: str = ""

    def arguments(self, batch: int | None = None, length: int | None = None) -> Arguments:
        """The arguments of one step, from the default generator."""
        return self.draw(batch or self.batch, length or self.length)


class Calls(nn.Module):
    """A module whose forward is a function of itself and the arguments.

    Args:
        function: Called with the module and the arguments.
        parts: Submodules and parameters, by name.
    """

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.function(self, *args, **kwargs)


def square(result: Tensor) -> Tensor:
    """The mean square."""
    return result.square().mean()


# ---------------------------------------------------------------------- images


def _stage(channels_in: int, channels_out: int, *, depth: int = 2) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index in range(depth):
        given = channels_out if index else channels_in
        layers.append(nn.Conv2d(given, channels_out, 3, padding=1, bias=index % 2 == 0))
        layers += [nn.BatchNorm2d(channels_out, momentum=0.3 if index else 0.1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _convolution() -> nn.Module:
    return nn.Sequential(
        _stage(3, 16, depth=6),
        nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


class _UNet(nn.Module):
    """Three levels of a U-Net: what the left side makes crosses to the right side."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.left = nn.ModuleList([_stage(3, width), _stage(width, 2 * width)])
        self.bottom = _stage(2 * width, 2 * width)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for _ in range(2))
        self.right = nn.ModuleList([_stage(3 * width, 2 * width), _stage(2 * width, width)])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for stage in self.left:
            skips.append(stage(x))
            x = functional.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up, stage in zip(self.up, self.right, strict=True):
            x = stage(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


# ---------------------------------------------------------------------- sequences


class _Block(nn.Module):
    """Attention and a perceptron, with dropout in both."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        queries, keys, values = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.project(self.norm1(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.dropout(self.mix(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class _Transformer(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.positions = nn.Parameter(torch.randn(16, 8) * 0.1)
        self.blocks = nn.ModuleList(_Block(8, 2) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Recurrent(nn.Module):
    """Two layers of GRU over the embedding of tokens, dropout between them; the scores and the state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.gru = nn.GRU(6, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 13)

    def forward(self, tokens: Tensor) -> Any:
        states, last = self.gru(self.embedding(tokens))
        return self.head(states), last


class _Experts(nn.Module):
    """A mixture of experts: each token is computed by its two best experts alone.

    Each expert takes a fixed number of tokens, the ones with the highest scores: shapes stay the same.
    """

    def __init__(self, width: int = 6, experts: int = 3, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 12), nn.SiLU(), nn.Linear(12, width)) for _ in range(experts)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens)
        best, routes = scores.topk(self.chosen, -1)
        weights = torch.zeros_like(scores).scatter(-1, routes, best.softmax(-1))
        total = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            taken = weights[:, index].topk(tokens.shape[0] // 2).indices
            part = expert(tokens[taken]) * weights[taken, index, None]
            total = total.index_put((taken,), part.to(total.dtype), accumulate=True)
        return self.norm(x + total.view_as(x))


# ---------------------------------------------------------------------- results of other kinds


def _deep(width: int, depth: int = 5) -> nn.Sequential:
    layers = [
        layer
        for _ in range(depth)
        for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Tanh())
    ]
    return nn.Sequential(*layers)


def _aliases(m: Any, x: Tensor) -> Any:
    h = m.inner(m.lin(x)) * 2.0
    return h, h.view(-1, 2), h[1:], h.t(), x, x[1:], m.lin.weight, m.lin.weight.t()


def _loss_of_aliases(result: Any) -> Tensor:
    h, viewed, rows, *_ = result
    return square(h) + viewed.sin().mean() + square(rows)


@dataclass
class Scores:
    """A result as libraries give it: a dataclass, known to pytree."""

    scores: Tensor
    loss: Tensor | None = None
    counts: Tensor | None = None


pytree.register_dataclass(Scores)


def _structured(m: Any, inputs: Mapping[str, Any], *, scale: float = 1.0, more: Any = None) -> Scores:
    h = torch.relu(m.lin(inputs["x"])) * scale
    h = m.inner(h) + inputs["pair"][0]
    if more is not None:
        h = h * more["gain"]
    scores = m.head(h)
    loss = functional.cross_entropy(scores, inputs["labels"])
    return Scores(scores, loss, scores.argmax(-1))


def _tokens(batch: int, length: int) -> Arguments:
    return Arguments((torch.randint(13, (batch, length)),))


def _images(batch: int, length: int) -> Arguments:
    return Arguments((torch.randn(batch, 3, 8, 8),))


def _next_token(result: Any) -> Tensor:
    scores = result[0] if isinstance(result, tuple) else result
    return functional.cross_entropy(scores.flatten(0, 1), torch.arange(scores[..., 0].numel()) % 13)


def _structured_arguments(batch: int, length: int) -> Arguments:
    inputs = {
        "x": torch.randn(batch, 6),
        "labels": torch.randint(4, (batch,)),
        "pair": (torch.randn(batch, 16), "unused"),
    }
    return Arguments((inputs,), {"scale": 0.5, "more": {"gain": torch.rand(16), "nothing": None}})


_ALL = [
    Subject(
        "convolution",
        _convolution,
        _images,
        lambda result: functional.cross_entropy(result, torch.arange(len(result)) % 5),
        frozenset({"batch norm", "dropout", "images", "tensor", "in-place"}),
        batch=16,
    ),
    Subject(
        "transformer",
        _Transformer,
        _tokens,
        _next_token,
        frozenset({"dropout", "tokens", "sequence", "ties", "tensor result"}),
        batch=64,
    ),
    Subject(
        "u-net",
        _UNet,
        _images,
        square,
        frozenset({"batch norm", "images", "tensor", "in-place"}),
        batch=16,
    ),
    Subject(
        "recurrent",
        _Recurrent,
        _tokens,
        lambda result: _next_token(result) + square(result[1]),
        frozenset({"dropout", "tokens", "sequence"}),
        batch=64,
        length=4,
        tolerance=1e-5,
        because="eager's recurrent kernels sum in another order than the time steps one by one",
    ),
    Subject(
        "experts",
        _Experts,
        lambda batch, length: Arguments((torch.randn(batch, length, 6),)),
        square,
        frozenset({"tensor", "sequence", "routing"}),
        batch=64,
    ),
    Subject(
        "aliases",
        lambda: Calls(_aliases, lin=nn.Linear(6, 16), inner=_deep(16)),
        lambda batch, length: Arguments((torch.randn(batch, 6),)),
        _loss_of_aliases,
        frozenset({"several results"}),
        batch=128,
    ),
    Subject(
        "structures",
        lambda: Calls(_structured, lin=nn.Linear(6, 16), inner=_deep(16), head=nn.Linear(16, 4)),
        _structured_arguments,
        lambda result: result.loss + square(result.scores),
        frozenset({"several results"}),
        batch=128,
    ),
]

MODELS = {subject.name: subject for subject in _ALL}
"""The models that checks run on, by name."""


def the(*names: str) -> tuple[str, ...]:
    """Names of models; a name that there is none of is a mistake in a check."""
    assert all(name in MODELS for name in names)
    return names
