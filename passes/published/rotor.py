"""Rotor: the fastest schedules of a chain of unlike blocks, by a dynamic programme over memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ..remat.problem import CheckpointProblem, Solution
from ..strategy_registry import Strategy
from .chain import Block
from .chain_schedules import Pass, Run, chain_of, schedule_of

__all__ = ["ROTOR", "Stage", "fastest", "rotor"]

ROTOR = Strategy("rotor", "Beaumont et al. 2019", lambda problem, asked: rotor(problem, asked.budget_bytes))

_PARTS = 500
"""The parts that memory above static bytes is counted in; what is needed is rounded up to them."""

_MORE = (1.1, 1.25, 1.5, 2.0, 3.0)
"""The multiples of the budget that are tried if nothing fits."""

_RESERVES = (1.0, 0.97, 0.93, 0.87, 0.8, 0.7, 0.6, 0.5)
"""The parts of the budget that are planned for: the model of a chain is not exact on other graphs."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a chain; bytes are above those that are there whatever runs.

    Args:
        forward_seconds: Time of its forward.
        last_seconds: The same right before its backward, when the next stage's backward is over: the next
            source is made only if it is read.
        backward_seconds: Time of its backward.
        source_bytes: What it reads of the stage before.
        saved_bytes: What its forward makes and its backward reads, and the source of the next stage.
        kept_bytes: The part of it that its backward reads.
        advancing_bytes: The most that its forward takes, beside its source, if only the next source is left.
        saving_bytes: The same if all that its backward reads is.
        entry_bytes: What is alive beside what is stored while its backward is the next one: gradients.
        backward_bytes: The most that its backward takes, beside its source and what of its saved it reads.
    """

    forward_seconds: float
    last_seconds: float
    backward_seconds: float
    source_bytes: int
    saved_bytes: int
    kept_bytes: int
    advancing_bytes: int
    saving_bytes: int
    entry_bytes: int
    backward_bytes: int


def rotor(problem: CheckpointProblem, budget_bytes: int) -> Iterator[Solution]:
    """Yields the schedules of the dynamic programme for the budget, and for somewhat less.

    If there is none, one for the least of a few larger budgets shows what the chain takes.

    Args:
        problem: The recomputation problem.
        budget_bytes: The most that may be alive at once, static bytes included.

    Raises:
        UsageError: IRC403 for a graph that is no chain.

    Source:
        Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, Optimal checkpointing for heterogeneous chains
        (Inria RR-9302, 2019): rotor. Ours cuts other graphs at their articulation points, and carries the
        choice out on the true graph, whose peak the simulation tells. A stage that runs again right before
        its backward does not make the next stage's source again; in the paper it does.
    """
    problem, blocks = chain_of(problem, "rotor")
    forced_bytes = sum(block.forced_bytes for block in blocks)
    stages = _stages_of(problem, blocks)
    static_bytes = problem.graph.static_bytes

    def fitting(shares: Iterable[float]) -> Iterator[Solution]:
        for share in shares:
            runs = fastest(stages, int(budget_bytes * share) - static_bytes - forced_bytes)
            if runs is not None:
                yield schedule_of(problem, blocks, runs)

    yield from list(fitting(_RESERVES)) or islice(fitting(_MORE), 1)


def _stages_of(problem: CheckpointProblem, blocks: Sequence[Block]) -> list[Stage]:
    """The stages of a chain of blocks.

    The loss counts for the last stage: it takes its bytes when that has run forward.
    """
    static_bytes = problem.graph.static_bytes
    loss_bytes = problem.held_in(len(problem.forward), 0) - static_bytes
    found: list[Stage] = []
    for number, block in enumerate(blocks):
        saved_bytes = kept_bytes = sum(s.nbytes for s in block.saved) - block.forced_bytes
        backward_bytes = block.backward_bytes - static_bytes
        if number + 1 == len(blocks):
            backward_bytes = max(backward_bytes, loss_bytes)
            last_seconds = block.forward_seconds
        else:
            following = blocks[number + 1]
            part = problem.backward[block.backward_first : block.backward_end]
            is_read = any(following.source in problem.forward_reads[node] for node in part)
            saved_bytes += following.source_bytes
            kept_bytes += following.source_bytes if is_read else 0
            last_seconds = block.again_seconds if is_read else block.again_last_seconds
        found.append(
            Stage(
                forward_seconds=block.forward_seconds,
                last_seconds=last_seconds,
                backward_seconds=block.backward_seconds,
                source_bytes=block.source_bytes,
                saved_bytes=saved_bytes,
                kept_bytes=kept_bytes,
                advancing_bytes=block.forward_bytes - block.base_bytes,
                saving_bytes=block.keeping_bytes - block.base_bytes,
                entry_bytes=block.entry_bytes - static_bytes,
                backward_bytes=backward_bytes,
            )
        )
    return found


def fastest(stages: Sequence[Stage], room_bytes: int, parts: int = _PARTS) -> list[Run] | None:
    """The passes of the fastest schedule of a chain within some memory; None if there is none.

    The class is that of the paper: what is stored stays until the backward that it is stored for. With C(s,
    t, m) the time from stage s, whose source is stored, to the backward of s, if the gradient behind stage t
    is there and m bytes are free, the least of

    - forward of s saves all: C(s + 1, t, m - saved bytes of s), and both passes of s; with s = t these alone;
    - only the source of a later stage k is stored: forward from s to k, C(k, t, m - source bytes of k), then
      C(s, k - 1, m).

    Args:
        stages: The chain.
        room_bytes: The memory, above what is there whatever runs.
        parts: The parts that it is counted in; sizes are rounded up to them.

    Source:
        RR-9302, theorem 1 and equations 1 to 4.
    """
    if room_bytes <= 0:
        return None
    table = _Table(stages, room_bytes, parts)
    if not math.isfinite(table.seconds[0][len(stages) - 1][parts]):
        return None
    return list(table.runs(0, len(stages) - 1, parts))


class _Table:
    """The programme's values: for stages s to t, the seconds at each number of parts that are free.

    Args:
        stages: The chain.
        room_bytes: The memory.
        parts: Its parts.
    """

    def __init__(self, stages: Sequence[Stage], room_bytes: int, parts: int) -> None:
        self.stages, self.part_bytes, self.parts = stages, room_bytes / parts, parts
        count = len(stages)
        nothing = np.full(parts + 1, math.inf)
        self.seconds = [[nothing] * count for _ in range(count)]
        self.chosen = [[np.zeros(parts + 1, np.int32)] * count for _ in range(count)]
        for length in range(count):
            for first in range(count - length):
                self._fill(first, first + length)

    def _in_parts(self, nbytes: int) -> int:
        return math.ceil(nbytes / self.part_bytes)

    def _fill(self, s: int, t: int) -> None:
        """Finds the values of the stages s to t from those of fewer."""
        stages, last = self.stages, t == len(self.stages) - 1
        beside_bytes = 0 if last else stages[t].entry_bytes  # before the loss there are no gradients
        here = stages[s]
        is_again = s == t and not last
        both = (here.last_seconds if is_again else here.forward_seconds) + here.backward_seconds
        seconds = np.full(self.parts + 1, both)
        if s < t:
            seconds += _shifted(self.seconds[s + 1][t], self._in_parts(here.saved_bytes))
        needed = max(beside_bytes + here.saving_bytes, here.backward_bytes + here.kept_bytes)
        seconds[: min(self._in_parts(needed), self.parts + 1)] = math.inf
        chosen = np.full(self.parts + 1, s, np.int32)
        forward_seconds, needed = 0.0, 0
        for k in range(s + 1, t + 1):
            before = stages[k - 1]
            forward_seconds += before.forward_seconds
            source_bytes = before.source_bytes if k - 1 > s else 0
            needed = max(needed, beside_bytes + before.advancing_bytes + source_bytes)
            there = _shifted(self.seconds[k][t], self._in_parts(stages[k].source_bytes))
            other = there + self.seconds[s][k - 1] + forward_seconds
            other[: min(self._in_parts(needed), self.parts + 1)] = math.inf
            better = other < seconds
            seconds, chosen = np.where(better, other, seconds), np.where(better, k, chosen)
        self.seconds[s][t], self.chosen[s][t] = seconds, chosen

    def runs(self, s: int, t: int, parts: int) -> Iterator[Run]:
        """The passes of the stages s to t with so many parts free."""
        k = int(self.chosen[s][t][parts])
        if k > s:
            yield Run(s, Pass.CHECKPOINT)
            yield from (Run(stage, Pass.ADVANCE) for stage in range(s + 1, k))
            yield from self.runs(k, t, parts - self._in_parts(self.stages[k].source_bytes))
            yield from self.runs(s, k - 1, parts)
            return
        yield Run(s, Pass.SAVE)
        if s < t:
            yield from self.runs(s + 1, t, parts - self._in_parts(self.stages[s].saved_bytes))
        yield Run(s, Pass.BACKWARD)


def _shifted(values: np.ndarray, by: int) -> np.ndarray:
    """The values at `by` parts less; infinite where that is less than none."""
    if by == 0:
        return values.copy()
    found = np.full(len(values), math.inf)
    found[by:] = values[: max(len(values) - by, 0)]
    return found
