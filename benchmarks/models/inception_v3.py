"""Inception-v3 (Szegedy, Vanhoucke, Ioffe, Shlens, Wojna 2016), without the auxiliary head."""

from __future__ import annotations

from torch import nn

from .images import classified
from .inception_v4 import Branches
from .registry import Example, benchmark

__all__ = ["inception_v3"]

_Size = int | tuple[int, int]
_Step = tuple[int, _Size] | tuple[int, _Size, int]
"""Channels, kernel, and the stride with which a convolution is not padded; without it the size stays."""


class InceptionV3:
    """The modules of Inception-v3, table 1 and figures 5 to 7, 10 of the paper.

    Args:
        thin: Divides every number of channels; 16 is the most.
    """

    def __init__(self, thin: int) -> None:
        self.thin = thin

    def chain(self, channels: int, *steps: _Step) -> nn.Sequential:
        """Convolutions in a row, each with BatchNorm and ReLU."""
        parts: list[nn.Module] = []
        for width, kernel, *strides in steps:
            height, breadth = (kernel, kernel) if isinstance(kernel, int) else kernel
            padding = (0, 0) if strides else (height // 2, breadth // 2)
            stride = strides[0] if strides else 1
            source = channels if channels == 3 else channels // self.thin
            convolution = nn.Conv2d(
                source, width // self.thin, (height, breadth), stride, padding, bias=False
            )
            norm = nn.BatchNorm2d(width // self.thin, eps=0.001)
            parts += [convolution, norm, nn.ReLU(inplace=True)]
            channels = width
        return nn.Sequential(*parts)

    def pooled(self, channels: int, width: int) -> nn.Sequential:
        """The mean of each 3x3 neighbourhood, then a 1x1 convolution."""
        return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), self.chain(channels, (width, 1)))

    def a(self, channels: int, width: int) -> nn.Module:
        """Figure 5: to 224 + width channels."""
        return Branches(
            self.chain(channels, (64, 1)),
            self.chain(channels, (48, 1), (64, 5)),
            self.chain(channels, (64, 1), (96, 3), (96, 3)),
            self.pooled(channels, width),
        )

    def b(self, narrow: int) -> nn.Module:
        """Figure 6 with n = 7: 768 channels, with so many inside."""
        return Branches(
            self.chain(768, (192, 1)),
            self.chain(768, (narrow, 1), (narrow, (1, 7)), (192, (7, 1))),
            self.chain(768, (narrow, 1), (narrow, (7, 1)), (narrow, (1, 7)), (narrow, (7, 1)), (192, (1, 7))),
            self.pooled(768, 192),
        )

    def c(self, channels: int) -> nn.Module:
        """Figure 7: to 2,048 channels."""
        return Branches(
            self.chain(channels, (320, 1)),
            nn.Sequential(self.chain(channels, (384, 1)), self.forked()),
            nn.Sequential(self.chain(channels, (448, 1), (384, 3)), self.forked()),
            self.pooled(channels, 192),
        )

    def forked(self) -> nn.Module:
        """1x3 and 3x1 from the same input; 768 channels."""
        return Branches(self.chain(384, (384, (1, 3))), self.chain(384, (384, (3, 1))))

    def network(self, classes: int) -> list[nn.Module]:
        """The whole network, table 1."""
        return [
            self.chain(3, (32, 3, 2), (32, 3, 1), (64, 3)),
            nn.MaxPool2d(3, 2),
            self.chain(64, (80, 1), (192, 3, 1)),
            nn.MaxPool2d(3, 2),
            self.a(192, 32),
            self.a(256, 64),
            self.a(288, 64),
            Branches(
                self.chain(288, (384, 3, 2)),
                self.chain(288, (64, 1), (96, 3), (96, 3, 2)),
                nn.MaxPool2d(3, 2),
            ),
            *(self.b(narrow) for narrow in (128, 160, 160, 192)),
            Branches(
                self.chain(768, (192, 1), (320, 3, 2)),
                self.chain(768, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)),
                nn.MaxPool2d(3, 2),
            ),
            self.c(1280),
            self.c(2048),
            nn.AdaptiveAvgPool2d(1),
            nn.Dropout(0.5),
            nn.Flatten(),
            nn.Linear(2048 // self.thin, classes),
        ]


@benchmark
def inception_v3(*, batch: int = 4, size: int = 299, classes: int = 1000, thin: int = 1) -> Example:
    """Inception-v3 for images [batch, 3, size, size], size 75 or more."""
    return classified(InceptionV3(thin).network(classes), batch, size, classes)
