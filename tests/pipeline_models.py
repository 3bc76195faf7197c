"""Small models that are hard to cut: tied weights, skips, statistics, a tensor that many stages read."""

from __future__ import annotations

import datetime
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["run_folders", "skips", "tied", "translator"]

Example = tuple[nn.Module, tuple[Tensor, ...]]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(functional.gelu(self.wide(self.norm(x))))


class _Tied(nn.Module):
    """A language model whose embedding is its last matrix, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(_Block(16) for _ in range(8))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.embedding(tokens) * (tokens > 3).unsqueeze(-1)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), following.flatten())


class _Skips(nn.Module):
    """A U: what the way down makes is read on the way up; with statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 4, 6, 8)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(self._layer(a, b) for a, b in pairs)
        self.middle = self._layer(8, 8)
        self.up = nn.ModuleList(self._layer(2 * b, a) for a, b in reversed(pairs))

    @staticmethod
    def _layer(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        x = self.middle(x)
        for layer, skip in zip(self.up, reversed(kept), strict=True):
            x = layer(torch.cat((x, skip), 1))
        return x.square().mean()


class _Translator(nn.Module):
    """An encoder, and a decoder each of whose blocks reads all that the encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(_Block(12) for _ in range(3)))
        self.decoder = nn.ModuleList(_Block(12) for _ in range(5))
        self.reading = nn.ModuleList(nn.Linear(12, 12) for _ in range(5))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read, x = self.encoder(source), target
        for block, reading in zip(self.decoder, self.reading, strict=True):
            scores = torch.softmax(x @ reading(read).transpose(1, 2), -1)
            x = block(x + scores @ read)
        return x.square().mean()


def tied() -> Example:
    torch.manual_seed(0)
    return _Tied(), (torch.randint(0, 40, (16, 6)), torch.randint(0, 40, (16, 6)))


def skips() -> Example:
    torch.manual_seed(0)
    return _Skips(), (torch.randn(16, 3, 8, 8),)


def translator() -> Example:
    torch.manual_seed(0)
    return _Translator(), (torch.randn(16, 5, 12), torch.randn(16, 4, 12))


def run_folders(rank: int, ranks: int, meeting: str, folders: Sequence[str], results: str) -> None:
    """Trains what is in each folder on one of several ranks; the first writes down what all of them saw."""
    from irc.tools.pipeline_run import run_pipeline

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=limit
    )
    try:
        found = {name: run_pipeline(Path(name), 2, with_original=True).to_json() for name in folders}
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(results).write_text(json.dumps(found))
