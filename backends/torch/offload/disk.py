"""The disk tier: a scratch file, with a thread for each direction.

Copies go by `pwritev` and `preadv` between the tensor's own memory and the file, and not through a mapping of
the file: the pages of a mapping count into the memory of the process, a full or failing disk kills the
process by a signal instead of an error, and a short read cannot be seen. Only offloaded parameters have a
mapping, through which they are read and written between steps. The calls release Python's lock, and a copy
allocates nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ....ir import TierError
from .extents import Range
from .lanes import Job, Lane
from .memory import bytes_at
from .scratch import ScratchFile, ScratchRoom
from .slots import Slot
from .tier import ResidentTier, Ticket
from .tier_config import TierConfig

__all__ = ["DiskTier", "DiskTierConfig"]


@dataclass(frozen=True, slots=True)
class DiskTierConfig(TierConfig):
    """A scratch file, for models on the CPU.

    Args:
        name: The name of the tier in schedules.
        capacity_bytes: The most bytes in the file at once, for all calls of the module.
        folder: The folder of the unlinked file; None is the system's folder for temporary files.
        checks: Compare checksums, as IRC_SWAP_CHECK=1 does for all tiers.
        uses_page_cache: Let the system keep copies in free memory, as it does with all files: a tensor that
            comes back soon may never wait for the disk. Otherwise each copy is written to the disk at once
            and dropped from that cache, so that it takes no memory of the machine, and the disk's own time.
        is_duplex: Copy both ways at once, as `ir.Tier` says of the tier; otherwise one copy after the other.
    """

    kind: ClassVar[str] = "disk"
    takes_parameters: ClassVar[bool] = True

    folder: str | None = None
    uses_page_cache: bool = True
    is_duplex: bool = True

    def open(self) -> DiskTier:
        """Makes the scratch file.

        Raises:
            TierError: As `DiskTier`.
        """
        return DiskTier(self)

    def refusal(self, device_type: str) -> tuple[str, str] | None:
        """Refuses tensors that are not in the host's memory."""
        if device_type == "cpu":
            return None
        return "disk tiers only copy tensors in the host's memory", "use a host tier: host:BYTES"

    def try_out(self) -> None:
        """Makes a scratch file in the folder.

        Raises:
            TierError: As `DiskTier`.
        """
        self.open()


class DiskTier(ResidentTier):
    """A tier on a disk, for tensors in the host's memory.

    Args:
        config: The folder, the capacity and how copies are made.

    Raises:
        TierError: IRC571 if no file can be made in the folder; IRC579 as `ScratchFile`.
    """

    def __init__(self, config: DiskTierConfig) -> None:
        self._file = ScratchFile(config.folder, uses_page_cache=config.uses_page_cache)
        super().__init__(ScratchRoom(config.name, config.capacity_bytes, self._file))
        self._out = Lane(f"irc {config.name} out")
        self._in = Lane(f"irc {config.name} in") if config.is_duplex else self._out
        weakref.finalize(self, _close, (self._out, self._in))

    def begin_out(self, tensor: Tensor, slot: Slot[tuple[Range, ...]]) -> Ticket:
        """Begins to copy a tensor to a slot."""
        return _begin(_Write, self._out, self._file, tensor, slot)

    def begin_in(self, slot: Slot[tuple[Range, ...]], tensor: Tensor) -> Ticket:
        """Begins to copy a slot to a tensor."""
        return _begin(_Read, self._in, self._file, tensor, slot)

    def take_resident(self, nbytes: int) -> Slot[tuple[Range, ...]]:
        """Takes a slot in one piece, which can be mapped."""
        return self.room.take(nbytes, whole=True)

    def tensor_at(self, slot: Slot[tuple[Range, ...]]) -> Tensor:
        """Maps a slot of the file."""
        (extent,) = slot.allocation
        return self._file.mapped(extent.start, slot.nbytes, slot)


def _close(lanes: Iterable[Lane]) -> None:
    for lane in lanes:
        lane.close()


def _begin(
    kind: type[_Transfer], lane: Lane, file: ScratchFile, tensor: Tensor, slot: Slot[tuple[Range, ...]]
) -> Ticket:
    job = kind(tensor.untyped_storage(), slot, tensor.data_ptr(), slot.nbytes)
    job.file = file
    lane.submit(job)
    return job


class _Transfer(Job):
    file: ScratchFile
    """The file, which stays open until the copy has ended, even if the tier is gone."""
    doing: str

    def transfer(self, slot: Slot[tuple[Range, ...]]) -> TierError | None:
        data = bytes_at(self.address, self.nbytes)
        try:
            for start, stop in slot.allocation:
                self.move(data[: stop - start], start)
                data = data[stop - start :]
        except OSError as error:
            return self.file.failed(error, self.doing, self.nbytes)
        return None

    def move(self, data: memoryview, start: int) -> None:
        raise NotImplementedError


class _Write(_Transfer):
    doing = "writing"

    def move(self, data: memoryview, start: int) -> None:
        self.file.write(data, start)


class _Read(_Transfer):
    doing = "reading"

    def move(self, data: memoryview, start: int) -> None:
        self.file.read(data, start)
