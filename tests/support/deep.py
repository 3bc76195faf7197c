"""A deep perceptron, of which much can be computed again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 16


class Deep(nn.Module):
    """Equal blocks, one after the other, and the mean of squares."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def made() -> tuple[Deep, tuple[Tensor]]:
    """The model and its arguments."""
    return Deep(), (torch.randn(256, WIDTH),)
