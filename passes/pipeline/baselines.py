"""Cuts of a line as others would make them, for comparison."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from itertools import pairwise

from .balance import block_partition, pipedream, uniform
from .devices import Devices
from .linear_order import Line

__all__ = ["PARTITIONS", "compared_cuts"]


def compared_cuts(name: str, line: Line, stages: int, devices: Devices) -> tuple[int, ...]:
    """The places at which a strategy cuts a line; what is between two places is a layer for it.

    Args:
        name: Of `PARTITIONS`, but not `best`.
        line: What is cut.
        stages: How many.
        devices: For the time of transfers; they count as equal.
    """
    ends = _STRATEGIES[name](line, stages, devices)
    return tuple(line.places[end] for end in ends[:-1])


def _uniform(line: Line, stages: int, devices: Devices) -> tuple[int, ...]:
    return uniform(len(line.places) - 1, stages)


def _by_time(line: Line, stages: int, devices: Devices) -> tuple[int, ...]:
    return block_partition([line.seconds(*pair) for pair in pairwise(line.places)], stages)


def _by_size(line: Line, stages: int, devices: Devices) -> tuple[int, ...]:
    saved = line.saved_prefix
    sizes = [saved[end] - saved[begin] for begin, end in pairwise(line.places)]
    for storage, is_trained, places in line.statics:
        layer = bisect.bisect_right(line.places, places[0] if places else 0) - 1
        sizes[layer] += storage.nbytes * (2 if is_trained else 1)
    return block_partition(sizes, stages)


def _pipedream(line: Line, stages: int, devices: Devices) -> tuple[int, ...]:
    seconds = [line.seconds(*pair) for pair in pairwise(line.places)]
    sent = [devices.transfer_seconds(line.crossing_bytes[place][0]) for place in line.places[1:]]
    return pipedream(seconds, sent, stages)


_STRATEGIES: dict[str, Callable[[Line, int, Devices], tuple[int, ...]]] = {
    "uniform": _uniform,
    "time": _by_time,
    "size": _by_size,
    "pipedream": _pipedream,
}

PARTITIONS = ("best", *_STRATEGIES)
"""How a model may be cut: irc's own way; as many places in each stage; torchgpipe's balance by time and by
size; PipeDream's dynamic programme."""
