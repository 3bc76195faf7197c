"""The GPT-2 of the published grid, as its authors' benchmark describes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .registry import Example

__all__ = ["GRID", "Shape", "WithLoss", "gpt2", "trained"]


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT-2 and of its batches.

    Args:
        layers: Blocks.
        width: Of the residual stream.
        heads: Attention heads; they divide the width.
        vocabulary: Tokens; embedding and head have a matrix each.
        positions: Of a sample.
        batch: Samples of a step.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int
    batch: int


GRID = Shape(layers=12, width=768, heads=12, vocabulary=3000, positions=128, batch=64)
"""Of the published grid: 89,762,304 parameters."""

_DROPOUT = 0.1


class _Positions(nn.Module):
    """Adds a trained vector for each position."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(shape.positions, shape.width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, positions, width] to the same shape."""
        return x + self.vectors[: x.size(1)]


class _Block(nn.Module):
    """A block with its LayerNorms after the sums.

    Its attention is torch's with the batch in the second place, while the benchmark has it in the first:
    attention is between the samples of a micro-batch, and its scores shrink as micro-batches do.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(shape.width, shape.heads, dropout=_DROPOUT)
        self.norm1 = nn.LayerNorm(shape.width)
        self.perceptron = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Dropout(_DROPOUT),
            nn.Linear(4 * shape.width, shape.width),
            nn.Dropout(_DROPOUT),
        )
        self.norm2 = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, positions, width] to the same shape."""
        x = self.norm1(x + self.attention(x, x, x)[0])
        return self.norm2(x + self.perceptron(x))


def gpt2(shape: Shape) -> nn.Sequential:
    """Tokens [batch, positions] to scores [batch, positions, vocabulary], in `layers` + 4 modules."""
    return nn.Sequential(
        nn.Embedding(shape.vocabulary, shape.width),
        _Positions(shape),
        *(_Block(shape) for _ in range(shape.layers)),
        nn.LayerNorm(shape.width),
        nn.Linear(shape.width, shape.vocabulary, bias=False),
    )


class WithLoss(nn.Module):
    """A GPT-2 whose result is the mean cross entropy of its scores."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = gpt2(shape)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of tokens and targets [batch, positions]."""
        return functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


def trained() -> Example:
    """The GPT-2 of the grid with a batch: what ranks load."""
    torch.manual_seed(0)
    tokens = torch.randint(GRID.vocabulary, (2, GRID.batch, GRID.positions))
    return WithLoss(GRID), (tokens[0].clone(), tokens[1].clone())
