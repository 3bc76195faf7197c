"""Places the operations of backward in stages, given the stages of forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ...ir import RUN_ONCE, SEEDED, Graph, Input, InputRole, Node, OutputRole, Region, Storage, Trait, Value

__all__ = ["Dataflow", "Placement", "place_backward"]

_ADD = "aten.add.Tensor"


@dataclass(frozen=True)
class Dataflow:
    """The facts about a training graph that decide how it may be cut, whatever the stages are.

    Args:
        graph: The graph as it was captured: gradients are delivered, nothing is released.
    """

    graph: Graph

    @cached_property
    def makers(self) -> dict[Value, Node]:
        """The node that writes each value."""
        return {value: node for node in self.graph.nodes for value in node.values}

    @cached_property
    def readers(self) -> dict[Storage, list[Node]]:
        """The operations that read each storage."""
        found: dict[Storage, list[Node]] = {}
        for node in self.graph.operations:
            for storage in self.graph.reads(node):
                found.setdefault(storage, []).append(node)
        return found

    @cached_property
    def static(self) -> dict[Storage, list[Input]]:
        """The inputs of each static storage; the same memory may have several names."""
        found: dict[Storage, list[Input]] = {}
        for entry in self.graph.inputs:
            if entry.role is not InputRole.TANGENT:
                found.setdefault(entry.value.storage, []).append(entry)
        return found

    @cached_property
    def parameters(self) -> frozenset[Storage]:
        """The storages of parameters."""
        entries = (i for i in self.graph.inputs if i.role is InputRole.PARAMETER)
        return frozenset(entry.value.storage for entry in entries)

    @cached_property
    def owners(self) -> dict[str, Input]:
        """The input that each gradient belongs to, by the name that outputs give it."""
        return {f"{entry.role.value}:{entry.target}": entry for entry in self.graph.inputs}

    @cached_property
    def repeated(self) -> frozenset[Node]:
        """Operations that each stage runs for itself instead of receiving what they make.

        They depend on nothing that is trained and on no gradient: masks, positions, constants.
        """
        found: set[Node] = set()
        trained = {i.value.storage for i in self.graph.inputs if i.requires_grad}
        known = self.static.keys() - trained - self.parameters - self.written
        for node in self.graph.operations:
            if not node.traits & RUN_ONCE and all(s in known for s in self.graph.reads(node)):
                found.add(node)
                known.update(self.graph.allocates(node))
        return frozenset(found)

    @cached_property
    def written(self) -> frozenset[Storage]:
        """The static storages that forward overwrites."""
        effects = (n for n in self.graph.nodes if Trait.EFFECT in n.traits)
        return frozenset(node.operands[0].storage for node in effects)

    @cached_property
    def together(self) -> tuple[frozenset[Node], ...]:
        """Operations of forward that must be in one stage.

        They touch a storage that is overwritten, or are a draw and the copy of the state that it begins from,
        or draws from one generator that each forward makes.
        """
        groups: dict[Storage, set[Node]] = {storage: set() for storage in self.written}
        for node in self.graph.operations:
            if node.region is Region.FORWARD:
                for storage in (*self.graph.reads(node), *(value.storage for value in node.values)):
                    if storage in groups:
                        groups[storage].add(node)
        producers = self.graph.producers
        draws = ((node, node.generator_state) for node in self.graph.operations)
        states = [frozenset((node, producers[s.storage])) for node, s in draws if s is not None]
        sources = {node: node.generator for node in self.graph.operations if Trait.RANDOM in node.traits}
        seeded = (symbol for symbol in self.graph.generator_symbols if symbol.kind == SEEDED)
        states += [frozenset(node for node, source in sources.items() if source == each) for each in seeded]
        return (*(frozenset(group) for group in groups.values() if group), *states)

    @cached_property
    def forward(self) -> tuple[Node, ...]:
        """The operations of forward that have a stage."""
        nodes = self.graph.operations
        return tuple(n for n in nodes if n.region is Region.FORWARD and n not in self.repeated)

    @cached_property
    def sums(self) -> dict[Value, tuple[Value, ...]]:
        """For the gradient of each parameter, the values that it is the sum of.

        A sum that nothing else reads is taken apart: if its parts come from several stages, each stage keeps
        its own, and they are added up once a step.
        """
        readers: dict[Value, int] = {}
        for node in self.graph.nodes:
            for value in node.operands:
                readers[value] = readers.get(value, 0) + 1
        delivered = [o.value for o in self.graph.outputs if o.value is not None]
        for value in delivered:
            readers[value] = readers.get(value, 0) + 1

        def parts(value: Value) -> Iterator[Value]:
            maker = self.makers.get(value)
            is_sum = (
                maker is not None
                and maker.op == _ADD
                and maker.region is Region.BACKWARD
                and not maker.keywords
                and len(maker.operands) == 2
                and all(o.type.shape == value.type.shape for o in maker.operands)
                and readers[value] == 1
            )
            if maker is not None and is_sum:
                for operand in maker.operands:
                    yield from parts(operand)
            else:
                yield value

        gradients = (o for o in self.graph.outputs if o.role is OutputRole.GRADIENT and o.value is not None)
        return {
            o.value: tuple(parts(o.value))
            for o in gradients
            if o.value is not None and o.target.startswith(f"{InputRole.PARAMETER.value}:")
        }

    def bases(self, value: Value) -> Iterator[Value]:
        """The values that must be there for a value to be read: views give way to what they are views of."""
        maker = self.makers.get(value)
        if maker is not None and maker.is_view:
            for operand in maker.operands:
                yield from self.bases(operand)
        else:
            yield value


@dataclass(frozen=True)
class Placement:
    """The stage of every operation.

    Args:
        stages: The stage by operation; operations that each stage repeats are not among them.
        reader_stages: For the storage of each static input, the stages whose forward reads it.
        parts: The gradients that are taken apart, as several stages have the parameter, with what they are
            sums of.
        dropped: The operations that would add the parts up.
    """

    stages: Mapping[Node, int]
    reader_stages: Mapping[Storage, tuple[int, ...]]
    parts: Mapping[Value, tuple[Value, ...]] = field(default_factory=dict[Value, tuple[Value, ...]])
    dropped: frozenset[Node] = field(default_factory=frozenset[Node])

    def parts_of(self, gradient: Value) -> tuple[Value, ...]:
        """The values whose sum is a gradient."""
        return self.parts.get(gradient, (gradient,))


def place_backward(flow: Dataflow, forward: Mapping[Node, int], count: int) -> Placement:
    """Chooses a stage for each operation of backward: the earliest that keeps its operands in their stages.

    Gradients go from later stages to earlier ones, and what forward made goes from earlier ones to later
    ones. So an operation runs no earlier than the stages that made what it reads of forward, and than those
    of the operations that read its results. If it makes the gradient of a parameter, it runs no earlier than
    the stage that has the parameter; if it reads a parameter, in a stage that has it. An operation that only
    joins gradients, such as the sum of those of a skip, does so before they are sent on.

    Args:
        flow: The dataflow of the training graph.
        forward: The stage of each operation in `flow.forward`.
        count: The number of stages.
    """
    graph = flow.graph
    found = dict(forward)
    reader_stages = _reader_stages(flow, forward)
    parts, dropped = _split_sums(flow, reader_stages)
    makers = graph.producers
    least: dict[Node, int] = {}

    def ask(value: Value, stage: int) -> None:
        for base in flow.bases(value):
            maker = makers.get(base.storage)
            if maker is not None and maker.region is Region.BACKWARD:
                least[maker] = max(least.get(maker, 0), stage)

    for output in graph.outputs:
        if output.role is OutputRole.GRADIENT and output.value is not None:
            owner = flow.owners[output.target]
            for part in parts.get(output.value, (output.value,)):
                ask(part, min(reader_stages.get(owner.value.storage, (0,))))
    backward = [n for n in graph.operations if n.region is Region.BACKWARD]
    for node in reversed(backward):
        if node in flow.repeated or node in dropped:
            continue
        stage = least.get(node, 0)
        for storage in graph.reads(node):
            maker = makers.get(storage)
            if maker is not None and maker.region is Region.FORWARD and maker not in flow.repeated:
                stage = max(stage, found[maker])
        stage = _at_parameters(flow, node, reader_stages, stage, count)
        found[node] = stage
        for value in node.operands:
            ask(value, stage)
    for node in backward:
        if node in found:
            found[node] = _joined_at(flow, node, found, count)
    return Placement(found, reader_stages, parts, dropped)


def _joined_at(flow: Dataflow, node: Node, stages: Mapping[Node, int], count: int) -> int:
    """The stage that joins gradients which nothing reads further on: their own, if that sends less."""
    graph = flow.graph
    made_at = {s: stages.get(graph.producers[s]) for s in graph.reads(node) if s in graph.producers}
    made_at |= {s: count - 1 for s in graph.reads(node) if s in graph.tangent_storages}
    sources = {storage: stage for storage, stage in made_at.items() if stage is not None}
    if len(sources) < len(graph.reads(node)) or not sources:
        return stages[node]
    if any(graph.producers[s].region is Region.FORWARD for s in sources if s in graph.producers):
        return stages[node]
    latest = min(sources.values())
    others = {s: [r for r in flow.readers[s] if r is not node] for s in sources}
    here = (s for s in sources if all(stages.get(reader, latest) >= latest for reader in others[s]))
    saved_bytes = sum(s.nbytes for s in here)
    made_bytes = sum(s.nbytes for s in graph.allocates(node))
    return latest if latest > stages[node] and made_bytes < saved_bytes else stages[node]


def _reader_stages(flow: Dataflow, forward: Mapping[Node, int]) -> dict[Storage, tuple[int, ...]]:
    reader_stages: dict[Storage, set[int]] = {}
    for node, stage in forward.items():
        for storage in flow.graph.reads(node):
            if storage in flow.static:
                reader_stages.setdefault(storage, set()).add(stage)
    return {storage: tuple(sorted(stages)) for storage, stages in reader_stages.items()}


def _split_sums(
    flow: Dataflow, reader_stages: Mapping[Storage, tuple[int, ...]]
) -> tuple[dict[Value, tuple[Value, ...]], frozenset[Node]]:
    """The gradients of parameters that several stages have, with their parts; and what would add these up."""
    split: dict[Value, tuple[Value, ...]] = {}
    for output in flow.graph.outputs:
        if output.role is not OutputRole.GRADIENT or output.value not in flow.sums:
            continue
        if len(reader_stages.get(flow.owners[output.target].value.storage, ())) > 1:
            split[output.value] = flow.sums[output.value]
    dropped: set[Node] = set()
    pending = list(split)
    kept = {part for parts in split.values() for part in parts}
    while pending:
        value = pending.pop()
        if value not in kept:
            dropped.add(flow.makers[value])
            pending.extend(flow.makers[value].operands)
    return split, frozenset(dropped)


def _at_parameters(
    flow: Dataflow,
    node: Node,
    reader_stages: Mapping[Storage, tuple[int, ...]],
    stage: int,
    count: int,
) -> int:
    """The first stage from `stage` on that has what is trained or written of an operation's operands.

    If no stage has all of it, `stage`.
    """
    read = [s for s in flow.graph.reads(node) if s in flow.parameters or s in flow.written]
    having = {
        reader for storage in read for reader in reader_stages.get(storage, ()) if stage < reader < count
    }
    for candidate in (stage, *sorted(having)):
        if all(candidate in reader_stages.get(storage, (candidate,)) for storage in read):
            return candidate
    return stage
