"""Computes when each instruction of a schedule runs; no other module computes its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .graph import Node
from .schedule import Compute, Fetch, Instruction, Offload, Schedule, Wait
from .tiers import Direction, Tier
from .types import Storage

__all__ = ["Copy", "StepTimes", "step_times"]


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy between the device and a tier.

    Args:
        storage: The storage that is copied.
        tier: The tier that it is copied from, or to.
        direction: Which way.
        step: The instruction that begins it.
        start_seconds: When its channel takes it up.
        end_seconds: When its last byte has arrived.
    """

    storage: Storage
    tier: str
    direction: Direction
    step: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of a schedule, from the beginning of the step.

    Args:
        start_seconds: When each instruction is reached; a `Wait` may take time, a copy is only begun.
        end_seconds: When the next instruction is reached.
        copies: All copies, in the order in which they are begun.
        compute_seconds: Time of all computations.
    """

    start_seconds: tuple[float, ...]
    end_seconds: tuple[float, ...]
    copies: tuple[Copy, ...]
    compute_seconds: float

    @property
    def step_seconds(self) -> float:
        """Time of the whole step."""
        return self.end_seconds[-1] if self.end_seconds else 0.0

    @property
    def exposed_seconds(self) -> float:
        """Time in which nothing is computed, as a copy is waited for."""
        return max(self.step_seconds - self.compute_seconds, 0.0)

    def busy_seconds(self, tier: str, direction: Direction) -> float:
        """Time that the copies to or from a tier take."""
        mine = (c for c in self.copies if c.tier == tier and c.direction is direction)
        return sum(copy.end_seconds - copy.start_seconds for copy in mine)


def step_times(schedule: Schedule, seconds: Mapping[Node, float], tiers: Sequence[Tier] = ()) -> StepTimes:
    """Computes when each instruction of `schedule` runs, and each copy.

    Computations run one after the other. A copy begins at its instruction, runs beside the
    computations once the channel is free, and delays them if a `Wait` comes before its end.

    Args:
        schedule: Need not be valid; who waits for what nobody copies does not wait.
        seconds: Time of each computation.
        tiers: Those that the schedule names.

    Raises:
        KeyError: The schedule names another tier.
    """
    by_name = {tier.name: tier for tier in tiers}
    free_at: dict[object, float] = {}
    ends: dict[Storage, float] = {}
    copies: list[Copy] = []
    starts: list[float] = []
    stops: list[float] = []
    now = computed = 0.0
    for step, instruction in enumerate(schedule.instructions):
        starts.append(now)
        match instruction:
            case Compute(node):
                now += seconds[node]
                computed += seconds[node]
            case Offload(storage, name) | Fetch(storage, name):
                tier, direction = by_name[name], _direction(instruction)
                channel = tier.channel(direction)
                start = max(now, free_at.get(channel, 0.0))
                end = start + tier.copy_seconds(storage.nbytes, direction)
                free_at[channel] = ends[storage] = end
                copies.append(Copy(storage, name, direction, step, start, end))
            case Wait(storage):
                now = max(now, ends.get(storage, now))
            case _:
                pass
        stops.append(now)
    return StepTimes(tuple(starts), tuple(stops), tuple(copies), computed)


def _direction(instruction: Instruction) -> Direction:
    return Direction.OUT if isinstance(instruction, Offload) else Direction.IN
