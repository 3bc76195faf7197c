"""Moves the copies of what lives in a tier, in a given schedule, away from the operations that need them.

A storage that is copied to the device again stays between two uses if memory allows that. Each copy to the
device begins as late as it can and still arrive in time. Each copy back is waited for once it has ended. Both
come later or earlier if memory allows no more. Copies of other storages stay in their places.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...ir import (
    Compute,
    Direction,
    Fetch,
    Free,
    Instruction,
    Node,
    Offload,
    OffloadedParameter,
    Schedule,
    Storage,
    Tier,
    Wait,
    liveness,
    step_times,
)

__all__ = ["prefetch"]


@dataclass(frozen=True, slots=True)
class _Stay:
    """A stretch of a schedule in which an offloaded storage is on the device.

    Steps count the instructions that are not about offloaded storages.

    Args:
        offloaded: The storage.
        start: The step before which its copy to the device begins.
        read: The first step that reads it.
        end: The step before which it is freed, in a schedule that waits for its copy back at once.
        stop: The step before which its copy back is waited for, and it is freed; `end` if there is none.
        changed: Whether it is copied back, from `end` on.
    """

    offloaded: OffloadedParameter
    start: int
    read: int
    end: int
    stop: int
    changed: bool


_SLACKS = (1.0, 1.5, 4.0)
"""A copy begins this many times its own time ahead."""


def prefetch(
    schedule: Schedule,
    seconds: Mapping[Node, float],
    workspace_bytes: Mapping[Node, int],
    tiers: Sequence[Tier],
    budget_bytes: int,
) -> Schedule:
    """Moves the copies of offloaded storages beside computations; takes the fastest schedule that fits.

    Args:
        schedule: A schedule that fits, with each of these copies right before its use.
        seconds: The time of each operation.
        workspace_bytes: The workspace of each operation.
        tiers: The tiers that it names.
        budget_bytes: The most that may be alive at once.
    """
    copies = _Prefetch(schedule, seconds, workspace_bytes, tiers, budget_bytes)
    best, best_seconds = schedule, step_times(schedule, seconds, tiers).step_seconds
    for slack, outs_first in itertools.product(_SLACKS, (True, False)):
        found = copies.moved(slack, outs_first=outs_first)
        taken = step_times(found, seconds, tiers).step_seconds
        if taken < best_seconds and liveness(found, workspace_bytes).peak_bytes <= budget_bytes:
            best, best_seconds = found, taken
    return best


class _Prefetch:
    """The instructions of a schedule that are not about offloaded storages, and the stays beside them."""

    def __init__(
        self,
        schedule: Schedule,
        seconds: Mapping[Node, float],
        workspace_bytes: Mapping[Node, int],
        tiers: Sequence[Tier],
        budget_bytes: int,
    ) -> None:
        self.graph = schedule.graph
        self.tiers = {tier.name: tier for tier in tiers}
        self.budget_bytes = budget_bytes
        offloaded_parameters = self.graph.offloaded_of
        self.steps: list[Instruction] = []
        self.stays: list[_Stay] = []
        begun: dict[Storage, _Stay] = {}
        for instruction in schedule.instructions:
            here = len(self.steps)
            if isinstance(instruction, Compute):
                for storage in _touched(schedule, instruction.node):
                    stay = begun.get(storage)
                    if stay is not None and stay.read < 0:
                        begun[storage] = replace(stay, start=here, read=here)
            if (
                not isinstance(instruction, Fetch | Wait | Offload | Free)
                or instruction.storage not in offloaded_parameters
            ):
                self.steps.append(instruction)
                continue
            storage = instruction.storage
            match instruction:
                case Fetch():
                    begun[storage] = _Stay(offloaded_parameters[storage], here, -1, here, here, changed=False)
                case Offload():
                    begun[storage] = replace(begun[storage], changed=True)
                case Free():
                    self.stays.append(replace(begun.pop(storage), end=here, stop=here))
                case Wait():
                    pass
        self.stays = [stay for stay in self.stays if stay.read >= 0]
        alone = Schedule(self.graph, tuple(self.steps))
        self.start_seconds = step_times(alone, seconds, tiers).start_seconds
        self.own_bytes = np.array(liveness(alone, workspace_bytes).during_bytes, dtype=np.int64)

    def moved(self, slack: float, *, outs_first: bool) -> Schedule:
        """Makes the schedule with these copies at some distance from their uses."""
        self.alive = self.own_bytes.copy()
        for stay in self.stays:
            self.alive[stay.start : stay.stop] += stay.offloaded.storage.nbytes
        stays = self._joined()
        ways = (self._leave, self._come) if outs_first else (self._come, self._leave)
        for way in ways:
            stays = way(stays, slack)
        return self._schedule(stays)

    def _joined(self) -> list[_Stay]:
        """Joins stays of one storage if there is memory in between, the nearest first."""
        found = _by_storage(self.stays)
        pairs = [pair for mine in found.values() for pair in itertools.pairwise(mine)]
        for before, after in sorted(pairs, key=lambda pair: pair[1].start - pair[0].stop):
            mine, nbytes = (
                found[before.offloaded.storage],
                before.offloaded.storage.nbytes,
            )
            between = self.alive[before.stop : after.start]
            if not before.changed and (not between.size or int(between.max()) + nbytes <= self.budget_bytes):
                between += nbytes
                at = next(k for k, stay in enumerate(mine) if stay.stop == before.stop)
                first = mine[at]
                mine[at : at + 2] = [replace(mine[at + 1], start=first.start, read=first.read)]
        return [stay for mine in found.values() for stay in mine]

    def _come(self, stays: Sequence[_Stay], slack: float) -> list[_Stay]:
        """Begins each copy to the device in time, the one that is needed last first."""
        due = dict.fromkeys(self.tiers, np.inf)
        gone: dict[tuple[Storage, int], int] = {}
        """The step at which each stay's storage was freed before it."""
        for mine in _by_storage(stays).values():
            for before, after in itertools.pairwise(mine):
                gone[after.offloaded.storage, after.read] = before.stop
        found: list[_Stay] = []
        for stay in sorted(stays, key=lambda stay: -stay.read):
            tier, nbytes = self.tiers[stay.offloaded.tier], stay.offloaded.storage.nbytes
            due_seconds = min(due[tier.name], self.start_seconds[stay.read])
            due_seconds -= slack * tier.copy_seconds(nbytes, Direction.IN)
            due[tier.name] = due_seconds
            wanted = max(bisect.bisect_right(self.start_seconds, due_seconds) - 1, 0)
            wanted = max(wanted, gone.get((stay.offloaded.storage, stay.read), 0))
            start = stay.start
            while start > wanted and self.alive[start - 1] + nbytes <= self.budget_bytes:
                start -= 1
            self.alive[start : stay.start] += nbytes
            found.append(replace(stay, start=start))
        return found

    def _leave(self, stays: Sequence[_Stay], slack: float) -> list[_Stay]:
        """Waits for each copy back when it has ended, the first one first."""
        free_at = dict.fromkeys(self.tiers, 0.0)
        starts: dict[tuple[Storage, int], int] = {}
        """The step at which each stay's storage comes again after it."""
        for mine in _by_storage(stays).values():
            for before, after in itertools.pairwise(mine):
                starts[before.offloaded.storage, before.read] = after.start
        found: list[_Stay] = []
        for stay in sorted(stays, key=lambda stay: stay.end):
            if stay.changed and stay.end < len(self.steps):
                tier, nbytes = (
                    self.tiers[stay.offloaded.tier],
                    stay.offloaded.storage.nbytes,
                )
                begun = max(self.start_seconds[stay.end], free_at[tier.name])
                free_at[tier.name] = ends = begun + slack * tier.copy_seconds(nbytes, Direction.OUT)
                wanted = bisect.bisect_left(self.start_seconds, ends)
                wanted = min(wanted, starts.get((stay.offloaded.storage, stay.read), wanted))
                stop = stay.end
                while stop < wanted and self.alive[stop] + nbytes <= self.budget_bytes:
                    stop += 1
                self.alive[stay.end : stop] += nbytes
                stay = replace(stay, stop=stop)
            found.append(stay)
        return found

    def _schedule(self, stays: Sequence[_Stay]) -> Schedule:
        coming: dict[int, list[_Stay]] = {}
        arriving: dict[int, list[_Stay]] = {}
        leaving: dict[int, list[_Stay]] = {}
        gone: dict[int, list[_Stay]] = {}
        for stay in sorted(stays, key=lambda stay: (stay.start, stay.read)):
            coming.setdefault(stay.start, []).append(stay)
            arriving.setdefault(stay.read, []).append(stay)
        for stay in sorted(stays, key=lambda stay: (stay.end, stay.stop)):
            leaving.setdefault(stay.end, []).append(stay)
            gone.setdefault(stay.stop, []).append(stay)
        found: list[Instruction] = []
        for step in range(len(self.steps) + 1):
            found += (
                Offload(s.offloaded.storage, s.offloaded.tier) for s in leaving.get(step, ()) if s.changed
            )
            found += _freed(gone.get(step, ()))
            found += (Fetch(s.offloaded.storage, s.offloaded.tier) for s in coming.get(step, ()))
            found += (Wait(s.offloaded.storage) for s in arriving.get(step, ()))
            found += self.steps[step : step + 1]
        return Schedule(self.graph, tuple(found))


def _by_storage(stays: Iterable[_Stay]) -> dict[Storage, list[_Stay]]:
    """The stays of each storage, in their order."""
    found: dict[Storage, list[_Stay]] = {}
    for stay in sorted(stays, key=lambda stay: stay.read):
        found.setdefault(stay.offloaded.storage, []).append(stay)
    return found


def _freed(stays: Sequence[_Stay]) -> Iterator[Instruction]:
    for stay in stays:
        if stay.changed:
            yield Wait(stay.offloaded.storage)
        yield Free(stay.offloaded.storage)


def _touched(schedule: Schedule, node: Node) -> Iterator[Storage]:
    """Yields the storages that an operation reads, the state of an optimizer included."""
    graph = schedule.graph
    yield from graph.reads(node)
    if node.releases is not None and node.operands[0].storage in graph.state_of:
        yield graph.state_of[node.operands[0].storage].storage
