"""A diffusion U-Net: a last batch that is smaller, gradients of two batches, an average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import irc

TITLE = "diffusion U-Net, accumulation, smaller last batch, EMA"


def embedded(steps: Tensor, width: int) -> Tensor:
    """Returns the sines and cosines of time steps: [batch, width]."""
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2) / (width // 2))
    angles = steps[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class Residual(nn.Module):
    """Two convolutions with the time between them."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, after))
        self.second = nn.Sequential(
            nn.GroupNorm(8, after), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(after, after, 3, padding=1)
        )
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Adds the branch to its input."""
        return self.skip(x) + self.second(self.first(x) + self.time(time)[:, :, None, None])


class Attention(nn.Module):
    """Attention between the places of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(8, width), nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Adds what the places attend to."""
        q, k, v = self.qkv(self.norm(x)).flatten(2).unflatten(1, (3, 1, -1)).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y[:, 0].transpose(-1, -2).reshape(x.shape))


class UNet(nn.Module):
    """Two levels down and up."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        time = 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width, time), Residual(width, 2 * width, time)])
        self.halve = nn.ModuleList(nn.Conv2d(n, n, 3, 2, 1) for n in (width, 2 * width))
        self.middle = nn.ModuleList([Residual(2 * width, 2 * width, time) for _ in range(2)])
        self.up = nn.ModuleList([Residual(4 * width, 2 * width, time), Residual(3 * width, width, time)])
        self.attention = nn.ModuleList(Attention(2 * width) for _ in range(3))
        self.head = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        """Returns the noise that is found in images at time steps."""
        time = self.time(embedded(steps, self.width))
        first = self.down[0](self.stem(x), time)
        second = self.attention[0](self.down[1](self.halve[0](first), time))
        y = self.attention[1](self.middle[0](self.halve[1](second), time))
        y = F.interpolate(self.middle[1](y, time), scale_factor=2)
        y = self.attention[2](self.up[0](torch.cat([y, second], 1), time))
        return self.head(self.up[1](torch.cat([F.interpolate(y, scale_factor=2), first], 1), time))


def model() -> nn.Module:
    """Returns the model as the script makes it."""
    return UNet()


def example() -> tuple[Tensor, ...]:
    """Returns the arguments of a call."""
    return torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)


def steps(model: nn.Module) -> Iterator[Tensor | None]:
    """Trains; yields None before each forward and the loss after each backward."""
    data = torch.Generator().manual_seed(2)
    kept = (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    while True:
        for number, size in enumerate((8, 8, 8, 5)):
            yield None
            images = torch.randn(size, 3, 32, 32, generator=data)
            noise = torch.randn(images.shape, generator=data)
            times = torch.randint(0, 1000, (size,), generator=data)
            share = kept[times][:, None, None, None]
            loss = F.mse_loss(model(share.sqrt() * images + (1 - share).sqrt() * noise, times), noise) / 2
            loss.backward()
            yield loss.detach()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                for name, value in model.state_dict().items():
                    average[name].lerp_(value, 0.01)


def planned(model: nn.Module, budget: str) -> nn.Module:
    """Plans the model for a budget."""
    return irc.optimize(model, example(), budget)
