"""What is kept, made again and copied along a line of steps, and the schedule that does so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from irc.ir import Compute, Fetch, Free, Instruction, Node, Offload, Schedule, Storage, Wait, with_frees
from irc.passes.remat.problem import CheckpointProblem

from .line import Step

__all__ = ["Begin", "Choice", "schedule_of"]


@dataclass(frozen=True, slots=True)
class Begin:
    """A copy.

    Args:
        instruction: What begins it.
        channel: What carries it.
        start: When it starts, in whole units of time.
        end: When it ends, in the same.
        place: The step before which it is begun, and 0 if at once, or 1 if after what is freed there.
    """

    instruction: Offload | Fetch
    channel: object
    start: int
    end: int
    place: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Choice:
    """What happens along a line of steps; all but `runs` and `begins` has an entry for the line's end too.

    Args:
        runs: Whether each step runs.
        retained: Of what was there before each step, what it still has, or what is freed before it after a
            wait.
        freed: What is freed before each step, each with the end of its copy out.
        gone: What leaves its tier before each step.
        begins: The copies.
    """

    runs: tuple[bool, ...]
    retained: tuple[set[Storage], ...]
    freed: tuple[list[tuple[int, Storage]], ...]
    gone: tuple[list[Storage], ...]
    begins: tuple[Begin, ...]


def schedule_of(problem: CheckpointProblem, steps: Sequence[Step], choice: Choice) -> Schedule:
    """The schedule of a choice, with the frees of `with_frees` for what is no storage that comes and goes.

    Args:
        problem: What the steps are of.
        steps: The line.
        choice: Of as many steps.
    """
    return Schedule(problem.graph, tuple(_Writer(problem, steps, choice).instructions))


class _Writer:
    """Goes along the line and writes down what happens."""

    def __init__(self, problem: CheckpointProblem, steps: Sequence[Step], choice: Choice) -> None:
        self.problem = problem
        self.choice = choice
        self.pending: dict[Storage, Offload | Fetch] = {}
        self.resident: set[Storage] = set()
        self.instructions: list[Instruction] = []
        begins = _in_order(choice.begins)
        computed = iter(_with_frees(problem, steps, choice.runs))
        for t, step in enumerate(steps):
            self.before(t, begins)
            if choice.runs[t]:
                self.run(t, step, next(computed))
        self.before(len(steps), begins)

    def before(self, t: int, begins: dict[tuple[int, int], list[Begin]]) -> None:
        """What stands before a step."""
        for storage in self.choice.gone[t]:
            self.wait(storage)
        for begin in begins.get((t, 0), ()):
            self.begin(begin)
        for _, storage in sorted(self.choice.freed[t], key=lambda pair: (pair[0], pair[1].name)):
            self.free(storage)
        for begin in begins.get((t, 1), ()):
            self.begin(begin)

    def run(self, t: int, step: Step, computed: Sequence[Instruction]) -> None:
        """A step that runs, and what is freed at once."""
        problem = self.problem
        first, *frees = computed
        read = problem.forward_reads[step.node] if step.node is not None else ()
        for storage in read:
            if isinstance(self.pending.get(storage), Fetch):
                self.wait(storage)
        if isinstance(first, Compute):
            assert step.node is first.node
            wanted = self.choice.retained[t + 1] - self.resident
            made = {s for s in problem.graph.allocates(first.node) if s in problem.producer} & wanted
            self.resident |= made
            first = Compute(
                first.node, frozenset(s for s in first.retained if s not in problem.producer) | made
            )
        self.instructions.append(first)
        self.instructions += (i for i in frees if isinstance(i, Free) and i.storage not in problem.producer)

    def begin(self, begin: Begin) -> None:
        storage = begin.instruction.storage
        self.instructions.append(begin.instruction)
        self.pending[storage] = begin.instruction
        self.resident.add(storage)

    def wait(self, storage: Storage) -> None:
        if self.pending.pop(storage, None) is not None:
            self.instructions.append(Wait(storage))

    def free(self, storage: Storage) -> None:
        if storage in self.resident:
            self.wait(storage)
            self.resident.remove(storage)
            self.instructions.append(Free(storage))


def _in_order(begins: Sequence[Begin]) -> dict[tuple[int, int], list[Begin]]:
    """The copies by the place where they are begun: not before those that their channel carries first."""
    latest: dict[object, tuple[int, int]] = {}
    found: dict[tuple[int, int], list[Begin]] = {}
    for begin in sorted(begins, key=lambda begin: (begin.start, begin.end, begin.place)):
        place = latest[begin.channel] = max(begin.place, latest.get(begin.channel, begin.place))
        found.setdefault(place, []).append(begin)
    return found


def _with_frees(
    problem: CheckpointProblem, steps: Sequence[Step], runs: Sequence[bool]
) -> Iterator[list[Instruction]]:
    """Each step that runs, with the frees that follow it where nothing is copied."""
    parts: tuple[list[Node], list[Node]] = ([], [])
    for step, is_run in zip(steps, runs, strict=True):
        if is_run and step.node is not None:
            parts[step.is_past_loss].append(step.node)
    found: list[list[Instruction]] = []
    for instruction in with_frees(problem.graph, *parts).instructions:
        if isinstance(instruction, Free):
            found[-1].append(instruction)
        else:
            found.append([instruction])
    return iter(found)
