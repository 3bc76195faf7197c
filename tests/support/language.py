"""Models that end in a loss of words, with many kinds of cross entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH = 2000, 16


class Language(nn.Module):
    """Words to a loss: a projection to words, perhaps in another type or capped, and its cross entropy."""

    def __init__(
        self,
        *,
        bias: bool = True,
        tied: bool = False,
        cap: float = 0.0,
        upcast: bool = False,
        shifted: tuple[int | None, int | None] | None = None,
        **loss: Any,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.shifted, self.weighted = shifted, loss.pop("weighted", False)
        self.cap, self.upcast, self.square = cap, upcast, loss.pop("square", 0.0)
        self.loss = loss
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.layer(self.embedding(words)).tanh())
        if self.upcast:
            logits = logits.float()
        if self.cap:
            logits = self.cap * torch.tanh(logits / self.cap)
        if self.shifted is not None:
            logits, labels = (
                logits[..., slice(*self.shifted), :].contiguous(),
                labels[..., slice(*self.shifted)],
            )
        weight = torch.arange(WORDS, dtype=logits.dtype) % 3 if self.weighted else None
        loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), weight=weight, **self.loss)
        if self.square:
            loss = loss + self.square * logits.logsumexp(-1).square().mean()
        return loss.mean()


LOSSES: dict[str, dict[str, Any]] = {
    "no bias": {"bias": False},
    "bias": {},
    "padding": {"ignore_index": 0},
    "smoothing": {"label_smoothing": 0.1},
    "sum": {"reduction": "sum"},
    "each": {"reduction": "none"},
    "cap": {"cap": 30.0},
    "square": {"square": 1e-4},
    "tied": {"tied": True, "bias": False},
    "upcast": {"upcast": True},
    "weighted": {"weighted": True},
    "weighted sum, smoothing": {"weighted": True, "reduction": "sum", "label_smoothing": 0.1},
    "weighted each": {"weighted": True, "reduction": "none"},
    "weighted, shifted": {"weighted": True, "shifted": (None, -1)},
    "shifted": {"shifted": (None, -1)},
    "first ones left out, upcast": {"shifted": (3, None), "upcast": True, "reduction": "sum"},
}


def batch(rows: int = 4, length: int = 32) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, WORDS, (rows, length))
    labels[0, : length // 2] = -100
    labels[-1, -1] = 0
    return torch.randint(0, WORDS, (rows, length)), labels.clamp_min(-100)


def gradients(module: nn.Module, *args: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    module.zero_grad()
    loss = module(*args)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
