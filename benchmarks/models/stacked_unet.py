"""The U-Net of torchgpipe's benchmarks."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from .registry import Example

__all__ = ["StackedUNet", "stacked_unet"]

_LEVELS = 5


def _row(channels: int, inner: int, width: int, depth: int) -> nn.Sequential:
    """As many 3x3 convolutions as `depth` says, with whole channels dropped, normalised and rectified."""
    widths = [channels, *[inner] * (depth - 1), width]
    parts: list[nn.Module] = []
    for source, result in itertools.pairwise(widths):
        parts += [nn.Conv2d(source, result, 3, padding=1, bias=False), nn.Dropout2d(0.1)]
        parts += [nn.InstanceNorm2d(result), nn.LeakyReLU(0.01)]
    return nn.Sequential(*parts)


class StackedUNet(nn.Module):
    """Five times down and up with rows of convolutions at each size, and skips: U-Net (B, C).

    Args:
        depth: B, the convolutions of a row.
        base: C, channels at full resolution; they double at each level.
    """

    def __init__(self, depth: int, base: int) -> None:
        super().__init__()
        widths = [base << level for level in range(_LEVELS)]
        sources = [3, *widths]
        self.down = nn.ModuleList(_row(a, b, b, depth) for a, b in zip(sources, widths, strict=False))
        self.middle = _row(widths[-1], 2 * widths[-1], widths[-1], depth)
        self.up = nn.ModuleList(_row(2 * w, w // 2, w // 2, depth) for w in reversed(widths))
        self.pool = nn.MaxPool2d(2)
        self.rise = nn.Upsample(scale_factor=2)
        self.head = nn.Conv2d(base // 2, 1, 1, bias=False)

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        """The mean binary cross entropy for images [batch, 3, h, w] and masks [batch, 1, h, w]."""
        x = images
        skips: list[Tensor] = []
        for down in self.down:
            skips.append(down(x))
            x = self.pool(skips[-1])
        x = self.middle(x)
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = up(torch.cat([self.rise(x), skip], 1))
        return functional.binary_cross_entropy_with_logits(self.head(x), masks)


def stacked_unet(*, batch: int, size: int = 192, depth: int = 5, base: int = 64) -> Example:
    """U-Net (depth, base) for images [batch, 3, size, size]; 32 divides the size."""
    return StackedUNet(depth, base), (torch.randn(batch, 3, size, size), torch.ones(batch, 1, size, size))
