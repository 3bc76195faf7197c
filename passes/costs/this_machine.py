"""Describes the machine that this runs on: measured, stored beside other measurements, and found again."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...ir import UsageError, check_scratch, first_line, format_bytes
from ...ir.files import write_whole
from .machines import Machine, read_machine
from .measure_device import device_bytes, launch_seconds, memory_bandwidth, present_device, product_flops
from .measure_tiers import MeasuredTier, measured_tier, tier_bytes
from .profiling import ProfileStore, device_name

__all__ = ["MeasuredMachine", "measure_machine", "store", "this_machine"]

DEFAULT_NAME = "this-machine"
_DEVICE_SHARE, _TIER_SHARE = 0.1, 0.3
_FULL_SECONDS, _QUICK_SECONDS = 18.0, 3.0


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """A machine as it was measured.

    Args:
        machine: The machine for plans.
        device: The name of its device.
        free_bytes: The memory of the device that was free.
        tiers: The tiers as they were measured.
        seconds: The time that this took.
    """

    machine: Machine
    device: str
    free_bytes: int
    tiers: tuple[MeasuredTier, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The description of the machine, with what else was measured as its entry `measured`."""
        measured = {
            "device": self.device,
            "torch": torch.__version__,
            "free_bytes": self.free_bytes,
            "seconds": self.seconds,
            "tiers": {found.tier.name: found.to_json() for found in self.tiers},
        }
        return {**self.machine.to_json(), "measured": measured}

    def table(self) -> str:
        """Prints the machine for a person."""
        machine = self.machine
        lines = [
            f"{'machine':>10}  {machine.name}: {self.device}",
            f"{'computes':>10}  {_scaled(machine.flops)}FLOP/s (a float32 matrix product), "
            f"an operation takes {machine.launch_seconds * 1e6:.3g} us beside its work",
            f"{'memory':>10}  {_scaled(machine.bandwidth_bytes)}B/s, {format_bytes(machine.capacity_bytes)}, "
            f"of them {format_bytes(self.free_bytes)} free",
            "",
        ]
        header = ("tier", "out", "in", "out alone", "in alone", "latency", "capacity", "computing slows by")
        rows = [header, *map(_row, self.tiers)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines += ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        lines.append("out and in are beside computations, as plans use them; alone is with an idle device")
        if machine.tier("host") is None:
            lines.append("no tier host: the device's memory is the host's")
        for found in self.tiers:
            if found.folder:
                lines.append(f"{found.tier.name}: {found.folder} ({found.filesystem})")
            lines += [f"note: {note}" for note in found.notes]
        return "\n".join(lines)


def measure_machine(
    device: str = "", scratch: str | Path = "", *, name: str = "", quick: bool = False
) -> MeasuredMachine:
    """Measures this machine, in under 30 seconds, or under 5 if quick. It should have nothing else to do.

    Args:
        device: A device such as `cpu` or `cuda:0`; if empty a GPU if there is one.
        scratch: The folder of the disk's scratch file; the system's folder for temporary files if empty.
        name: The name of the machine; `this-machine` if empty.
        quick: Whether to measure less.

    Raises:
        UsageError: IRC419 when something cannot be measured here; IRC427 or IRC428 for the folder.
    """
    folder = Path(scratch or tempfile.gettempdir()).absolute()
    check_scratch(folder)
    torch_device = present_device(device)
    started = time.perf_counter()
    seconds = _QUICK_SECONDS if quick else _FULL_SECONDS
    share = _DEVICE_SHARE * seconds
    try:
        with torch.no_grad():
            flops = product_flops(torch_device, share)
            bandwidth_bytes = memory_bandwidth(torch_device, share)
            launching = launch_seconds(torch_device, share)
            total_bytes, free_bytes = device_bytes(torch_device)
    except RuntimeError as error:
        raise UsageError(
            "IRC419",
            f"{torch_device} cannot be measured: {first_line(error)}",
            help="free some of its memory",
        ) from error
    kinds = ("host", "disk") if torch_device.type == "cuda" else ("disk",)
    tiers = tuple(measured_tier(kind, folder, torch_device, _TIER_SHARE * seconds) for kind in kinds)
    machine = Machine(
        name=name or DEFAULT_NAME,
        flops=flops,
        bandwidth_bytes=bandwidth_bytes,
        launch_seconds=launching,
        capacity_bytes=total_bytes,
        tiers=tuple(found.tier for found in tiers),
    )
    took = time.perf_counter() - started
    return MeasuredMachine(machine, device_name(str(torch_device)), free_bytes, tiers, took)


def store(measured: MeasuredMachine, path: Path | None = None) -> Path:
    """Writes the description of a machine; without a path to where `this_machine` finds it.

    Raises:
        UsageError: IRC435 when it cannot be written.
    """
    if path is None:
        path = _stored(measured.device)
        with contextlib.suppress(OSError):  # writing the file will say what is wrong
            path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(measured.to_json(), indent=1) + "\n")
    return path


def _stored(device: str) -> Path:
    """The path of this machine's description with a device of that name: beside measured operations."""
    plain = "".join(c if c.isalnum() or c in ".-" else "-" for c in device)
    folder = ProfileStore.default().folder
    assert folder is not None, "the user's store has a folder"
    return folder / f"machine-{plain}.json"


def this_machine(device: str, folder: str | Path = "") -> Machine | None:
    """Reads this machine as `irc machine` last measured it with that device; None if it has not.

    The tiers' capacities are what is free now. The disk is left out if `folder` is on another file system
    than the one that was measured.

    Args:
        device: The device of the model, such as `cpu` or `cuda:0`.
        folder: The folder of scratch files; the system's folder for temporary files if empty.

    Raises:
        UsageError: IRC414 to IRC418 when the stored description cannot be read.
    """
    path = _stored(device_name(device))
    if not path.is_file():
        return None
    machine = read_machine(path)
    wanted = Path(folder or tempfile.gettempdir())
    tiers = [
        replace(tier, capacity_bytes=tier_bytes(tier.name, wanted))
        for tier in machine.tiers
        if tier.name != "disk" or _measured_on(path, wanted)
    ]
    return replace(machine, tiers=tuple(tiers))


def _measured_on(path: Path, wanted: Path) -> bool:
    """Whether the disk that a description was measured on has the folder `wanted`."""
    try:
        measured = json.loads(path.read_text())["measured"]["tiers"]["disk"]["folder"]
        return Path(measured).stat().st_dev == wanted.stat().st_dev
    except (OSError, LookupError, TypeError):
        return False  # the folder is gone, or somebody wrote the file by hand


def _row(found: MeasuredTier) -> tuple[str, ...]:
    tier = found.tier
    rates = (tier.out_bytes_per_second, tier.in_bytes_per_second, found.out_alone, found.in_alone)
    return (
        tier.name,
        *(f"{_scaled(rate)}B/s" for rate in rates),
        f"{tier.latency_seconds * 1e6:.3g} us",
        format_bytes(tier.capacity_bytes),
        f"{max(found.out_slowdown, found.in_slowdown):.2f}x",
    )


def _scaled(number: float) -> str:
    """A number with a decimal prefix: `1.25 G`."""
    for prefix in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} T"
