"""Networks of cells that a search has found, for images of CIFAR-10: NASNet-A, AmoebaNet-A and DARTS.

All three have the frame of Liu, Simonyan and Yang (DARTS, 2019): a stem, twenty cells, of which the seventh
and the fourteenth halve the size, and a linear head, without an auxiliary one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .amoebanet import CellNetwork, Halved, Sum, joined_sums
from .images import Classifier
from .registry import Example, benchmark

__all__ = ["amoebanet_cifar", "darts_cifar", "nasnet_cifar"]


@dataclass(frozen=True, slots=True)
class Plan:
    """One kind of cell.

    Args:
        steps: Each makes the next state; states 0 and 1 are the results of the two cells before.
        result: The states that are joined along the channels.
    """

    steps: tuple[Sum, ...]
    result: tuple[int, ...]


_NASNET = (
    Plan(
        (
            ((1, "separable 5"), (0, "separable 3")),
            ((0, "separable 5"), (0, "separable 3")),
            ((1, "mean"), (0, "as it is")),
            ((0, "mean"), (0, "mean")),
            ((1, "separable 3"), (1, "as it is")),
        ),
        (2, 3, 4, 5, 6),
    ),
    Plan(
        (
            ((1, "separable 5"), (0, "separable 7")),
            ((1, "largest"), (0, "separable 7")),
            ((1, "mean"), (0, "separable 5")),
            ((3, "as it is"), (2, "mean")),
            ((2, "separable 3"), (1, "largest")),
        ),
        (4, 5, 6),
    ),
)
"""Zoph, Vasudevan, Shlens, Le: Learning Transferable Architectures for Scalable Image Recognition (2018)."""

_AMOEBANET = (
    Plan(
        (
            ((0, "mean"), (1, "largest")),
            ((0, "separable 3"), (2, "separable 5")),
            ((0, "separable 3"), (3, "mean")),
            ((1, "separable 3"), (1, "as it is")),
            ((0, "as it is"), (1, "mean")),
        ),
        (4, 5, 6),
    ),
    Plan(
        (
            ((0, "mean"), (1, "separable 3")),
            ((0, "largest"), (2, "separable 7")),
            ((0, "separable 7"), (1, "mean")),
            ((0, "largest"), (1, "largest")),
            ((0, "1x7 and 7x1"), (5, "separable 3")),
        ),
        (3, 4, 6),
    ),
)
"""Real, Aggarwal, Huang, Le: Regularized Evolution for Image Classifier Architecture Search (2019)."""

_DARTS = (
    Plan(
        (
            ((0, "separable 3"), (1, "separable 3")),
            ((0, "separable 3"), (1, "separable 3")),
            ((1, "separable 3"), (0, "as it is")),
            ((0, "as it is"), (2, "dilated 3")),
        ),
        (2, 3, 4, 5),
    ),
    Plan(
        (
            ((0, "largest"), (1, "largest")),
            ((2, "as it is"), (1, "largest")),
            ((0, "largest"), (2, "as it is")),
            ((2, "as it is"), (1, "largest")),
        ),
        (2, 3, 4, 5),
    ),
)
"""DARTS (2019), second order, figures 4 and 5."""


def _convolved(channels: int, width: int) -> nn.Sequential:
    """ReLU, a 1x1 convolution, BatchNorm."""
    return nn.Sequential(nn.ReLU(), nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width))


def _depthwise(width: int, kernel: int, stride: int, dilation: int = 1) -> list[nn.Module]:
    """ReLU, a convolution of each channel by itself, a 1x1 convolution, BatchNorm."""
    padding = dilation * (kernel // 2)
    return [
        nn.ReLU(),
        nn.Conv2d(width, width, kernel, stride, padding, dilation, groups=width, bias=False),
        nn.Conv2d(width, width, 1, bias=False),
        nn.BatchNorm2d(width),
    ]


def _operation(name: str, width: int, stride: int) -> nn.Module:
    match name.split():
        case ["mean"]:
            return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
        case ["largest"]:
            return nn.MaxPool2d(3, stride, padding=1)
        case ["separable", kernel]:
            first = _depthwise(width, int(kernel), stride)
            return nn.Sequential(*first, *_depthwise(width, int(kernel), 1))
        case ["dilated", kernel]:
            return nn.Sequential(*_depthwise(width, int(kernel), stride, dilation=2))
        case ["1x7", *_]:
            across = nn.Conv2d(width, width, (1, 7), (1, stride), (0, 3), bias=False)
            along = nn.Conv2d(width, width, (7, 1), (stride, 1), (3, 0), bias=False)
            return nn.Sequential(nn.ReLU(), across, along, nn.BatchNorm2d(width))
        case _:
            return nn.Identity() if stride == 1 else Halved(width, width)


class SearchedCell(nn.Module):
    """Sums of two operations each, on the results of the two cells before.

    Args:
        plan: The operations.
        before: Channels of the last result but one.
        last: Channels of the last result.
        width: Channels of each sum.
        is_reduction: Whether it halves the size.
        is_after_reduction: Whether the last result is half as large as the one before it.
    """

    def __init__(
        self, plan: Plan, before: int, last: int, width: int, *, is_reduction: bool, is_after_reduction: bool
    ) -> None:
        super().__init__()
        self.plan = plan
        self.channels = width * len(plan.result)
        self.from_before = Halved(before, width) if is_after_reduction else _convolved(before, width)
        self.from_last = _convolved(last, width)
        self.operations = nn.ModuleList(
            _operation(name, width, 2 if is_reduction and source < 2 else 1)
            for step in plan.steps
            for source, name in step
        )

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        """Maps [batch, before, h, w] (or 2h, 2w) and [batch, last, h, w] to [batch, channels, h, w]."""
        states = [self.from_before(before), self.from_last(last)]
        return joined_sums(states, self.plan.steps, self.operations, self.plan.result)


class SearchedNetwork(CellNetwork):
    """A stem, cells of two kinds, and a head.

    Args:
        plans: The normal cell and the reduction.
        layers: Cells; those after a third and two thirds are reductions.
        width: Channels of the first cell's sums; they double at each reduction.
        classes: Of the images.
    """

    def __init__(self, plans: tuple[Plan, Plan], layers: int, width: int, classes: int) -> None:
        super().__init__()
        before = last = 3 * width
        self.stem = nn.Sequential(nn.Conv2d(3, last, 3, padding=1, bias=False), nn.BatchNorm2d(last))
        self.cells = nn.ModuleList()
        was_reduction = False
        for number in range(layers):
            is_reduction = number in (layers // 3, 2 * layers // 3)
            width *= 2 if is_reduction else 1
            cell = SearchedCell(
                plans[is_reduction],
                before,
                last,
                width,
                is_reduction=is_reduction,
                is_after_reduction=was_reduction,
            )
            self.cells.append(cell)
            before, last, was_reduction = last, cell.channels, is_reduction
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes))


def _searched(name: str, plans: tuple[Plan, Plan]) -> Callable[..., Example]:
    """The factory of a network for images [batch, 3, size, size]."""

    def make(
        *, batch: int = 16, size: int = 32, classes: int = 10, layers: int = 20, width: int = 36
    ) -> Example:
        images, labels = torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))
        return Classifier(SearchedNetwork(plans, layers, width, classes)), (images, labels)

    make.__name__ = name
    return benchmark(make)


nasnet_cifar = _searched("nasnet_cifar", _NASNET)
amoebanet_cifar = _searched("amoebanet_cifar", _AMOEBANET)
darts_cifar = _searched("darts_cifar", _DARTS)
