"""Room in a tier: each copy has a slot, which is given back when nobody holds it any more."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Generic, TypeVar

from ....ir import TierError, format_bytes

__all__ = ["AnyRoom", "AnySlot", "Room", "Slot"]

Allocation = TypeVar("Allocation")


class Slot(Generic[Allocation]):
    """Room for one copy.

    A call and a copy under way hold it while they write or read it. It is given back when the last of them is
    gone. That may happen in any thread and within garbage collection, so giving it back only appends to a
    queue, which takes no lock.

    Args:
        allocation: The memory or the bytes of a file that the room has set aside.
        nbytes: The bytes of the copy.
        returned: The queue of slots that were given back.
    """

    __slots__ = ("_returned", "allocation", "nbytes")

    def __init__(self, allocation: Allocation, nbytes: int, returned: deque[tuple[Allocation, int]]) -> None:
        self.allocation = allocation
        self.nbytes = nbytes
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append((self.allocation, self.nbytes))


class Room(ABC, Generic[Allocation]):
    """The slots of a tier.

    Args:
        name: The name of the tier.
        capacity_bytes: The most that all slots may take.
    """

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._held_bytes = 0
        self._returned: deque[tuple[Allocation, int]] = deque()

    @property
    def held_bytes(self) -> int:
        """The bytes of the copies in the tier."""
        with self._lock:
            self._collect()
            return self._held_bytes

    def prepare(self, nbytes: int, count: int) -> None:
        """Makes room before a step that will need it.

        Args:
            nbytes: The bytes that the copies of the step take at once.
            count: The number of its copies.

        Raises:
            TierError: As `take`; the capacity is not checked, as calls may need their room one after another.
        """
        with self._lock:
            self._collect()
            self._prepare(nbytes, count)

    def take(self, nbytes: int, *, whole: bool = False) -> Slot[Allocation]:
        """Takes a slot.

        Args:
            nbytes: The bytes of the copy.
            whole: Whether the slot must be in one piece.

        Raises:
            TierError: IRC577 if the tier is full; IRC570 if its disk or the host's memory is.
        """
        with self._lock:
            self._collect()
            if self._held_bytes + nbytes > self.capacity_bytes:
                raise TierError(
                    "IRC577",
                    f"tier {self.name} holds {format_bytes(self._held_bytes)} of its "
                    f"{format_bytes(self.capacity_bytes)}, and {format_bytes(nbytes)} more are copied to it",
                    help="drop outputs that need no backward, or give the tier room for all forwards in "
                    "flight",
                )
            allocation = self._take_whole(nbytes) if whole else self._take(nbytes)
            self._held_bytes += nbytes
        return Slot(allocation, nbytes, self._returned)

    def _collect(self) -> None:
        while self._returned:
            allocation, nbytes = self._returned.popleft()
            self._held_bytes -= nbytes
            self._give_back(allocation)

    def _prepare(self, nbytes: int, count: int) -> None:
        """Does the work of `prepare`; the lock is held."""

    @abstractmethod
    def _take(self, nbytes: int) -> Allocation:
        """Does the work of `take`; the lock is held."""

    def _take_whole(self, nbytes: int) -> Allocation:
        """Does the same for a slot in one piece."""
        return self._take(nbytes)

    @abstractmethod
    def _give_back(self, allocation: Allocation) -> None:
        """Makes an allocation free again; the lock is held."""


AnySlot = Slot[Any]
AnyRoom = Room[Any]
