"""A tagger with a bidirectional LSTM over packed sequences, whose lengths decide what runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import irc

TITLE = "packed bi-LSTM tagger, clipping"


class Tagger(nn.Module):
    """Words to tags."""

    def __init__(self, words: int = 500, width: int = 64, tags: int = 9) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(words, width, padding_idx=0), nn.Dropout(0.3)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Returns the logits of each word's tag: [batch, words, tags]."""
        x = self.dropout(self.embedding(words))
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(self.dropout(y))


def model() -> nn.Module:
    """Returns the model as the script makes it."""
    return Tagger()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Returns padded sequences of words, with their lengths."""
    data = torch.Generator().manual_seed(2)
    found: list[tuple[Tensor, Tensor]] = []
    for _ in range(count):
        lengths = torch.randint(5, 40, (16,), generator=data)
        words = [torch.randint(1, 500, (int(length),), generator=data) for length in lengths]
        found.append((pad_sequence(words, batch_first=True), lengths))
    return found


def example() -> tuple[Tensor, ...]:
    """Returns the arguments of a call."""
    return batches(1)[0]


def steps(model: nn.Module) -> Iterator[Tensor | None]:
    """Trains; yields None before each forward and the loss after each backward."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    while True:
        for words, lengths in batches(4):
            yield None
            tags = model(words, lengths)
            loss = F.cross_entropy(tags.flatten(0, 1), (words[:, : tags.shape[1]] % 9).flatten())
            loss.backward()
            yield loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()


def planned(model: nn.Module, budget: str) -> Any:
    """Plans the model for a budget."""
    return irc.optimize(model, example(), budget)


def by_dynamo(model: nn.Module) -> Any:
    """Compiles the model with graphs that share a budget, as the refusal says."""
    return torch.compile(model, backend=irc.backend("8MiB", outside="measured"))
