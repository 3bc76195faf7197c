"""What a partition over devices is made of, and what one costs: independent of whatever finds it.

The model is that of Tarnawski et al., "Efficient algorithms for device placement of DNN graph operators"
(NeurIPS 2020): each node runs on one device; an output that is read on another device is moved once by
the device that makes it and once by each device that reads it; a device's load is the time of its nodes
and of these transfers; in a pipeline that is full, the largest load is the time of a micro-batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from irc.ir import UsageError
from irc.passes.pipeline.coarsened_problem import DeviceClass

__all__ = [
    "Blocks",
    "Evaluation",
    "Partition",
    "PartitionNode",
    "PartitionProblem",
    "evaluate",
    "no_room",
]

_PROVED = 1e-4
"""What a bound may be off for a partition to count as proved, as for plans."""


@dataclass(frozen=True, slots=True)
class PartitionNode:
    """A layer or an operation.

    Args:
        name: For messages.
        seconds: On a device of each class; infinite where it may not run there.
        memory_bytes: What it takes of its device's memory.
        transfer_seconds: For its output to leave a device, or to enter one.
        colour: Nodes of the same colour are on the same device: a forward node and its backward.
        is_backward: Whether it belongs to the backward part.
    """

    name: str
    seconds: tuple[float, ...]
    memory_bytes: int = 0
    transfer_seconds: float = 0.0
    colour: int = 0
    is_backward: bool = False


@dataclass(frozen=True)
class Blocks:
    """What has to be together in a contiguous partition, and in which order.

    Args:
        members: Positions of the nodes of each block.
        block_of: The block of each node.
        edges: Pairs of blocks; the first must not be behind the second. They have no cycle.
    """

    members: tuple[tuple[int, ...], ...]
    block_of: tuple[int, ...]
    edges: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class PartitionProblem:
    """A graph to be divided among devices.

    Args:
        name: For tables and messages.
        nodes: In any order.
        edges: From the position of a node to that of one that reads its output.
        classes: The devices.

    Raises:
        UsageError: IRC470 when the edges form a cycle; IRC471 when a node has no time for a class; IRC472
            when a node may not run on any device.
    """

    name: str
    nodes: tuple[PartitionNode, ...]
    edges: tuple[tuple[int, int], ...]
    classes: tuple[DeviceClass, ...]

    def __post_init__(self) -> None:
        for node in self.nodes:
            if len(node.seconds) != len(self.classes):
                raise UsageError(
                    "IRC471",
                    f"{self.name}: node {node.name} has {len(node.seconds)} times for {len(self.classes)} "
                    "classes of devices",
                    help="give one time for each class; infinity where the node may not run",
                )
            if not any(self.may_run(node, kind) for kind in range(len(self.classes))):
                raise UsageError(
                    "IRC472",
                    f"{self.name}: node {node.name} ({node.memory_bytes:,} bytes) may not run on any of the "
                    "devices",
                    help="give a class of devices that it may run on and whose memory it fits in",
                )
        graph: nx.DiGraph[int] = nx.DiGraph(self.edges)
        if not nx.is_directed_acyclic_graph(graph):
            cycle = " -> ".join(self.nodes[tail].name for tail, _ in nx.find_cycle(graph))
            raise UsageError(
                "IRC470",
                f"{self.name}: these nodes read each other's outputs in a circle: {cycle}",
                help="a partition is made of a graph without cycles; unroll what is repeated",
            )

    def may_run(self, node: PartitionNode, kind: int) -> bool:
        """Whether a node may run on a device of a class."""
        device = self.classes[kind]
        return (
            device.count > 0 and node.seconds[kind] < math.inf and node.memory_bytes <= device.capacity_bytes
        )

    @property
    def is_memory_free(self) -> bool:
        """Whether all nodes together fit on each device."""
        total_bytes = sum(node.memory_bytes for node in self.nodes)
        return all(total_bytes <= device.capacity_bytes for device in self.classes)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The class of each device, the devices of a class side by side."""
        return tuple(kind for kind, device in enumerate(self.classes) for _ in range(device.count))

    @cached_property
    def readers(self) -> tuple[frozenset[int], ...]:
        """For each node those that read its output."""
        found: list[set[int]] = [set() for _ in self.nodes]
        for tail, head in self.edges:
            found[tail].add(head)
        return tuple(map(frozenset, found))

    @cached_property
    def blocks(self) -> Blocks:
        """What contiguous partitions keep together, and in which order.

        The order is that of the forward part: stages follow it, and in backward the same stages follow
        each other in reverse, each with the backward of its own forward. So an edge between forward nodes
        is one between their colours. A colour without a forward node, such as an optimizer step, takes its
        place from the edges within the backward part, reversed. What is then on a cycle is one block.
        """
        has_forward = {node.colour for node in self.nodes if not node.is_backward}
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(sorted({node.colour for node in self.nodes}))
        for tail, head in self.edges:
            first, second = self.nodes[tail], self.nodes[head]
            if not first.is_backward and not second.is_backward:
                graph.add_edge(first.colour, second.colour)
            elif (
                first.is_backward and second.is_backward and not {first.colour, second.colour} <= has_forward
            ):
                graph.add_edge(second.colour, first.colour)
        condensed = nx.condensation(graph)
        block_of_colour: dict[int, int] = condensed.graph["mapping"]
        block_of = tuple(block_of_colour[node.colour] for node in self.nodes)
        members: list[list[int]] = [[] for _ in condensed]
        for position, block in enumerate(block_of):
            members[block].append(position)
        return Blocks(tuple(map(tuple, members)), block_of, frozenset(condensed.edges))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a partition is like.

    Args:
        loads: Seconds of each device for one micro-batch, transfers included.
        memory_bytes: Of each device.
        is_together: Whether each colour is on one device.
        fits: Whether each node may run where it is, and the memory of no device is exceeded.
        is_contiguous: Whether the devices can be put in an order that all edges between blocks follow.
    """

    loads: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    is_together: bool
    fits: bool
    is_contiguous: bool

    @property
    def max_load_seconds(self) -> float:
        """Of the slowest device: the time of a micro-batch in a full pipeline."""
        return max(self.loads, default=0.0)


def evaluate(problem: PartitionProblem, assignment: Sequence[int]) -> Evaluation:
    """What a partition costs, straight from the definition.

    Args:
        problem: The graph and the devices.
        assignment: The device of each node, a position in `problem.devices`.
    """
    loads = [0.0] * len(problem.devices)
    memory_bytes = [0] * len(problem.devices)
    fits = True
    for position, node in enumerate(problem.nodes):
        device = assignment[position]
        kind = problem.devices[device]
        loads[device] += node.seconds[kind]
        memory_bytes[device] += node.memory_bytes
        fits = fits and node.seconds[kind] < math.inf
        elsewhere = {assignment[reader] for reader in problem.readers[position]} - {device}
        for touched in elsewhere | {device} if elsewhere else ():
            if problem.classes[problem.devices[touched]].pays_transfers:
                loads[touched] += node.transfer_seconds
    for device, kind in enumerate(problem.devices):
        fits = fits and memory_bytes[device] <= problem.classes[kind].capacity_bytes
    device_of = dict(zip((node.colour for node in problem.nodes), assignment, strict=True))
    between: nx.DiGraph[int] = nx.DiGraph()
    for tail, head in problem.blocks.edges:
        ends = (assignment[problem.blocks.members[block][0]] for block in (tail, head))
        between.add_edge(*ends)
    between.remove_edges_from(list(nx.selfloop_edges(between)))
    whole = all(len({assignment[node] for node in members}) == 1 for members in problem.blocks.members)
    return Evaluation(
        tuple(loads),
        tuple(memory_bytes),
        all(device_of[node.colour] == assignment[i] for i, node in enumerate(problem.nodes)),
        fits,
        whole and nx.is_directed_acyclic_graph(between),
    )


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition, and how good it is.

    Args:
        assignment: The device of each node, a position in `PartitionProblem.devices`.
        max_load_seconds: Of the slowest device.
        bound_seconds: No partition of the kind that was looked for has less.
        plan_seconds: How long it took to find.
    """

    assignment: tuple[int, ...]
    max_load_seconds: float
    bound_seconds: float
    plan_seconds: float

    @staticmethod
    def of(
        problem: PartitionProblem, assignment: tuple[int, ...], bound_seconds: float, started: float
    ) -> Partition:
        """An assignment with its load; `started` is when the search began, by `time.monotonic()`."""
        load = evaluate(problem, assignment).max_load_seconds
        return Partition(assignment, load, bound_seconds, time.monotonic() - started)

    @property
    def is_proved(self) -> bool:
        """Whether none is better by 0.01% or more."""
        return self.max_load_seconds <= self.bound_seconds * (1 + _PROVED)


def no_room(problem: PartitionProblem) -> UsageError:
    """The error for a problem that no partition fits the devices of."""
    total_bytes = sum(node.memory_bytes for node in problem.nodes)
    devices = " and ".join(
        f"{device.count} {device.name} of {device.capacity_bytes:,.0f} bytes" for device in problem.classes
    )
    return UsageError(
        "IRC473",
        f"{problem.name} cannot be divided among its devices: it takes {total_bytes:,} bytes, on {devices}",
        help="give more devices, devices with more memory, or ones that all nodes may run on",
    )
