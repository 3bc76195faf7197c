"""The configs of tiers: where the tiers of a plan are on this machine. Nothing is open yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["DiskTierConfig", "FakeTierConfig", "HostTierConfig", "TierConfig", "TierPlace"]


@dataclass(frozen=True, slots=True)
class DiskTierConfig:
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

    name: str
    capacity_bytes: int
    folder: str | None = None
    checks: bool = False
    uses_page_cache: bool = True
    is_duplex: bool = True


@dataclass(frozen=True, slots=True)
class HostTierConfig:
    """Pinned memory of the host, for models on CUDA; the arguments are those of `DiskTierConfig`."""

    kind: ClassVar[str] = "host"

    name: str
    capacity_bytes: int
    checks: bool = False


@dataclass(frozen=True, slots=True)
class FakeTierConfig:
    """A tier for tests: copies are made late, and memory that must not be read meanwhile is overwritten.

    Args:
        name: As in `DiskTierConfig`.
        capacity_bytes: As in `DiskTierConfig`.
        checks: As in `DiskTierConfig`.
        seed: The seed of the times at which copies are made.
        is_late: Make each copy at its own `Wait` and not before it.
    """

    kind: ClassVar[str] = "fake-async"

    name: str
    capacity_bytes: int
    checks: bool = False
    seed: int = 0
    is_late: bool = False


TierConfig = DiskTierConfig | HostTierConfig | FakeTierConfig

TierPlace = TierConfig
