"""The host tier for CUDA: pinned memory, and a stream for each direction.

Copies are ordered by events and not by `record_stream`, so that memory is free for the next operation as soon
as the schedule frees it.

- A copy waits on its stream for an event of the compute stream, recorded when the copy is begun. By then the
  tensor is computed, or nobody reads the memory of a fetched tensor any more: the allocator gives memory out
  in the order of the compute stream.
- A `Wait` makes the compute stream wait for the copy's event. Memory that is freed after it is used again
  only on the compute stream, and so after the copy.
- A slot that is used again waits for the event of the copy that read it last.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ....ir import TierError, first_line, format_bytes
from .extents import Extents, Range, in_pages
from .memory import bytes_of
from .slots import Room, Slot
from .tier import RunningTier, Ticket
from .tier_config import TierConfig

__all__ = ["HostTier", "HostTierConfig"]


@dataclass(frozen=True, slots=True)
class HostTierConfig(TierConfig):
    """Pinned memory of the host, for models on CUDA."""

    kind: ClassVar[str] = "host"
    takes_parameters: ClassVar[bool] = False

    def open(self) -> HostTier:
        """Opens the tier; memory is pinned when it is needed."""
        return HostTier(self)

    def try_out(self) -> None:
        """Does nothing: memory is pinned when it is needed."""

    def refusal(self, device_type: str) -> tuple[str, str] | None:
        """Refuses tensors that are not on CUDA."""
        if device_type == "cuda":
            return None
        if device_type == "cpu":
            return (
                "the memory of a model on the CPU is the host's memory: copies within it gain nothing",
                "use a disk tier: disk:FOLDER:BYTES",
            )
        return "pinned memory is for models on CUDA", "plan without swap"


_CHUNK_BYTES = 1 << 26
"""The size of the pieces in which pinned memory is taken: torch rounds each up to a power of two."""


class _Pinned:
    """The ranges of a slot.

    Args:
        ranges: Ranges of the pinned memory, none of them across two chunks.
    """

    def __init__(self, ranges: tuple[Range, ...]) -> None:
        self.ranges = ranges
        self.last_read: Any = None
        """The event of the last copy back."""


class _Streams(NamedTuple):
    out: Any
    back: Any


class HostTier(RunningTier):
    """A tier in the host's memory, for tensors on CUDA.

    Args:
        config: The name and the capacity.
    """

    room: PinnedRoom

    def __init__(self, config: HostTierConfig) -> None:
        super().__init__(PinnedRoom(config.name, config.capacity_bytes))
        self._lock = threading.Lock()
        self._streams: dict[torch.device, _Streams] = {}

    def begin_out(self, tensor: Tensor, slot: Slot[_Pinned]) -> Ticket:
        """Begins to copy a tensor to a slot."""
        compute, streams = torch.cuda.current_stream(tensor.device), self._streams_of(tensor.device)
        streams.out.wait_event(compute.record_event())
        for event in self.room.readers():
            streams.out.wait_event(event)
        with torch.cuda.stream(streams.out):
            data = bytes_of(tensor)
            for pinned, start, stop in self.room.pieces(slot):
                _copy(data[start:stop], pinned)
        return _Crossing(tensor, compute, streams.out.record_event())

    def begin_in(self, slot: Slot[_Pinned], tensor: Tensor) -> Ticket:
        """Begins to copy a slot to a tensor."""
        compute, streams = torch.cuda.current_stream(tensor.device), self._streams_of(tensor.device)
        streams.back.wait_event(compute.record_event())
        with torch.cuda.stream(streams.back):
            data = bytes_of(tensor)
            for pinned, start, stop in self.room.pieces(slot):
                _copy(pinned, data[start:stop])
        slot.allocation.last_read = streams.back.record_event()
        return _Crossing(tensor, compute, slot.allocation.last_read)

    def _streams_of(self, device: torch.device) -> _Streams:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))
            return self._streams[device]


def _copy(source: Tensor, target: Tensor) -> None:
    """Copies on the current stream, without waiting."""
    target.copy_(source, non_blocking=True)


class _Crossing(Ticket):
    """A copy on a stream; the tensor is held until the compute stream waits for it."""

    def __init__(self, tensor: Tensor, compute: Any, ended: Any) -> None:
        self._tensor: Tensor | None = tensor
        self._device = tensor.device
        self._compute = compute
        self._ended = ended

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._ended)
        self._tensor = None

    def cancel(self) -> None:
        self._compute.wait_event(self._ended)
        self._tensor = None

    def settle(self) -> None:
        """Does nothing: later work on the compute stream is in order already."""


class PinnedRoom(Room[_Pinned]):
    """Slots in pinned memory, which grows by chunks and is used again from step to step."""

    def __init__(self, name: str, capacity_bytes: int) -> None:
        super().__init__(name, capacity_bytes)
        self.extents = Extents()
        self.chunks: list[Tensor] = []
        self._readers: list[Any] = []
        """The events of copies that read slots which were given back."""

    def readers(self) -> list[Any]:
        """Returns the events of copies that still read returned slots; the next write waits for them."""
        with self._lock:
            self._readers = [event for event in self._readers if not event.query()]
            return self._readers.copy()

    def pieces(self, slot: Slot[_Pinned]) -> list[tuple[Tensor, int, int]]:
        """Returns the parts of a slot in pinned memory, each with the range of the tensor's bytes in it."""
        found: list[tuple[Tensor, int, int]] = []
        done = 0
        for start, stop in slot.allocation.ranges:
            nbytes = min(stop - start, slot.nbytes - done)
            chunk, first = divmod(start, _CHUNK_BYTES)
            found.append((self.chunks[chunk][first : first + nbytes], done, done + nbytes))
            done += nbytes
        return found

    def _prepare(self, nbytes: int, count: int) -> None:
        self._ensure(in_pages(nbytes) + count * in_pages(1))

    def _take(self, nbytes: int) -> _Pinned:
        self._ensure(in_pages(nbytes))
        return _Pinned(tuple(part for whole in self.extents.take(nbytes) for part in _within_chunks(whole)))

    def _ensure(self, nbytes: int) -> None:
        while self.extents.free_bytes < nbytes:
            try:
                self.chunks.append(torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True))
            except RuntimeError as error:
                raise TierError(
                    "IRC570",
                    f"tier {self.name} holds {format_bytes(self.extents.size_bytes)} of pinned memory, and "
                    f"the host gives no more: {first_line(error)}",
                    help="plan with less host memory (swap=), or make room on the host",
                ) from error
            self.extents.grow(_CHUNK_BYTES)

    def _give_back(self, allocation: _Pinned) -> None:
        if allocation.last_read is not None:
            self._readers.append(allocation.last_read)
        self.extents.give_back(allocation.ranges)


def _within_chunks(whole: Range) -> Iterator[Range]:
    start = whole.start
    while start < whole.stop:
        stop = min(whole.stop, (start // _CHUNK_BYTES + 1) * _CHUNK_BYTES)
        yield Range(start, stop)
        start = stop
