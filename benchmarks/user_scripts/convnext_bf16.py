"""A ConvNeXt in bfloat16 autocast, with stochastic depth, clipped gradients and an average of the weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import irc

TITLE = "ConvNeXt, bf16 autocast, clipping, EMA"


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Normalises [batch, channels, height, width]."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """A depthwise convolution and two of size 1, skipped at random."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 7, padding=3, groups=width),
            ChannelNorm(width),
            nn.Conv2d(width, 4 * width, 1),
            nn.GELU(),
            nn.Conv2d(4 * width, width, 1),
        )
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-2))
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Adds the branch, or leaves it out for a sample."""
        y = self.scale * self.layers(x)
        if self.training and self.rate:
            y = y * torch.empty(len(x), 1, 1, 1).bernoulli_(1 - self.rate) / (1 - self.rate)
        return x + y


class ConvNeXt(nn.Module):
    """Three stages of blocks."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128), depths: tuple[int, ...] = (2, 2, 6)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 4, 4)
        self.blocks = nn.ModuleList()
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if stage:
                down = ChannelNorm(widths[stage - 1]), nn.Conv2d(widths[stage - 1], width, 2, 2)
                self.blocks.append(nn.Sequential(*down))
            self.blocks.extend(Block(width, 0.1 * stage) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits: [batch, 10]."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean((2, 3))))


def model() -> nn.Module:
    """Returns the model as the script makes it."""
    return ConvNeXt()


def batch() -> tuple[Tensor, Tensor]:
    """Returns images and their classes."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(16, 3, 64, 64, generator=generator)
    return images, torch.randint(0, 10, (16,), generator=generator)


def example() -> tuple[Tensor, ...]:
    """Returns the arguments of a call."""
    return (batch()[0],)


def steps(model: nn.Module) -> Iterator[Tensor | None]:
    """Trains; yields None before each forward and the loss after each backward."""
    images, classes = batch()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    while True:
        yield None
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(images), classes)
        loss.backward()
        yield loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        average.update_parameters(model)


def planned(model: nn.Module, budget: str) -> nn.Module:
    """Plans the model for a budget."""
    with torch.autocast("cpu", torch.bfloat16):
        return irc.optimize(model, example(), budget)
