"""Small models of the kinds that people train, for plans that are recorded."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

Example = tuple[nn.Module, tuple[Tensor, ...]]


def mlp() -> Example:
    torch.manual_seed(0)
    layers = [part for _ in range(5) for part in (nn.Linear(32, 32), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(32, 4)), (torch.randn(256, 32),)


def heavy() -> Example:
    """Layers whose parameters weigh more than their results."""
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(96, 96), nn.Tanh())]
    return nn.Sequential(*layers), (torch.randn(8, 96),)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.last_norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm(self.first(x)))
        return functional.relu(x + self.last_norm(self.second(y)))


def resnet() -> Example:
    torch.manual_seed(0)
    blocks = (_Residual(8) for _ in range(3))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, *head), (torch.randn(4, 3, 16, 16),)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pairs = list(itertools.pairwise((3, 4, 8, 8)))
        self.down = nn.ModuleList(self._layer(a, b) for a, b in pairs)
        self.up = nn.ModuleList(self._layer(2 * b, a) for a, b in reversed(pairs))

    @staticmethod
    def _layer(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            x = layer(torch.cat((x, skip), 1))
        return x.square().mean()


def unet() -> Example:
    torch.manual_seed(0)
    return _UNet(), (torch.randn(8, 3, 16, 16),)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm, self.wide_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.mix(self.norm(x)).chunk(3, -1)
        )
        scores = torch.softmax(q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5, -1)
        mixed = (self.dropout(scores) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.project(mixed))
        return x + self.dropout(self.narrow(functional.gelu(self.wide(self.wide_norm(x)))))


class _Language(nn.Module):
    """A transformer whose embedding is its last matrix, too."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(_Attention(16, 2, dropout) for _ in range(layers))
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), following.flatten())


def language() -> Example:
    torch.manual_seed(0)
    return _Language(3, 0.0), (torch.randint(0, 64, (4, 12)), torch.randint(0, 64, (4, 12)))


def dropping() -> Example:
    torch.manual_seed(0)
    return _Language(2, 0.1), (torch.randint(0, 64, (4, 12)), torch.randint(0, 64, (4, 12)))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[1], 12)
        for step in x:
            state = self.cell(step, state)
        return self.head(state)


def recurrent() -> Example:
    torch.manual_seed(0)
    return _Recurrent(), (torch.randn(6, 16, 8),)


def frozen() -> Example:
    model, args = mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("4", "6", "10")))
    return model, args


class _Vocabulary(nn.Module):
    """A head whose scores are most of the memory: tiles of rows hold a part of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 512)

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.head(functional.gelu(self.mix(self.words(ids))))
        return functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


def vocabulary() -> Example:
    torch.manual_seed(0)
    return _Vocabulary(), (torch.randint(64, (16, 32)),)
