"""How much devices can do within a time, whatever they are given to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from irc.passes.pipeline.coarsened_problem import CoarsenedProblem, DeviceClass
from irc.passes.pipeline.order_ideals import Floats

__all__ = ["Speeds", "least_load"]

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Speeds:
    """Work is measured in seconds on the class that is fastest for an item; bounds of what devices do of it.

    Args:
        coarsened: The items.
        classes: The devices.
    """

    coarsened: CoarsenedProblem
    classes: Sequence[DeviceClass]

    @cached_property
    def least_seconds(self) -> Floats:
        """The work of each item."""
        return np.array([min(seconds) for seconds in self.coarsened.seconds])

    @cached_property
    def _by_speed(self) -> list[tuple[Floats, Floats]]:
        """For each class, seconds and work of its items, summed up from those on that it is fastest at."""
        found: list[tuple[Floats, Floats]] = []
        for column in np.array(self.coarsened.seconds).T:
            runs = np.isfinite(column) & (column > 0)
            seconds, work = column[runs], self.least_seconds[runs]
            fastest = np.argsort(-work / seconds, kind="stable")
            found.append((_summed(seconds[fastest]), _summed(work[fastest])))
        return found

    @cached_property
    def _largest_speed(self) -> Floats:
        """Work in a second, at most, for each class."""
        return np.array([work[1] / seconds[1] if len(work) > 1 else 0.0 for seconds, work in self._by_speed])

    def work(self, kind: int, seconds: float) -> float:
        """The most work that a device of a class does within a time, items being divisible."""
        return float(np.interp(seconds, *self._by_speed[kind]))

    def can_do(self, work: Floats, devices: Sequence[int], seconds: float) -> NDArray[np.bool_]:
        """Whether some devices may do a work within a time; False only if they cannot.

        Args:
            work: One or many.
            devices: How many of each class.
            seconds: Limit of each load.
        """
        most = sum(count * self.work(kind, seconds) for kind, count in enumerate(devices))
        return work <= most * (1 + _ROUNDING)

    def can_do_with(
        self, work: Floats, transfers: Floats, devices: Sequence[int], seconds: float
    ) -> NDArray[np.bool_] | np.bool_:
        """The same for devices that have to pay for transfers too, some second of one of them for each."""
        used = [kind for kind, count in enumerate(devices) if count]
        if not used or not all(self.classes[kind].pays_transfers for kind in used):
            return np.True_
        speeds = self._largest_speed[used]
        most = seconds * sum(devices[kind] * self._largest_speed[kind] for kind in used)
        return work + speeds.min() * transfers <= most * (1 + _ROUNDING)


def _summed(each: Floats) -> Floats:
    return np.concatenate([np.zeros(1), np.cumsum(each)])


def least_load(coarsened: CoarsenedProblem, classes: Sequence[DeviceClass]) -> float:
    """A lower bound of the largest load: of all work divided freely, and of the longest item."""
    speeds = Speeds(coarsened, classes)
    total = np.array([speeds.least_seconds.sum()])
    counts = [device.count for device in classes]
    low, high = 0.0, float(total[0])
    while high - low > _ROUNDING * high:
        middle = (low + high) / 2
        low, high = (low, middle) if speeds.can_do(total, counts, middle)[0] else (middle, high)
    return max(low, *speeds.least_seconds.tolist())
