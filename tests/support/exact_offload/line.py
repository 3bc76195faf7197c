"""The line of steps of a small graph: where something may run, be copied or be freed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from irc.ir import Direction, Node, Storage, Tier
from irc.passes.remat.problem import CheckpointProblem
from irc.passes.remat.solution_merging import complete

__all__ = ["ExactProblem", "Step", "line"]


@dataclass(frozen=True)
class ExactProblem:
    """What is asked for of a small graph.

    Args:
        problem: What may run again.
        tiers: Where storages may be copied to.
        budget_bytes: The most that may be alive on the device at once.
    """

    problem: CheckpointProblem
    tiers: tuple[Tier, ...]
    budget_bytes: int

    @cached_property
    def copyable(self) -> dict[Storage, list[Tier]]:
        """What may be copied, and where it has room."""
        problem = self.problem
        able = problem.graph.copyable_storages - problem.transient
        found = {
            s: [tier for tier in self.tiers if s.nbytes <= tier.capacity_bytes]
            for s in problem.producer
            if s in able
        }
        return {storage: room for storage, room in found.items() if room}

    @cached_property
    def tight(self) -> frozenset[Tier]:
        """The tiers that do not hold all that may be copied."""
        total_bytes = sum(storage.nbytes for storage in self.copyable)
        return frozenset(tier for tier in self.tiers if tier.capacity_bytes < total_bytes)

    @cached_property
    def longest_copy_seconds(self) -> float:
        """Time of the longest copy."""
        pairs = [(s.nbytes, tier) for s, room in self.copyable.items() for tier in room]
        times = (tier.copy_seconds(nbytes, way) for nbytes, tier in pairs for way in Direction)
        return max(times, default=0.0)

    @cached_property
    def pauses(self) -> list[int]:
        """How many pauses lose no schedule, before each step of the base order and before the loss.

        Between two computations a schedule first begins copies to the tier, then waits for copies that have
        to end before it frees, then begins copies back. It does so anew only if something is freed after a
        copy back was begun, or is copied to a tier after waiting for it to have room. What is freed is not
        copied back in the same place, and what is copied to a tier makes no room there in the same place:
        with k storages in question each of the two happens at most k/2 times.
        """
        problem = self.problem
        split = len(problem.forward)
        found: list[int] = []
        for time_step in range(problem.time_steps):
            there = [s for s in self.copyable if problem.index[problem.producer[s]] < time_step]
            count = sum(problem.is_useful(s, time_step) for s in there)
            found.append(count // 2 * (2 if self.tight else 1))
        return [*found[:split], *found[split + 1 :], found[split]]


@dataclass(frozen=True, slots=True)
class Step:
    """A place of the line.

    Args:
        node: What runs there; None for the loss and for a pause.
        is_repeat: Whether it runs only if chosen.
        is_loss: Whether it is the loss.
        is_past_loss: Whether it is the loss, or comes after it.
        base: Index of the step of the base order that it is, or that comes next.
        held_bytes: Bytes there without what forward makes that comes and goes.
        running_bytes: What it takes more if it runs.
    """

    node: Node | None
    is_repeat: bool
    is_loss: bool
    is_past_loss: bool
    base: int
    held_bytes: int
    running_bytes: int = 0

    @property
    def is_pause(self) -> bool:
        """Whether nothing happens there."""
        return self.node is None and not self.is_loss


def line(problem: CheckpointProblem, pauses: Sequence[int]) -> Iterator[Step]:
    """All that may run, in order: the base order with all repeats, and pauses before each.

    Args:
        problem: The recomputation problem.
        pauses: Their number before each step of the base order and each repeat before it; the last is that
            before the loss.
    """
    graph, split = problem.graph, len(problem.forward)
    at_loss_bytes = problem.held_before[split] - graph.loss_held_bytes
    tangent_bytes = sum(storage.nbytes for storage in graph.tangent_storages)

    def loss() -> Iterator[Step]:
        yield from [Step(None, False, False, False, split, at_loss_bytes - tangent_bytes)] * pauses[-1]
        yield Step(None, False, True, True, split, at_loss_bytes + graph.loss_bytes)

    for index, (node, before) in enumerate(zip(problem.base, complete(problem), strict=True)):
        if index == split:
            yield from loss()
        past = index >= split
        pause = Step(None, False, False, past, index, problem.held_before[index])
        for again in before:
            made_bytes = sum(storage.nbytes for storage in graph.allocates(again))
            running = made_bytes + problem.costs.workspace_bytes[again]
            yield from [pause] * pauses[index]
            yield Step(again, True, False, past, index, problem.held_before[index], running)
        yield from [pause] * pauses[index]
        made_bytes = sum(s.nbytes for s in graph.allocates(node) if s in problem.producer and not past)
        yield Step(node, False, False, past, index, problem.held_at[index] + made_bytes)
    if not problem.backward:
        yield from loss()
