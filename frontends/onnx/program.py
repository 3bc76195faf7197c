"""Runs an imported graph: its nodes in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ...ir.errors import IrcError, Location, UnsupportedError, UsageError, first_line
from .lowerings.table import Call, Lowering, NodeInfo, Value, settle
from .tensors import Static

__all__ = [
    "UNKNOWN",
    "Frame",
    "NodeStep",
    "Operand",
    "Output",
    "Program",
    "RunError",
    "Shapes",
    "Step",
    "device_of",
    "flat",
    "run",
    "slots_of",
    "with_frees",
]


@dataclass(frozen=True, slots=True)
class Operand:
    """Locates a value that a step reads: a slot that an earlier step filled, a weight or a constant."""

    kind: Literal["slot", "weight", "constant", "absent"]
    index: int = 0


Output: TypeAlias = "Operand | tuple[Operand, ...]"
"""One value, or the values of a list."""

Shapes: TypeAlias = tuple["tuple[int, ...] | None", ...]
"""A shape for each input or output; `None` if it is unknown, or the value is not a tensor."""


@dataclass
class Frame:
    """One run of a module.

    Args:
        values: The known values, by operand; slots come and go.
        statics: The module's constants as plain data.
        training: Whether the module is in train mode.
        enter: Told the name of each node before it runs.
        placed: Moves a constant to the device of the module.
    """

    values: dict[Operand, Value]
    statics: Sequence[Static]
    training: bool
    enter: Callable[[str], None]
    placed: Callable[[Tensor], Tensor]

    def tensor(self, operand: Operand) -> Tensor | None:
        """A value that is a tensor or absent."""
        value = self.values.get(operand)
        if value is not None and not isinstance(value, Tensor):
            kind = "a list of tensors" if isinstance(value, list) else "an array of strings"
            raise RunError(
                "IRC318",
                f"{kind} stands in place of one tensor",
                help="lists within lists are not values of ONNX: mend the file",
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
        """The name for messages, such as `ai.onnx::Conv (opset 17)`."""
        ...

    @property
    def results(self) -> tuple[int | None, ...]:
        """The slot of each result; `None` if nothing reads it."""
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
        node: The facts that are fixed about it.
        lowering: Its meaning in torch.
        operands: The operands that it reads.
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
        return slots_of(self.operands)

    def freeing(self, slots: tuple[int, ...]) -> NodeStep:
        """See `Step`."""
        return replace(self, frees=slots)

    def run(self, frame: Frame) -> None:
        """See `Step`."""
        literals: Iterator[int] = iter(self.literals)

        def literal(make: Callable[[], Tensor]) -> Tensor:
            if self.decided_late:
                return frame.placed(make()).to(device_of(values))
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
        if self.decided_late:
            call.refuse_unread()
        frame.fill(self.results, result if isinstance(result, tuple) else (result,))


def device_of(values: Iterable[Value]) -> torch.device:
    """Returns the device of the first tensor."""
    return next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))


def slots_of(operands: Iterable[Operand]) -> set[int]:
    """The slots among operands."""
    return {o.index for o in operands if o.kind == "slot"}


def flat(outputs: Iterable[Output]) -> Iterator[Operand]:
    """Yields the operands of the outputs, those of sequences one by one."""
    for output in outputs:
        yield from (output,) if isinstance(output, Operand) else output


@dataclass(frozen=True)
class Program:
    """Holds the steps that a graph runs for some sizes of its inputs.

    Args:
        shapes: The shapes of the inputs for which it is specialized; `None` if only a run knows.
        steps: In order.
        outputs: The operand that is each output, by name.
        output_shapes: As far as they are known.
        weights: The ONNX name of each weight, by its place.
        statics: The constants as plain data.
        tensors: The constants that are read as tensors, by their place.
    """

    shapes: Shapes
    steps: tuple[Step, ...]
    outputs: Mapping[str, Output]
    output_shapes: Shapes
    weights: tuple[str, ...]
    statics: tuple[Static, ...]
    tensors: Mapping[int, Tensor]


class RunError(UsageError, RuntimeError):
    """Reports a fault of a graph and its inputs that only a run shows; a RuntimeError, as torch's own are."""


UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)
"""The errors that a tracer raises if a step needs to see data."""
# What torch raises for values that do not fit; its subclasses (out of memory, of its tracers) pass.
_FAULTS = (RuntimeError, IndexError, TypeError, ValueError, ZeroDivisionError, OverflowError, AssertionError)


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
        except (*UNKNOWN, *_FAULTS) as error:
            if type(error) not in (*UNKNOWN, NotImplementedError, *_FAULTS):
                raise
            raise _explained(step, error) from error
        frame.free(step.frees)


def _explained(step: Step, error: BaseException) -> IrcError:
    """Returns the error for a step that failed."""
    at = Location(onnx_node=step.name)
    if isinstance(error, UNKNOWN):
        return UnsupportedError(
            "IRC302",
            f"{step.title} whose work depends on the values of its operands is not supported in a plan",
            at=at,
            help=settle(),
        )
    if isinstance(error, NotImplementedError):
        return UnsupportedError(
            "IRC302",
            f"{step.title} is not supported here (torch: {first_line(error)})",
            at=at,
            help="export the model with another element type, or replace the node",
        )
    return RunError(
        "IRC318",
        f"{step.title} cannot run on these values: {first_line(error)}",
        at=at,
        help="check the values and the shapes of the inputs",
    )


def with_frees(steps: Sequence[Step], outputs: Iterable[Output], own: set[int] | None = None) -> list[Step]:
    """Each step with the slots that it is the last to read, or that nothing reads.

    Args:
        steps: In the order that they run in.
        outputs: The operands that are read after the last.
        own: The slots that may be freed; all of them without it.
    """
    seen, done = slots_of(flat(outputs)), list[Step]()
    for step in reversed(steps):
        touched = step.reads() | {slot for slot in step.results if slot is not None}
        last = touched - seen if own is None else (touched - seen) & own
        done.append(step.freeing(tuple(sorted(last))))
        seen |= touched
    return done[::-1]
