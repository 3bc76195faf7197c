"""Image models: AlexNet, ResNet, DenseNet, VGG and U-Net."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from .registry import Example, benchmark

__all__ = [
    "Classifier",
    "alexnet",
    "classified",
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet201",
    "plain_cnn",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet200",
    "unet",
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
]


class Classifier(nn.Module):
    """A model with cross entropy behind it.

    Args:
        model: Maps inputs to class scores, [batch, classes, ...].
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy of the model's scores for `inputs` against `labels` [batch, ...]."""
        return functional.cross_entropy(self.model(inputs), labels)


def classified(parts: Sequence[nn.Module], batch: int, size: int, classes: int) -> Example:
    """The parts in a row, for images [batch, 3, size, size] with labels [batch]."""
    images, labels = torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))
    return Classifier(nn.Sequential(*parts)), (images, labels)


def _stem(width: int) -> list[nn.Module]:
    """Images to `width` channels at a quarter of the size, as ResNet and DenseNet begin."""
    return [
        nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]


# ---------------------------------------------------------------------- ResNet


def _shortcut(channels: int, wide: int, stride: int) -> nn.Sequential:
    """A projection where the residual has another shape than the input, else nothing."""
    if stride == 1 and channels == wide:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))


class Basic(nn.Module):
    """A residual block of two 3x3 convolutions (He et al. 2016).

    Args:
        channels: Of the input.
        width: Of the output.
        stride: Of the first convolution.
    """

    widens: ClassVar[int] = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(channels, width, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, channels, h, w] to [batch, width, h / stride, w / stride]."""
        y = self.relu(self.norm1(self.first(x)))
        y = self.norm2(self.second(y))
        return self.relu(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """A residual block of three convolutions: narrow, convolve, widen by four (He et al. 2016).

    Args:
        channels: Of the input.
        width: Of the 3x3 convolution; the output has four times as many channels.
        stride: Of the 3x3 convolution.
    """

    widens: ClassVar[int] = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.narrow = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.convolve = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.widen = nn.Conv2d(width, wide, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(wide)
        self.shortcut = _shortcut(channels, wide, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, channels, h, w] to [batch, 4 * width, h / stride, w / stride]."""
        y = self.relu(self.norm1(self.narrow(x)))
        y = self.relu(self.norm2(self.convolve(y)))
        y = self.norm3(self.widen(y))
        return self.relu(y + self.shortcut(x))


def _resnet(
    depths: Sequence[int], width: int, classes: int, block: type[Basic | Bottleneck]
) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    channels = width
    for stage, depth in enumerate(depths):
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            blocks.append(block(channels, width << stage, stride))
            channels = block.widens * (width << stage)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return [*_stem(width), *blocks, *head]


def _resnet_of(
    name: str, depths: Sequence[int], block: type[Basic | Bottleneck] = Bottleneck
) -> Callable[..., Example]:
    """The factory of a ResNet; the stride is in the 3x3 convolutions."""

    def make(
        *,
        batch: int = 4,
        size: int = 224,
        classes: int = 1000,
        width: int = 64,
        depths: Sequence[int] = depths,
    ) -> Example:
        return classified(_resnet(depths, width, classes, block), batch, size, classes)

    make.__name__ = name
    return benchmark(make)


resnet18 = _resnet_of("resnet18", (2, 2, 2, 2), Basic)
resnet34 = _resnet_of("resnet34", (3, 4, 6, 3), Basic)
resnet50 = _resnet_of("resnet50", (3, 4, 6, 3))
resnet101 = _resnet_of("resnet101", (3, 4, 23, 3))
resnet152 = _resnet_of("resnet152", (3, 8, 36, 3))
resnet200 = _resnet_of("resnet200", (3, 24, 36, 3))


# ---------------------------------------------------------------------- DenseNet


class DenseLayer(nn.Module):
    """Appends `growth` new channels to its input (Huang et al. 2017).

    Args:
        channels: Of the input.
        growth: Channels added.
    """

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        inner = 4 * growth
        self.new = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, channels, h, w] to [batch, channels + growth, h, w]."""
        return torch.cat([x, self.new(x)], 1)


def _densenet(depths: Sequence[int], growth: int, classes: int) -> list[nn.Module]:
    channels = 2 * growth
    parts = _stem(channels)
    for block, depth in enumerate(depths):
        for _ in range(depth):
            parts.append(DenseLayer(channels, growth))
            channels += growth
        parts += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        if block + 1 < len(depths):
            parts += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    return [*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def _densenet_of(name: str, depths: Sequence[int], growth: int = 32) -> Callable[..., Example]:
    """The factory of a DenseNet, for images [batch, 3, size, size]."""

    def make(
        *,
        batch: int = 4,
        size: int = 224,
        classes: int = 1000,
        growth: int = growth,
        depths: Sequence[int] = depths,
    ) -> Example:
        return classified(_densenet(depths, growth, classes), batch, size, classes)

    make.__name__ = name
    return benchmark(make)


densenet121 = _densenet_of("densenet121", (6, 12, 24, 16))
densenet161 = _densenet_of("densenet161", (6, 12, 36, 24), growth=48)
densenet169 = _densenet_of("densenet169", (6, 12, 32, 32))
densenet201 = _densenet_of("densenet201", (6, 12, 48, 32))


# ---------------------------------------------------------------------- VGG and AlexNet


def _vgg_of(name: str, depths: Sequence[int]) -> Callable[..., Example]:
    """The factory of a VGG without BatchNorm (Simonyan and Zisserman 2015)."""

    def make(
        *, batch: int = 4, size: int = 224, classes: int = 1000, width: int = 64, hidden: int = 4096
    ) -> Example:
        parts: list[nn.Module] = []
        channels = 3
        for factor, depth in zip((1, 2, 4, 8, 8), depths, strict=True):
            for _ in range(depth):
                parts += [nn.Conv2d(channels, factor * width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = factor * width
            parts.append(nn.MaxPool2d(2))
        parts += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
        features = 7 * 7 * channels
        for _ in range(2):
            parts += [nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Dropout(0.5)]
            features = hidden
        return classified([*parts, nn.Linear(features, classes)], batch, size, classes)

    make.__name__ = name
    return benchmark(make)


vgg11 = _vgg_of("vgg11", (1, 1, 2, 2, 2))
vgg13 = _vgg_of("vgg13", (2, 2, 2, 2, 2))
vgg16 = _vgg_of("vgg16", (2, 2, 3, 3, 3))
vgg19 = _vgg_of("vgg19", (2, 2, 4, 4, 4))


@benchmark
def alexnet(
    *, batch: int = 4, size: int = 224, classes: int = 1000, thin: int = 1, hidden: int = 4096
) -> Example:
    """AlexNet in one column (Krizhevsky 2014), for images [batch, 3, size, size]; `thin` divides channels."""
    widths = [width // thin for width in (64, 192, 384, 256, 256)]
    parts: list[nn.Module] = [nn.Conv2d(3, widths[0], 11, 4, padding=2), nn.ReLU(inplace=True)]
    parts += [nn.MaxPool2d(3, 2), nn.Conv2d(widths[0], widths[1], 5, padding=2), nn.ReLU(inplace=True)]
    parts.append(nn.MaxPool2d(3, 2))
    for source, width in pairwise(widths[1:]):
        parts += [nn.Conv2d(source, width, 3, padding=1), nn.ReLU(inplace=True)]
    parts += [nn.MaxPool2d(3, 2), nn.AdaptiveAvgPool2d(6), nn.Flatten()]
    features = 6 * 6 * widths[-1]
    for _ in range(2):
        parts += [nn.Dropout(0.5), nn.Linear(features, hidden), nn.ReLU(inplace=True)]
        features = hidden
    return classified([*parts, nn.Linear(features, classes)], batch, size, classes)


@benchmark
def plain_cnn(
    *, batch: int = 64, size: int = 96, classes: int = 10, width: int = 64, depth: int = 20
) -> Example:
    """Equal 3x3 convolutions in a row, each with a ReLU."""
    parts: list[nn.Module] = []
    for source in (3, *(width,) * (depth - 1)):
        parts += [nn.Conv2d(source, width, 3, padding=1), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
    return classified([*parts, *head], batch, size, classes)


# ---------------------------------------------------------------------- U-Net


class DoubleConvolution(nn.Sequential):
    """Two 3x3 convolutions, each with BatchNorm and ReLU.

    Args:
        channels: Of the input.
        width: Of the output.
    """

    def __init__(self, channels: int, width: int) -> None:
        parts: list[nn.Module] = []
        for source in (channels, width):
            convolution = nn.Conv2d(source, width, 3, padding=1, bias=False)
            parts += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        super().__init__(*parts)


class UNet(nn.Module):
    """Four times down by pooling and up by transposed convolution, with skips (Ronneberger et al. 2015).

    Args:
        base: Channels at full resolution; they double at each level.
        classes: Channels of the output.
    """

    def __init__(self, base: int, classes: int) -> None:
        super().__init__()
        widths = [base << level for level in range(5)]
        sources = [3, *widths]
        self.down = nn.ModuleList(DoubleConvolution(a, b) for a, b in zip(sources, widths, strict=False))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(DoubleConvolution(2 * w, w) for w in reversed(widths[:-1]))
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(base, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, 3, size, size] to scores [batch, classes, size, size]; 16 divides the size."""
        skips: list[Tensor] = []
        for level, down in enumerate(self.down):
            x = down(self.pool(x) if level else x)
            skips.append(x)
        for rise, up, skip in zip(self.rise, self.up, reversed(skips[:-1]), strict=True):
            x = up(torch.cat([skip, rise(x)], 1))
        return self.head(x)


@benchmark
def unet(*, batch: int = 2, size: int = 256, base: int = 32, classes: int = 4) -> Example:
    """U-Net for images [batch, 3, size, size] and labels [batch, size, size]."""
    labels = torch.randint(classes, (batch, size, size))
    return Classifier(UNet(base, classes)), (torch.randn(batch, 3, size, size), labels)
