"""The tiers of a module: opened at its first step, and never part of a copy or a pickle of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torch.optim import Optimizer

from ....ir import TierError
from .disk import DiskTier
from .fake import FakeTier
from .memory import is_checking
from .offloaded_parameters import OffloadedParameters, Resident
from .pinned import HostTier
from .session import Session
from .table import CopyTable
from .tier import RunningTier, Traffic
from .tier_config import DiskPlace, FakePlace, HostPlace, TierPlace

__all__ = ["Tiers", "check_places"]


class Tiers:
    """Where the copies of a module's steps go.

    Args:
        places: One for each tier that its schedules name.

    Raises:
        TierError: IRC576 when two have one name.
    """

    def __init__(self, places: Sequence[TierPlace] = ()) -> None:
        self.places = tuple(places)
        self._by_name = {place.name: place for place in places}
        if len(self._by_name) < len(self.places):
            names = ", ".join(place.name for place in self.places)
            raise TierError("IRC576", f"two tiers have the same name: {names}", help="give each its own name")
        self._lock = threading.Lock()
        self._running: dict[str, RunningTier] = {}
        self._process = os.getpid()
        self._offloaded_parameters = OffloadedParameters()

    def __reduce__(self) -> tuple[Any, ...]:
        return Tiers, (self.places,)

    def check(self, table: CopyTable) -> None:
        """Refuses copies that cannot be made.

        Args:
            table: Of a program.

        Raises:
            TierError: IRC575 for tensors that a tier is not made for; IRC576 for a tier that has no place.
        """
        for copied in table.tensors:
            place = self._by_name.get(copied.tier)
            if place is None:
                self._refuse_unknown(copied.tier)
            _refuse_device(place, copied.type.device)
            if copied.offloaded is not None:
                _refuse_offloaded(place)

    def residents(
        self, table: CopyTable, parameter: Callable[[int], Any], optimizers: Mapping[str, Optimizer]
    ) -> dict[int, Resident]:
        """Moves what lives in a tier under a plan there (see `OffloadedParameters.residents`).

        Raises:
            TierError: As of `session`; IRC577 when a tier has no room for it.
        """
        return self._offloaded_parameters.residents(
            table, parameter, optimizers, self._opened, self._checked(table)
        )

    def session(
        self, table: CopyTable, offloaded_parameters: Mapping[int, Resident] | None = None
    ) -> Session:
        """What carries out the copies of one call.

        Args:
            table: Of its program.
            offloaded_parameters: What `residents` gave.

        Raises:
            TierError: IRC576 for a tier that has no place; IRC570 to IRC572 and IRC579 when it cannot be
                opened, or has no room for the call.
        """
        running = {name: self._opened(name) for name in table.peak_bytes}
        for name, nbytes in table.peak_bytes.items():
            count = sum(copied.tier == name and copied.offloaded is None for copied in table.tensors)
            running[name].room.prepare(nbytes, count)
        return Session(table.tensors, running, offloaded_parameters or {}, self._checked(table))

    def _checked(self, table: CopyTable) -> frozenset[str]:
        """The tiers whose copies are compared."""
        every = is_checking()
        return frozenset(name for name in table.peak_bytes if every or self._by_name[name].checks)

    @property
    def held_bytes(self) -> dict[str, int]:
        """For each tier that was used, the bytes that lie there now."""
        return {name: tier.room.held_bytes for name, tier in self._running.copy().items()}

    @property
    def traffic(self) -> dict[str, Traffic]:
        """For each tier that was used, what went through it so far."""
        return {name: tier.traffic for name, tier in self._running.copy().items()}

    def _opened(self, name: str) -> RunningTier:
        with self._lock:
            if self._process != os.getpid():  # a fork: file and threads are the other process's
                self._running, self._process = {}, os.getpid()
            if name not in self._running:
                if name not in self._by_name:
                    self._refuse_unknown(name)
                self._running[name] = _open(self._by_name[name])
            return self._running[name]

    def _refuse_unknown(self, name: str) -> NoReturn:
        known = ", ".join(self._by_name) or "none"
        raise TierError(
            "IRC576",
            f"the schedule copies to tier {name}, and it is not said where that is (known: {known})",
            help="give the place of each tier: tiers=(DiskPlace('disk', capacity_bytes, folder), ...)",
        )


def _open(place: TierPlace) -> RunningTier:
    match place:
        case DiskPlace():
            return DiskTier(place)
        case HostPlace():
            return HostTier(place)
        case FakePlace():
            return FakeTier(place)


def check_places(
    places: Iterable[TierPlace], devices: Iterable[str], *, have_offloaded: bool = False
) -> None:
    """Refuses places that cannot serve a model, before anything is planned; a disk's folder is tried.

    Args:
        places: What the user gave, the one first that parameters would live in.
        devices: Where the model's tensors are, such as `cpu`.
        have_offloaded: Whether parameters or optimizer state may live in a tier between steps.

    Raises:
        TierError: IRC571 for a folder that no file can be made in; IRC575 for a kind of tier that is not made
            for the device, or in which nothing can live between steps; IRC576 for two of one name; IRC579 as
            `ScratchFile`.
    """
    known = tuple(devices)
    tiers = Tiers(tuple(places)).places
    if have_offloaded and tiers:
        _refuse_offloaded(tiers[0])
    for place in tiers:
        for device in known:
            _refuse_device(place, device)
        if isinstance(place, DiskPlace):
            _open(place)


def _refuse_offloaded(place: TierPlace) -> None:
    if isinstance(place, HostPlace):
        raise TierError(
            "IRC575",
            f"parameters and optimizer state cannot live in tier {place.name} ({place.kind}) between steps: "
            "that is for models on the CPU, with a disk",
            help="leave params and optimizer out of what is swapped; other tensors can go to the host",
        )


def _refuse_device(place: TierPlace, device: str) -> None:
    kind = device.partition(":")[0]
    match place:
        case HostPlace() if kind == "cpu":
            why = (
                "the memory of a model on the CPU is the host's memory: nothing is gained by copies within it"
            )
            help = "use a disk tier: disk:FOLDER:BYTES"
        case HostPlace() if kind != "cuda":
            why, help = "pinned memory is for models on CUDA", "plan without swap"
        case DiskPlace() | FakePlace() if kind != "cpu":
            why = f"{place.kind} tiers copy tensors in the host's memory alone"
            help = "use a host tier: host:BYTES"
        case _:
            return
    raise TierError(
        "IRC575", f"tier {place.name} ({place.kind}) cannot hold tensors on {device}: {why}", help=help
    )
