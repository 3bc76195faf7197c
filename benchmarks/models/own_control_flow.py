"""Models of our own whose shapes depend on data, that differentiate in forward, or have sparse gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .registry import Instance, architecture

_WIDTH = 16

# ---------------------------------------------------------------------- shapes that depend on data


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))


class Routed(nn.Module):
    """Experts that take the rows which a router picks for them, by `nonzero`."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, 3)
        self.experts = nn.ModuleList(_block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of what each expert makes of its rows."""
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        return out


@architecture
def nonzero_experts() -> Instance:
    """Experts whose numbers of rows depend on data."""
    return Instance(Routed(), (torch.randn(64, _WIDTH),))


class Selected(nn.Module):
    """A loss of the words that are labelled alone, by `masked_select`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(30, _WIDTH), _block()
        self.score = nn.Linear(_WIDTH, 1)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        scores = self.score(self.block(self.embedding(words)))[..., 0]
        labelled = labels >= 0
        found = scores.masked_select(labelled)
        return functional.mse_loss(found, labels.masked_select(labelled).float())


@architecture
def masked_select() -> Instance:
    """A loss whose number of terms depends on data."""
    labels = torch.randint(-2, 5, (16, 12))
    return Instance(Selected(), (torch.randint(30, (16, 12)), labels))


class PackedTagger(nn.Module):
    """A bidirectional LSTM over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, _WIDTH, padding_idx=0)
        self.recurrent = nn.LSTM(_WIDTH, _WIDTH, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * _WIDTH, 5)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """The scores of each word's tags."""
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return self.head(states)


@architecture
def packed_tagger() -> Instance:
    """Sequences whose lengths are tensors."""
    return Instance(PackedTagger(), (torch.randint(1, 30, (8, 10)), torch.randint(3, 11, (8,))))


# ---------------------------------------------------------------------- derivatives


class Critic(nn.Module):
    """A critic with a gradient penalty, which differentiates in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(_WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head = nn.Linear(32, 1)

    def forward(self, true: Tensor, false: Tensor) -> Tensor:
        """The loss of the critic with its penalty."""
        between = (0.3 * true + 0.7 * false).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self._score(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=-1) - 1).square().mean()
        return self._score(false).mean() - self._score(true).mean() + 10 * penalty

    def _score(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@architecture
def gradient_penalty() -> Instance:
    """A backward within forward, which is differentiated again."""
    return Instance(Critic(), (torch.randn(64, _WIDTH), torch.randn(64, _WIDTH)))


@architecture
def sparse_embedding() -> Instance:
    """A gradient that is a sparse tensor."""
    model = nn.Sequential(nn.Embedding(200, _WIDTH, sparse=True), _block(), nn.Linear(_WIDTH, 5))
    return Instance(model, (torch.randint(200, (16, 12)),))
