"""Which of several different devices takes the first stage, which the second, and so on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from .devices import Devices
from .linear_partition import LinearPartition

__all__ = ["device_order"]

_MOST_DEVICES = 8
"""With more devices their orders are too many to look at, and they stay as they were given."""


def device_order(partition: LinearPartition, deadline: float) -> tuple[int, ...]:
    """The devices in the order in which the estimated step is the shortest.

    Args:
        partition: With the devices as they were given.
        deadline: When, by `time.monotonic()`, the best order so far is taken.

    Returns:
        For each place in the pipeline the device that takes it: 0, 1 and so on where all are equal, or there
        are too many of them, or none of their orders seems to fit.
    """
    given = partition.devices
    best, best_seconds = tuple(range(len(given.speeds))), partition.seconds()
    if len(given.speeds) > _MOST_DEVICES:
        return best
    for order in _orders(given):
        if time.monotonic() >= deadline:
            break
        seconds = partition.on(given.ordered(order)).seconds()
        if seconds < best_seconds * (1 - 1e-9):
            best, best_seconds = order, seconds
    return best


def _orders(devices: Devices) -> Iterator[tuple[int, ...]]:
    """The orders of the devices; of those that only change equal devices with each other, one."""
    kinds = list(zip(devices.budget_bytes, devices.speeds, strict=True))
    seen: set[tuple[tuple[int, float], ...]] = set()
    for order in itertools.permutations(range(len(kinds))):
        row = tuple(kinds[device] for device in order)
        if row not in seen:
            seen.add(row)
            yield order
