"""Inception-v4 (Szegedy, Ioffe, Vanhoucke, Alemi 2016)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .images import classified
from .registry import Example, benchmark

__all__ = ["inception_v4"]


class Branches(nn.Module):
    """Several ways from one input, with their results side by side.

    Args:
        branches: Each maps [batch, channels, h, w]; all results have the same height and width.
    """

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """The results of the branches, joined along the channels."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class InceptionV4:
    """The modules of Inception-v4, figures 3 to 9 of the paper.

    Args:
        thin: Divides every number of channels; 32 is the most.
    """

    def __init__(self, thin: int) -> None:
        self.thin = thin

    def convolution(
        self, channels: int, width: int, kernel: int | tuple[int, int], stride: int = 1, *, same: bool = True
    ) -> nn.Module:
        """A convolution with BatchNorm and ReLU; `same` pads it so that the size stays, at stride 1."""
        height, breadth = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, breadth // 2) if same else 0
        source = channels if channels == 3 else channels // self.thin
        width //= self.thin
        convolution = nn.Conv2d(source, width, (height, breadth), stride, padding, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(width, eps=0.001), nn.ReLU(inplace=True))

    def chain(self, channels: int, *steps: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
        """Convolutions in a row, each given by its width and kernel."""
        sources = [channels, *(width for width, _ in steps)]
        return nn.Sequential(
            *(self.convolution(a, b, kernel) for a, (b, kernel) in zip(sources, steps, strict=False))
        )

    def pooled(self, channels: int, width: int) -> nn.Module:
        """The mean of each 3x3 neighbourhood, then a 1x1 convolution."""
        return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), self.convolution(channels, width, 1))

    def halved(self, channels: int, *branches: tuple[nn.Module, int, int]) -> nn.Module:
        """Figures 7 and 8: branches that end in a 3x3 convolution of stride 2, and a pool."""
        ends = (
            nn.Sequential(start, self.convolution(source, width, 3, 2, same=False))
            for start, source, width in branches
        )
        return Branches(*ends, nn.MaxPool2d(3, 2))

    def stem(self) -> list[nn.Module]:
        """Figure 3: images to 384 channels at an eighth of the size."""
        return [
            self.convolution(3, 32, 3, 2, same=False),
            self.convolution(32, 32, 3, same=False),
            self.convolution(32, 64, 3),
            Branches(nn.MaxPool2d(3, 2), self.convolution(64, 96, 3, 2, same=False)),
            Branches(
                self.ending(self.chain(160, (64, 1)), 64, 96),
                self.ending(self.chain(160, (64, 1), (64, (7, 1)), (64, (1, 7))), 64, 96),
            ),
            Branches(self.convolution(192, 192, 3, 2, same=False), nn.MaxPool2d(3, 2)),
        ]

    def ending(self, start: nn.Module, channels: int, width: int) -> nn.Module:
        """What `start` gives, with a 3x3 convolution that is not padded behind it."""
        return nn.Sequential(start, self.convolution(channels, width, 3, same=False))

    def a(self) -> nn.Module:
        """Figure 4: 384 channels at 35x35."""
        return Branches(
            self.pooled(384, 96),
            self.convolution(384, 96, 1),
            self.chain(384, (64, 1), (96, 3)),
            self.chain(384, (64, 1), (96, 3), (96, 3)),
        )

    def b(self) -> nn.Module:
        """Figure 5: 1024 channels at 17x17; the second way ends in 7x1, as the first of its kind says."""
        return Branches(
            self.pooled(1024, 128),
            self.convolution(1024, 384, 1),
            self.chain(1024, (192, 1), (224, (1, 7)), (256, (7, 1))),
            self.chain(1024, (192, 1), (192, (1, 7)), (224, (7, 1)), (224, (1, 7)), (256, (7, 1))),
        )

    def c(self) -> nn.Module:
        """Figure 6: 1536 channels at 8x8."""
        return Branches(
            self.pooled(1536, 256),
            self.convolution(1536, 256, 1),
            nn.Sequential(self.convolution(1536, 384, 1), self.forked(384)),
            nn.Sequential(self.chain(1536, (384, 1), (448, (1, 3)), (512, (3, 1))), self.forked(512)),
        )

    def forked(self, channels: int) -> nn.Module:
        """1x3 and 3x1 from the same input; 512 channels."""
        return Branches(self.convolution(channels, 256, (1, 3)), self.convolution(channels, 256, (3, 1)))

    def network(self, depths: tuple[int, int, int], classes: int) -> list[nn.Module]:
        """The whole network, figure 9, with so many modules of each kind."""
        narrow = self.chain(384, (192, 1), (224, 3))
        long = self.chain(1024, (256, 1), (256, (1, 7)), (320, (7, 1)))
        return [
            *self.stem(),
            *(self.a() for _ in range(depths[0])),
            self.halved(384, (nn.Identity(), 384, 384), (narrow, 224, 256)),
            *(self.b() for _ in range(depths[1])),
            self.halved(1024, (self.convolution(1024, 192, 1), 192, 192), (long, 320, 320)),
            *(self.c() for _ in range(depths[2])),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(1536 // self.thin, classes),
        ]


@benchmark
def inception_v4(
    *,
    batch: int = 4,
    size: int = 299,
    classes: int = 1000,
    thin: int = 1,
    depths: tuple[int, int, int] = (4, 7, 3),
) -> Example:
    """Inception-v4 for images [batch, 3, size, size], size 75 or more."""
    return classified(InceptionV4(thin).network(depths, classes), batch, size, classes)
