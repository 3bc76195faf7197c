"""Memory beside the device, for storages that a step does not need for a while, and the time of copies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Direction", "Tier"]


class Direction(Enum):
    """Names the direction of a copy."""

    OUT = "out"
    """Copies from the device to a tier."""
    IN = "in"
    """Back."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A memory that storages can be copied to and from, beside the computations.

    Args:
        name: Its name in schedules: `host`, `disk`.
        capacity_bytes: The most that it may hold at once.
        out_bytes_per_second: From the device, beside computations.
        in_bytes_per_second: To the device, beside computations.
        latency_seconds: The time that each copy takes beyond its bytes.
        is_duplex: Whether a copy each way may run at once; else the two share one channel. A channel carries
            one copy at a time, in the order in which they are begun.
    """

    name: str
    capacity_bytes: int
    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: float = 0.0
    is_duplex: bool = True

    def copy_seconds(self, nbytes: int, direction: Direction) -> float:
        """Time of one copy."""
        outward = direction is Direction.OUT
        return self.latency_seconds + nbytes / (
            self.out_bytes_per_second if outward else self.in_bytes_per_second
        )

    def channel(self, direction: Direction) -> tuple[str, Direction | None]:
        """The channel that carries copies in a direction; a tier with one channel has the same for both."""
        return self.name, direction if self.is_duplex else None
