"""Machines: the rates at which a device computes and moves bytes, and the memory tiers beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from ...ir import Tier, UsageError, load_plugin, plugins

__all__ = ["FORMAT", "MACHINES", "Machine", "machine_named", "read_machine"]

FORMAT = "irc-machine-1"
"""The format that files of machines name."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A device, as the roofline model sees it (Williams, Waterman, Patterson 2009), and the tiers beside it.

    Args:
        name: The name on the command line.
        flops: The sustained floating-point operations a second, in 32 bits.
        bandwidth_bytes: The sustained bytes a second between the device and its memory.
        launch_seconds: The fixed time of an operation.
        capacity_bytes: The memory of the device; 0 if it is unknown.
        tiers: The tiers that storages can be copied to, each under another name.
        half_flops: The same in 16 bits, by matrix units; 0 if it has none: then they are those in 32 bits.
        product_workspace_bytes: The most that a product of matrices takes for itself; 0 if it may copy them.
    """

    name: str
    flops: float
    bandwidth_bytes: float
    launch_seconds: float
    capacity_bytes: int = 0
    tiers: tuple[Tier, ...] = ()
    half_flops: float = 0.0
    product_workspace_bytes: int = 0

    def seconds(self, flops: float, nbytes: int, *, is_half: bool = False) -> float:
        """The time of an operation that computes `flops`, in 16 bits if it `is_half`, and moves `nbytes`."""
        rate = self.half_flops if is_half and self.half_flops else self.flops
        return self.launch_seconds + max(flops / rate, nbytes / self.bandwidth_bytes)

    def tier(self, name: str) -> Tier | None:
        """The tier of that name; None if the machine has none."""
        return next((tier for tier in self.tiers if tier.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """The machine as JSON-ready data, with units in the names of the fields."""
        return {
            "format": FORMAT,
            "name": self.name,
            "flops_per_second": self.flops,
            **{key: getattr(self, name) for key, name in _OPTIONAL_FIELDS.items() if getattr(self, name)},
            "memory_bytes_per_second": self.bandwidth_bytes,
            "launch_seconds": self.launch_seconds,
            "capacity_bytes": self.capacity_bytes,
            "tiers": [{f.name: getattr(tier, f.name) for f in fields(tier)} for tier in self.tiers],
        }

    @staticmethod
    def from_json(data: object, source: str = "the machine") -> Machine:
        """Reads the machine that `to_json` wrote; an entry `measured` may hold anything.

        Args:
            data: The data that was read.
            source: The name of the data in errors, such as the path of a file.

        Raises:
            UsageError: IRC415 when it is not a description of a machine; IRC416 for an entry that is missing
                or unknown; IRC417 for a value that cannot be; IRC418 for two tiers of one name.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise UsageError(
                "IRC415",
                f"{source} is not a description of a machine",
                help=f'give a file that irc machine -o FILE wrote; it says "format": "{FORMAT}"',
            )
        entries = cast("dict[str, Any]", data)
        rows = {key: entry for key, entry in entries.items() if key not in ("format", "measured")}
        more = {key: rows.pop(key, 0) for key in _OPTIONAL}
        _check(more, _OPTIONAL, source)
        _check(rows, _MACHINE, source)
        if not rows["name"].isprintable() or len(rows["name"]) > _LONGEST_NAME:
            raise UsageError(
                "IRC417",
                f"name of {source} is {rows['name']!r:.60}",
                help=f"give a text of up to {_LONGEST_NAME} characters that can be printed",
            )
        tiers: list[Tier] = []
        for index, row in enumerate(cast("list[object]", rows["tiers"])):
            place = f"tier {index + 1} of {source}"
            if not isinstance(row, dict):
                raise UsageError(
                    "IRC417", f"{place} is {row!r}", help="give an object with the tier's figures"
                )
            given = cast("dict[str, Any]", row)
            _check(given, _TIER, place)
            tiers.append(Tier(**{key: _TIER[key].read(entry) for key, entry in given.items()}))
        names = [tier.name for tier in tiers]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(
                    "IRC418",
                    f"{source} has two tiers called {name!r}",
                    help="give each tier a name of its own",
                )
        return Machine(
            name=rows["name"],
            flops=float(rows["flops_per_second"]),
            bandwidth_bytes=float(rows["memory_bytes_per_second"]),
            launch_seconds=float(rows["launch_seconds"]),
            capacity_bytes=rows["capacity_bytes"],
            tiers=tuple(tiers),
            **{_OPTIONAL_FIELDS[key]: _OPTIONAL[key].read(entry) for key, entry in more.items()},
        )


# ---------------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class _Entry:
    """The types and limits of an entry of a file."""

    kind: type
    least: float = 0.0
    is_above: bool = False
    most: float = 1e30

    @property
    def wanted(self) -> str:
        if self.kind in (str, bool, list):
            return {str: "a text that is not empty", bool: "true or false", list: "a list"}[self.kind]
        number = "a whole number" if self.kind is int else "a number"
        return f"{number} {'above' if self.is_above else 'not below'} {self.least:g}, at most {self.most:g}"

    def is_met(self, entry: object) -> bool:
        if isinstance(entry, bool) or self.kind is bool:
            return isinstance(entry, bool) and self.kind is bool
        if self.kind is str:
            return isinstance(entry, str) and bool(entry)
        if self.kind is list:
            return isinstance(entry, list)
        if not isinstance(entry, int if self.kind is int else int | float):
            return False
        # an integer of hundreds of digits is not a float
        if isinstance(entry, int) and abs(entry) > 1 << 100:
            return False
        number = float(entry)
        return (number > self.least if self.is_above else number >= self.least) and number <= self.most

    def read(self, entry: Any) -> Any:
        return float(entry) if self.kind is float else entry


_LONGEST_NAME = 64
_RATE = _Entry(float, least=1e-6, is_above=True)
_SECONDS = _Entry(float, most=1e6)
_MACHINE: Mapping[str, _Entry] = {
    "name": _Entry(str),
    "flops_per_second": _RATE,
    "memory_bytes_per_second": _RATE,
    "launch_seconds": _SECONDS,
    "capacity_bytes": _Entry(int),
    "tiers": _Entry(list),
}
_OPTIONAL: Mapping[str, _Entry] = {
    "half_flops_per_second": _Entry(float),
    "product_workspace_bytes": _Entry(int),
}
"""Entries that may be missing, which is the same as 0."""

_OPTIONAL_FIELDS = {
    "half_flops_per_second": "half_flops",
    "product_workspace_bytes": "product_workspace_bytes",
}
_TIER: Mapping[str, _Entry] = {
    "name": _Entry(str),
    "capacity_bytes": _Entry(int),
    "out_bytes_per_second": _RATE,
    "in_bytes_per_second": _RATE,
    "latency_seconds": _SECONDS,
    "is_duplex": _Entry(bool),
}


def _check(given: Mapping[str, object], entries: Mapping[str, _Entry], source: str) -> None:
    """Refuses other entries, and values that cannot be."""
    missing = [key for key in entries if key not in given]
    unknown = [key for key in given if key not in entries]
    if missing or unknown:
        faults = [f"no entry {key!r}" for key in missing] + [f"an unknown entry {key!r}" for key in unknown]
        raise UsageError(
            "IRC416", f"{source} has {' and '.join(faults)}", help=f"give {', '.join(entries)}, and no others"
        )
    for key, entry in entries.items():
        if not entry.is_met(given[key]):
            raise UsageError(
                "IRC417", f"{key} of {source} is {given[key]!r:.60}", help=f"give {entry.wanted}"
            )


def read_machine(path: Path) -> Machine:
    """Reads the machine that a file describes.

    Raises:
        UsageError: IRC414 when the file cannot be read; else the errors of `Machine.from_json`.
    """
    help = "give the path of a file that irc machine -o FILE wrote"
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UsageError("IRC414", f"{path} cannot be read: it is not a file", help=help)
        data = json.loads(path.read_text())
    except OSError as error:
        raise UsageError("IRC414", f"{path} cannot be read: {error.strerror}", help=help) from error
    except (ValueError, RecursionError) as error:
        raise UsageError("IRC414", f"{path} is not JSON: {error}", help=help) from error
    return Machine.from_json(data, str(path))


# ---------------------------------------------------------------------- described machines


def _nvme(capacity_bytes: int, out_bytes_per_second: float, in_bytes_per_second: float) -> Tier:
    return Tier("disk", capacity_bytes, out_bytes_per_second, in_bytes_per_second, 1e-4, is_duplex=False)


def _pcie(capacity_bytes: int, bytes_per_second: float) -> Tier:
    return Tier("host", capacity_bytes, bytes_per_second, bytes_per_second, 1e-5)


_CUBLAS_BYTES = 8_519_680
_CUBLAS_BYTES_OF_HOPPER = 32 << 20
"""The workspaces that torch gives to cuBLAS."""

_DESCRIBED: Sequence[Machine] = (
    Machine("cpu", 60e9, 8e9, 5e-6, 0, (_nvme(200 << 30, 1.0e9, 2.0e9),)),
    Machine(
        "gtx1080",
        7.1e12,
        256e9,
        5e-6,
        8 << 30,
        (_pcie(64 << 30, 12e9), _nvme(500 << 30, 1.5e9, 2.8e9)),
        product_workspace_bytes=_CUBLAS_BYTES,
    ),
    Machine(
        "gtx1080ti",
        9.1e12,
        387e9,
        5e-6,
        11 << 30,
        (_pcie(64 << 30, 12e9), _nvme(500 << 30, 1.5e9, 2.8e9)),
        product_workspace_bytes=_CUBLAS_BYTES,
    ),
    Machine(
        "p40",
        9.4e12,
        277e9,
        5e-6,
        24 << 30,
        (_pcie(64 << 30, 12e9), _nvme(500 << 30, 1.5e9, 2.8e9)),
        product_workspace_bytes=_CUBLAS_BYTES,
    ),
    Machine(
        "v100",
        12.5e12,
        720e9,
        5e-6,
        16 << 30,
        (_pcie(64 << 30, 12e9), _nvme(1 << 40, 1.5e9, 2.8e9)),
        half_flops=100e12,
        product_workspace_bytes=_CUBLAS_BYTES,
    ),
    Machine(
        "a100",
        15e12,
        1.3e12,
        5e-6,
        40 << 30,
        (_pcie(128 << 30, 24e9), _nvme(2 << 40, 3.0e9, 5.5e9)),
        half_flops=250e12,
        product_workspace_bytes=_CUBLAS_BYTES,
    ),
    Machine(
        "h100",
        40e12,
        2.6e12,
        4e-6,
        80 << 30,
        (_pcie(256 << 30, 50e9), _nvme(4 << 40, 3.0e9, 5.5e9)),
        half_flops=600e12,
        product_workspace_bytes=_CUBLAS_BYTES_OF_HOPPER,
    ),
)

MACHINES = {machine.name: machine for machine in _DESCRIBED}
"""Described machines, with sustained figures.

Operations and bytes a second are about 0.8 of the data sheets of the accelerators: 8.87 TFLOP/s and 320 GB/s
(GTX 1080), 11.34 and 484 (GTX 1080 Ti), 11.76 and 346 (Tesla P40), 15.7 and 900 (V100), 19.5 and 1555 (A100
with 40 GB), 51 and 3350 (H100); in 16 bits, with matrix units, 125 (V100), 312 (A100) and 756 (H100). The
device's capacity is the data sheet's; what the driver keeps comes off. Products take the workspace that torch
gives to cuBLAS, 2 times 4 MiB and 8 times 16 KiB, or 8 times 4 MiB on Hopper: it is counted at each product.

`host` is pinned memory behind PCIe with 16 lanes: 15.8, 31.5 and 63 GB/s each way in generations 3, 4 and 5,
of which about 0.78 arrive (bandwidthTest of the CUDA samples shows 12 to 13 GB/s in generation 3). The two
directions have copy engines of their own. Host capacities are those of a workstation, and an eighth of the
memory of servers with eight GPUs of that generation.

`disk` is one NVMe drive of four lanes (generation 3; 4 beside A100 and H100): about 0.8 of what data sheets
give for sequential reads, and less than half of it for writes, which must last beyond the drive's cache. The
device of `cpu` is the host's memory itself, so it has no tier `host`; its disk is a modest drive.
"""


def machine_named(name: str) -> Machine:
    """Finds the described machine of that name, or reads that of a file.

    Args:
        name: One of `MACHINES`, or the path of a file: it ends in `.json` or has a folder in it.

    Raises:
        UsageError: IRC410 when there is none; IRC414 to IRC418 for a file that does not describe one.
    """
    if name in MACHINES:
        return MACHINES[name]
    other = load_plugin("irc.machines", name, Machine)
    if other is not None:
        return other
    path = Path(name)
    if path.suffix == ".json" or len(path.parts) > 1:
        return read_machine(path)
    raise UsageError(
        "IRC410",
        f"no machine is called {name!r}",
        help=f"choose one of {', '.join((*MACHINES, *plugins('irc.machines')))}, or give the path of a file "
        "of irc machine -o FILE",
    )
