"""The devices of a pipeline, and the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Devices"]


@dataclass(frozen=True)
class Devices:
    """What the stages run on.

    Args:
        budget_bytes: Of each device.
        speeds: Of each device, beside the one that costs were found for.
        link_bytes_per_second: Of the link between two devices, in each direction.
        link_seconds: What a transfer takes beside its bytes.
    """

    budget_bytes: tuple[int, ...]
    speeds: tuple[float, ...]
    link_bytes_per_second: float
    link_seconds: float = 0.0

    def ordered(self, order: Sequence[int]) -> Devices:
        """The same devices in another order."""
        return replace(
            self,
            budget_bytes=tuple(self.budget_bytes[device] for device in order),
            speeds=tuple(self.speeds[device] for device in order),
        )

    def transfer_seconds(self, nbytes: int) -> float:
        """Time of one transfer."""
        return self.link_seconds + nbytes / self.link_bytes_per_second
