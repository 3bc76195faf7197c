"""A tier for tests, in which a program that does not wait for a copy reads wrong numbers.

A copy is made when somebody waits for it, or, at random, when another copy is begun or waited for before. A
tensor that is dropped before its copy is made is overwritten, as the allocator may give its memory to the
next tensor. A tensor that is being fetched, and a slot that holds no copy, are overwritten too.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, UntypedStorage

from irc.backends.torch import TierConfig
from irc.backends.torch.offload.slots import Room, Slot
from irc.backends.torch.offload.tier import ResidentTier, Ticket

__all__ = ["POISON", "FakeTier", "FakeTierConfig"]

POISON = 0xFF
_RATE = 0.4
"""The probability that the next copy of a direction is made now."""

_Memory = ctypes.Array[ctypes.c_char]


@dataclass(frozen=True, slots=True)
class FakeTierConfig(TierConfig):
    """A tier whose copies are made late, and in which memory that must not be read meanwhile is overwritten.

    Args:
        name: The name of the tier in schedules.
        capacity_bytes: The most bytes in the tier at once.
        checks: Compare checksums.
        seed: The seed of the times at which copies are made.
        is_late: Make each copy at its own `Wait` and not before it.
    """

    kind: ClassVar[str] = "fake-async"
    takes_parameters: ClassVar[bool] = True

    seed: int = 0
    is_late: bool = False

    def open(self) -> FakeTier:
        """Opens the tier."""
        return FakeTier(self)

    def try_out(self) -> None:
        """Does nothing: the tier is memory."""

    def refusal(self, device_type: str) -> tuple[str, str] | None:
        """Refuses tensors that are not in the host's memory."""
        return None if device_type == "cpu" else ("the tier is in the host's memory", "use a host tier")


class _FakeRoom(Room[_Memory]):
    def _take(self, nbytes: int) -> _Memory:
        memory = (ctypes.c_char * nbytes)()
        ctypes.memset(memory, POISON, nbytes)
        return memory

    def _give_back(self, allocation: _Memory) -> None:
        pass


class FakeTier(ResidentTier):
    """A tier in memory whose copies are late.

    Args:
        config: The capacity, and when copies are made.
    """

    def __init__(self, config: FakeTierConfig) -> None:
        super().__init__(_FakeRoom(config.name, config.capacity_bytes))
        self.is_late = config.is_late
        self._draw = random.Random(config.seed)
        self._lock = threading.Lock()
        self._queues: tuple[deque[_FakeCopy], deque[_FakeCopy]] = (deque(), deque())
        """The copies of each direction that were begun and are not made yet."""

    def begin_out(self, tensor: Tensor, slot: Slot[_Memory]) -> Ticket:
        """Begins to copy a tensor to a slot."""
        copy = _FakeCopy(self, tensor.untyped_storage(), tensor.data_ptr(), slot, is_out=True)
        copy.watched = weakref.ref(tensor, copy.poisoner())
        return self._begin(copy)

    def begin_in(self, slot: Slot[_Memory], tensor: Tensor) -> Ticket:
        """Begins to copy a slot to a tensor, which is overwritten meanwhile."""
        ctypes.memset(tensor.data_ptr(), POISON, slot.nbytes)
        return self._begin(_FakeCopy(self, tensor.untyped_storage(), tensor.data_ptr(), slot, is_out=False))

    def take_resident(self, nbytes: int) -> Slot[_Memory]:
        """Takes a slot."""
        return self.room.take(nbytes)

    def tensor_at(self, slot: Slot[_Memory]) -> Tensor:
        """Returns the bytes of a slot."""
        return torch.frombuffer(slot.allocation, dtype=torch.uint8)

    def _begin(self, copy: _FakeCopy) -> Ticket:
        if not self.is_late:
            with self._lock:
                self._queues[copy.is_out].append(copy)
                self._go_on()
        return copy

    def make(self, copy: _FakeCopy) -> None:
        """Makes a copy now, and before it, unless all copies are late, the earlier ones of its direction."""
        if self.is_late:
            copy.make()
            return
        with self._lock:
            queue = self._queues[copy.is_out]
            while queue and not copy.is_made:
                queue.popleft().make()
            self._go_on()

    def _go_on(self) -> None:
        for queue in self._queues:
            while queue and self._draw.random() < _RATE:
                queue.popleft().make()


class _FakeCopy(Ticket):
    def __init__(
        self, tier: FakeTier, storage: UntypedStorage, address: int, slot: Slot[_Memory], *, is_out: bool
    ) -> None:
        self.tier = tier
        self.address = address
        self.is_out = is_out
        self.is_made = False
        self.watched: weakref.ref[Tensor] | None = None
        self._holds = [(storage, slot)]

    def poisoner(self) -> _Poisoner:
        return _Poisoner(self._holds, self.address)

    def make(self) -> None:
        if self._holds:
            _, slot = self._holds[0]
            ends = (slot.allocation, self.address) if self.is_out else (self.address, slot.allocation)
            ctypes.memmove(*ends, slot.nbytes)
            self._holds.clear()
        self.is_made = True

    def wait(self) -> None:
        self.tier.make(self)

    def cancel(self) -> None:
        self._holds.clear()

    def settle(self) -> None:
        pass


class _Poisoner:
    """Overwrites the memory of a tensor that is dropped before it was copied."""

    def __init__(self, holds: list[tuple[UntypedStorage, Slot[_Memory]]], address: int) -> None:
        self.holds = holds
        self.address = address

    def __call__(self, gone: weakref.ref[Tensor]) -> None:
        for _, slot in self.holds:
            ctypes.memset(self.address, POISON, slot.nbytes)
