"""The devices of a pipeline, and the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Devices"]


@dataclass(frozen=True)
class Devices:
    """The devices that the stages run on.

    Args:
        budget_bytes: The budget of each device.
        speeds: The speed of each device, relative to the one that costs were found for.
        link_bytes_per_second: The rate of the link between two devices, in each direction.
        link_seconds: The time that a transfer takes beside its bytes.
    """

    budget_bytes: tuple[int, ...]
    speeds: tuple[float, ...]
    link_bytes_per_second: float
    link_seconds: float = 0.0

    def ordered(self, order: Sequence[int]) -> Devices:
        """Gives the same devices in another order."""
        return replace(
            self,
            budget_bytes=tuple(self.budget_bytes[device] for device in order),
            speeds=tuple(self.speeds[device] for device in order),
        )

    def transfer_seconds(self, nbytes: int) -> float:
        """The time of one transfer."""
        return self.link_seconds + nbytes / self.link_bytes_per_second
