"""Measures the tiers beside a device: copies to pinned memory and to a file, alone and beside computations.

Plans use the figures beside computations, since that is when copies run.

A file is measured as the disk behind it, not as the page cache before it. A write counts until `fdatasync`
has returned. Before a read the cache is told to drop the file (`POSIX_FADV_DONTNEED`), and asked afterwards
whether it does (`RWF_NOWAIT`). The cache within a drive, or of a virtual machine's host, cannot be passed by
without an administrator's rights. The scratch file is rewritten in place, as that of a plan is. The latency
is that of small copies: a read from the disk or a write handed to the kernel, whichever takes longer.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ...ir import TIER_KINDS, Tier, UsageError, check_scratch
from .measure_device import Product, busy, free_host_bytes, present_device, several

__all__ = [
    "Copies",
    "MeasuredTier",
    "filesystem_of",
    "measure_copies",
    "measure_tier",
    "measured_tier",
    "tier_bytes",
]

_PROBE_BYTES = 4 << 20
_LARGEST_BLOCK_BYTES = 256 << 20
_BLOCK_SECONDS = 0.1
_SMALL_BYTES = 4096
_SMALL_COPIES = 40
_HOST_BLOCK_BYTES = 64 << 20
_DUPLEX_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class MeasuredTier:
    """A tier as it was measured.

    Args:
        tier: The tier for plans, with rates beside computations.
        out_alone: Bytes a second from the device while it computes nothing.
        in_alone: Bytes a second to the device while it computes nothing.
        out_slowdown: The factor by which computations take longer while copies go out.
        in_slowdown: The factor by which they take longer while copies come in.
        folder: The folder of the file; empty for the host's memory.
        filesystem: The file system of the folder, such as `ext4`.
        notes: Remarks for a reader of the figures.
    """

    tier: Tier
    out_alone: float
    in_alone: float
    out_slowdown: float
    in_slowdown: float
    folder: str = ""
    filesystem: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The facts that a description of the machine does not have, as JSON-ready data."""
        return {
            "out_bytes_per_second_alone": self.out_alone,
            "in_bytes_per_second_alone": self.in_alone,
            "compute_slowdown_beside_out": self.out_slowdown,
            "compute_slowdown_beside_in": self.in_slowdown,
            "folder": self.folder,
            "filesystem": self.filesystem,
            "notes": list(self.notes),
        }


def measure_tier(kind: str, folder: str | Path = "", *, device: str = "", seconds: float = 1.0) -> Tier:
    """Measures one tier of this machine in a second or two.

    Args:
        kind: `host` or `disk`.
        folder: The folder of a disk's scratch file; the system's folder for temporary files if empty.
        device: A device such as `cpu` or `cuda:0`; if empty a GPU if there is one.
        seconds: The time to measure for, about.

    Raises:
        UsageError: IRC419 when the tier cannot be measured here; IRC427 or IRC428 for the folder.
    """
    return measured_tier(kind, folder, present_device(device), seconds).tier


def measured_tier(kind: str, folder: str | Path, device: torch.device, seconds: float) -> MeasuredTier:
    """Measures one tier of this machine, beside computations and alone.

    Args:
        kind: `host` or `disk`.
        folder: The folder of a disk, as for `measure_tier`.
        device: The device that computes, and that the host's memory is beside.
        seconds: The time to measure for, about.

    Raises:
        UsageError: The errors of `measure_tier`.
    """
    if kind not in TIER_KINDS:
        raise UsageError(
            "IRC419", f"a tier {kind!r} cannot be measured", help=f"tiers: {', '.join(TIER_KINDS)}"
        )
    try:
        with torch.no_grad():
            if kind == "disk":
                return _measured_disk(Path(folder or tempfile.gettempdir()).absolute(), device, seconds)
            return _measured_host(device, seconds)
    except (OSError, RuntimeError) as error:
        raise UsageError(
            "IRC419",
            f"the tier {kind} cannot be measured: {str(error).splitlines()[0]}",
            help="free memory or disk space, or name another folder",
        ) from error


def tier_bytes(kind: str, folder: str | Path = "") -> int:
    """The bytes that a tier could hold now: free memory of the host, or free bytes of the folder."""
    return free_host_bytes() if kind == "host" else shutil.disk_usage(folder or tempfile.gettempdir()).free


class Copies(Protocol):
    """Copies of one size, each of which returns its seconds."""

    @property
    def nbytes(self) -> int:
        """The bytes of a copy."""
        ...

    def out(self) -> float:
        """Copies from the device."""
        ...

    def back(self) -> float:
        """Copies to the device."""
        ...


def measure_copies(
    tier: Tier, copies: Copies, device: torch.device, seconds: float, folder: str = "", filesystem: str = ""
) -> MeasuredTier:
    """Measures the rates of a tier: out and back, alone and beside computations.

    Args:
        tier: The tier; its rates count for nothing.
        copies: Copies to and from it.
        device: The device that computes beside them.
        seconds: The time to measure for, about.
        folder: As in `MeasuredTier`.
        filesystem: As in `MeasuredTier`.
    """
    product = Product(device)
    copies.out()
    copies.back()
    share = seconds / 5
    product_seconds = statistics.median(several(product.seconds, share))
    alone: list[float] = []
    beside: list[float] = []
    slowdown: list[float] = []
    for copy in (copies.out, copies.back):
        alone.append(copies.nbytes / statistics.median(several(copy, share)))
        with busy(product) as products:
            beside.append(copies.nbytes / statistics.median(several(copy, share)))
        slowdown.append(statistics.median(products) / product_seconds)
    return MeasuredTier(
        replace(tier, out_bytes_per_second=beside[0], in_bytes_per_second=beside[1]),
        out_alone=alone[0],
        in_alone=alone[1],
        out_slowdown=slowdown[0],
        in_slowdown=slowdown[1],
        folder=folder,
        filesystem=filesystem,
    )


# ---------------------------------------------------------------------- disk


def _measured_disk(folder: Path, device: torch.device, seconds: float) -> MeasuredTier:
    check_scratch(folder)
    filesystem = filesystem_of(folder)
    with _ScratchFile(folder, min(seconds / 20, _BLOCK_SECONDS)) as file:
        latency_seconds = max(file.small_read_seconds(), file.small_write_seconds())
        tier = Tier("disk", 0, 1.0, 1.0, latency_seconds, is_duplex=False)
        found = measure_copies(tier, file, device, seconds, str(folder), filesystem)
        notes = file.notes(filesystem)
    tier = replace(found.tier, capacity_bytes=tier_bytes("disk", folder))
    return replace(found, tier=tier, notes=notes)


class _ScratchFile:
    """A file without a name, which is written and read block by block past the page cache.

    Args:
        folder: The folder that it is in.
        block_seconds: The time that a block should take, about.
    """

    def __init__(self, folder: Path, block_seconds: float) -> None:
        self.folder = folder
        self.block_seconds = block_seconds
        self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115, it is closed by __exit__
        self.number = self.file.fileno()
        self.content = memoryview(random.Random(0).randbytes(_PROBE_BYTES))
        self.nbytes = _PROBE_BYTES
        self.target = memoryview(bytearray(_PROBE_BYTES))

    def __enter__(self) -> _ScratchFile:
        try:
            self.out()
            wanted_bytes = int(_PROBE_BYTES / self.out() * self.block_seconds)
            free_bytes = shutil.disk_usage(self.folder).free
            limit_bytes = min(_LARGEST_BLOCK_BYTES, free_bytes // 4, free_host_bytes() // 8)
            count = max(min(wanted_bytes, limit_bytes) // _PROBE_BYTES, 1)
            # bytes that drives cannot compress, at least within four MiB
            self.content = memoryview(bytes(self.content) * count)
            self.nbytes = len(self.content)
            self.target = memoryview(bytearray(self.nbytes))
            self.out()
        except BaseException:
            self.file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def out(self) -> float:
        """Writes the block, and waits until the disk has it; returns the seconds that it took."""
        start = time.perf_counter()
        written = 0
        while written < self.nbytes:
            written += os.pwrite(self.number, self.content[written:], written)
        _synchronize(self.number)
        return time.perf_counter() - start

    def back(self) -> float:
        """Reads the block from the disk; returns the seconds that it took."""
        self._forget()
        start = time.perf_counter()
        read = 0
        while read < self.nbytes:
            count = os.preadv(self.number, [self.target[read:]], read)
            if not count:
                raise OSError(f"the scratch file in {self.folder} ended after {read} of {self.nbytes} bytes")
            read += count
        return time.perf_counter() - start

    def small_read_seconds(self) -> float:
        """The median time of reading a few bytes from the disk."""
        self._forget(at_random=True)
        offsets = iter(self._small_offsets())
        target = memoryview(bytearray(_SMALL_BYTES))

        def read() -> float:
            offset = next(offsets)
            start = time.perf_counter()
            os.preadv(self.number, [target], offset)
            return time.perf_counter() - start

        return statistics.median(read() for _ in range(_SMALL_COPIES))

    def small_write_seconds(self) -> float:
        """The median time of handing a few bytes to the kernel."""

        def write(offset: int) -> float:
            start = time.perf_counter()
            os.pwrite(self.number, self.content[:_SMALL_BYTES], offset)
            return time.perf_counter() - start

        return statistics.median(write(offset) for offset in self._small_offsets())

    def notes(self, filesystem: str) -> tuple[str, ...]:
        """The known objections to the figures."""
        if filesystem in _IN_MEMORY:
            return (f"{self.folder} is {filesystem}: its bytes are the host's memory, not a disk",)
        self.out()
        self._forget()
        cached = self._is_cached()
        if cached is None:
            return ("whether the page cache was passed by cannot be told here; reads may be too fast",)
        return ("the page cache kept the file: reads are from memory, in part",) if cached else ()

    def _small_offsets(self) -> list[int]:
        draw = random.Random(1)
        return [draw.randrange(self.nbytes // _SMALL_BYTES) * _SMALL_BYTES for _ in range(_SMALL_COPIES)]

    def _forget(self, *, at_random: bool = False) -> None:
        """Lets the page cache drop the file, and read ahead in it or not."""
        if not hasattr(os, "posix_fadvise"):
            return
        os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM if at_random else os.POSIX_FADV_SEQUENTIAL)

    def _is_cached(self) -> bool | None:
        """Whether the file is in the page cache, at one of many offsets; None if nothing says so."""
        flag = getattr(os, "RWF_NOWAIT", None)
        if flag is None:
            return None
        target = memoryview(bytearray(1))
        for offset in self._small_offsets():
            try:
                os.preadv(self.number, [target], offset, flag)
            except BlockingIOError:
                continue
            except OSError:
                return None
            return True
        return False


_IN_MEMORY = ("tmpfs", "ramfs")


def _synchronize(number: int) -> None:
    getattr(os, "fdatasync", os.fsync)(number)


def filesystem_of(folder: str | Path) -> str:
    """The kind of file system that a folder is on, such as `ext4`; `unknown` if nothing says so."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    kinds = [line.split(" - ", 1)[1].split()[0] for line in lines if line.split()[2] == number]
    return kinds[-1] if kinds else "unknown"


# ---------------------------------------------------------------------- host


def _measured_host(device: torch.device, seconds: float) -> MeasuredTier:
    if device.type != "cuda":
        raise UsageError(
            "IRC419",
            f"the memory of {device} is the host's; there is no tier host beside it",
            help="swap to a disk, as disk:/scratch; or plan for a described machine, such as gtx1080",
        )
    with torch.cuda.device(device):
        copies = _PinnedCopies(device)
        tier = Tier("host", tier_bytes("host"), 1.0, 1.0, copies.small_seconds(), copies.is_duplex())
        return measure_copies(tier, copies, device, seconds)


class _PinnedCopies:
    """Copies between a GPU and pinned memory of the host, each direction on a stream of its own.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        free_bytes = min(torch.cuda.mem_get_info(device)[0], free_host_bytes())
        self.nbytes = max(min(_HOST_BLOCK_BYTES, free_bytes // 16), 1 << 20)
        self.on_host = [torch.zeros(self.nbytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
        self.on_device = [torch.zeros(self.nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self.streams = [torch.cuda.Stream(device) for _ in range(2)]
        torch.cuda.synchronize(device)

    def out(self) -> float:
        """Copies from the device; returns the seconds that it took."""
        return self._seconds(0, self.nbytes)

    def back(self) -> float:
        """Copies to the device; returns the seconds that it took."""
        return self._seconds(1, self.nbytes)

    def small_seconds(self) -> float:
        """The median time of copying a few bytes, in the slower direction."""
        return max(
            statistics.median(self._seconds(way, _SMALL_BYTES) for _ in range(_SMALL_COPIES))
            for way in (0, 1)
        )

    def is_duplex(self) -> bool:
        """Whether a copy each way at once takes clearly less than one after the other."""
        each = sum(statistics.median(self._seconds(way, self.nbytes) for _ in range(5)) for way in (0, 1))
        both: list[float] = []
        for _ in range(5):
            events = [self._copied(way, self.nbytes) for way in (0, 1)]
            for _, end in events:
                end.synchronize()
            # from the first that began to the last that ended
            both.append(max(start.elapsed_time(end) for start, _ in events for _, end in events) / 1000)
        return statistics.median(both) < _DUPLEX_SHARE * each

    def _seconds(self, way: int, nbytes: int) -> float:
        start, end = self._copied(way, nbytes)
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def _copied(self, way: int, nbytes: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Begins a copy; returns the events around it."""
        stream = self.streams[way]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        host, device = self.on_host[way][:nbytes], self.on_device[way][:nbytes]
        target, source = (host, device) if way == 0 else (device, host)
        with torch.cuda.stream(stream):
            start.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        return start, end
