"""Parameters and states of optimizers that live in a tier: which can, and how a search sees them.

A search sees a copy to the device as an operation without operands, a load, that runs as often as need be.
`LoadedProgram.schedule` turns what it finds into a schedule with copies; when they run is chosen afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...ir import (
    LOAD,
    Compute,
    Direction,
    DType,
    Fetch,
    Free,
    Gradients,
    Graph,
    Input,
    InputRole,
    Instruction,
    Node,
    Offload,
    OffloadedParameter,
    Region,
    Schedule,
    Storage,
    TensorType,
    Tier,
    Trait,
    Value,
    Wait,
    allocation_bytes,
)
from ..costs.table import StepCost
from ..program import Program
from ..remat.problem import CheckpointProblem

__all__ = ["LEAST_BYTES", "OFFLOADABLE", "LoadedProgram", "offloadable_in"]

OFFLOADABLE = ("params", "optimizer")
"""The names that a user gives to what may live in a tier."""

LEAST_BYTES = 1 << 12
"""Smaller parameters stay on the device: a copy costs more than it frees."""


def offloadable_in(
    tier: str, graph: Graph, which: Sequence[str], *, least_bytes: int = LEAST_BYTES
) -> tuple[OffloadedParameter, ...]:
    """Lists what can live in a tier, in the order in which it should: state first, large ones first.

    Parameters are copied at least twice in a step, their optimizer's state once each way.

    Args:
        tier: The tier's name.
        graph: A training graph.
        which: Names of `OFFLOADABLE`; `optimizer` needs gradients that are applied.
        least_bytes: Smaller parameters stay on the device.
    """
    found: list[OffloadedParameter] = []
    if "optimizer" in which:
        found += sorted(_states(tier, graph), key=_largest_first)
    if "params" in which:
        found += sorted(_parameters(tier, graph, least_bytes), key=_largest_first)
    return tuple(found)


def _largest_first(offloaded: OffloadedParameter) -> tuple[int, str]:
    return -offloaded.storage.nbytes, offloaded.parameter


def _parameters(tier: str, graph: Graph, least_bytes: int) -> Iterator[OffloadedParameter]:
    """Yields parameters alone in their memory, which only optimizers write and which are not outputs."""
    fixed = {o.value.storage for o in graph.outputs if o.value is not None}
    fixed |= {n.operands[0].storage for n in graph.nodes if Trait.EFFECT in n.traits and n.releases is None}
    entries: dict[Storage, list[Input]] = {}
    for entry in graph.inputs:
        entries.setdefault(entry.value.storage, []).append(entry)
    for storage, names in entries.items():
        first, type = names[0], names[0].value.type
        same = all(entry.role is InputRole.PARAMETER and entry.value.type == type for entry in names)
        whole = type.is_dense and storage.nbytes == allocation_bytes(type.nbytes, type.device)
        if same and whole and type.nbytes >= least_bytes and storage not in fixed:
            yield OffloadedParameter(first.value, tier, first.target)


def _states(tier: str, graph: Graph) -> Iterator[OffloadedParameter]:
    names = {entry.value: entry.target for entry in graph.inputs if entry.role is InputRole.PARAMETER}
    taken = {storage.name for storage in graph.storages}
    taken |= {i.value.name for i in graph.inputs} | {v.name for node in graph.nodes for v in node.values}
    for node in graph.releases:
        nbytes = StepCost.of(node).moving_bytes if node.releases is Gradients.APPLIED else 0
        if nbytes:
            parameter = node.operands[0]
            name = f"state_{names[parameter]}"
            while name in taken:
                name += "_"
            type = TensorType.contiguous((nbytes,), DType.UINT8, parameter.type.device)
            storage = Storage(name, nbytes, parameter.storage.device)
            yield OffloadedParameter(Value(name, type, storage), tier, names[parameter], is_state=True)


@dataclass
class LoadedProgram:
    """A program some of whose parameters and states live in a tier, as a search sees it.

    Args:
        program: A program with costs, whose graphs have no offloaded parameters.
        offloaded_parameters: The parameters and states that live in a tier.
        tier: The tier.
        weight: The cost of a load for each second of its copy: copies run beside computations.

    Attributes:
        seen: The program with loads.
    """

    program: Program
    offloaded_parameters: tuple[OffloadedParameter, ...]
    tier: Tier
    weight: float
    seen: Program = field(init=False)

    def __post_init__(self) -> None:
        program, costs = self.program, self.program.costs
        assert costs is not None, "costs come first"
        self._real: dict[Node, Node] = {}
        """The original operation of each one that reads the state of an optimizer here."""
        read = {storage for node in program.graph.nodes for storage in program.graph.reads(node)}
        self._loads = {
            offloaded.storage: self._load(offloaded, program.graph)
            for offloaded in self.offloaded_parameters
            if offloaded.is_state or offloaded.storage in read
        }
        graph = self._seen(program.graph)
        original = None if program.original is None else self._seen(program.original)
        seconds, workspace_bytes = dict(costs.seconds), dict(costs.workspace_bytes)
        for storage, load in self._loads.items():
            seconds[load] = self.weight * self.tier.copy_seconds(storage.nbytes, Direction.IN)
            workspace_bytes[load] = 0
        for seen, real in self._real.items():
            seconds[seen], workspace_bytes[seen] = seconds[real], workspace_bytes[real]
        costs = replace(costs, seconds=seconds, workspace_bytes=workspace_bytes)
        self.seen = replace(program, graph=graph, original=original, costs=costs)

    @property
    def unread_bytes(self) -> int:
        """Bytes of parameters that nothing reads: they live in the tier and never come."""
        return sum(
            offloaded.storage.nbytes
            for offloaded in self.offloaded_parameters
            if offloaded.storage not in self._loads
        )

    def problem(self, seen: CheckpointProblem) -> CheckpointProblem:
        """The problem that a search sees with loads, without them."""
        nodes = tuple(self._real.get(node, node) for node in seen.graph.nodes if node.op != LOAD)
        graph = replace(seen.graph, nodes=nodes)
        assert self.program.costs is not None
        sequence = tuple(self._real.get(node, node) for node in seen.sequence)
        return CheckpointProblem(graph, self.program.costs, sequence)

    def schedule(self, graph: Graph, seen: Schedule) -> Schedule:
        """Turns a schedule with loads into one with copies that nothing runs beside.

        Args:
            graph: The graph of `problem`.
            seen: The schedule that a search found.
        """
        found: list[Instruction] = []
        changed: set[Storage] = set()
        for instruction in seen.instructions:
            match instruction:
                case Compute(node, retained) if node.op == LOAD:
                    for storage in retained:
                        found += [Fetch(storage, self.tier.name), Wait(storage)]
                case Compute(node, retained):
                    node = self._real.get(node, node)
                    found.append(Compute(node, retained))
                    for storage in self._changed(graph, node):
                        changed.add(storage)
                        found.append(Offload(storage, self.tier.name))
                case Free(storage):
                    if storage in changed:
                        found.append(Wait(storage))
                    found.append(instruction)
                case _:
                    found.append(instruction)
        return Schedule(graph, tuple(found))

    def _changed(self, graph: Graph, node: Node) -> Iterator[Storage]:
        """Yields the offloaded storages that an operation changes."""
        if node.releases is Gradients.APPLIED:
            parameter = node.operands[0].storage
            if parameter in graph.offloaded_of:
                yield parameter
            if parameter in graph.state_of:
                yield graph.state_of[parameter].storage

    def _load(self, offloaded: OffloadedParameter, graph: Graph) -> Node:
        what = "state" if offloaded.is_state else "parameter"
        values = [i.value for i in graph.inputs if i.value.storage is offloaded.storage] or [offloaded.value]
        name = f"load_{what}_{offloaded.parameter}"
        taken = {node.name for node in graph.nodes}
        while name in taken:
            name += "_"
        return Node(name, LOAD, (), tuple(values), is_sequence=len(values) > 1)

    def _seen(self, graph: Graph) -> Graph:
        """Puts each load before its first use in forward, or at the end of forward."""
        states = replace(graph, offloaded_parameters=self.offloaded_parameters).state_of
        waiting = dict(self._loads)
        nodes: list[Node] = []
        for node in graph.nodes:
            if node.region is Region.BACKWARD:
                nodes += waiting.values()
                waiting.clear()
            nodes += [waiting.pop(s) for s in graph.reads(node) if s in waiting]
            state = states.get(node.operands[0].storage) if node.releases is Gradients.APPLIED else None
            if state is not None:
                seen = replace(node, arguments=(*node.arguments, state.value))
                self._real[seen] = node
                node = seen
            nodes.append(node)
        return replace(
            graph, nodes=(*nodes, *waiting.values()), offloaded_parameters=self.offloaded_parameters
        )
