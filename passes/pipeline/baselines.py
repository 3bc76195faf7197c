"""Cuts of a linear order as others would make them, for comparison."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from itertools import pairwise

from .balance import block_partition, pipedream, uniform
from .devices import Devices
from .linear_order import LinearOrder

__all__ = ["PARTITIONS", "baseline_cuts"]


def baseline_cuts(name: str, linear_order: LinearOrder, stages: int, devices: Devices) -> tuple[int, ...]:
    """Cuts a linear order by a strategy, for which a layer lies between two cut points; returns positions.

    Args:
        name: One of `PARTITIONS`, but not `best`.
        linear_order: The order to cut.
        stages: The number of stages.
        devices: The devices, for the time of transfers; they count as equal.
    """
    ends = _STRATEGIES[name](linear_order, stages, devices)
    return tuple(linear_order.cut_points[end] for end in ends[:-1])


def _uniform(linear_order: LinearOrder, stages: int, devices: Devices) -> tuple[int, ...]:
    return uniform(len(linear_order.cut_points) - 1, stages)


def _by_time(linear_order: LinearOrder, stages: int, devices: Devices) -> tuple[int, ...]:
    return block_partition(
        [linear_order.seconds(*pair) for pair in pairwise(linear_order.cut_points)], stages
    )


def _by_size(linear_order: LinearOrder, stages: int, devices: Devices) -> tuple[int, ...]:
    saved = linear_order.saved_prefix
    sizes = [saved[end] - saved[begin] for begin, end in pairwise(linear_order.cut_points)]
    for storage, is_trained, positions in linear_order.statics:
        layer = bisect.bisect_right(linear_order.cut_points, positions[0] if positions else 0) - 1
        sizes[layer] += storage.nbytes * (2 if is_trained else 1)
    return block_partition(sizes, stages)


def _pipedream(linear_order: LinearOrder, stages: int, devices: Devices) -> tuple[int, ...]:
    seconds = [linear_order.seconds(*pair) for pair in pairwise(linear_order.cut_points)]
    sent = [
        devices.transfer_seconds(linear_order.crossing_bytes[point][0])
        for point in linear_order.cut_points[1:]
    ]
    return pipedream(seconds, sent, stages)


_STRATEGIES: dict[str, Callable[[LinearOrder, int, Devices], tuple[int, ...]]] = {
    "uniform": _uniform,
    "time": _by_time,
    "size": _by_size,
    "pipedream": _pipedream,
}

PARTITIONS = ("best", *_STRATEGIES)
"""The ways to cut a model: irc's own; equal numbers of layers; torchgpipe's by time and size; PipeDream's."""
