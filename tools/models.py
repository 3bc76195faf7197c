"""The benchmark models: standard architectures and sizes, each a factory of `(module, example_args)`.

The modules return their scalar loss, so the loss and its targets stand inside the planned step:
`irc optimize irc.tools.models:resnet50`. Keyword arguments make small versions for tests. Every factory
seeds its own generator and leaves the caller's as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["densenet121", "gpt2", "lstm", "resnet50", "unet", "vgg16"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _seeded(factory: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes a factory deterministic: it draws from its own seed."""

    @functools.wraps(factory)
    def seeded(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return factory(*args, **kwargs)

    return seeded


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


# ---------------------------------------------------------------------- ResNet


class Bottleneck(nn.Module):
    """A residual block of three convolutions: narrow, convolve, widen by four (He et al. 2016).

    Args:
        channels: Of the input.
        width: Of the 3x3 convolution; the output has four times as many channels.
        stride: Of the 3x3 convolution.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.narrow = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.convolve = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.widen = nn.Conv2d(width, wide, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(wide)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != wide:
            projection = nn.Conv2d(channels, wide, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(wide))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, channels, h, w] to [batch, 4 * width, h / stride, w / stride]."""
        y = self.relu(self.norm1(self.narrow(x)))
        y = self.relu(self.norm2(self.convolve(y)))
        y = self.norm3(self.widen(y))
        return self.relu(y + self.shortcut(x))


@_seeded
def resnet50(
    *, batch: int = 4, size: int = 224, classes: int = 1000
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """ResNet-50 for images [batch, 3, size, size], with the stride in the 3x3 convolutions."""
    stem: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    blocks: list[nn.Module] = []
    channels = 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            blocks.append(Bottleneck(channels, width, stride))
            channels = 4 * width
    head: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    model = nn.Sequential(*stem, *blocks, *head)
    return Classifier(model), _images(batch, size, classes)


def _images(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Images [batch, 3, size, size] and labels [batch]."""
    return torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


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


@_seeded
def densenet121(
    *, batch: int = 4, size: int = 224, classes: int = 1000
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """DenseNet-121 (growth 32, blocks of 6, 12, 24 and 16 layers) for images [batch, 3, size, size]."""
    growth, channels = 32, 64
    parts: list[nn.Module] = [
        nn.Conv2d(3, channels, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    depths = (6, 12, 24, 16)
    for block, depth in enumerate(depths):
        for _ in range(depth):
            parts.append(DenseLayer(channels, growth))
            channels += growth
        if block + 1 < len(depths):
            transition = nn.Conv2d(channels, channels // 2, 1, bias=False)
            parts += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), transition, nn.AvgPool2d(2)]
            channels //= 2
    parts += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*parts, nn.Linear(channels, classes))
    return Classifier(model), _images(batch, size, classes)


# ---------------------------------------------------------------------- VGG


@_seeded
def vgg16(*, batch: int = 4, size: int = 224, classes: int = 1000) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """VGG-16 without BatchNorm (configuration D) for images [batch, 3, size, size]."""
    parts: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            parts += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        parts.append(nn.MaxPool2d(2))
    parts += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    features = 7 * 7 * channels
    for _ in range(2):
        parts += [nn.Linear(features, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)]
        features = 4096
    model = nn.Sequential(*parts, nn.Linear(features, classes))
    return Classifier(model), _images(batch, size, classes)


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


@_seeded
def unet(
    *, batch: int = 2, size: int = 256, base: int = 32, classes: int = 4
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """U-Net for images [batch, 3, size, size] and labels [batch, size, size]."""
    labels = torch.randint(classes, (batch, size, size))
    return Classifier(UNet(base, classes)), (torch.randn(batch, 3, size, size), labels)


# ---------------------------------------------------------------------- GPT-2


class TransformerBlock(nn.Module):
    """A GPT-2 block: LayerNorm before causal attention and before the perceptron (Radford et al. 2019).

    Args:
        width: Of the residual stream.
        heads: Attention heads; they divide the width.
        dropout: Rate on what is added to the stream.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, sequence, width] to the same shape."""
        x = x + self.dropout(self.mix(self.attend(self.norm1(x))))
        y = functional.gelu(self.expand(self.norm2(x)), approximate="tanh")
        return x + self.dropout(self.contract(y))

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention of [batch, sequence, width], the heads side by side in the result."""
        batch, sequence, width = x.shape
        split = (batch, sequence, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.queries_keys_values(x).chunk(3, 2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, sequence, width)


class TransformerStack(nn.Module):
    """Learned positions, blocks, a final LayerNorm, and the mean squared distance to a target.

    Args:
        depth: Number of blocks.
        width: Of the residual stream.
        heads: Attention heads of each block.
        sequence: Number of positions.
        dropout: Rate after the positions and in the blocks.
    """

    def __init__(self, depth: int, width: int, heads: int, sequence: int, dropout: float) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.02 * torch.randn(sequence, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The mean squared distance of the final states to `target`; both are [batch, sequence, width]."""
        x = self.dropout(hidden + self.positions)
        for block in self.blocks:
            x = block(x)
        return functional.mse_loss(self.norm(x), target)


@_seeded
def gpt2(
    *,
    batch: int = 4,
    sequence: int = 256,
    depth: int = 6,
    width: int = 768,
    heads: int = 12,
    dropout: float = 0.1,
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A stack of GPT-2 blocks over hidden states [batch, sequence, width]; no vocabulary."""
    model = TransformerStack(depth, width, heads, sequence, dropout)
    return model, (torch.randn(batch, sequence, width), torch.randn(batch, sequence, width))


# ---------------------------------------------------------------------- LSTM


class TextClassifier(nn.Module):
    """Embedding, a two-layer bidirectional LSTM, the mean over time, and a linear head.

    Args:
        vocabulary: Number of tokens.
        embedding: Width of the embedding.
        hidden: Width of each direction.
        classes: Number of classes.
        dropout: Rate between the two layers.
    """

    def __init__(self, vocabulary: int, embedding: int, hidden: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(
            embedding, hidden, num_layers=2, batch_first=True, bidirectional=True, dropout=dropout
        )
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens [batch, sequence] to scores [batch, classes]."""
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states.mean(1))


@_seeded
def lstm(
    *,
    batch: int = 32,
    sequence: int = 32,
    vocabulary: int = 5000,
    embedding: int = 128,
    hidden: int = 256,
    classes: int = 4,
    dropout: float = 0.3,
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """An LSTM text classifier for tokens [batch, sequence] and labels [batch]."""
    model = TextClassifier(vocabulary, embedding, hidden, classes, dropout)
    tokens = torch.randint(vocabulary, (batch, sequence))
    return Classifier(model), (tokens, torch.randint(classes, (batch,)))
