"""A scratch file. It is unlinked at once, so it disappears when the process exits, even after a crash."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from ....ir import TierError, format_bytes
from .extents import Extents, Range, in_pages
from .slots import Room

__all__ = ["ScratchFile", "ScratchRoom"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@functools.cache
def _system() -> ctypes.CDLL:
    """Loads the system's own mmap: Python's keeps one of the process's few open files for each mapping."""
    found = ctypes.CDLL(None, use_errno=True)
    size, number = ctypes.c_size_t, ctypes.c_int
    found.mmap.argtypes = (ctypes.c_void_p, size, number, number, number, ctypes.c_int64)
    found.mmap.restype = ctypes.c_void_p
    found.munmap.argtypes = (ctypes.c_void_p, size)
    return found


def _unmap(address: int, nbytes: int, holder: object) -> None:
    _system().munmap(address, nbytes)


class ScratchFile:
    """An open, unlinked file, which is closed when nobody refers to it any more.

    Args:
        folder: The folder of the file; None is the system's folder for temporary files.
        uses_page_cache: As in `DiskTierConfig`.

    Raises:
        TierError: IRC571 if no file can be made in the folder; IRC579 if the system cannot read and write at
            an offset.
    """

    def __init__(self, folder: str | None, *, uses_page_cache: bool = True) -> None:
        self.number = -1
        self._drops = not uses_page_cache and hasattr(os, "posix_fadvise")
        if not (hasattr(os, "preadv") and hasattr(os, "pwritev")):
            raise TierError(
                "IRC579",
                "this system has no preadv and pwritev, by which tensors are copied to a disk",
                help="plan without a disk tier",
            )
        try:
            self.folder = folder if folder is not None else tempfile.gettempdir()
            with tempfile.TemporaryFile(dir=folder, prefix="irc-", buffering=0) as made:
                self.number = os.dup(made.fileno())
        except OSError as error:
            shown = folder if folder is not None else "the folder for temporary files"
            raise TierError(
                "IRC571",
                f"no scratch file can be made in {shown}: {error.strerror or error}",
                help="give the disk tier a folder that exists and that you may write to",
            ) from error

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit modules are empty
        if self.number >= 0:
            close(self.number)

    def reserve(self, start: int, nbytes: int) -> None:
        """Reserves bytes on the disk, so that copies do not find it full.

        If the file system cannot reserve, the copy that meets a full disk fails.

        Raises:
            TierError: IRC570 if the disk is full; IRC572 if it fails in another way.
        """
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.number, start, nbytes)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise self.failed(error, "reserving", nbytes) from error

    def mapped(self, start: int, nbytes: int, holder: object) -> Tensor:
        """Maps bytes of the file as a tensor of the host's memory.

        Args:
            start: The first byte.
            nbytes: The number of bytes.
            holder: An object that must exist as long as the tensor does.

        Raises:
            TierError: IRC570 if the disk is full; IRC572 if the file cannot be mapped.
        """
        first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = start + nbytes - first
        try:
            if os.fstat(self.number).st_size < start + nbytes:  # if nothing was reserved
                os.pwrite(self.number, b"\0", start + nbytes - 1)
            access = mmap.PROT_READ | mmap.PROT_WRITE
            address = _system().mmap(None, length, access, mmap.MAP_SHARED, self.number, first)
            if address == ctypes.c_void_p(-1).value:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
        except OSError as error:
            raise self.failed(error, "mapping", nbytes) from error
        memory = (ctypes.c_char * length).from_address(address)
        weakref.finalize(memory, _unmap, address, length, holder).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start - first)

    def write(self, data: memoryview, start: int) -> None:
        """Writes all of `data`.

        Raises:
            OSError: As the system says.
        """
        offset = start
        while data:
            done = os.pwritev(self.number, [data], offset)  # the system ends one call at 2 GiB
            if not done:
                raise OSError(errno.EIO, f"nothing more is written at byte {offset}")
            data, offset = data[done:], offset + done
        self._let_go(start, offset - start)

    def read(self, data: memoryview, start: int) -> None:
        """Fills all of `data`.

        Raises:
            OSError: As the system says; EIO if the file ends too early.
        """
        offset = start
        while data:
            done = os.preadv(self.number, [data], offset)
            if not done:
                raise OSError(errno.EIO, f"the file ends at byte {offset}, {len(data)} B too early")
            data, offset = data[done:], offset + done
        self._let_go(start, offset - start)

    def _let_go(self, start: int, nbytes: int) -> None:
        """Drops written pages from the page cache, and begins to write the others to the disk."""
        if self._drops:
            os.posix_fadvise(self.number, start, nbytes, os.POSIX_FADV_DONTNEED)

    def failed(self, error: OSError, doing: str, nbytes: int) -> TierError:
        """Makes the user's error of an error of the system."""
        failure = f"{doing} {format_bytes(nbytes)} in a scratch file in {self.folder} failed"
        if error.errno in _FULL:
            return TierError(
                "IRC570",
                f"{failure}: {error.strerror}",
                help="make room there, give the disk tier another folder, or plan with a larger budget",
            )
        return TierError(
            "IRC572",
            f"{failure}: {error.strerror or error}",
            help="see that the disk is in order, or give the disk tier another folder, and repeat the step",
        )


class ScratchRoom(Room[tuple[Range, ...]]):
    """Slots in a scratch file, which grows on demand and is used again from step to step.

    Args:
        name: The name of the tier.
        capacity_bytes: The most that slots may take, before each is rounded up to whole pages.
        file: The file.
    """

    def __init__(self, name: str, capacity_bytes: int, file: ScratchFile) -> None:
        super().__init__(name, capacity_bytes)
        self.file = file
        self.extents = Extents()

    def _prepare(self, nbytes: int, count: int) -> None:
        self._ensure(in_pages(nbytes) + count * in_pages(1))

    def _take(self, nbytes: int) -> tuple[Range, ...]:
        self._ensure(in_pages(nbytes))
        return self.extents.take(nbytes)

    def _take_whole(self, nbytes: int) -> tuple[Range, ...]:
        if all(stop - start < in_pages(nbytes) for start, stop in self.extents.free):
            self._grow(in_pages(nbytes))
        return self.extents.take(nbytes)

    def _ensure(self, nbytes: int) -> None:
        missing = nbytes - self.extents.free_bytes
        if missing > 0:
            self._grow(missing)

    def _grow(self, nbytes: int) -> None:
        self.file.reserve(self.extents.size_bytes, nbytes)
        self.extents.grow(nbytes)

    def _give_back(self, allocation: tuple[Range, ...]) -> None:
        self.extents.give_back(allocation)
