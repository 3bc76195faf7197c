"""The recomputation problem: what the solvers and strategies look at, and how a choice becomes a schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from ..ir import Compute, Graph, Node, OutputRole, Region, Schedule, Storage, liveness, with_frees
from .costs import Costs

__all__ = ["CheckpointProblem", "Simulated", "Stage", "Staging"]


@dataclass(frozen=True, slots=True)
class Stage:
    """What is resident at one point of backward.

    Args:
        position: Index of a backward operation.
        resident: The forward-made storages that stay resident from before it runs until after; what it
            reads is resident while it runs in any case, and goes right after it unless it is named here.
    """

    position: int
    resident: frozenset[Storage]


Staging = tuple[Stage, ...]
"""Stages in order of position. The first is at position 0, the boundary between forward and backward: what is
resident there, and what the first backward operation reads, is kept from forward on."""


@dataclass(frozen=True)
class Simulated:
    """A schedule with its cost.

    Args:
        schedule: What runs.
        peak_bytes: The most memory alive at once, static bytes included.
        seconds: Time of all computations; the same to the last bit in whatever order they run.
        during_bytes: Memory at each computation (frees and the loss left out), in the order of `order`.
        order: The operations that run.
        owners: For each of them, the backward position that it serves; -1 in forward.
    """

    schedule: Schedule
    peak_bytes: int
    seconds: float
    during_bytes: tuple[int, ...]
    order: tuple[Node, ...]
    owners: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointProblem:
    """Which forward values to keep for backward, and which to compute again.

    A schedule of the class considered here runs forward once, in the graph's order; then the backward
    operations in the graph's order, and before each of them but the first whatever of the forward must
    be computed again, in forward order. A `Staging` fixes what is resident at some of the backward
    operations; with a stage at each of them it describes every schedule of the class.

    Args:
        graph: The training graph.
        costs: Seconds and workspace of its operations.
    """

    graph: Graph
    costs: Costs

    @cached_property
    def forward(self) -> tuple[Node, ...]:
        """The forward operations, in order."""
        return tuple(n for n in self.graph.operations if n.region is Region.FORWARD)

    @cached_property
    def backward(self) -> tuple[Node, ...]:
        """The backward operations, in order."""
        return tuple(n for n in self.graph.operations if n.region is Region.BACKWARD)

    @cached_property
    def index(self) -> dict[Node, int]:
        """Position of each forward operation."""
        return {node: i for i, node in enumerate(self.forward)}

    @cached_property
    def producer(self) -> dict[Storage, Node]:
        """The forward operation that makes each storage which may come and go: outputs are not among them."""
        return {
            storage: node
            for node in self.forward
            for storage in self.graph.allocates(node)
            if storage not in self.graph.output_storages
        }

    @cached_property
    def forward_reads(self) -> dict[Node, tuple[Storage, ...]]:
        """For each operation, the storages in `producer` that it reads."""
        return {n: tuple(s for s in self.graph.reads(n) if s in self.producer) for n in self.graph.operations}

    @cached_property
    def read_positions(self) -> dict[Storage, list[int]]:
        """The backward positions that read each forward-made storage."""
        found: dict[Storage, list[int]] = {}
        for position, node in enumerate(self.backward):
            for storage in self.forward_reads[node]:
                found.setdefault(storage, []).append(position)
        return found

    @cached_property
    def users(self) -> dict[Storage, list[Node]]:
        """The forward operations that read each storage."""
        found: dict[Storage, list[Node]] = {}
        for node in self.forward:
            for storage in self.forward_reads[node]:
                found.setdefault(storage, []).append(node)
        return found

    @cached_property
    def wanted(self) -> tuple[Storage, ...]:
        """The storages that backward reads, and those that it could make them from; in forward order."""
        flow: nx.DiGraph[Storage | str] = nx.DiGraph()
        flow.add_node("backward")
        flow.add_edges_from((storage, "backward") for storage in self.read_positions)
        for storage, node in self.producer.items():
            if node.is_recomputable:
                flow.add_edges_from((read, storage) for read in self.forward_reads[node])
        found = nx.ancestors(flow, "backward")
        return tuple(storage for storage in self.producer if storage in found)

    @cached_property
    def last_useful(self) -> dict[Storage, int]:
        """The last backward position that can profit from a storage, directly or through what it makes."""
        found: dict[Storage, int] = {}
        for storage in reversed(self.producer):
            through = (
                found[made]
                for user in self.users.get(storage, ())
                for made in self.graph.allocates(user)
                if made in self.producer
            )
            found[storage] = max([self.read_positions.get(storage, [-1])[-1], *through])
        return found

    @cached_property
    def _held(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes during and after each backward operation of everything but forward-made storages."""
        graph = self.graph
        last_read: dict[Storage, int] = {}
        for position, node in enumerate(self.backward):
            for storage in (*graph.allocates(node), *graph.reads(node)):
                last_read[storage] = position
        permanent = graph.static_storages | graph.tangent_storages | graph.output_storages
        made_forward = {s for n in self.forward for s in graph.allocates(n)}
        outputs = sum(s.nbytes for s in graph.output_storages & made_forward)
        alive = graph.static_bytes + outputs + sum(s.nbytes for s in graph.tangent_storages)
        alive += graph.loss_held_bytes
        during: list[int] = []
        after: list[int] = []
        for position, node in enumerate(self.backward):
            alive += sum(s.nbytes for s in graph.allocates(node))
            during.append(alive + self.costs.workspace_bytes[node])
            touched = set(graph.allocates(node)) | (set(graph.reads(node)) - made_forward)
            alive -= sum(s.nbytes for s in touched if s not in permanent and last_read[s] == position)
            after.append(alive)
        return tuple(during), tuple(after)

    @property
    def held_during(self) -> tuple[int, ...]:
        """Bytes while each backward operation runs, without the storages of forward that come and go."""
        return self._held[0]

    @property
    def held_after(self) -> tuple[int, ...]:
        """The same once it has run and what it read last is freed."""
        return self._held[1]

    @cached_property
    def step_seconds(self) -> float:
        """Time of a step that computes nothing twice."""
        return math.fsum(self.costs.seconds[node] for node in self.graph.operations)

    @cached_property
    def keep_all(self) -> Simulated:
        """The schedule that computes nothing twice."""
        return self.simulate((Stage(0, frozenset(self.wanted)),))

    @cached_property
    def demand_bytes(self) -> dict[Node, int]:
        """For each operation, what no schedule with this order of backward can go below while it runs."""
        graph = self.graph
        found: dict[Node, int] = {}
        for node in self.forward:
            touched = {*graph.reads(node), *graph.allocates(node)} - graph.static_storages
            found[node] = (
                graph.static_bytes + sum(s.nbytes for s in touched) + self.costs.workspace_bytes[node]
            )
        for held, node in zip(self.held_during, self.backward, strict=True):
            found[node] = held + sum(s.nbytes for s in self.forward_reads[node])
        return found

    @cached_property
    def floor_bytes(self) -> int:
        """What no schedule with this order of backward can go below: one operation, or the loss."""
        graph = self.graph
        delivered = {o.value.storage for o in graph.outputs if o.value and o.role is OutputRole.OUTPUT}
        at_loss = graph.tangent_storages | (delivered - graph.static_storages)
        loss = graph.static_bytes + sum(s.nbytes for s in at_loss) + graph.loss_bytes
        return max([loss, *self.demand_bytes.values()])

    # ------------------------------------------------------------------ from a choice to a schedule

    def closure(self, wanted: Iterable[Storage], have: set[Storage]) -> list[Node]:
        """The operations that make `wanted` from `have`, in forward order; every one of them recomputable.

        Raises:
            ValueError: when a storage would have to be made by an operation that may run only once.
        """
        found: set[Node] = set()
        pending = [storage for storage in wanted if storage not in have]
        while pending:
            node = self.producer[pending.pop()]
            if node in found:
                continue
            if not node.is_recomputable:
                raise ValueError(f"{node.name} may run only once")
            found.add(node)
            pending.extend(s for s in self.forward_reads[node] if s not in have)
        return sorted(found, key=self.index.__getitem__)

    def order(self, staging: Staging, *, eager: bool = True) -> tuple[list[Node], list[int]]:
        """The operations after the loss, and for each the backward position that it serves.

        Args:
            staging: What is resident at the stages; between them, what is computed again stays as long
                as it is read.
            eager: At a stage, make everything that is to be resident there; else only when it is first read.
        """
        stages = {stage.position: stage.resident for stage in staging}
        have = set(staging[0].resident).union(*(self.forward_reads[node] for node in self.backward[:1]))
        order: list[Node] = []
        owners: list[int] = []
        for position, node in enumerate(self.backward):
            resident = stages.get(position)
            reads = self.forward_reads[node]
            if resident is not None and not eager:
                have &= resident.union(reads)
            goal = reads if resident is None or not eager else (*reads, *resident)
            for again in self.closure(goal, have):
                order.append(again)
                owners.append(position)
                have.update(s for s in self.graph.allocates(again) if s in self.producer)
            if resident is not None:
                have &= resident
            order.append(node)
            owners.append(position)
        return order, owners

    def simulate(self, staging: Staging, *, eager: bool = True) -> Simulated:
        """The schedule of a staging, with its memory and time."""
        order, owners = self.order(staging, eager=eager)
        return self.simulate_order(self.forward, order, owners)

    def simulate_order(
        self, forward: Sequence[Node], backward: Sequence[Node], owners: Sequence[int] | None = None
    ) -> Simulated:
        """The schedule that runs these operations, with its memory and time."""
        schedule = with_frees(self.graph, forward, backward)
        timeline = liveness(schedule, self.costs.workspace_bytes)
        during = _at_computations(schedule, timeline.during_bytes)
        order = (*forward, *backward)
        owned = list(owners) if owners is not None else [0] * len(backward)
        return Simulated(
            schedule=schedule,
            peak_bytes=timeline.peak_bytes,
            seconds=math.fsum(self.costs.seconds[node] for node in order),
            during_bytes=during,
            order=order,
            owners=(*([-1] * len(forward)), *owned),
        )


def _at_computations(schedule: Schedule, during_bytes: Sequence[int]) -> tuple[int, ...]:
    pairs = zip(schedule.instructions, during_bytes, strict=True)
    return tuple(nbytes for instruction, nbytes in pairs if isinstance(instruction, Compute))
