"""The interface of a tier while steps run."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from .slots import AnyRoom, AnySlot

__all__ = ["ResidentTier", "RunningTier", "Ticket", "Traffic"]


class Ticket(ABC):
    """A copy that was begun."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until the copy has ended; it may be called again.

        Raises:
            TierError: The copy failed.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Cancels the copy if it has not started. It must not block."""

    @abstractmethod
    def settle(self) -> None:
        """Waits, after `cancel`, until neither the tensor nor the slot is touched any more."""


@dataclass(slots=True)
class Traffic:
    """The traffic of a tier so far.

    Args:
        out_bytes: The bytes copied from the device.
        in_bytes: The bytes copied back.
        waited_seconds: The time for which the computation waited for copies. It is not known for CUDA, as
            the device waits there.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    waited_seconds: float = 0.0


class RunningTier(ABC):
    """An open tier, which all calls of a module share.

    Args:
        room: The slots of the tier.
    """

    def __init__(self, room: AnyRoom) -> None:
        self.room = room
        self.traffic = Traffic()
        self._counting = threading.Lock()

    def count(self, *, out_bytes: int = 0, in_bytes: int = 0, waited_seconds: float = 0.0) -> None:
        """Adds to the traffic."""
        with self._counting:
            self.traffic.out_bytes += out_bytes
            self.traffic.in_bytes += in_bytes
            self.traffic.waited_seconds += waited_seconds

    @abstractmethod
    def begin_out(self, tensor: Tensor, slot: AnySlot) -> Ticket:
        """Begins to copy a tensor to a slot."""

    @abstractmethod
    def begin_in(self, slot: AnySlot, tensor: Tensor) -> Ticket:
        """Begins to copy a slot to a tensor."""


class ResidentTier(RunningTier):
    """A tier whose slots are memory that anybody may read and write between steps."""

    @abstractmethod
    def take_resident(self, nbytes: int) -> AnySlot:
        """Takes a slot that `tensor_at` can show.

        Raises:
            TierError: As `Room.take`.
        """

    @abstractmethod
    def tensor_at(self, slot: AnySlot) -> Tensor:
        """Returns the bytes of such a slot; the slot is held as long as they are."""
