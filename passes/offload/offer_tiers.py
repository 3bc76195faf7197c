"""The pass that says which tiers a plan may copy to, and how fast."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...ir import Tier, TierRequest, UsageError, parse_tiers
from ..costs.machines import machine_named
from ..program import Program

__all__ = ["OfferTiers"]


@dataclass(frozen=True, slots=True)
class OfferTiers:
    """Lets the passes behind it copy storages to tiers.

    Args:
        swap: The tiers, such as `host:64GiB` or `host+disk:/scratch:200GiB`.
        machine: The machine whose bandwidths they have: a described one, or the path of a file of `irc
            machine`. Empty is the machine at hand, whose tiers are given.
        tiers: The tiers of the machine at hand, measured.
        asked: The parts of `swap`, if its text cannot be cut at each `+`: a folder may have one in its name.
    """

    name: ClassVar[str] = "offer-tiers"

    swap: str = "host"
    machine: str = ""
    tiers: tuple[Tier, ...] = field(default=(), metadata={"in_text": False})
    asked: tuple[TierRequest, ...] = field(default=(), metadata={"in_text": False})

    def check(self) -> None:
        """Refuses malformed options.

        Raises:
            UsageError: IRC423 to IRC429 for the tiers, IRC410 and others for the machine, IRC408 for a
                machine without such a tier.
        """
        self.requests()
        if self.machine:
            self.offered()

    def requests(self) -> tuple[TierRequest, ...]:
        """The tiers that were asked for."""
        return self.asked or parse_tiers(self.swap.split("+"))

    def run(self, program: Program, /) -> Program:
        """The program with the tiers; of several forwards in flight each has a part of their capacity.

        Raises:
            UsageError: As of `check`.
        """
        count = program.graph.forwards_in_flight
        parts = (replace(tier, capacity_bytes=tier.capacity_bytes // count) for tier in self.offered())
        return replace(program, tiers=tuple(parts))

    def offered(self) -> tuple[Tier, ...]:
        """The tiers, each with the capacity that was asked for, in the order given."""
        if self.tiers:
            return self.tiers
        if not self.machine:
            raise UsageError(
                "IRC409",
                f"nobody has measured the tiers {self.swap} of this machine",
                help="run the pipeline by irc optimize --passes, which measures them, or name a machine, as "
                "offer-tiers{swap=host,machine=a100}",
            )
        machine = machine_named(self.machine)
        known = {tier.name: tier for tier in machine.tiers}
        found: list[Tier] = []
        for request in self.requests():
            if request.name not in known:
                raise UsageError(
                    "IRC408",
                    f"machine {machine.name} has no tier {request.name}",
                    help=f"its tiers are {', '.join(known) or 'none'}; describe it with `irc machine`",
                )
            tier = known[request.name]
            capacity_bytes = tier.capacity_bytes if request.capacity_bytes is None else request.capacity_bytes
            found.append(replace(tier, capacity_bytes=capacity_bytes))
        return tuple(found)
