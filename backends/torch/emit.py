"""Emits a schedule as straight-line Python: a line for each computation and copy, a `del` for each free."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...ir import (
    PAUSE,
    RECEIVE,
    SEND,
    Argument,
    Compute,
    Fetch,
    Free,
    Gradients,
    Graph,
    InputRole,
    Instruction,
    Loss,
    Node,
    Offload,
    OutputRole,
    Schedule,
    Storage,
    Symbol,
    Trait,
    Value,
    Wait,
)
from .gradient_dependencies import zero_without
from .offload.table import copied_value, copy_keys, last_fetches

__all__ = ["emit_source", "is_partial", "saved_values"]

_HEADER = '''"""One training step as straight-line Python, written by irc.

{forward} -> (outputs, saved); {backward} -> gradients.
`inputs` are the parameters, buffers, inputs and constants below, in this order. `saved` is emptied
by backward, so that what it holds is freed as backward goes.{partial}{releases}{exchanges}{copies}
"""
'''
_PARTIAL = """
`given` has bit k where output k has a gradient: what comes from others alone is zero, and not computed."""
_RELEASES = """
backward calls `release(name, parameter, gradient)`, which takes the gradient of a parameter; with the state
of its optimizer last, where that comes from a tier."""
_EXCHANGES = """
`exchange` carries values between pipeline stages: `send(key, value)`, `value = receive(key)`."""
_PAUSES = """
backward is a generator: what comes after `yield` can wait, as no other stage waits for it."""
_COPIES = """
`copies` carries values to other memory and back: `offload(key, value)` and `value = fetch(key)` begin a copy,
`wait(key)` waits for its end, after which the value may be deleted or read, `drop(key)` gives its copy up."""


def emit_source(schedule: Schedule) -> str:
    """Python source with `forward` and `backward`, which run `schedule` exactly.

    `forward(inputs)` takes the static inputs in graph order and returns `(outputs, saved)`.
    `backward(inputs, saved, tangents)` empties `saved` and returns the gradients in graph order, with
    None where there is none. Views are derived where they are used. Both must run without gradients.
    Where parts of backward come from some outputs alone, `backward` takes `given`, with bit k where output k
    has a gradient: the others' parts are zeros, as the product of a zero and an infinite derivative is none.
    Where gradients are released, `backward` takes one more argument, which it calls for each of them as
    `release(name, parameter, gradient)`.
    Where the graph is a pipeline stage that exchanges values with others, both take `exchange`; where it has
    a pause, backward is a generator that yields once, there.
    Where the schedule copies to tiers, both take `copies` as their last argument, such as `swap.Session`.
    """
    return _Emitter(schedule).source()


def is_partial(graph: Graph) -> bool:
    """Whether some operation of backward comes from the gradients of some outputs alone."""
    return bool(_partial(graph))


def _partial(graph: Graph) -> dict[Node, int]:
    """Such operations, each with the outputs as bits; what has an effect or gives nothing new always runs."""
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
    """What the emitted `forward` returns as `saved`, in that order."""
    split = next(k for k, instruction in enumerate(schedule.instructions) if isinstance(instruction, Loss))
    before, after = schedule.instructions[:split], schedule.instructions[split + 1 :]
    return tuple(_Emitter(schedule).saved(before, after))


@dataclass
class _Emitter:
    schedule: Schedule
    names: dict[Value, str] = field(default_factory=dict)
    taken: set[str] = field(
        default_factory=lambda: {"inputs", "saved", "tangents", "given", "release", "exchange", "torch", "_"}
    )
    operations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.makers = {value: node for node in self.graph.nodes for value in node.values}
        self.partial = _partial(self.graph)
        self.keys = copy_keys(self.schedule)
        self.last_fetches = last_fetches(self.schedule)
        self.copying: dict[Storage, int] = {}
        """The key of the copy that a `Wait` is for."""
        if self.keys:
            self.taken.add("copies")

    @property
    def graph(self) -> Graph:
        return self.schedule.graph

    def source(self) -> str:
        statics = [i for i in self.graph.inputs if i.role is not InputRole.TANGENT]
        tangents = [i.value for i in self.graph.inputs if i.role is InputRole.TANGENT]
        split = next(i for i, ins in enumerate(self.schedule.instructions) if isinstance(ins, Loss))
        before, after = self.schedule.instructions[:split], self.schedule.instructions[split + 1 :]
        outputs = [o.value for o in self.graph.outputs if o.role is OutputRole.OUTPUT]
        gradients = [o.value for o in self.graph.outputs if o.role is OutputRole.GRADIENT]
        saved = self.saved(before, after)
        forward = [
            *self._unpack([i.value for i in statics], "inputs", before, outputs),
            *self._body(before, 0),
            f"return [{self._list(outputs)}], [{self._saved_list(saved, outputs)}]",
        ]
        backward = [
            *([f"{self._targets(saved)} = saved"] if saved else []),
            "saved.clear()",
            *self._unpack([i.value for i in statics], "inputs", after, gradients),
            *self._unpack(tangents, "tangents", after, gradients),
            *self._body(after, split + 1),
            f"return [{self._list(gradients)}]",
        ]
        releases = bool(self.graph.releases)
        used = {node.op for node in self.graph.operations}
        exchanges = bool(used & {SEND, RECEIVE})
        others = f"{', exchange' if exchanges else ''}{', copies' if self.keys else ''}"
        more = f"{', given' if self.partial else ''}{', release' if releases else ''}{others}"
        first = f"forward(inputs{others})"
        signature = f"backward(inputs, saved, tangents{more})"
        operations = [f"{name} = torch.ops.{op}" for op, name in self.operations.items()]
        table = [f"#   {self._name(i.value)}: {i.role.value} {i.target}" for i in statics]
        copied = ((key, copied_value(self.schedule, storage), to) for (storage, to), key in self.keys.items())
        carried = [
            f"#   {key}: {self._name(value)} to {to}, {value.type.nbytes} B" for key, value, to in copied
        ]
        return "\n".join(
            [
                _HEADER.format(
                    forward=first,
                    backward=signature,
                    partial=_PARTIAL if self.partial else "",
                    releases=_RELEASES if releases else "",
                    exchanges=(_EXCHANGES if exchanges else "") + (_PAUSES if PAUSE in used else ""),
                    copies=_COPIES if self.keys else "",
                ),
                "import torch",
                "",
                *operations,
                "",
                "# inputs:",
                *table,
                *(["", "# copies:", *carried] if carried else []),
                "",
                "",
                f"def {first}:",
                *(f"    {line}" for line in forward),
                "",
                "",
                f"def {signature}:",
                *(f"    {line}" for line in backward),
                "",
            ]
        )

    # ------------------------------------------------------------------ what is alive where

    def saved(self, before: Iterable[Instruction], after: Iterable[Instruction]) -> list[Value]:
        """What forward hands to backward: alive at the loss, and used after it before it is made again."""
        alive: dict[Storage, list[Value]] = {}
        for instruction in before:
            if isinstance(instruction, Compute):
                for value in instruction.node.values:
                    if value.storage in instruction.retained:
                        alive.setdefault(value.storage, []).append(value)
            elif isinstance(instruction, Fetch):
                alive[instruction.storage] = [copied_value(self.schedule, instruction.storage)]
            elif isinstance(instruction, Free):
                alive.pop(instruction.storage, None)
        read: set[Storage] = set()
        made: set[Storage] = set()
        for instruction in after:
            match instruction:
                case Compute(node, retained):
                    read |= set(self.graph.reads(node)) - made
                    made |= retained
                case Free(storage) | Offload(storage):
                    read |= {storage} - made
                case Fetch(storage):
                    made.add(storage)
                case Loss() | Wait():
                    pass
        read |= {
            o.value.storage for o in self.graph.outputs if o.value and o.role is OutputRole.GRADIENT
        } - made
        return [value for storage, values in alive.items() if storage in read for value in values]

    def _unpack(
        self, values: list[Value], source: str, body: Iterable[Instruction], results: Iterable[Value | None]
    ) -> Iterator[str]:
        """Names the inputs that a body reads; the others are not touched."""
        read = {v for i in body if isinstance(i, Compute) for v in self._bases(i.node.operands)}
        read |= set(self._bases(value for value in results if value is not None))
        for index, value in enumerate(values):
            if value in read and value.storage not in self.graph.offloaded_of:
                yield f"{self._name(value)} = {source}[{index}]"

    def _bases(self, values: Iterable[Value]) -> Iterator[Value]:
        """The values that the variables hold: views are followed to what they are views of."""
        for value in values:
            maker = self.makers.get(value)
            if maker is not None and maker.is_view:
                yield from self._bases(maker.operands)
            else:
                yield value

    # ------------------------------------------------------------------ statements

    def _body(self, instructions: Iterable[Instruction], first: int) -> Iterator[str]:
        where = None
        for step, instruction in enumerate(instructions, first):
            match instruction:
                case Compute(node, retained):
                    if node.at is not None and node.at != where:
                        where = node.at
                        yield f"# {where}"
                    yield from self._compute(node, retained)
                case Free(storage):
                    made = dict.fromkeys(self._made(storage))
                    yield f"del {', '.join(self._name(value) for value in made)}"
                case Offload() | Fetch() | Wait():
                    yield from self._copy(instruction, step)
                case Loss():
                    raise AssertionError("the loss stands between the two bodies")

    def _made(self, storage: Storage) -> Iterator[Value]:
        """The values that fill what is freed."""
        offloaded = self.graph.offloaded_of.get(storage)
        if offloaded is not None:
            yield offloaded.value
        else:
            yield from (v for v in self.graph.producers[storage].values if v.storage is storage)

    def _copy(self, instruction: Offload | Fetch | Wait, step: int) -> Iterator[str]:
        """Copies; the copy in the tier is given up where the last copy of it is waited for."""
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
        if node in self.partial:
            call = f"{call} if given & {self.partial[node]} else {self._zeros(node)}"
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
        if offloaded is not None:  # a parameter under another of its names
            value = offloaded.value
        if value not in self.names:
            plain = re.sub(r"\W", "_", value.name)
            if not plain or plain[0].isdigit() or keyword.iskeyword(plain):
                plain = f"v_{plain}"
            name, count = plain, 1
            while name in self.taken:
                count += 1
                name = f"{plain}_{count}"
            self.taken.add(name)
            self.names[value] = name
        return self.names[value]

    def _operation(self, op: str) -> str:
        if op not in self.operations:
            name = re.sub(r"\W", "_", op.removesuffix(".default"))
            self.taken.add(name)
            self.operations[op] = name
        return self.operations[op]

    def _expression(self, value: Value) -> str:
        maker = self.makers.get(value)
        if maker is None or not maker.is_view:
            return self._name(value)
        call = self._call(maker)
        return f"{call}[{maker.results.index(value)}]" if maker.is_sequence else call

    def _call(self, node: Node) -> str:
        if node.releases is not None:
            parameter = node.operands[0]
            name = next(i.target for i in self.graph.inputs if i.value is parameter)
            arguments = [self._argument(argument) for argument in node.arguments]
            if parameter.storage in self.graph.state_of and node.releases is Gradients.APPLIED:
                arguments.append(self._name(self.graph.state_of[parameter.storage].value))
            return f"release({name!r}, {', '.join(arguments)})"
        match node.op, node.arguments:
            case op, (Value() as value, key) if op == SEND:
                return f"exchange.send({key!r}, {self._argument(value)})"
            case op, (key,) if op == RECEIVE:
                return f"exchange.receive({key!r})"
            case op, _ if op == PAUSE:
                return "yield"
            case _:
                pass
        arguments = [self._argument(argument) for argument in node.arguments]
        arguments += [f"{key}={self._argument(argument)}" for key, argument in node.keywords]
        return f"{self._operation(node.op)}({', '.join(arguments)})"

    def _argument(self, argument: Argument) -> str:
        match argument:
            case Value():
                return self._expression(argument)
            case tuple():
                return f"[{', '.join(self._argument(item) for item in argument)}]"
            case Symbol("device", name):
                return f"torch.device({name!r})"
            case Symbol(_, name):
                return f"torch.{name}"
            case float() if not math.isfinite(argument):
                return f"float({str(argument)!r})"
            case _:
                return repr(argument)

    def _zeros(self, node: Node) -> str:
        made = ["None" if value is None else self._zero(value) for value in node.results]
        return f"({', '.join(made)},)" if node.is_sequence else made[0]

    def _zero(self, value: Value) -> str:
        kind = value.type
        where = f"dtype=torch.{kind.dtype.value}, device={kind.device!r}"
        return f"torch.empty_strided({kind.shape!r}, {kind.strides!r}, {where}).zero_()"

    def _list(self, values: Iterable[Value | None]) -> str:
        return ", ".join("None" if value is None else self._expression(value) for value in values)

    def _saved_list(self, saved: Iterable[Value], outputs: Iterable[Value | None]) -> str:
        """The saved values; what is also an output goes in as an alias, or it would refer to itself."""
        given = {base for value in outputs if value is not None for base in self._bases([value])}
        return ", ".join(f"{self._name(v)}.detach()" if v in given else self._name(v) for v in saved)
