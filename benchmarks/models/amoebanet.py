"""AmoebaNet-D (L, D), the network of GPipe's largest models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from .images import Classifier
from .registry import Example, benchmark

__all__ = ["AmoebaNet", "CellNetwork", "Halved", "Sum", "amoebanet_d", "joined_sums"]

Sum = tuple[tuple[int, str], tuple[int, str]]
"""Two operations whose results are added, each with the number of the state that it reads."""

_NORMAL: tuple[Sum, ...] = (
    ((1, "1x1"), (1, "largest of 3x3")),
    ((1, "as it is"), (0, "1x7 and 7x1")),
    ((0, "1x1"), (0, "1x7 and 7x1")),
    ((2, "largest of 3x3"), (2, "as it is")),
    ((1, "mean of 3x3"), (5, "1x1")),
)
_NORMAL_RESULT = (0, 3, 4, 6)
_REDUCTION: tuple[Sum, ...] = (
    ((0, "largest of 2x2"), (0, "largest of 3x3")),
    ((2, "as it is"), (1, "3x3")),
    ((2, "1x7 and 7x1"), (2, "largest of 3x3")),
    ((3, "as it is"), (1, "largest of 2x2")),
    ((2, "mean of 3x3"), (3, "1x1")),
)
_REDUCTION_RESULT = (4, 5, 6)


def _convolved(
    channels: int, width: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> list[nn.Module]:
    """ReLU, a convolution that keeps the size at stride 1, BatchNorm."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return [
        nn.ReLU(),
        nn.Conv2d(channels, width, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(width),
    ]


def _through_a_quarter(channels: int, *inner: tuple[tuple[int, int], tuple[int, int]]) -> nn.Module:
    """Convolutions, each given by kernel and stride, between two of 1x1 to a quarter of the channels."""
    narrow = channels // 4
    parts = _convolved(channels, narrow)
    for kernel, stride in inner:
        parts += _convolved(narrow, narrow, kernel, stride)
    return nn.Sequential(*parts, *_convolved(narrow, channels))


def _operation(name: str, channels: int, stride: int) -> nn.Module:
    match name:
        case "as it is":
            return nn.Identity()
        case "largest of 2x2":
            return nn.MaxPool2d(2, stride)
        case "largest of 3x3":
            return nn.MaxPool2d(3, stride, padding=1)
        case "mean of 3x3":
            return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
        case "1x1":
            return nn.Sequential(*_convolved(channels, channels, stride=(stride, stride)))
        case "3x3":
            return _through_a_quarter(channels, ((3, 3), (stride, stride)))
        case _:
            return _through_a_quarter(channels, ((1, 7), (1, stride)), ((7, 1), (stride, 1)))


class Halved(nn.Module):
    """Half the size without a loss of places: two 1x1 convolutions of stride 2, one of them shifted.

    Args:
        channels: Of the input.
        width: Of the output.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(channels, width // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(channels, width - width // 2, 1, 2, bias=False)
        self.shift = nn.ZeroPad2d((0, 1, 0, 1))
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, channels, h, w] to [batch, width, h / 2, w / 2]; h and w are even."""
        x = self.relu(x)
        return self.norm(torch.cat([self.even(x), self.odd(self.shift(x[:, :, 1:, 1:]))], 1))


class CellNetwork(nn.Module):
    """A network of cells, of which each reads the results of the two before it.

    Attributes:
        stem: Makes the first result of the images.
        cells: The cells, in order.
        head: Makes scores of the last result.
    """

    stem: nn.Module
    cells: nn.ModuleList
    head: nn.Module

    def forward(self, images: Tensor) -> Tensor:
        """Maps [batch, 3, size, size] to scores [batch, classes]; all reductions divide the size."""
        before = last = self.stem(images)
        for cell in self.cells:
            before, last = last, cell(before, last)
        return self.head(last)


def joined_sums(
    states: list[Tensor], steps: Sequence[Sum], operations: Iterable[nn.Module], result: Sequence[int]
) -> Tensor:
    """Adds the results of two operations at each step, and joins some of the states along the channels.

    Args:
        states: The first two; the steps' sums follow them.
        steps: For each sum the states that it reads.
        operations: Those of the steps, two for each.
        result: The states to join.
    """
    following = iter(operations)
    for (one, _), (other, _) in steps:
        states.append(next(following)(states[one]) + next(following)(states[other]))
    return torch.cat([states[place] for place in result], 1)


class Cell(nn.Module):
    """Five sums of two operations each, on the results of the two cells before.

    Args:
        before: Channels of the last result but one.
        last: Channels of the last result.
        width: Channels of each sum.
        is_reduction: Whether it halves the size.
        is_after_reduction: Whether the last result is half as large as the one before it.
    """

    def __init__(
        self, before: int, last: int, width: int, *, is_reduction: bool, is_after_reduction: bool
    ) -> None:
        super().__init__()
        self.sums = _REDUCTION if is_reduction else _NORMAL
        self.result = _REDUCTION_RESULT if is_reduction else _NORMAL_RESULT
        self.channels = width * len(self.result)
        self.from_last = nn.Sequential(*_convolved(last, width))
        self.from_before: nn.Module = nn.Identity()
        if is_after_reduction:
            self.from_before = Halved(before, width)
        elif before != width:
            self.from_before = nn.Sequential(*_convolved(before, width))
        self.operations = nn.ModuleList(
            _operation(name, width, 2 if is_reduction and source < 2 else 1)
            for each in self.sums
            for source, name in each
        )

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        """Maps [batch, before, h, w] (or 2h, 2w) and [batch, last, h, w] to [batch, channels, h, w]."""
        states = [self.from_last(last), self.from_before(before)]
        return joined_sums(states, self.sums, self.operations, self.result)


class AmoebaNet(CellNetwork):
    """AmoebaNet-D: a stem and three rows of normal cells, with reductions between them.

    The cells are those of Real et al. (Regularized Evolution for Image Classifier Architecture Search, 2019)
    with the results joined as in Google's TensorFlow code, which gives GPipe's numbers of parameters.

    Args:
        layers: L, the number of normal cells; a multiple of three.
        filters: D, four times the channels of the stem; they double at each of four reductions.
        classes: Of the images.
    """

    def __init__(self, layers: int, filters: int, classes: int) -> None:
        super().__init__()
        width = filters // 4
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width))
        row = [False] * (layers // 3)
        kinds = [True, True, *row, True, *row, True, *row]
        self.cells = nn.ModuleList()
        before = last = width
        was_reduction = False
        for is_reduction in kinds:
            width = 2 * width if is_reduction else width
            cell = Cell(before, last, width, is_reduction=is_reduction, is_after_reduction=was_reduction)
            self.cells.append(cell)
            before, last, was_reduction = last, cell.channels, is_reduction
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes))


@benchmark
def amoebanet_d(
    *, batch: int = 1, size: int = 224, classes: int = 1000, layers: int = 18, filters: int = 208
) -> Example:
    """AmoebaNet-D (layers, filters) for images [batch, 3, size, size]; 81.5 M parameters as it stands."""
    images, labels = torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))
    return Classifier(AmoebaNet(layers, filters, classes)), (images, labels)
