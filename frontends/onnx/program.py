"""What an imported graph runs: its nodes in order, with branches and loops that only a run decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ...ir.errors import Location, UnsupportedError, UsageError
from .lowerings.table import SETTLE, Call, Lowering, NodeInfo, Value
from .tensors import Static

__all__ = [
    "Block",
    "Branch",
    "Frame",
    "Loop",
    "Map",
    "NodeStep",
    "Operand",
    "Output",
    "RunError",
    "Step",
    "with_frees",
]


@dataclass(frozen=True, slots=True)
class Operand:
    """Where a step reads a value: a slot that an earlier step filled, a weight, a constant, or nowhere."""

    kind: Literal["slot", "weight", "constant", "absent"]
    index: int = 0


Output: TypeAlias = "Operand | tuple[Operand, ...]"
"""One value, or the values of a list."""


@dataclass
class Frame:
    """One run of a module.

    Args:
        values: What is known now, by where it is read; slots come and go.
        statics: The module's constants as plain data.
        training: Whether the module is in train mode.
        enter: Told the name of each node before it runs.
    """

    values: dict[Operand, Value]
    statics: Sequence[Static]
    training: bool
    enter: Callable[[str], None]

    def tensor(self, operand: Operand) -> Tensor | None:
        """A value that is a tensor or absent."""
        value = self.values.get(operand)
        if value is not None and not isinstance(value, Tensor):
            kind = "a list of tensors" if isinstance(value, list) else "an array of strings"
            raise RunError(
                "IRC318",
                f"{kind} stands where the graph reads one tensor",
                help="lists within lists are no values of ONNX: mend the file",
            )
        return value

    def output(self, output: Output) -> Value:
        """The value of an output."""
        if isinstance(output, Operand):
            return self.values.get(output)
        values = [self.tensor(operand) for operand in output]
        return [value for value in values if value is not None]

    def fill(self, slots: Iterable[int | None], values: Iterable[Value]) -> None:
        """Put results into their slots; `None` is the slot of a result that nothing reads."""
        for slot, value in zip(slots, values, strict=False):
            if slot is not None:
                self.values[Operand("slot", slot)] = value

    def free(self, slots: Iterable[int]) -> None:
        """Let go of what no later step reads."""
        for slot in slots:
            self.values.pop(Operand("slot", slot), None)


class Step(Protocol):
    """One thing to run: a node, a branch or a loop."""

    @property
    def name(self) -> str:
        """The name of the ONNX node."""
        ...

    @property
    def title(self) -> str:
        """What messages call it, such as `ai.onnx::Conv (opset 17)`."""
        ...

    @property
    def results(self) -> tuple[int | None, ...]:
        """The slot of each result; `None` where nothing reads it."""
        ...

    @property
    def frees(self) -> tuple[int, ...]:
        """Slots that nothing reads after this step."""
        ...

    def reads(self) -> set[int]:
        """The slots that it reads, itself or in its blocks."""
        ...

    def run(self, frame: Frame) -> None:
        """Run it, and fill its results."""
        ...

    def freeing(self, slots: tuple[int, ...]) -> Step:
        """The same step, freeing these slots."""
        ...


@dataclass(frozen=True)
class NodeStep:
    """One node to run.

    Args:
        node: What is fixed about it.
        lowering: What it means in torch.
        operands: Where its operands come from.
        results: See `Step`.
        literals: Constants that the lowering worked out at import, in order.
        decided_late: Whether sizes or values that only a run tells decide what it does.
        frees: See `Step`.
    """

    node: NodeInfo
    lowering: Lowering
    operands: tuple[Operand, ...]
    results: tuple[int | None, ...]
    literals: tuple[int, ...] = ()
    decided_late: bool = False
    frees: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name of the ONNX node."""
        return self.node.name

    @property
    def title(self) -> str:
        """See `Step`."""
        return self.node.title

    def reads(self) -> set[int]:
        """See `Step`."""
        return _slots(self.operands)

    def freeing(self, slots: tuple[int, ...]) -> NodeStep:
        """See `Step`."""
        return replace(self, frees=slots)

    def run(self, frame: Frame) -> None:
        """See `Step`."""
        literals: Iterator[int] = iter(self.literals)

        def literal(make: Callable[[], Tensor]) -> Tensor:
            if self.decided_late:
                return make().to(_device(values))
            found = frame.tensor(Operand("constant", next(literals)))
            assert found is not None
            return found

        values = [frame.values.get(operand) for operand in self.operands]
        call = Call(
            self.node,
            values,
            [frame.statics[o.index] if o.kind == "constant" else None for o in self.operands],
            [o.kind == "weight" for o in self.operands],
            frame.training,
            literal,
            runs=self.decided_late,
        )
        result = self.lowering(call)
        frame.fill(self.results, result if isinstance(result, tuple) else (result,))


def _device(values: Iterable[Value]) -> torch.device:
    return next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))


def _slots(operands: Iterable[Operand]) -> set[int]:
    return {o.index for o in operands if o.kind == "slot"}


@dataclass(frozen=True)
class Block:
    """The body of a branch or of a loop; it also reads the slots of the graph around it.

    Args:
        inputs: The slots of its own inputs.
        steps: What it runs.
        outputs: Where its outputs are.
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
        return (inner | _slots(_flat(self.outputs))) - own

    def run(self, frame: Frame, inputs: Sequence[Value] = ()) -> list[Value]:
        """Its outputs for these inputs."""
        frame.fill(self.inputs, inputs)
        run(self.steps, frame)
        outputs = [frame.output(output) for output in self.outputs]
        own = {slot for step in self.steps for slot in step.results if slot is not None}
        frame.free(own | set(self.inputs))
        return outputs


def _flat(outputs: Iterable[Output]) -> Iterator[Operand]:
    for output in outputs:
        yield from (output,) if isinstance(output, Operand) else output


@dataclass(frozen=True)
class Branch:
    """An `If` whose condition only a run tells.

    Args:
        name: See `Step`.
        title: See `Step`.
        condition: One boolean.
        then: What runs where it holds.
        otherwise: What runs where it does not.
        results: See `Step`.
        frees: See `Step`.
    """

    name: str
    title: str
    condition: Operand
    then: Block
    otherwise: Block
    results: tuple[int | None, ...]
    frees: tuple[int, ...] = ()

    def reads(self) -> set[int]:
        """See `Step`."""
        return _slots((self.condition,)) | self.then.reads() | self.otherwise.reads()

    def freeing(self, slots: tuple[int, ...]) -> Branch:
        """See `Step`."""
        return replace(self, frees=slots)

    def run(self, frame: Frame) -> None:
        """See `Step`."""
        condition = frame.tensor(self.condition)
        assert condition is not None
        taken = self.then if bool(condition) else self.otherwise
        frame.fill(self.results, taken.run(frame))


@dataclass(frozen=True)
class Loop:
    """A `Loop` whose count only a run tells.

    Args:
        name: See `Step`.
        title: See `Step`.
        count: The most iterations; absent when only the condition ends it.
        condition: Whether to begin; absent when it begins always.
        carried: What the first iteration gets.
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
        return _slots((self.count, self.condition, *self.carried)) | self.body.reads()

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
            device = _device(carried)
            given = [torch.tensor(iteration, device=device), torch.tensor(True, device=device)]
            again, *outputs = self.body.run(frame, [*given, *carried])
            assert isinstance(again, Tensor)
            goes_on = bool(again)
            carried = outputs[: len(carried)]
            for stack, value in zip(stacks, outputs[len(carried) :], strict=True):
                assert isinstance(value, Tensor)
                stack.append(value)
            iteration += 1
        device = _device(carried)
        stacked = [
            torch.stack(stack) if stack else _stack_of_none(self.name, empty, device)
            for stack, empty in zip(stacks, self.empty, strict=True)
        ]
        frame.fill(self.results, [*carried, *stacked])


def _stack_of_none(name: str, empty: Static | None, device: torch.device) -> Tensor:
    if empty is None:
        raise UnsupportedError(
            "IRC302",
            "ai.onnx::Loop of no iteration, without the shape of its results, is not supported",
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
        operands: What the body gets: of each list one element at a time, of each tensor the whole.
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
        return _slots(self.operands) | self.body.reads()

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


class RunError(UsageError, RuntimeError):
    """What only a run can tell of a graph and its inputs: a RuntimeError, as torch's own are."""


# What torch raises for values that do not fit; its subclasses (out of memory, of its tracers) pass.
_FAULTS = (RuntimeError, IndexError, TypeError, ValueError, ZeroDivisionError, OverflowError, AssertionError)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def run(steps: Iterable[Step], frame: Frame) -> None:
    """Run the steps in order.

    Raises:
        UnsupportedError: IRC302 when a tracer runs them and a step needs to see data, or when torch has no
            kernel for the element type on this device.
        RunError: IRC318 when a step cannot take the values it gets, such as an index out of range.
    """
    for step in steps:
        frame.enter(step.name)
        try:
            step.run(frame)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UnsupportedError(
                "IRC302",
                f"{step.title} whose work depends on the values of its operands is not supported in a plan",
                at=Location(onnx_node=step.name),
                help=SETTLE,
            ) from error
        except _FAULTS as error:
            if type(error) is NotImplementedError:
                raise UnsupportedError(
                    "IRC302",
                    f"{step.title} is not supported here (torch: {_first_line(error)})",
                    at=Location(onnx_node=step.name),
                    help="export the model with another element type, or replace the node",
                ) from error
            if type(error) not in _FAULTS:
                raise
            raise RunError(
                "IRC318",
                f"{step.title} cannot run on these values: {_first_line(error)}",
                at=Location(onnx_node=step.name),
                help="check the values and the shapes of the inputs",
            ) from error
        frame.free(step.frees)


def with_frees(steps: Sequence[Step], outputs: Iterable[Output], own: set[int] | None = None) -> list[Step]:
    """Each step with the slots that it is the last to read, or that nothing reads.

    Args:
        steps: In the order that they run in.
        outputs: What is read after the last.
        own: The slots that may be freed; all of them without it.
    """
    seen, done = _slots(_flat(outputs)), list[Step]()
    for step in reversed(steps):
        touched = step.reads() | {slot for slot in step.results if slot is not None}
        last = touched - seen if own is None else (touched - seen) & own
        done.append(step.freeing(tuple(sorted(last))))
        seen |= touched
    return done[::-1]
