"""What a tier can do while steps run."""

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
        """Goes on when the copy has ended; again and again if need be.

        Raises:
            TierError: It failed.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Nobody needs the copy any more: it is not made, if it has not started. May not block."""

    @abstractmethod
    def settle(self) -> None:
        """After `cancel`: returns when neither the tensor nor the slot is touched any more."""


@dataclass(slots=True)
class Traffic:
    """What went through a tier so far.

    Args:
        out_bytes: Copied from the device.
        in_bytes: Copied back.
        waited_seconds: How long computing stood still, as a copy had not ended. Not known of CUDA, where it
            is the device that waits.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    waited_seconds: float = 0.0


class RunningTier(ABC):
    """A tier that is open, shared by all calls of a module.

    Args:
        room: Its slots.
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
    """A tier whose slots are memory that everybody may read and write between steps."""

    @abstractmethod
    def take_resident(self, nbytes: int) -> AnySlot:
        """A slot that `tensor_at` can show.

        Raises:
            TierError: As of `Room.take`.
        """

    @abstractmethod
    def tensor_at(self, slot: AnySlot) -> Tensor:
        """The bytes of such a slot, which stays as long as they do."""
