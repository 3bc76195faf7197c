"""Room in a tier: each copy has a slot, which comes back by itself when nobody holds it any more."""

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

    Whoever writes or reads it holds it: a call, and a copy under way. It is given back when the last of them
    is gone. That may happen in any thread and within garbage collection, so giving back only appends to a
    queue, which takes no lock.

    Args:
        allocation: The memory or the bytes of a file that the room has set aside.
        nbytes: Of the copy.
        returned: The queue.
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
        name: The tier's.
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
        """Bytes of the copies that lie in the tier."""
        with self._lock:
            self._collect()
            return self._held_bytes

    def prepare(self, nbytes: int, count: int) -> None:
        """Makes sure that there is room, before a step that will need it.

        Args:
            nbytes: Bytes that its copies take at once.
            count: How many copies it makes.

        Raises:
            TierError: As `take`; the capacity is not looked at, as calls may need theirs one after the other.
        """
        with self._lock:
            self._collect()
            self._prepare(nbytes, count)

    def take(self, nbytes: int, *, whole: bool = False) -> Slot[Allocation]:
        """A slot.

        Args:
            nbytes: Of the copy.
            whole: Whether it must be in one piece.

        Raises:
            TierError: IRC577 when the tier is full; IRC570 when what it is made of is.
        """
        with self._lock:
            self._collect()
            if self._held_bytes + nbytes > self.capacity_bytes:
                raise TierError(
                    "IRC577",
                    f"tier {self.name} holds {format_bytes(self._held_bytes)} of its "
                    f"{format_bytes(self.capacity_bytes)}, and {format_bytes(nbytes)} more are copied to it",
                    help="let go of outputs that need no backward, or give the tier room for all forwards "
                    "that are in flight",
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
        """As `prepare`, with the lock."""

    @abstractmethod
    def _take(self, nbytes: int) -> Allocation:
        """As `take`, with the lock."""

    def _take_whole(self, nbytes: int) -> Allocation:
        """The same in one piece."""
        return self._take(nbytes)

    @abstractmethod
    def _give_back(self, allocation: Allocation) -> None:
        """Makes an allocation free again; the lock is held."""


AnySlot = Slot[Any]
AnyRoom = Room[Any]
