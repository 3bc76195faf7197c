"""The config of a tier: the place of a plan's tier on this machine. Nothing is open yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Self

from ....ir import UsageError
from .tier import RunningTier

__all__ = ["TierConfig"]


@dataclass(frozen=True, slots=True)
class TierConfig(ABC):
    """The config of a tier, as plain data that copies, pickles and written folders of a module carry.

    The fields of a tier of another distribution are values of JSON. A true `is_duplex`, if it has one, says
    that a copy each way may run at once.

    Args:
        name: The name of the tier in schedules.
        capacity_bytes: The most bytes in the tier at once, for all calls of the module.
        checks: Compare checksums, as IRC_SWAP_CHECK=1 does for all tiers.

    Attributes:
        kind: The word for this kind of tier, in messages and files.
        takes_parameters: Whether parameters and optimizer state can be offloaded to it between steps.
    """

    kind: ClassVar[str]
    takes_parameters: ClassVar[bool]

    name: str
    capacity_bytes: int
    checks: bool = field(default=False, kw_only=True)

    @classmethod
    def from_request(cls, argument: str, capacity_bytes: int | None) -> Self:
        """Returns the config that `swap="KIND:ARGUMENT:CAPACITY"` asks for, if KIND is an entry point.

        Args:
            argument: The text between the name and the capacity; empty if there is none.
            capacity_bytes: The capacity; None if it is left out.

        Raises:
            UsageError: IRC425 if something is missing, or means nothing to the tier.
        """
        if argument or capacity_bytes is None:
            raise UsageError(
                "IRC425",
                f"the tier {cls.kind} takes an amount of memory{f', not {argument!r}' if argument else ''}",
                help=f'write "{cls.kind}:64GiB"',
            )
        return cls(cls.kind, capacity_bytes)

    @abstractmethod
    def open(self) -> RunningTier:
        """Opens the tier.

        Raises:
            TierError: IRC571 or IRC579 if it cannot be opened.
        """

    @abstractmethod
    def refusal(self, device_type: str) -> tuple[str, str] | None:
        """Returns why the tier cannot hold tensors on a type of device, and a way out; None if it can."""

    @abstractmethod
    def try_out(self) -> None:
        """Refuses, before anything is planned, a tier that cannot be opened.

        Raises:
            TierError: As `open`.
        """
