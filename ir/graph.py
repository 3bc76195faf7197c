"""The training graph: forward and backward of one step, in static single assignment form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from .annotation import Annotation, Policy
from .errors import Location
from .types import DType, Storage, TensorType, Value, allocation_bytes

__all__ = [
    "ACCUMULATE_GRADIENT",
    "APPLY_GRADIENT",
    "GENERATOR_STATE",
    "INDICES",
    "LOAD",
    "PAUSE",
    "RECEIVE",
    "RUN_ONCE",
    "SEEDED",
    "SEND",
    "STRIDED_VALUES",
    "VALUES",
    "Argument",
    "Gradients",
    "Graph",
    "Input",
    "InputRole",
    "Node",
    "OffloadedParameter",
    "Output",
    "OutputRole",
    "Region",
    "Symbol",
    "Trait",
    "generator_state_type",
    "values_in",
]


SEEDED = "seeded"
"""The kind of the symbol of a generator that each forward makes."""
_SEEDED_NAME = re.compile(r"[0-9]+:([0-9]{1,20})@([a-z]+(?::(?:0|[1-9][0-9]?))?)")


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named constant of the framework: kind is `dtype`, `device`, `layout` or `memory_format`.

    One of the kind `generator` stands for a generator of the user's, by a number and its device: `0@cpu`. One
    of the kind `seeded` stands for one that each forward makes, and has its seed, too: `0:7@cpu`.
    """

    kind: str
    name: str

    @property
    def seed_and_device(self) -> tuple[int, str] | None:
        """The seed of a generator that each forward makes, and its device; None if it is no such symbol."""
        parts = _SEEDED_NAME.fullmatch(self.name) if self.kind == SEEDED else None
        return (int(parts[1]), parts[2]) if parts is not None and int(parts[1]) < 2**64 else None


Argument = Value | Symbol | None | bool | int | float | complex | str | tuple["Argument", ...]


def values_in(argument: Argument) -> Iterator[Value]:
    """The values inside a (nested) argument, in order, repeated as often as they stand there."""
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from values_in(item)


class Region(Enum):
    """The half of the training step that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Trait(Enum):
    """Marks the properties of a node that a pass must know beyond its operands."""

    VIEW = "view"
    """Allocates nothing: its results alias an operand. Derived again at each use, for free."""
    RANDOM = "random"
    """Draws from the generator: runs in the original order, and again only from a state that it reads."""
    EFFECT = "effect"
    """Writes its first operand (a buffer, or a sum that grows): runs once, in the original order."""
    PINNED = "pinned"
    """Reads a storage that an effect overwrites later: running it again would give other numbers."""
    NONDETERMINISTIC = "nondeterministic"
    """Run again on the same operands, it may give other numbers (see `nondeterminism`)."""
    EXCHANGE = "exchange"
    """Takes part in the traffic between pipeline stages: runs exactly once, in the original order."""
    REORDERED = "reordered"
    """Adds what the model's own operation adds, but may do so in another order (see `reordered`)."""
    IN_PLACE = "in_place"
    """The model writes this result over memory that it has, and the graph makes it anew."""
    OVERWRITES = "overwrites"
    """Writes into an operand (see `Node.written_operand`): the storage of its result takes over the memory of
    the operand's, whose numbers are gone."""


RUN_ONCE = frozenset({Trait.RANDOM, Trait.EFFECT, Trait.PINNED, Trait.NONDETERMINISTIC, Trait.EXCHANGE})
"""The traits of nodes that must not run again, but for draws that read a state of the generator."""


class Gradients(Enum):
    """Names how the gradients of parameters are released."""

    RETURNED = "returned"
    """They are delivered together when backward ends."""
    ACCUMULATED = "accumulated"
    """Each is added to the `.grad` of its parameter as soon as it is known."""
    APPLIED = "applied"
    """An optimizer takes its step for a parameter within backward, and the gradient is freed."""


ACCUMULATE_GRADIENT = "irc.accumulate_grad"
"""The operation (parameter, gradient) that adds a gradient to the `.grad` of its parameter."""
APPLY_GRADIENT = "irc.apply_gradient"
"""The operation (parameter, gradient) that takes the optimizer's step for a parameter, which it writes. Its
keywords are what was measured of this step: `state_bytes`, `workspace_bytes`, `seconds`, and `moving_bytes`,
the part of the state that may live in a tier."""

GENERATOR_STATE = "irc.generator_state.default"
"""The operation (device or symbol) that copies the state of a generator, for the draw that follows it."""


def generator_state_type(source: Symbol | str) -> TensorType:
    """Returns the type of such a copy: bytes on the CPU, of a seed and an offset if the device is another."""
    device = source.name.partition("@")[2] if isinstance(source, Symbol) else source
    return TensorType.contiguous((5056 if device.partition(":")[0] == "cpu" else 16,), DType.UINT8, "cpu")


_STATE = "generator_state"
"""The keyword by which a draw reads the state that the generator has when it runs first."""

LOAD = "irc.load"
"""The operation without operands that stands for the copy of an offloaded parameter during a search."""

SEND = "irc.send"
"""The operation (value, key) of a pipeline stage that sends a storage: to the next stage in forward, to
the previous one in backward."""
RECEIVE = "irc.receive"
"""The operation (key) of a pipeline stage that allocates a storage and receives it: from the previous
stage in forward, from the next one in backward."""
PAUSE = "irc.pause"
"""The operation of backward after which all that other stages wait for is sent: the rest may run later."""

INDICES, VALUES, STRIDED_VALUES = "indices", "values", "strided values"
"""The parts of a sparse gradient (`torch.sparse_coo`), which the backend joins when backward ends. Strided
values are a part of a larger tensor in eager, which then adds them in another order to what is there."""

_RELEASES = {ACCUMULATE_GRADIENT: Gradients.ACCUMULATED, APPLY_GRADIENT: Gradients.APPLIED}


@dataclass(eq=False, frozen=True, slots=True)
class Node:
    """One operation.

    Args:
        name: Unique in the graph.
        op: Qualified name, such as `aten.convolution.default`.
        arguments: Positional arguments; values may be nested in tuples.
        keywords: Keyword arguments, in order.
        results: One value per result; None if the operation returns nothing there.
        is_sequence: The operation returns a tuple or list (even of one), not a single tensor.
        region: Forward or backward.
        traits: See `Trait`.
        at: Its origin.
        annotation: The annotation of its results; only of a forward operation that is not a view.
    """

    name: str
    op: str
    arguments: tuple[Argument, ...]
    results: tuple[Value | None, ...]
    keywords: tuple[tuple[str, Argument], ...] = ()
    is_sequence: bool = False
    region: Region = Region.FORWARD
    traits: frozenset[Trait] = frozenset()
    at: Location | None = None
    annotation: Annotation | None = None

    @property
    def operands(self) -> tuple[Value, ...]:
        """The values read, each once, in order of first appearance."""
        found = dict.fromkeys(values_in(self.arguments))
        for _, argument in self.keywords:
            found.update(dict.fromkeys(values_in(argument)))
        return tuple(found)

    @property
    def values(self) -> tuple[Value, ...]:
        """The results that exist."""
        return tuple(value for value in self.results if value is not None)

    @property
    def is_view(self) -> bool:
        """Whether the node allocates nothing."""
        return Trait.VIEW in self.traits

    @property
    def generator_state(self) -> Value | None:
        """The state of the generator from which a draw runs again; None if it is no draw or has no state."""
        found = dict(self.keywords).get(_STATE) if self.keywords and Trait.RANDOM in self.traits else None
        return found if isinstance(found, Value) else None

    @property
    def generator(self) -> Symbol | str:
        """The generator that a draw draws from: the user's, or the name of a device for its own."""
        given = dict(self.keywords).get("generator")
        return given if isinstance(given, Symbol) else self.values[0].type.device if self.values else ""

    def with_generator_state(self, state: Value) -> Node:
        """The draw, which may run again from this state."""
        return replace(self, keywords=(*self.keywords, (_STATE, state)))

    @property
    def own_keywords(self) -> tuple[tuple[str, Argument], ...]:
        """The keywords of its operation: without the state of the generator."""
        if self.generator_state is None:
            return self.keywords
        return tuple((key, argument) for key, argument in self.keywords if key != _STATE)

    @property
    def run_once(self) -> frozenset[Trait]:
        """The traits because of which the node must not run again."""
        once = self.traits & RUN_ONCE
        return once if self.generator_state is None else once - {Trait.RANDOM}

    @property
    def is_recomputable(self) -> bool:
        """Whether the node may run again: same numbers, no other effect, not against an annotation."""
        return not self.run_once and (self.annotation is None or self.annotation.policy is not Policy.KEEP)

    @property
    def is_transient(self) -> bool:
        """Whether the results must not stay from forward to backward: the user asks to make them again."""
        return (
            self.annotation is not None
            and self.annotation.policy is Policy.RECOMPUTE
            and self.is_recomputable
        )

    @property
    def plain_op(self) -> str:
        """The operation that makes the same result anew, for one whose name says that it writes in place."""
        library, _, rest = self.op.partition(".")
        name, dot, overload = rest.partition(".")
        if not name.endswith("_") or name.endswith("__"):
            return self.op
        return f"{library}.{name[:-1]}{dot}{overload}"

    @property
    def written_operand(self) -> Value | None:
        """The operand that the node writes into, `out` or the first one; None if it overwrites none."""
        if Trait.OVERWRITES not in self.traits:
            return None
        operand = dict(self.keywords).get("out", self.arguments[0] if self.arguments else None)
        return operand if isinstance(operand, Value) else None

    @property
    def releases(self) -> Gradients | None:
        """The way in which the node releases a gradient, its second operand; None for other nodes."""
        return _RELEASES.get(self.op)

    def __repr__(self) -> str:
        return f"Node({self.name} = {self.op})"


class InputRole(Enum):
    """Names the user's view of a graph input."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"
    TANGENT = "tangent"


class OutputRole(Enum):
    """Names the user's view of a graph output."""

    OUTPUT = "output"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Input:
    """A graph input.

    Args:
        value: The value that it binds.
        role: Its role. A tangent is the gradient of an output: it arrives after the loss.
        target: Dotted name of the parameter or buffer, index of the input, index of the output (tangent).
        requires_grad: Whether it asks for a gradient.
        part: Name of the plain tensor that it is of a packed parameter; empty for a whole tensor.
        adds_apart: Whether eager adds its gradient to `.grad` before backward ends, and by itself, as a
            reentrant checkpoint does.
    """

    value: Value
    role: InputRole
    target: str
    requires_grad: bool = False
    part: str = ""
    adds_apart: bool = False

    @property
    def label(self) -> str:
        """The target and the part, for people to read."""
        return f"{self.target} ({self.part})" if self.part else self.target


@dataclass(frozen=True, slots=True)
class Output:
    """A graph output.

    Args:
        value: The value delivered; None if no gradient flows, or if a node of the graph releases it
            (see `Graph.releases`).
        role: An output of the forward, or a gradient.
        target: Index of the output; for a gradient the target of the input it belongs to, prefixed by
            the input's role, such as `parameter:conv1.weight`.
        part: `INDICES`, `VALUES` or `STRIDED_VALUES`, what it is of a sparse gradient; empty for a whole one.
    """

    value: Value | None
    role: OutputRole
    target: str
    part: str = ""

    @property
    def gradient_of(self) -> tuple[InputRole, str]:
        """The role and the target of the input that a gradient belongs to: a target may hold colons, too."""
        role, _, target = self.target.partition(":")
        return InputRole(role), target


@dataclass(frozen=True, slots=True)
class OffloadedParameter:
    """A tensor that lives in a tier between steps, and is on the device only while a schedule has it there.

    It is written by the node that applies the gradient of its parameter; a schedule copies it back to the
    tier then.

    Args:
        value: A parameter's, or one of a storage of its own for the state of its optimizer: all of the state
            that can move, as bytes. It fills its storage.
        tier: The tier that it lives in.
        parameter: Dotted name of the parameter, the first one if it has several.
        is_state: Whether it is the state of the optimizer that applies the parameter's gradient.
    """

    value: Value
    tier: str
    parameter: str
    is_state: bool = False

    @property
    def storage(self) -> Storage:
        """The storage that is copied."""
        return self.value.storage

    @property
    def name(self) -> str:
        """A name for messages."""
        return f"optimizer state of {self.parameter}" if self.is_state else f"parameter {self.parameter}"


@dataclass(eq=False, frozen=True)
class Graph:
    """Forward and backward of one training step.

    Args:
        inputs: Parameters, buffers, inputs, constants and tangents.
        nodes: In execution order: forward, then backward.
        outputs: Outputs of the forward, then gradients.
        loss_bytes: The most that the caller's loss and its backward take between forward and backward,
            beyond the outputs and the tangents.
        loss_held_bytes: The part of it that stays until backward returns: the loss itself and its gradient.
        loss_saved_bytes: The part of it that the loss holds from its forward to its backward, if other
            forwards run in between.
        reserved_bytes: Bytes that exist before the step and after it, outside of the graph: the `.grad` that
            gradients are accumulated into, or the state of the optimizers that apply them. Offloaded
            state is part of them.
        annotations: All that the user asks for, those that concern no node too.
        forwards_in_flight: The most forwards that have run while their backward has not (see
            `live_forwards`).
        offloaded_parameters: The parameters, and states of optimizers, that live in a tier between steps.

    All inputs but tangents and offloaded parameters are static: on the device before and after the step.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    loss_bytes: int = 0
    loss_held_bytes: int = 0
    reserved_bytes: int = 0
    annotations: tuple[Annotation, ...] = ()
    loss_saved_bytes: int = 0
    forwards_in_flight: int = 1
    offloaded_parameters: tuple[OffloadedParameter, ...] = ()

    @cached_property
    def offloaded_of(self) -> dict[Storage, OffloadedParameter]:
        """The offloaded parameter or state that each offloaded storage belongs to."""
        return {offloaded.storage: offloaded for offloaded in self.offloaded_parameters}

    @cached_property
    def state_of(self) -> dict[Storage, OffloadedParameter]:
        """The offloaded state of each parameter's optimizer, by the parameter's storage."""
        storages = {i.target: i.value.storage for i in self.inputs if i.role is InputRole.PARAMETER}
        return {
            storages[offloaded.parameter]: offloaded
            for offloaded in self.offloaded_parameters
            if offloaded.is_state
        }

    @cached_property
    def static_storages(self) -> frozenset[Storage]:
        """Storages that are on the device before and after the step."""
        found = {i.value.storage for i in self.inputs if i.role is not InputRole.TANGENT}
        return frozenset(found.difference(self.offloaded_of))

    @cached_property
    def unused_outputs(self) -> frozenset[Storage]:
        """The storages of outputs that the loss does not use, and that nothing else delivers."""
        trained = {entry.target for entry in self.inputs if entry.role is InputRole.TANGENT}
        results = [output for output in self.outputs if output.role is OutputRole.OUTPUT]
        unused = {o for index, o in enumerate(results) if str(index) not in trained}
        others = {o.value.storage for o in self.outputs if o.value is not None and o not in unused}
        found = {o.value.storage for o in unused if o.value is not None}
        return frozenset(found) - others - self.static_storages

    @property
    def loss_tangent_bytes(self) -> int:
        """The bytes of the gradient that a loss begins with, if that may be an output's: of one element."""
        tangents = (entry.value for entry in self.inputs if entry.role is InputRole.TANGENT)
        return max((value.storage.nbytes for value in tangents if value.type.numel == 1), default=0)

    @cached_property
    def tangent_storages(self) -> frozenset[Storage]:
        """Storages that arrive with the loss and that the caller holds until backward returns."""
        tangents = (i.value.storage for i in self.inputs if i.role is InputRole.TANGENT)
        return frozenset(tangents) - self.static_storages - self.offloaded_of.keys()

    @cached_property
    def output_storages(self) -> frozenset[Storage]:
        """Storages that belong to the caller once produced: outputs and gradients."""
        found = {o.value.storage for o in self.outputs if o.value is not None}
        return frozenset(found) - self.static_storages - self.tangent_storages - self.offloaded_of.keys()

    @cached_property
    def transient_storages(self) -> frozenset[Storage]:
        """Storages that must not stay from forward to backward: the user asks to make them again."""
        found = {s for node in self.operations if node.is_transient for s in self.allocates(node)}
        return frozenset(found) - self.output_storages

    @cached_property
    def call_storages(self) -> frozenset[Storage]:
        """The static storages that each forward in flight has of its own: those of inputs alone."""
        inputs = {i.value.storage for i in self.inputs if i.role is InputRole.INPUT}
        shared = {i.value.storage for i in self.inputs if i.role is not InputRole.INPUT}
        return frozenset(inputs - shared)

    @cached_property
    def static_bytes(self) -> int:
        """Bytes of parameters, buffers and constants, of the inputs of each forward in flight, and reserved.

        Each storage counts once, those of inputs once for each forward. Offloaded ones do not count.
        """
        once = sum(storage.nbytes for storage in self.static_storages)
        more = sum(storage.nbytes for storage in self.call_storages) * (self.forwards_in_flight - 1)
        offloaded_bytes = sum(each.storage.nbytes for each in self.offloaded_parameters if each.is_state)
        return once + more + self.reserved_bytes - offloaded_bytes

    @cached_property
    def generators(self) -> tuple[str, ...]:
        """The names of the generators of the user's that operations draw from, in order of appearance."""
        return tuple(each.name for each in self.generator_symbols if each.kind != SEEDED)

    @cached_property
    def generator_symbols(self) -> tuple[Symbol, ...]:
        """The generators that operations draw from, other than devices' own, in order of appearance."""
        sources = (node.generator for node in self.nodes if Trait.RANDOM in node.traits)
        return tuple(dict.fromkeys(source for source in sources if isinstance(source, Symbol)))

    @cached_property
    def tied(self) -> dict[Value, Value]:
        """The first parameter of the same storage and type, for each parameter: both name one tensor."""
        first: dict[tuple[Storage, TensorType], Value] = {}
        parameters = (i.value for i in self.inputs if i.role is InputRole.PARAMETER)
        return {value: first.setdefault((value.storage, value.type), value) for value in parameters}

    @cached_property
    def releases(self) -> tuple[Node, ...]:
        """The nodes that accumulate or apply the gradient of a parameter."""
        return tuple(node for node in self.nodes if node.releases is not None)

    @property
    def gradients(self) -> Gradients:
        """The way in which the gradients of parameters are released; it is the same for all."""
        kinds = (node.releases for node in self.releases)
        return next(filter(None, kinds), Gradients.RETURNED)

    @property
    def sparse_gradients(self) -> tuple[str, ...]:
        """The targets of sparse gradients: what is added to their `.grad` makes it longer."""
        return tuple(output.target for output in self.outputs if output.part == INDICES)

    @cached_property
    def storages(self) -> tuple[Storage, ...]:
        """Every storage, in order of appearance."""
        found = dict.fromkeys(i.value.storage for i in self.inputs)
        found.update(dict.fromkeys(self.offloaded_of))
        for node in self.nodes:
            found.update(dict.fromkeys(value.storage for value in node.values))
        return tuple(found)

    @cached_property
    def operations(self) -> tuple[Node, ...]:
        """The nodes that a schedule runs: all but views, which are derived at their uses."""
        return tuple(node for node in self.nodes if not node.is_view)

    @cached_property
    def producers(self) -> dict[Storage, Node]:
        """The operation that allocates each storage; inputs have none, and offloaded ones only a load."""
        found: dict[Storage, Node] = {}
        inputs = self.static_storages | self.tangent_storages | self.offloaded_of.keys()
        for node in self.operations:
            for value in node.values:
                if value.storage not in inputs or node.op == LOAD:
                    found.setdefault(value.storage, node)
        return found

    @cached_property
    def copyable_storages(self) -> frozenset[Storage]:
        """Storages that can go to a tier and back: made as one tensor that fills them, not the caller's.

        Offloaded parameters are copied too; they are not among these, nor is what is written in place.
        """
        found: set[Storage] = set()
        written = {node.operands[0].storage for node in self.nodes if Trait.EFFECT in node.traits}
        written |= {value.storage for node in self.nodes if (value := node.written_operand) is not None}
        for storage, node in self.producers.items():
            if node.op == LOAD:
                continue
            made = [value.type for value in node.values if value.storage is storage]
            if storage in self.output_storages | written or not storage.nbytes or len(made) != 1:
                continue
            whole_bytes = allocation_bytes(made[0].nbytes, storage.device)
            if made[0].is_dense and made[0].device == storage.device and whole_bytes == storage.nbytes:
                found.add(storage)
        return frozenset(found)

    @cached_property
    def _reads(self) -> dict[Node, tuple[Storage, ...]]:
        return {node: tuple(dict.fromkeys(v.storage for v in node.operands)) for node in self.nodes}

    @cached_property
    def _allocates(self) -> dict[Node, tuple[Storage, ...]]:
        made: dict[Node, list[Storage]] = {node: [] for node in self.nodes}
        for storage, node in self.producers.items():
            made[node].append(storage)
        return {node: tuple(storages) for node, storages in made.items()}

    @cached_property
    def _allocated_bytes(self) -> dict[Node, int]:
        return {node: sum(s.nbytes for s in storages) for node, storages in self._allocates.items()}

    def reads(self, node: Node) -> tuple[Storage, ...]:
        """The storages that running `node` reads, each once; views are seen through."""
        return self._reads[node]

    def allocates(self, node: Node) -> tuple[Storage, ...]:
        """The storages that running `node` allocates, each once."""
        return self._allocates[node]

    def allocated_bytes(self, node: Node) -> int:
        """The bytes that running `node` allocates."""
        return self._allocated_bytes[node]
