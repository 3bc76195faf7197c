"""Emits a schedule as straight-line Python: a line for each computation and copy, a `del` for each free.

Names and texts of a graph may come from a file of others, and what is emitted is executed. So each of them
goes through a function that returns one kind of token and nothing else: `_plain` an identifier, `_comment`
the rest of a line, `_literal` a constant. Operations, keywords and symbols that are not names are refused.
"""

from __future__ import annotations

import keyword
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ...ir import (
    FUSED,
    PAUSE,
    RECEIVE,
    SEEDED,
    SEND,
    Argument,
    Compute,
    Fetch,
    Free,
    Gradients,
    Graph,
    InputRole,
    Instruction,
    Kernel,
    Loss,
    Node,
    Offload,
    OutputRole,
    Schedule,
    Storage,
    Symbol,
    TensorType,
    Trait,
    Value,
    VerificationError,
    Wait,
    printable,
    zero_without,
)
from ...ir.lengths import Polynomial
from ...torch_support.draws import draw_again, draw_first
from ...torch_support.kernels import kernel
from ...torch_support.operations import OWN_FUNCTIONS, function_name
from .offload.table import copied_value, copy_keys, last_fetches

__all__ = ["LengthForms", "NumberSlots", "check_names", "emit_source", "is_partial", "saved_values"]

_HEADER = '''"""One training step as straight-line Python, written by irc.

{forward} -> (outputs, saved); {backward} -> gradients.
`inputs` are the parameters, buffers, inputs, constants, generators and numbers below, in this order. backward
empties `saved`, so that saved values are freed as backward runs.{partial}{releases}{exchanges}{copies}
"""
'''
_PARTIAL = """
`given` has bit k if output k has a gradient: values that come only from others are zero, not computed."""
_RELEASES = """
backward calls `release(name, parameter, gradient)`, which takes the gradient of a parameter; the state of
its optimizer is the last argument if it comes from a tier."""
_EXCHANGES = """
`exchange` carries values between pipeline stages: `send(key, value)`, `value = receive(key)`."""
_PAUSES = """
backward is a generator: the part after `yield` can run later, as no other stage waits for it."""
_COPIES = """
`copies` carries values to other memory and back: `offload(key, value)` and `value = fetch(key)` begin a copy,
`wait(key)` waits for its end, after which the value may be deleted or read, `drop(key)` frees its copy."""


NumberSlots = Mapping[str, Mapping[int | str, int]]
"""The scalar operands that come with each call: by the name of the node and the index or the keyword of the
argument, the index of the number."""


@dataclass(frozen=True)
class LengthForms:
    """The operations and types of a graph, with polynomials of the length in the place of sizes.

    Args:
        nodes: The operations, by name and kind.
        types: The types of values, by name.
    """

    nodes: Mapping[tuple[str, str], Node]
    types: Mapping[str, TensorType]


def emit_source(
    schedule: Schedule, slots: NumberSlots = MappingProxyType({}), lengths: LengthForms | None = None
) -> str:
    """Writes Python source with `forward` and `backward`, which run `schedule` exactly.

    `forward(inputs)` takes the static inputs in graph order, then the generators of the user's that are drawn
    from, the numbers that `slots` names and, with `lengths`, the length; it returns `(outputs, saved)`.
    `backward(inputs, saved, tangents)` empties `saved` and returns the gradients in graph order; a missing
    gradient is None. Views are derived where they are used, or once if they are used often. Both functions
    must run without gradients.
    Further arguments follow if the schedule needs them, in this order:

    - `given` of backward, with bit k set if output k has a gradient, if parts of backward come only from some
      outputs. The parts of the other outputs are zeros: the product of a zero and an infinite derivative is
      not.
    - `release` of backward, called as `release(name, parameter, gradient)`, if gradients are released.
    - `exchange` of both, if the graph is a pipeline stage that exchanges values with others. If it has a
      pause, backward is a generator that yields once, at the pause.
    - `copies` of both, such as a `Session`, if the schedule copies to tiers.
    """
    return _Emitter(schedule, slots, lengths).source()


def is_partial(graph: Graph) -> bool:
    """Whether an operation of backward comes only from the gradients of some outputs."""
    return bool(_partial(graph))


def _partial(graph: Graph) -> dict[Node, int]:
    """Returns such operations, each with its outputs as bits.

    Operations with an effect, and those that do not fill new memory, always run and are left out.
    """
    zero = zero_without(graph)
    every = frozenset(int(i.target) for i in graph.inputs if i.role is InputRole.TANGENT)
    found: dict[Node, int] = {}
    for node in graph.operations:
        comes_from = next((zero.get(value) for value in node.values), None)
        own = {value.storage for value in node.values}
        makes_all = len(own) == len(node.values) and own == set(graph.allocates(node))
        plain = node.releases is None and not node.traits & {Trait.EFFECT, Trait.RANDOM}
        if comes_from and comes_from != every and makes_all and plain:
            found[node] = sum(1 << index for index in comes_from)
    return found


def saved_values(schedule: Schedule) -> tuple[Value, ...]:
    """Returns the values that the emitted `forward` returns as `saved`, in that order."""
    return _Halves.of(schedule).saved()


@dataclass(frozen=True)
class _Halves:
    """The instructions of a schedule before the loss and after it."""

    schedule: Schedule
    before: tuple[Instruction, ...]
    after: tuple[Instruction, ...]

    @staticmethod
    def of(schedule: Schedule) -> _Halves:
        instructions = schedule.instructions
        split = next(k for k, instruction in enumerate(instructions) if isinstance(instruction, Loss))
        return _Halves(schedule, instructions[:split], instructions[split + 1 :])

    def saved(self) -> tuple[Value, ...]:
        """Returns the values that are alive at the loss, and read after it before they are made again."""
        read = self._read_after()
        return tuple(
            v for storage, values in self._alive_at_loss().items() if storage in read for v in values
        )

    def _alive_at_loss(self) -> dict[Storage, list[Value]]:
        alive: dict[Storage, list[Value]] = {}
        for instruction in self.before:
            if isinstance(instruction, Compute):
                for value in instruction.node.values:
                    if value.storage in instruction.retained:
                        alive.setdefault(value.storage, []).append(value)
            elif isinstance(instruction, Fetch):
                alive[instruction.storage] = [copied_value(self.schedule, instruction.storage)]
            elif isinstance(instruction, Free):
                alive.pop(instruction.storage, None)
        return alive

    def _read_after(self) -> set[Storage]:
        """Returns the storages that backward reads or frees before it makes them."""
        graph = self.schedule.graph
        read: set[Storage] = set()
        made: set[Storage] = set()
        for instruction in self.after:
            match instruction:
                case Compute(node, retained):
                    read |= set(graph.reads(node)) - made
                    made |= retained
                case Free(storage) | Offload(storage):
                    read |= {storage} - made
                case Fetch(storage):
                    made.add(storage)
                case Loss() | Wait():
                    pass
        gradients = (o.value for o in graph.outputs if o.role is OutputRole.GRADIENT)
        return read | {value.storage for value in gradients if value is not None} - made


def _repeated_nodes(schedule: Schedule) -> set[Node]:
    """Returns the operations that a schedule runs more than once."""
    runs = Counter(i.node for i in schedule.instructions if isinstance(i, Compute))
    return {node for node, count in runs.items() if count > 1}


class _Emitter:
    """Writes the source of one schedule. Names are given out in the order in which they are first used."""

    def __init__(self, schedule: Schedule, slots: NumberSlots, lengths: LengthForms | None) -> None:
        graph = schedule.graph
        self.schedule, self.graph = schedule, graph
        self.halves = _Halves.of(schedule)
        self.statics = [i for i in graph.inputs if i.role is not InputRole.TANGENT]
        self.tangents = [i.value for i in graph.inputs if i.role is InputRole.TANGENT]
        self.outputs = [o.value for o in graph.outputs if o.role is OutputRole.OUTPUT]
        self.gradients = [o.value for o in graph.outputs if o.role is OutputRole.GRADIENT]
        self.saved = self.halves.saved()
        self.producers = {value: node for node in graph.nodes for value in node.values}
        self.partial = _partial(graph)
        used = {node.op for node in graph.operations}
        self.exchanges, self.pauses = bool(used & {SEND, RECEIVE}), PAUSE in used
        self.keys = copy_keys(schedule)
        self.last_fetches = last_fetches(schedule)
        self.copying: dict[Storage, int] = {}
        """The key of the copy that a `Wait` is for."""
        self.lengths = lengths
        self.views = _Views(graph, self._type)
        self.repeated: set[Value] = set()
        """The views that the body reads several times, which become variables."""
        self.bound: dict[Storage, list[Value]] = {}
        """The views of each storage that are variables now."""
        inputs = {entry.value.storage: entry.value for entry in reversed(self.statics)}
        self.sums = {
            value: inputs.get(value.storage, node.operands[0])
            for node in graph.nodes
            if Trait.EFFECT in node.traits
            for value in node.values
            if value.storage is node.operands[0].storage
        }
        """The value that each tensor was before it was written, such as a sum which grows in place."""
        self.names: dict[Value, str] = {}
        self.operations: dict[str, str] = {}
        self.kernels: dict[str, str] = {}
        """The variable of each kernel, by its text."""
        self.generators: dict[Symbol, str] = {}
        """The variable of each generator that is no device's own: those of the user's come with a call."""
        self.replayed = _repeated_nodes(schedule)
        self.ran: set[Node] = set()
        self.own: set[Callable[..., Any]] = set()
        """The functions of irc that are called."""
        self.taken: set[str] = set(_RESERVED)
        for symbol in sorted(graph.generator_symbols, key=lambda symbol: symbol.kind == SEEDED):
            self.generators[symbol] = self._unique("generator")
        self.slots = slots
        self.numbers = {
            index: self._unique("number")
            for index in sorted({index for places in slots.values() for index in places.values()})
        }
        """The variable of each number that comes with a call, by its index."""

    def source(self) -> str:
        """Writes the module: docstring, imports, tables, forward and backward."""
        forward, backward = list(self._forward()), list(self._backward())
        return "\n".join(
            [
                self._docstring(),
                "import torch",
                *sorted(_import(function) for function in self.own),
                "",
                *(f"{name} = {function_name(op)}" for op, name in self.operations.items()),
                *(f"{name} = kernel({_literal(text)})" for text, name in self.kernels.items()),
                "",
                *self._input_table(),
                *self._copy_table(),
                "",
                "",
                f"def {self._forward_signature}:",
                *(f"    {line}" for line in forward),
                "",
                "",
                f"def {self._backward_signature}:",
                *(f"    {line}" for line in backward),
                "",
            ]
        )

    # ------------------------------------------------------------------ head

    def _docstring(self) -> str:
        return _HEADER.format(
            forward=self._forward_signature,
            backward=self._backward_signature,
            partial=_PARTIAL if self.partial else "",
            releases=_RELEASES if self.graph.releases else "",
            exchanges=(_EXCHANGES if self.exchanges else "") + (_PAUSES if self.pauses else ""),
            copies=_COPIES if self.keys else "",
        )

    @property
    def _forward_signature(self) -> str:
        return f"forward(inputs{self._common_arguments})"

    @property
    def _backward_signature(self) -> str:
        given = ", given" if self.partial else ""
        release = ", release" if self.graph.releases else ""
        return f"backward(inputs, saved, tangents{given}{release}{self._common_arguments})"

    @property
    def _common_arguments(self) -> str:
        return f"{', exchange' if self.exchanges else ''}{', copies' if self.keys else ''}"

    def _input_table(self) -> list[str]:
        rows = [_comment(f"  {self._name(i.value)}: {i.role.value} {i.label}") for i in self.statics]
        users = ((name, symbol) for symbol, name in self.generators.items() if symbol.kind != SEEDED)
        rows += [_comment(f"  {name}: generator {symbol.name}") for name, symbol in users]
        rows += [_comment(f"  {name}: number {index}") for index, name in self.numbers.items()]
        rows += [_comment("  length: the length of the call")] if self.lengths is not None else []
        return [_comment("inputs:"), *rows]

    def _copy_table(self) -> list[str]:
        rows: list[str] = []
        for (storage, tier), key in self.keys.items():
            value = copied_value(self.schedule, storage)
            rows.append(_comment(f"  {key}: {self._name(value)} to {tier}, {value.type.nbytes} B"))
        return ["", _comment("copies:"), *rows] if rows else []

    # ------------------------------------------------------------------ functions

    def _forward(self) -> Iterator[str]:
        statics = [i.value for i in self.statics]
        yield from self._unpack(statics, "inputs", self.halves.before, self.outputs)
        yield from self._unpack_generators(self.halves.before)
        yield from self._unpack_numbers(self.halves.before)
        yield from self._unpack_length()
        yield from self._body(self.halves.before, 0)
        yield f"return [{self._list(self.outputs)}], [{self._saved_list()}]"

    def _backward(self) -> Iterator[str]:
        if self.saved:
            yield f"{self._targets(self.saved)} = saved"
        yield "saved.clear()"
        statics = [i.value for i in self.statics]
        yield from self._unpack(statics, "inputs", self.halves.after, self.gradients)
        yield from self._unpack_generators(self.halves.after)
        yield from self._unpack_numbers(self.halves.after)
        yield from self._unpack_length()
        yield from self._unpack(self.tangents, "tangents", self.halves.after, self.gradients)
        yield from self._body(self.halves.after, len(self.halves.before) + 1)
        yield f"return [{self._list(self.gradients)}]"

    def _unpack(
        self, values: list[Value], source: str, body: Iterable[Instruction], results: Iterable[Value | None]
    ) -> Iterator[str]:
        """Assigns names to the inputs that a body reads; the others are not touched."""
        read = {v for i in body if isinstance(i, Compute) for v in self._bases(i.node.operands)}
        read |= set(self._bases(value for value in results if value is not None))
        for index, value in enumerate(values):
            if value in read and value.storage not in self.graph.offloaded_of:
                yield f"{self._name(value)} = {source}[{index}]"

    def _unpack_generators(self, body: Iterable[Instruction]) -> Iterator[str]:
        """Assigns names to the generators that a body draws from, other than devices' own."""
        drawn_from = {i.node.generator for i in body if isinstance(i, Compute) and i.node not in self.ran}
        for index, (symbol, name) in enumerate(self.generators.items(), len(self.statics)):
            if symbol in drawn_from and (parts := symbol.seed_and_device) is not None:
                yield f"{name} = torch.Generator({_literal(parts[1])}).manual_seed({parts[0]})"
            elif symbol in drawn_from:
                yield f"{name} = inputs[{index}]"

    def _unpack_numbers(self, body: Iterable[Instruction]) -> Iterator[str]:
        """Assigns names to the numbers of a call that a body computes with."""
        places = [self.slots.get(i.node.name, {}) for i in body if isinstance(i, Compute)]
        read = {index for each in places for index in each.values()}
        first = len(self.statics) + len(self.graph.generators)
        for index, name in self.numbers.items():
            if index in read:
                yield f"{name} = inputs[{first + index}]"

    def _unpack_length(self) -> Iterator[str]:
        if self.lengths is not None:
            yield f"length = inputs[{len(self.statics) + len(self.graph.generators) + len(self.numbers)}]"

    def _bases(self, values: Iterable[Value]) -> Iterator[Value]:
        """Yields the values that are variables: views are followed to their bases."""
        for value in values:
            producer = self.producers.get(value)
            if value in self.sums:
                yield self.sums[value]
            elif producer is not None and producer.is_view:
                yield from self._bases(producer.operands)
            else:
                yield value

    # ------------------------------------------------------------------ statements

    def _body(self, instructions: Sequence[Instruction], first: int) -> Iterator[str]:
        location = None
        self.repeated, self.bound = self.views.repeated(instructions), {}
        for step, instruction in enumerate(instructions, first):
            match instruction:
                case Compute(node, retained):
                    if node.at is not None and node.at != location:
                        location = node.at
                        yield _comment(str(location))
                    yield from self._bindings(node.operands)
                    yield from self._compute(node, retained)
                case Free(storage):
                    values = dict.fromkeys((*self._filling(storage), *self.bound.pop(storage, ())))
                    yield f"del {', '.join(self._name(value) for value in values)}"
                case Offload() | Fetch() | Wait():
                    yield from self._copy(instruction, step)
                case Loss():
                    raise AssertionError("the loss stands between the two bodies")

    def _bindings(self, values: Iterable[Value]) -> Iterator[str]:
        """Writes the views that become variables before an operation reads these values."""
        for value in map(self.views.shortest, values):
            producer = self.producers.get(value)
            bound = self.bound.get(value.storage, ())
            if producer is None or not producer.is_view or value in bound:
                continue
            yield from self._bindings(producer.operands)
            if value in self.repeated:
                call = self._view(producer, value)
                self.bound.setdefault(value.storage, []).append(value)
                yield f"{self._name(value)} = {call}"

    def _filling(self, storage: Storage) -> Iterator[Value]:
        """Yields the values that fill a storage that is freed."""
        offloaded = self.graph.offloaded_of.get(storage)
        if offloaded is not None:
            yield offloaded.value
        else:
            yield from (v for v in self.graph.producers[storage].values if v.storage is storage)

    def _copy(self, instruction: Offload | Fetch | Wait, step: int) -> Iterator[str]:
        """Writes a copy; the slot in the tier is dropped when the last copy from it has ended."""
        storage = instruction.storage
        if isinstance(instruction, Wait):
            key = self.copying[storage]
            yield f"copies.wait({key})"
            if storage not in self.graph.offloaded_of and self.last_fetches.get(storage, -1) < step:
                yield f"copies.drop({key})"
            return
        key = self.copying[storage] = self.keys[storage, instruction.tier]
        name = self._name(copied_value(self.schedule, storage))
        yield (
            f"copies.offload({key}, {name})"
            if isinstance(instruction, Offload)
            else f"{name} = copies.fetch({key})"
        )

    def _compute(self, node: Node, retained: frozenset[Storage]) -> Iterator[str]:
        kept = [v if v is not None and v.storage in retained else None for v in node.results]
        call = self._call(node)
        self.ran.add(node)
        if node in self.partial:
            written = node.written_operand
            zeros = self._zeros(node) if written is None else self._argument(written)
            call = f"{call} if given & {self.partial[node]} else {zeros}"
        if not any(kept):
            yield call
        elif not node.is_sequence:
            assert kept[0] is not None
            yield f"{self._name(kept[0])} = {call}"
        else:
            yield f"{self._targets(kept)} = {call}"
            if None in kept:
                yield "del _"

    def _targets(self, values: Iterable[Value | None]) -> str:
        names = ["_" if value is None else self._name(value) for value in values]
        return f"({names[0]},)" if len(names) == 1 else ", ".join(names)

    # ------------------------------------------------------------------ expressions

    def _name(self, value: Value) -> str:
        offloaded = self.graph.offloaded_of.get(value.storage)
        if offloaded is not None and value not in self.views.of:  # a parameter under another of its names
            value = offloaded.value
        while value in self.sums:
            value = self.sums[value]
        if value not in self.names:
            self.names[value] = self._unique(_plain(value.name))
        return self.names[value]

    def _operation(self, op: str) -> str:
        if op not in self.operations:
            if op in OWN_FUNCTIONS:
                self.own.add(OWN_FUNCTIONS[op])
            self.operations[op] = self._unique(_plain(op.removesuffix(".default")))
        return self.operations[op]

    def _kernel(self, node: Node) -> str:
        """Returns the name of a kernel.

        Raises:
            VerificationError: IRC132 if the node does not hold operations that one kernel can compute.
        """
        try:
            text = Kernel.of(node).text
        except ValueError as error:
            raise VerificationError("IRC132", f"{printable(node.name)}: {error}", at=node.at) from error
        if text not in self.kernels:
            self.own.add(kernel)
            self.kernels[text] = self._unique("fused")
        return self.kernels[text]

    def _unique(self, plain: str) -> str:
        """Returns a name that nothing else in the source has."""
        name, count = plain, 1
        while name in self.taken:
            count += 1
            name = f"{plain}_{count}"
        self.taken.add(name)
        return name

    def _expression(self, value: Value) -> str:
        producer = self.producers.get(value)
        if producer is None or not producer.is_view or value in self.bound.get(value.storage, ()):
            return self._name(value)
        return self._view(producer, value)

    def _view(self, producer: Node, value: Value) -> str:
        """Derives a view; one of several by itself, and a slice as the quicker operation."""
        index = producer.results.index(value)
        match producer.op, self._arguments(producer), producer.keywords:
            case "aten.unbind.int", (Value() as base, *axis), ():
                alone = "aten.select.int", (base, *(axis or [0]), index)
            case "aten.split.Tensor" | "aten.unsafe_split.Tensor", (Value() as base, int(size), *axis), ():
                alone = "aten.narrow.default", (base, *(axis or [0]), index * size, self._size(value, axis))
            case "aten.slice.Tensor", (Value() as base, int(axis), int(start), int()), () if (
                start >= 0 and _size(value, [axis])
            ):
                alone = "aten.narrow.default", (base, axis, start, self._size(value, [axis]))
            case _:
                call = self._call(producer)
                return f"{call}[{index}]" if producer.is_sequence else call
        op, arguments = alone
        return f"{self._operation(op)}({', '.join(map(self._argument, arguments))})"

    def _size(self, value: Value, axis: Sequence[Argument]) -> int:
        """Returns the size of a view along an axis; a polynomial if it depends on the length."""
        return _size(replace(value, type=self._type(value)), axis)

    def _type(self, value: Value) -> TensorType:
        return value.type if self.lengths is None else self.lengths.types[value.name]

    def _arguments(self, node: Node) -> tuple[Argument, ...]:
        """Returns the arguments of an operation, with polynomials where they depend on the length."""
        if self.lengths is None:
            return node.arguments
        return _with_lengths(node.arguments, self.lengths.nodes[node.name, node.op].arguments)

    def _own_keywords(self, node: Node) -> tuple[tuple[str, Argument], ...]:
        if self.lengths is None:
            return node.own_keywords
        form = dict(self.lengths.nodes[node.name, node.op].keywords)
        return tuple((key, _with_lengths(argument, form[key])) for key, argument in node.own_keywords)

    def _call(self, node: Node) -> str:
        if node.releases is not None:
            parameter = node.operands[0]
            name = next(i.target for i in self.graph.inputs if i.value is parameter)
            arguments = [self._argument(argument) for argument in node.arguments]
            if parameter.storage in self.graph.state_of and node.releases is Gradients.APPLIED:
                arguments.append(self._name(self.graph.state_of[parameter.storage].value))
            return f"release({_literal(name)}, {', '.join(arguments)})"
        match node.op, node.arguments:
            case op, (Value() as value, key) if op == SEND:
                return f"exchange.send({self._argument(key)}, {self._argument(value)})"
            case op, (key,) if op == RECEIVE:
                return f"exchange.receive({self._argument(key)})"
            case op, _ if op == PAUSE:
                return "yield"
            case op, _ if op == FUSED:
                operands = ", ".join(map(self._argument, node.operands))
                return f"{self._kernel(node)}([{operands}])"
            case _:
                check_names(node)
        numbers = {place: self.numbers[index] for place, index in self.slots.get(node.name, {}).items()}
        given = enumerate(self._arguments(node))
        arguments = [numbers.get(k) or self._argument(argument) for k, argument in given]
        keywords = dict(self._own_keywords(node))
        if node.generator_state is not None and node in self.replayed:
            if node in self.ran:
                drawing, source = draw_again, node.values[0].type.device
            else:
                drawing, source = draw_first, node.generator
            self.own.add(drawing)
            keywords.pop("generator", None)
            before = [self._name(node.generator_state), self._argument(source), self._operation(node.op)]
            arguments, call = [*before, *arguments], drawing.__name__
        else:
            call = self._operation(node.op)
        arguments += [
            f"{key}={numbers.get(key) or self._argument(argument)}" for key, argument in keywords.items()
        ]
        return f"{call}({', '.join(arguments)})"

    def _argument(self, argument: Argument | Polynomial) -> str:
        match argument:
            case Value():
                return self._expression(self.views.shortest(argument))
            case tuple():
                return f"[{', '.join(self._argument(item) for item in argument)}]"
            case Symbol() if argument in self.generators:
                return self.generators[argument]
            case Symbol():
                return _symbol(argument)
            case Polynomial():
                return str(argument)
            case _:
                return _literal(argument)

    def _zeros(self, node: Node) -> str:
        made = ["None" if value is None else self._zero(value) for value in node.results]
        return f"({', '.join(made)},)" if node.is_sequence else made[0]

    def _zero(self, value: Value) -> str:
        kind = self._type(value)
        options = f"dtype=torch.{kind.dtype.value}, device={_literal(kind.device)}"
        shape, strides = self._argument(kind.shape), self._argument(kind.strides)
        return f"torch.empty_strided({shape}, {strides}, {options}).zero_()"

    def _list(self, values: Iterable[Value | None]) -> str:
        return ", ".join("None" if value is None else self._expression(value) for value in values)

    def _saved_list(self) -> str:
        """Lists the saved values; an output goes in as an alias, or it would refer to itself."""
        outputs = {base for value in self.outputs if value is not None for base in self._bases([value])}
        return ", ".join(f"{self._name(v)}.detach()" if v in outputs else self._name(v) for v in self.saved)


def _with_lengths(argument: Any, form: Any) -> Any:
    """Returns an argument with its numbers as another form of it has them."""
    if isinstance(argument, tuple):
        return tuple(_with_lengths(each, other) for each, other in zip(argument, form, strict=True))
    return argument if isinstance(argument, Value) else form


def _import(function: Callable[..., Any]) -> str:
    """The line that imports a function of irc's own."""
    return f"from {function.__module__} import {function.__name__}"


# ---------------------------------------------------------------------- views


def _size(value: Value, axis: Sequence[Argument]) -> int:
    """Returns the size of a view along an axis; the first one if none is named."""
    (place,) = axis or (0,)
    assert isinstance(place, int)
    return value.type.shape[place]


_STAYING = frozenset(
    f"aten.{name}"
    for name in (
        *("detach.default", "alias.default", "t.default", "transpose.int", "permute.default"),
        *("view.default", "_unsafe_view.default", "unsqueeze.default", "squeeze.dim", "squeeze.dims"),
    )
)
"""The views that begin where their operand begins."""

_ALIASES = frozenset(("aten.detach.default", "aten.alias.default"))


class _Views:
    """The views of a graph, derived with as few calls as possible.

    Args:
        graph: A graph in which each value has a producer or is an input.
        type_of: The type of a value.
    """

    def __init__(self, graph: Graph, type_of: Callable[[Value], TensorType]) -> None:
        self.type_of = type_of
        self.nodes = [node for node in graph.nodes if node.is_view]
        self.of = {value: node for node in self.nodes for value in node.values}
        self.known: dict[Value, Value] = {}

    def shortest(self, value: Value) -> Value:
        """Returns the earliest value that lies in memory as this one does: it is the same to an operation.

        A dimension of size one may have another stride than its type says, by which kernels choose how they
        sum (`passes/rewrites/real_layouts.py`): such a value is derived as eager derives it.
        """
        if value not in self.known:
            found, base = value, value
            passing = _ALIASES if 1 in self.type_of(value).shape else _STAYING
            while (node := self.of.get(base)) is not None and node.op in passing:
                base = node.operands[0]
                found = base if self.type_of(base) == self.type_of(value) else found
            self.known[value] = found
        return self.known[value]

    def repeated(self, instructions: Iterable[Instruction]) -> set[Value]:
        """Returns the views that these instructions read, or derive others from, more than once."""
        reads = Counter(
            self.shortest(v) for i in instructions if isinstance(i, Compute) for v in i.node.operands
        )
        for node in reversed(self.nodes):
            read = sum(1 if reads[value] > 1 else reads[value] for value in node.values)
            for operand in node.operands:
                reads[self.shortest(operand)] += read
        return {value for value in self.of if reads[value] > 1}


# ---------------------------------------------------------------------- names and texts of others

_RESERVED = frozenset(
    (
        *("inputs", "saved", "tangents", "given", "release", "exchange", "copies"),
        *("forward", "backward", "torch", "float", "complex", "length", "_"),
        *(function.__name__ for function in (draw_first, draw_again, kernel)),
        *(function.__name__ for function in OWN_FUNCTIONS.values()),
    )
)
"""The names that the emitted source has itself."""

_OPERATION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*){2}")
_SYMBOLS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def check_names(node: Node) -> None:
    """Refuses an operation whose own name or keywords cannot be names in Python.

    Args:
        node: Not one of irc's own operations, which are no names in Python.

    Raises:
        VerificationError: IRC132.
    """
    if not _OPERATION.fullmatch(node.op) or any(map(keyword.iskeyword, node.op.split("."))):
        raise VerificationError("IRC132", f"{printable(node.op)} is not an operation of torch", at=node.at)
    keys = [key for key, _ in node.keywords]
    for key in keys:
        is_name = key.isascii() and key.isidentifier() and not keyword.iskeyword(key)
        if not is_name or key == "__debug__" or keys.count(key) > 1:
            raise VerificationError(
                "IRC132", f"{printable(key)} is not a keyword of {printable(node.op)}", at=node.at
            )


def _symbol(symbol: Symbol) -> str:
    """Returns a named constant of torch as Python.

    Raises:
        VerificationError: IRC132 if torch has no such constant.
    """
    if symbol.kind == "device":
        return f"torch.device({_literal(symbol.name)})"
    kind = _SYMBOLS.get(symbol.kind)
    if kind is None or not isinstance(getattr(torch, symbol.name, None), kind):
        raise VerificationError("IRC132", f"{printable(symbol.name)} is not a name of torch")
    return f"torch.{symbol.name}"


def _plain(name: str) -> str:
    """Returns an identifier like a name, in ASCII: Python takes some other letters for one another."""
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name[:80])
    is_special = not plain or plain[0].isdigit() or plain.startswith("__") or keyword.iskeyword(plain)
    return f"v_{plain}" if is_special else plain


def _comment(text: str) -> str:
    """Returns a comment; nothing in the text ends its line."""
    return f"# {printable(text)}"


def _literal(value: object) -> str:
    """Returns a constant as Python, which gives an equal constant of the same type."""
    match value:
        case bool() | None:
            return repr(value)
        case int():
            if abs(value) >= 1 << 64:
                raise VerificationError("IRC132", "a whole number of a program has more than 64 bits")
            return int.__repr__(value)
        case float():
            return float.__repr__(value) if math.isfinite(value) else f"float({float.__repr__(value)!r})"
        case complex():
            return f"complex({_literal(value.real)}, {_literal(value.imag)})"
        case str():
            return str.__repr__(value)
        case _:
            raise VerificationError("IRC132", f"a {type(value).__name__} is not a constant of a program")
