"""Branches, loops, scans and maps that only a run decides, as steps with the blocks that they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...ir.errors import Location, UnsupportedError
from .lowerings.table import Value, settle
from .program import (
    UNKNOWN,
    Frame,
    Operand,
    Output,
    RunError,
    Step,
    device_of,
    flat,
    run,
    slots_of,
    with_frees,
)
from .tensors import Static

__all__ = ["Block", "Branch", "Loop", "Map", "Scan", "Scanned"]


@dataclass(frozen=True)
class Block:
    """The body of a branch or of a loop; it also reads the slots of the graph around it.

    Args:
        inputs: The slots of its own inputs.
        steps: The steps that it runs.
        outputs: The operands that it returns.
    """

    inputs: tuple[int, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]

    @classmethod
    def of(cls, inputs: Sequence[int], steps: Sequence[Step], outputs: Sequence[Output]) -> Block:
        """A block that frees its own slots, and none of the graph's around it."""
        own = set(inputs) | {slot for step in steps for slot in step.results if slot is not None}
        return cls(tuple(inputs), tuple(with_frees(steps, outputs, own)), tuple(outputs))

    def reads(self) -> set[int]:
        """The slots of the graph around it that it reads."""
        own = set(self.inputs) | {slot for step in self.steps for slot in step.results if slot is not None}
        inner = {slot for step in self.steps for slot in step.reads()}
        return (inner | slots_of(flat(self.outputs))) - own

    def run(self, frame: Frame, inputs: Sequence[Value] = ()) -> list[Value]:
        """Its outputs for these inputs."""
        frame.fill(self.inputs, inputs)
        run(self.steps, frame)
        outputs = [frame.output(output) for output in self.outputs]
        own = {slot for step in self.steps for slot in step.results if slot is not None}
        frame.free(own | set(self.inputs))
        return outputs


@dataclass(frozen=True)
class Branch:
    """An `If` whose condition only a run tells.

    Args:
        name: See `Step`.
        title: See `Step`.
        condition: One boolean.
        then: The block that runs if it holds.
        otherwise: The block that runs if it does not.
        results: See `Step`.
        frees: See `Step`.
        decided_by: The inputs of the model whose elements decide the condition.
    """

    name: str
    title: str
    condition: Operand
    then: Block
    otherwise: Block
    results: tuple[int | None, ...]
    frees: tuple[int, ...] = ()
    decided_by: tuple[str, ...] = ()

    def reads(self) -> set[int]:
        """See `Step`."""
        return slots_of((self.condition,)) | self.then.reads() | self.otherwise.reads()

    def freeing(self, slots: tuple[int, ...]) -> Branch:
        """See `Step`."""
        return replace(self, frees=slots)

    def run(self, frame: Frame) -> None:
        """See `Step`."""
        condition = frame.tensor(self.condition)
        assert condition is not None
        try:
            taken = self.then if bool(condition) else self.otherwise
        except UNKNOWN as error:
            inputs = " and ".join(map(repr, self.decided_by)) or "what only a run tells"
            raise UnsupportedError(
                "IRC302",
                f"{self.title} whose condition depends on {inputs} is not supported in a plan",
                at=Location(onnx_node=self.name),
                help=settle(self.decided_by),
            ) from error
        frame.fill(self.results, taken.run(frame))


@dataclass(frozen=True)
class Loop:
    """A `Loop` whose count only a run tells.

    Args:
        name: See `Step`.
        title: See `Step`.
        count: The most iterations; absent when only the condition ends it.
        condition: Whether to begin; absent when it begins always.
        carried: The values that the first iteration gets.
        body: From iteration number, condition and carried values to condition, carried values, and one more
            value for each stacked result.
        empty: For each stacked result, what it is when nothing runs.
        results: See `Step`.
        frees: See `Step`.
    """

    name: str
    title: str
    count: Operand
    condition: Operand
    carried: tuple[Operand, ...]
    body: Block
    empty: tuple[Static | None, ...]
    results: tuple[int | None, ...]
    frees: tuple[int, ...] = ()

    def reads(self) -> set[int]:
        """See `Step`."""
        return slots_of((self.count, self.condition, *self.carried)) | self.body.reads()

    def freeing(self, slots: tuple[int, ...]) -> Loop:
        """See `Step`."""
        return replace(self, frees=slots)

    def run(self, frame: Frame) -> None:
        """See `Step`."""
        count, condition = frame.tensor(self.count), frame.tensor(self.condition)
        most = None if count is None else int(count)
        goes_on = condition is None or bool(condition)
        carried = [frame.values.get(operand) for operand in self.carried]
        stacks: list[list[Tensor]] = [[] for _ in self.empty]
        iteration = 0
        while goes_on and (most is None or iteration < most):
            device = device_of(carried)
            given = [torch.tensor(iteration, device=device), torch.tensor(True, device=device)]
            again, *outputs = self.body.run(frame, [*given, *carried])
            assert isinstance(again, Tensor)
            goes_on = bool(again)
            carried = outputs[: len(carried)]
            for stack, value in zip(stacks, outputs[len(carried) :], strict=True):
                assert isinstance(value, Tensor)
                stack.append(value)
            iteration += 1
        device = device_of(carried)
        stacked = [
            torch.stack(stack) if stack else _stack_of_none(self.title, self.name, empty, device)
            for stack, empty in zip(stacks, self.empty, strict=True)
        ]
        frame.fill(self.results, [*carried, *stacked])


def _stack_of_none(title: str, name: str, empty: Static | None, device: torch.device) -> Tensor:
    if empty is None:
        raise UnsupportedError(
            "IRC302",
            f"{title} of no iteration, without the shape of its results, is not supported",
            at=Location(onnx_node=name),
            help="export the model with the shapes of all values",
        )
    return torch.from_numpy(empty.array).to(empty.dtype).to(device)


@dataclass(frozen=True)
class Map:
    """A `SequenceMap` over a list whose length only a run tells.

    Args:
        name: See `Step`.
        title: See `Step`.
        operands: The operands of the body: of each list one element at a time, of each tensor the whole.
        body: From one element of each list to one element of each result.
        results: See `Step`.
        frees: See `Step`.
    """

    name: str
    title: str
    operands: tuple[Operand, ...]
    body: Block
    results: tuple[int | None, ...]
    frees: tuple[int, ...] = ()

    def reads(self) -> set[int]:
        """See `Step`."""
        return slots_of(self.operands) | self.body.reads()

    def freeing(self, slots: tuple[int, ...]) -> Map:
        """See `Step`."""
        return replace(self, frees=slots)

    def run(self, frame: Frame) -> None:
        """See `Step`."""
        values = [frame.values.get(operand) for operand in self.operands]
        first = values[0]
        assert isinstance(first, list)
        columns: list[list[Tensor]] = [[] for _ in self.body.outputs]
        for i in range(len(first)):
            outputs = self.body.run(frame, [v[i] if isinstance(v, list) else v for v in values])
            for column, value in zip(columns, outputs, strict=True):
                assert isinstance(value, Tensor)
                column.append(value)
        frame.fill(self.results, columns)


@dataclass(frozen=True)
class Scanned:
    """Says how a scan reads or stacks along an axis.

    Args:
        axis: The axis of the whole.
        is_backward: Whether the last element comes first.
    """

    axis: int
    is_backward: bool


@dataclass(frozen=True)
class Scan:
    """A `Scan` over inputs whose length only a run tells.

    Args:
        name: See `Step`.
        title: See `Step`.
        states: The states that the first iteration gets.
        sequences: The tensors that are read element by element.
        reads_as: The way in which each of them is read.
        body: From the states and an element of each sequence to the states and what is stacked.
        stacks_as: The way in which each result is stacked.
        empty: For each stacked result, what it is when nothing runs.
        results: See `Step`.
        frees: See `Step`.
    """

    name: str
    title: str
    states: tuple[Operand, ...]
    sequences: tuple[Operand, ...]
    reads_as: tuple[Scanned, ...]
    body: Block
    stacks_as: tuple[Scanned, ...]
    empty: tuple[Static | None, ...]
    results: tuple[int | None, ...]
    frees: tuple[int, ...] = ()

    def reads(self) -> set[int]:
        """See `Step`."""
        return slots_of((*self.states, *self.sequences)) | self.body.reads()

    def freeing(self, slots: tuple[int, ...]) -> Scan:
        """See `Step`."""
        return replace(self, frees=slots)

    def run(self, frame: Frame) -> None:
        """See `Step`."""
        states = [frame.values.get(operand) for operand in self.states]
        columns: list[tuple[Tensor, ...]] = []
        for operand, how in zip(self.sequences, self.reads_as, strict=True):
            whole = frame.tensor(operand)
            assert whole is not None
            column = whole.unbind(how.axis)
            columns.append(column[::-1] if how.is_backward else column)
        if len({len(column) for column in columns}) > 1:
            raise RunError(
                "IRC318",
                f"{self.title} scans inputs of {' and '.join(str(len(c)) for c in columns)} elements",
                at=Location(onnx_node=self.name),
                help="check the values and the shapes of the inputs",
            )
        stacks: list[list[Tensor]] = [[] for _ in self.stacks_as]
        for elements in zip(*columns, strict=True):
            outputs = self.body.run(frame, [*states, *elements])
            states = outputs[: len(states)]
            for stack, value in zip(stacks, outputs[len(states) :], strict=True):
                assert isinstance(value, Tensor)
                stack.append(value)
        device = device_of(states)
        stacked = [
            torch.stack(stack[::-1] if how.is_backward else stack, how.axis)
            if stack
            else _stack_of_none(self.title, self.name, empty, device).movedim(0, how.axis)
            for stack, how, empty in zip(stacks, self.stacks_as, self.empty, strict=True)
        ]
        frame.fill(self.results, [*states, *stacked])
