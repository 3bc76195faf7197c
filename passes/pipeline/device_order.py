"""The order of different devices in a pipeline."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from .devices import Devices
from .linear_partition import LinearPartition

__all__ = ["device_order"]

_MOST_DEVICES = 8
"""The most devices whose orders are looked at; more of them stay as they were given."""


def device_order(partition: LinearPartition, deadline: float) -> tuple[int, ...]:
    """Finds the order of the devices with the shortest estimated step.

    Args:
        partition: The partition, with the devices as they were given.
        deadline: `time.thread_time()` at which the best order so far is taken.

    Returns:
        For each place in the pipeline the device that takes it: 0, 1 and so on if all are equal, or if there
        are too many of them, or if none of their orders seems to fit.
    """
    given = partition.devices
    best, best_seconds = tuple(range(len(given.speeds))), partition.seconds()
    if len(given.speeds) > _MOST_DEVICES:
        return best
    for order in _orders(given):
        if time.thread_time() >= deadline:
            break
        seconds = partition.on(given.ordered(order)).seconds()
        if seconds < best_seconds * (1 - 1e-9):
            best, best_seconds = order, seconds
    return best


def _orders(devices: Devices) -> Iterator[tuple[int, ...]]:
    """Yields the orders of the devices; among those that only exchange equal devices, one."""
    kinds = list(zip(devices.budget_bytes, devices.speeds, strict=True))
    seen: set[tuple[tuple[int, float], ...]] = set()
    for order in itertools.permutations(range(len(kinds))):
        row = tuple(kinds[device] for device in order)
        if row not in seen:
            seen.add(row)
            yield order
