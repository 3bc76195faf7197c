"""Checks that a graph is well formed."""

from __future__ import annotations

from collections.abc import Mapping

from ..fused import FUSED, Kernel, overwritten
from ..graph import (
    GENERATOR_STATE,
    INDICES,
    PAUSE,
    RECEIVE,
    SEEDED,
    SEND,
    STRIDED_VALUES,
    VALUES,
    Gradients,
    Graph,
    InputRole,
    Node,
    OutputRole,
    Region,
    Symbol,
    Trait,
    generator_state_type,
)
from ..types import DType, Storage, Value, allocation_bytes
from .faults import describe, fail
from .offloaded_parameters import check_offloaded
from .released_gradients import check_released

__all__ = ["verify_graph"]

_EXCHANGES = frozenset({SEND, RECEIVE, PAUSE})


def verify_graph(graph: Graph) -> None:
    """Checks that `graph` is well formed.

    Raises:
        VerificationError: IRC110 a name is used twice; IRC111 a value is read before it is written, or never
            written; IRC112 a value is written twice; IRC113 a value does not fit its storage; IRC114 forward
            depends on backward; IRC115 a view allocates; IRC116 an operation that is not a view returns an
            alias; IRC117 an output is missing; IRC118 a gradient belongs to no input, or is sparse and its
            parts do not fit; IRC119 an effect writes no parameter, buffer, input, constant or what backward
            makes; IRC133 a gradient is released wrongly, or the reserved bytes are not those of what is
            released; IRC134 a parameter is read after its gradient was applied; IRC140 a tensor is offloaded
            that cannot be; IRC141 an exchange between pipeline stages is not well formed; IRC142 a draw reads
            another state of the generator than it begins from; IRC144 a sum that grows by parts is not marked
            as one in another order; IRC145 a node overwrites what is not its own or what is read later, or a
            fused one does not hold operations; IRC550 an annotation is out of place; IRC566 the number of
            forwards in flight is less than one, or does not fit the graph.
    """
    _GraphCheck(graph).run()
    _check_forwards(graph)
    if graph.releases or graph.reserved_bytes:
        check_released(graph)
    check_offloaded(graph)


def _check_forwards(graph: Graph) -> None:
    count = graph.forwards_in_flight
    if count < 1:
        fail("IRC566", f"{count} forwards are in flight; at least one must be")
    if count > 1 and graph.sparse_gradients:
        fail("IRC566", f"{count} forwards are in flight, and sparse gradients grow with each backward")
    if count > 1 and graph.gradients is Gradients.APPLIED:
        message = f"{count} forwards are in flight, and the first backward updates the parameters"
        fail("IRC566", f"{message} that the others read")


class _GraphCheck:
    """Follows a graph node by node, with what is known of it so far."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names: dict[tuple[type, str], Storage | Value | Node] = {}
        self.written: set[Value] = set()
        self.written_later = {value for node in graph.nodes for value in node.values}
        self.after_loss: set[Value] = set()
        """Tangents, and the values that backward nodes write."""
        self.allocated: set[Storage] = set()
        self.made: set[Storage] = set()
        """Storages that nodes allocate: sums that effects add to, or scale."""
        self.static = {i.value.storage for i in graph.inputs if i.role is not InputRole.TANGENT}
        self.exchanged: set[tuple[str, Region, str]] = set()
        self.gone: dict[Storage, Node] = {}
        """Storages whose memory a result has taken, each with the node that makes it."""
        self.generator_state: tuple[Value, object] | None = None
        """The state of a generator that was copied since the last draw, and its device."""

    def run(self) -> None:
        for entry in self.graph.inputs:
            self.write(entry.value, None)
            self.allocated.add(entry.value.storage)
            if entry.role is InputRole.TANGENT:
                self.after_loss.add(entry.value)
        for offloaded in self.graph.offloaded_parameters:
            if offloaded.is_state:
                self.write(offloaded.value, None)
                self.allocated.add(offloaded.storage)
        backward: Node | None = None
        if len({annotation.by for annotation in self.graph.annotations}) < len(self.graph.annotations):
            fail("IRC550", "two annotations have the same name")
        for node in self.graph.nodes:
            self.name(node, node)
            self.annotation(node)
            for operand in node.operands:
                self.read(operand, node)
                if operand.storage in self.gone and not node.is_view:
                    by = self.gone[operand.storage].name
                    fail("IRC145", f"{node.name} reads {operand}, which {by} has overwritten", node)
            if node.region is Region.BACKWARD:
                backward = node
            elif backward is not None:
                fail("IRC114", f"forward node {node.name} stands after backward node {backward.name}", node)
            for value in node.values:
                self.write(value, node)
            self.aliases(node)
            self.draw(node)
            self.overwrites(node)
            self.made.update({value.storage for value in node.values} - self.allocated)
            self.allocated.update(value.storage for value in node.values)
        self.outputs()

    def name(self, thing: Storage | Value | Node, node: Node | None) -> None:
        known = self.names.setdefault((type(thing), thing.name), thing)
        if known is not thing:
            kind = type(thing).__name__.lower()
            fail("IRC110", f"two {kind}s are named {thing.name}", node)

    def annotation(self, node: Node) -> None:
        if node.annotation is None:
            return
        if node.annotation not in self.graph.annotations:
            fail(
                "IRC550",
                f"{node.name} has the annotation {node.annotation.by}, which is not one of the graph",
                node,
            )
        if node.is_view or node.region is Region.BACKWARD:
            fail(
                "IRC550",
                f"{node.name} has the annotation {node.annotation.by}, but is not a forward operation",
                node,
            )

    def read(self, value: Value, node: Node) -> None:
        if value not in self.written:
            when = "before it is written" if value in self.written_later else "but never written"
            fail("IRC111", f"{value} is read by {node.name} {when}", node)
        if node.region is Region.FORWARD and value in self.after_loss:
            fail("IRC114", f"forward node {node.name} reads {value}, which exists only in backward", node)

    def write(self, value: Value, node: Node | None) -> None:
        if value in self.written:
            by = f" by {node.name}" if node else ""
            fail("IRC112", f"{value} is written again{by}", node)
        self.name(value, node)
        self.name(value.storage, node)
        self.written.add(value)
        if node is not None and node.region is Region.BACKWARD:
            self.after_loss.add(value)
        if min((*value.type.shape, *value.type.strides), default=0) < 0:
            fail("IRC113", f"{value} has a negative size or stride", node)
        reach_bytes = _reach_bytes(value)
        if reach_bytes is None:
            rank, strides = len(value.type.shape), len(value.type.strides)
            fail("IRC113", f"{value} has {rank} dimensions and {strides} strides", node)
        if reach_bytes > value.storage.nbytes:
            storage = value.storage
            message = f"{value} reaches {reach_bytes} B into storage {storage.name} of {storage.nbytes} B"
            fail("IRC113", message, node)

    def aliases(self, node: Node) -> None:
        if Trait.EXCHANGE in node.traits or node.op in _EXCHANGES:
            self.exchange(node)
        if Trait.EFFECT in node.traits:
            return self.effect(node)
        read = {operand.storage for operand in node.operands}
        for value in node.values:
            if node.is_view and value.storage not in read:
                message = f"view {node.name} returns {value} in storage {value.storage.name}"
                fail("IRC115", f"{message}, in which none of its operands lies", node)
            if not node.is_view and value.storage in self.allocated:
                message = f"{node.name} is not a view but returns {value} in storage {value.storage.name}"
                fail("IRC116", f"{message}, which exists already", node)

    def overwrites(self, node: Node) -> None:
        """Checks what a node overwrites, and that a fused node holds operations."""
        try:
            if node.op == FUSED:
                Kernel.of(node)
            taken = overwritten(node)
        except ValueError as error:
            fail("IRC145", f"fused node {node.name}: {error}", node)
        is_in_place = node.plain_op != node.op or any(key == "out" for key, _ in node.keywords)
        is_overwriting = Trait.OVERWRITES in node.traits
        is_plain = is_in_place and taken and len(node.values) == 1
        if is_overwriting and (not is_plain or node.is_view or node.is_sequence):
            fail("IRC145", f"{node.name} overwrites no operand, or has several results", node)
        kept = self.graph.static_storages | self.graph.tangent_storages | self.graph.output_storages
        for value, index in taken.items():
            storage, made = value.storage, node.values[index].storage
            if any(storage is g.storage for release in self.graph.releases for g in release.operands):
                fail("IRC145", f"{node.name} overwrites {value}, which is released", node)
            if storage in kept or (node.op == FUSED and node.region is not Region.BACKWARD):
                fail("IRC145", f"{node.name} overwrites {value}, which is not its own", node)
            others = [v.storage for v in node.operands].count(storage) > 1
            if storage.nbytes != made.nbytes or storage.device != made.device or others:
                fail("IRC145", f"{node.name} overwrites {value}, which it reads otherwise", node)
            self.gone[storage] = node

    def draw(self, node: Node) -> None:
        """Checks that a draw which may run again reads the state of the generator that it begins from."""
        if node.op == GENERATOR_STATE:
            is_copy = node.traits == frozenset({Trait.RANDOM}) and not node.keywords and not node.is_sequence
            match node.arguments, node.values:
                case ((Symbol() | str()) as source,), (Value() as state,) if is_copy:
                    self.generator_state = state, source
                case _:
                    fail("IRC142", f"{node.name} does not copy the state of a generator", node)
            made, whole = state.type, generator_state_type(source)
            if made != whole or state.storage.nbytes != allocation_bytes(whole.nbytes, "cpu"):
                message = f"{node.name} copies a state of {whole.nbytes} B into {state} of {made.nbytes} B"
                fail("IRC142", message, node)
            return
        source = node.generator
        if isinstance(source, Symbol) and source.kind == SEEDED:
            seeded = source.seed_and_device
            if seeded is None or any(
                v.type.device.partition(":")[0] != seeded[1].partition(":")[0] for v in node.values
            ):
                fail(
                    "IRC142",
                    f"{node.name} draws from {source.name}, which is no generator of its device",
                    node,
                )
        state = node.generator_state
        if state is not None and (state, node.generator) != self.generator_state:
            fail("IRC142", f"{node.name} reads {state}, which is not the state that it begins from", node)
        if Trait.RANDOM in node.traits:
            self.generator_state = None

    def effect(self, node: Node) -> None:
        operands = node.operands
        written = operands[0].storage if operands else None
        may_be_sum = node.region is Region.BACKWARD or Trait.REORDERED in node.traits
        is_sum = may_be_sum and written in self.made and node.releases is None
        if node.is_view or not (written in self.static or is_sum):
            fail("IRC119", f"effect {node.name} does not write a static storage by its first operand", node)
        if is_sum and Trait.REORDERED not in node.traits:
            fail("IRC144", f"effect {node.name} adds to a sum, and is not marked as reordered", node)
        for value in node.values:
            if value.storage is not operands[0].storage and value.storage in self.allocated:
                message = f"effect {node.name} returns {value} in storage {value.storage.name}"
                fail("IRC116", f"{message}, which exists already and is not the one it writes", node)

    def exchange(self, node: Node) -> None:
        """Checks a send, a receive or a pause; each key occurs once a direction, and a pause once."""
        match node.op, node.arguments, node.results:
            case (op, (Value(), str() as key), ()) if op == SEND:
                pass
            case (op, (str() as key,), (Value(),)) if op == RECEIVE:
                pass
            case (op, (), ()) if op == PAUSE and node.region is Region.BACKWARD:
                key = ""
            case _:
                fail("IRC141", f"{node.name} is not an exchange between pipeline stages", node)
        if node.traits != frozenset({Trait.EXCHANGE}) or node.keywords:
            fail("IRC141", f"{node.name} is an exchange with other traits, or with keywords", node)
        if (node.op, node.region, key) in self.exchanged:
            fail("IRC141", f"{node.name} is {node.op} {key!r} a second time", node)
        self.exchanged.add((node.op, node.region, key))

    def outputs(self) -> None:
        is_stage = any(node.op in (SEND, RECEIVE) for node in self.graph.nodes)
        if not is_stage and not any(output.role is OutputRole.OUTPUT for output in self.graph.outputs):
            fail("IRC117", "the graph has no output")
        inputs = (i for i in self.graph.inputs if i.role is not InputRole.TANGENT)
        targets = {f"{i.role.value}:{i.target}": i.value for i in inputs}
        delivered: set[tuple[OutputRole, str, str]] = set()
        sparse: dict[str, dict[str, Value | None]] = {}
        for output in self.graph.outputs:
            what = describe(output)
            if (output.role, output.target, output.part) in delivered:
                fail("IRC110", f"{what} is delivered twice")
            delivered.add((output.role, output.target, output.part))
            if output.value is not None and output.value not in self.written:
                fail("IRC117", f"{what} is {output.value}, which is never written")
            if output.role is OutputRole.GRADIENT:
                if output.target not in targets:
                    fail("IRC118", f"{what} belongs to no input of the graph")
                if output.part:
                    sparse.setdefault(output.target, {})[output.part] = output.value
            elif output.part:
                fail("IRC118", f"{what} is none of a gradient")
            elif output.value is None:
                fail("IRC117", f"{what} has no value")
            elif output.value in self.after_loss:
                fail("IRC117", f"{what} is {output.value}, which exists only in backward")
        for target, parts in sparse.items():
            is_whole_too = (OutputRole.GRADIENT, target, "") in delivered
            if is_whole_too or not _are_parts_of(targets[target], parts):
                fail("IRC118", f"gradient of {target} is not made of indices and values that fit it")


def _are_parts_of(owner: Value, parts: Mapping[str, Value | None]) -> bool:
    """Whether these are the indices and the values of a sparse gradient of `owner`."""
    indices, values = parts.get(INDICES), parts.get(VALUES, parts.get(STRIDED_VALUES))
    if len(parts) != 2 or indices is None or values is None or len(indices.type.shape) != 2:
        return False
    axes, count = indices.type.shape
    has_rows = values.type.shape == (count, *owner.type.shape[axes:]) and axes <= len(owner.type.shape)
    return has_rows and indices.type.dtype is DType.INT64 and values.type.dtype is owner.type.dtype


def _reach_bytes(value: Value) -> int | None:
    """Returns the bytes from the first to the last element; None if the strides are wrong."""
    shape, strides = value.type.shape, value.type.strides
    if len(strides) != len(shape):
        return None if strides else 0
    if 0 in shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * value.type.dtype.itemsize
