"""The tiers of a module: opened at its first step, and never part of its copies and pickles."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torch.optim import Optimizer

from ....ir import TierError
from .memory import is_checking
from .offloaded_parameters import OffloadedParameters, Resident
from .session import Session
from .table import CopyTable
from .tier import RunningTier, Traffic
from .tier_config import TierConfig

__all__ = ["Tiers", "check_tier_configs"]


class Tiers:
    """The tiers that the steps of a module copy to.

    Args:
        configs: One for each tier that its schedules name.

    Raises:
        TierError: IRC576 if two have one name.
    """

    def __init__(self, configs: Sequence[TierConfig] = ()) -> None:
        self.configs = tuple(configs)
        self._by_name = {config.name: config for config in configs}
        if len(self._by_name) < len(self.configs):
            names = ", ".join(config.name for config in self.configs)
            raise TierError("IRC576", f"two tiers have the same name: {names}", help="give each its own name")
        self._lock = threading.Lock()
        self._running: dict[str, RunningTier] = {}
        self._process = os.getpid()
        self._offloaded_parameters = OffloadedParameters()

    def __reduce__(self) -> tuple[Any, ...]:
        return Tiers, (self.configs,)

    def check(self, table: CopyTable) -> None:
        """Refuses copies that cannot be made.

        Args:
            table: The copies of a program.

        Raises:
            TierError: IRC575 for tensors that a tier is not made for; IRC576 for a tier without a config.
        """
        for copied in table.tensors:
            config = self._by_name.get(copied.tier)
            if config is None:
                self._refuse_unknown(copied.tier)
            _refuse_device(config, copied.type.device)
            if copied.offloaded is not None:
                _refuse_offloaded(config)

    def residents(
        self, table: CopyTable, parameter: Callable[[int], Any], optimizers: Mapping[str, Optimizer]
    ) -> dict[int, Resident]:
        """Moves the offloaded tensors of a plan to their tiers (see `OffloadedParameters.residents`).

        Raises:
            TierError: As `session`; IRC577 if a tier has no room for them.
        """
        return self._offloaded_parameters.residents(
            table, parameter, optimizers, self._opened, self._checked(table)
        )

    def session(
        self, table: CopyTable, offloaded_parameters: Mapping[int, Resident] | None = None
    ) -> Session:
        """Opens the session that carries out the copies of one call.

        Args:
            table: The copies of its program.
            offloaded_parameters: The result of `residents`.

        Raises:
            TierError: IRC576 for a tier without a config; IRC570 to IRC572 and IRC579 if it cannot be opened,
                or has no room for the call.
        """
        running = {name: self._opened(name) for name in table.peak_bytes}
        for name, nbytes in table.peak_bytes.items():
            count = sum(copied.tier == name and copied.offloaded is None for copied in table.tensors)
            running[name].room.prepare(nbytes, count)
        return Session(table.tensors, running, offloaded_parameters or {}, self._checked(table))

    def _checked(self, table: CopyTable) -> frozenset[str]:
        """Returns the names of the tiers whose copies are compared."""
        every = is_checking()
        return frozenset(name for name in table.peak_bytes if every or self._by_name[name].checks)

    @property
    def held_bytes(self) -> dict[str, int]:
        """The bytes in each tier that was used."""
        return {name: tier.room.held_bytes for name, tier in self._running.copy().items()}

    @property
    def traffic(self) -> dict[str, Traffic]:
        """The traffic so far of each tier that was used."""
        return {name: tier.traffic for name, tier in self._running.copy().items()}

    def _opened(self, name: str) -> RunningTier:
        with self._lock:
            if self._process != os.getpid():  # after a fork, file and threads belong to the other process
                self._running, self._process = {}, os.getpid()
            if name not in self._running:
                if name not in self._by_name:
                    self._refuse_unknown(name)
                self._running[name] = self._by_name[name].open()
            return self._running[name]

    def _refuse_unknown(self, name: str) -> NoReturn:
        known = ", ".join(self._by_name) or "none"
        raise TierError(
            "IRC576",
            f"the schedule copies to tier {name}, which has no config (known: {known})",
            help="give a config for each tier: tiers=(DiskTierConfig('disk', capacity_bytes, folder), ...)",
        )


def check_tier_configs(
    configs: Iterable[TierConfig], devices: Iterable[str], *, have_offloaded: bool = False
) -> None:
    """Refuses tiers that cannot serve a model, before anything is planned; a file is made in a disk's folder.

    Args:
        configs: The user's tiers; parameters would be offloaded to the first one.
        devices: The devices of the model's tensors, such as `cpu`.
        have_offloaded: Whether parameters or optimizer state may be offloaded between steps.

    Raises:
        TierError: IRC571 for a folder in which no file can be made; IRC575 for a kind of tier that is not
            made for the device, or to which no parameters can be offloaded; IRC576 for two of one name;
            IRC579 as `ScratchFile`.
    """
    known = tuple(devices)
    tiers = Tiers(tuple(configs)).configs
    if have_offloaded and tiers:
        _refuse_offloaded(tiers[0])
    for config in tiers:
        for device in known:
            _refuse_device(config, device)
        config.try_out()


def _refuse_offloaded(config: TierConfig) -> None:
    if not config.takes_parameters:
        raise TierError(
            "IRC575",
            f"parameters and optimizer state cannot be offloaded to tier {config.name} ({config.kind}) "
            "between steps: only models on the CPU with a disk tier can do that",
            help="leave params and optimizer out of swap=; other tensors can go to the host",
        )


def _refuse_device(config: TierConfig, device: str) -> None:
    refusal = config.refusal(device.partition(":")[0])
    if refusal is not None:
        why, help = refusal
        raise TierError(
            "IRC575", f"tier {config.name} ({config.kind}) cannot hold tensors on {device}: {why}", help=help
        )
