"""The recomputation problem: the view of solvers and strategies, and the step from a choice to a schedule."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property

from ...ir import (
    Compute,
    Graph,
    Node,
    Others,
    OutputRole,
    Region,
    Schedule,
    Storage,
    liveness,
    loss_waiting_bytes,
    others_after,
    others_before,
    overwritten,
    with_frees,
)
from ..costs.table import Costs

__all__ = ["CheckpointProblem", "Recomputations", "Solution"]

Recomputations = Sequence[Sequence[Node]]
"""For each step of the base order (forward, then backward), the operations that run again right before it."""


@dataclass(frozen=True)
class Solution:
    """A schedule with its cost.

    Args:
        schedule: The schedule.
        peak_bytes: The most memory alive at once, static bytes included.
        seconds: The time of all computations; the same to the last bit in whatever order they run.
        during_bytes: Memory at each computation (frees and the loss left out), in the order of `order`.
        order: The operations that run.
    """

    schedule: Schedule
    peak_bytes: int
    seconds: float
    during_bytes: tuple[int, ...]
    order: tuple[Node, ...]


@dataclass(frozen=True)
class CheckpointProblem:
    """The problem of which forward values to keep for backward, and which to compute again.

    A schedule of the class considered here runs forward once, in the graph's order, and then the backward
    operations in one fixed order. Before each backward operation but the first it runs whatever of forward
    must be computed again, in forward order; before the first one too if annotations keep storages from
    staying. Searches beyond small graphs may compute again in forward too, and in any order.

    Annotations of the user (`Node.annotation`) are constraints of the problem: what is to be kept does not
    run again, and what is transient does not stay from forward to backward. Bounds and optima hold under
    them.

    Args:
        graph: The training graph.
        costs: Seconds and workspace of its operations.
        sequence: The backward operations in the order that they run in; empty for the graph's own order.
    """

    graph: Graph
    costs: Costs
    sequence: tuple[Node, ...] = ()

    @cached_property
    def forward(self) -> tuple[Node, ...]:
        """The forward operations, in order."""
        return tuple(n for n in self.graph.operations if n.region is Region.FORWARD)

    @cached_property
    def backward(self) -> tuple[Node, ...]:
        """The backward operations, in order."""
        return self.sequence or tuple(n for n in self.graph.operations if n.region is Region.BACKWARD)

    @cached_property
    def base(self) -> tuple[Node, ...]:
        """Forward, then backward: the first runs of all operations."""
        return (*self.forward, *self.backward)

    @property
    def time_steps(self) -> int:
        """The number of time steps: the forward operations, the loss, and the backward operations."""
        return len(self.base) + 1

    def base_of(self, time_step: int) -> Node | None:
        """The operation of the base order that runs at a time step; None at the loss."""
        split = len(self.forward)
        if time_step == split:
            return None
        return self.base[time_step if time_step < split else time_step - 1]

    def read_at(self, time_step: int) -> tuple[Storage, ...]:
        """The storages that come and go that are read at a time step."""
        node = self.base_of(time_step)
        return () if node is None else self.forward_reads[node]

    @cached_property
    def _read_time_steps(self) -> dict[Storage, list[int]]:
        split = len(self.forward)
        found: dict[Storage, list[int]] = {}
        for index, node in enumerate(self.base):
            for storage in self.forward_reads[node]:
                found.setdefault(storage, []).append(index if index < split else index + 1)
        return found

    def is_read(self, storage: Storage, first: int, last: int | None = None) -> bool:
        """Whether the base order reads a storage between two time steps, these included."""
        time_steps = self._read_time_steps.get(storage, [])
        at = bisect.bisect_left(time_steps, first)
        return at < len(time_steps) and (last is None or time_steps[at] <= last)

    @cached_property
    def last_needed(self) -> dict[Storage, int]:
        """The last time step that can profit from a storage, directly or by what is made again of it.

        Forward counts too: what it reads late may have been dropped, and be made again of the storage.
        """
        found = dict.fromkeys(self.producer, -1)
        for time_step in range(self.time_steps):
            for storage in self.read_at(time_step):
                found[storage] = time_step
        for storage, node in reversed(self.producer.items()):
            for read in self.forward_reads[node] if node in self.recomputable else ():
                found[read] = max(found[read], found[storage])
        return found

    def is_useful(self, storage: Storage, time_step: int) -> bool:
        """Whether a storage is of use at a time step or later: read, or needed to make what is read."""
        return self.last_needed[storage] >= time_step

    @cached_property
    def index(self) -> dict[Node, int]:
        """The position of each forward operation."""
        return {node: i for i, node in enumerate(self.forward)}

    @cached_property
    def recomputable(self) -> frozenset[Node]:
        """The forward operations that may run again."""
        return frozenset(node for node in self.forward if node.is_recomputable)

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
    def transient(self) -> frozenset[Storage]:
        """The storages of `producer` that must not stay from forward to backward."""
        return self.graph.transient_storages

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
        return self.with_sources(self.read_positions)

    def with_sources(self, demanded: Iterable[Storage]) -> tuple[Storage, ...]:
        """Storages that come and go, and those that they could be made from; in forward order."""
        found = set(demanded)
        for storage, node in reversed(self.producer.items()):
            if storage in found and node in self.recomputable:
                found.update(self.forward_reads[node])
        return tuple(storage for storage in self.producer if storage in found)

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
        """The same once the operation has run and what it read last is freed."""
        return self._held[1]

    @cached_property
    def held_before(self) -> tuple[int, ...]:
        """Bytes of all but what comes and goes, before each step of the base order and at its end."""
        graph = self.graph
        held = [graph.static_bytes]
        for node in self.forward:
            held.append(held[-1] + sum(s.nbytes for s in graph.allocates(node) if s not in self.producer))
        held[-1] += sum(s.nbytes for s in graph.tangent_storages) + graph.loss_held_bytes
        return (*held, *self.held_after)

    @cached_property
    def held_at(self) -> tuple[int, ...]:
        """The same while each step of the base order runs, its workspace included."""
        forward = (
            before
            + sum(s.nbytes for s in self.graph.allocates(node) if s not in self.producer)
            + self.costs.workspace_bytes[node]
            for before, node in zip(self.held_before, self.forward, strict=False)
        )
        return (*forward, *self.held_during)

    def held_in(self, time_step: int, small_bytes: float = math.inf) -> int:
        """The same at a time step, with the storages larger than `small_bytes` that it makes itself."""
        split = len(self.forward)
        if time_step == split:
            return self.held_before[split] - self.graph.loss_held_bytes + self.graph.loss_bytes
        if time_step > split:
            return self.held_during[time_step - split - 1]
        made = self.graph.allocates(self.forward[time_step])
        return self.held_at[time_step] + sum(
            s.nbytes for s in made if s in self.producer and s.nbytes > small_bytes
        )

    @cached_property
    def _others(self) -> tuple[tuple[Others, ...], tuple[Others, ...]]:
        """The bytes that other forwards in flight hold before the loss, and from it on."""
        graph = self.graph
        delivered = sum(s.nbytes for s in graph.output_storages if graph.producers[s] in self.index)
        fixed_bytes = delivered + loss_waiting_bytes(graph)
        before, after = (
            tuple(replace(case, nbytes=case.bytes_at(fixed_bytes)) for case in cases)
            for cases in (others_before(graph), others_after(graph))
        )
        return before, after

    def held_between(self, time_step: int) -> int:
        """The same while something runs again right before a time step."""
        split = len(self.forward)
        if time_step != split:
            return self.held_before[time_step if time_step < split else time_step - 1]
        tangents = sum(s.nbytes for s in self.graph.tangent_storages)
        return self.held_before[split] - tangents - self.graph.loss_held_bytes

    def others_at(self, time_step: int) -> tuple[Others, ...]:
        """The cases of what other forwards in flight hold at a time step or base step: each may be the worst.

        A waiting forward is said to hold the storages of forward that come and go and that the schedule keeps
        at the loss; the rest of what it holds is among the bytes of the case.
        """
        return self._others[time_step >= len(self.forward)]

    @cached_property
    def forced_bytes(self) -> int:
        """Bytes that every schedule keeps at the loss: what backward reads and only one run can make."""
        return sum(s.nbytes for s in self.read_positions if not self.producer[s].is_recomputable)

    def least_others_bytes(self, time_step: int) -> int:
        """The bytes that other forwards in flight hold at a time step under every schedule."""
        return max(case.bytes_at(self.forced_bytes) for case in self.others_at(time_step))

    @cached_property
    def step_seconds(self) -> float:
        """Time of a step that computes nothing twice."""
        return math.fsum(self.costs.seconds[node] for node in self.graph.operations)

    @cached_property
    def eager(self) -> Solution:
        """The schedule that computes nothing twice, whatever annotations ask for."""
        return self.simulate_order(self.forward, self.backward)

    @cached_property
    def keep_all(self) -> Solution:
        """The schedule that computes nothing twice but what annotations keep from staying."""
        return self.keeping(self.wanted)

    def is_fastest(self, solution: Solution) -> bool:
        """Whether a schedule takes as little time as any can."""
        return solution.seconds <= self.step_seconds * (1 + 1e-12)

    @cached_property
    def demand_bytes(self) -> dict[Node, int]:
        """For each operation, bytes that no schedule with this order of backward goes below at its run."""
        graph = self.graph
        found: dict[Node, int] = {}
        least_bytes = graph.static_bytes + self.least_others_bytes(0)
        for node in self.forward:
            touched = {*graph.reads(node), *graph.allocates(node)} - graph.static_storages
            found[node] = least_bytes + sum(s.nbytes for s in touched) + self.costs.workspace_bytes[node]
        least_bytes = self.least_others_bytes(len(self.forward))
        for held, node in zip(self.held_during, self.backward, strict=True):
            found[node] = least_bytes + held + sum(s.nbytes for s in self.forward_reads[node])
        return found

    @cached_property
    def floor_bytes(self) -> int:
        """The bytes that no schedule with this order of backward can go below: one operation, or the loss."""
        graph = self.graph
        delivered = {o.value.storage for o in graph.outputs if o.value and o.role is OutputRole.OUTPUT}
        at_loss = graph.tangent_storages | (delivered - graph.static_storages)
        loss = graph.static_bytes + sum(s.nbytes for s in at_loss) + graph.loss_bytes
        loss += self.least_others_bytes(len(self.forward))
        return max([loss, *self.demand_bytes.values()])

    # ------------------------------------------------------------------ from a choice to a schedule

    def closure(self, wanted: Iterable[Storage], have: set[Storage]) -> list[Node]:
        """The operations that make `wanted` from `have`, in forward order; every one of them recomputable.

        Raises:
            ValueError: when a storage would have to be made by an operation that may run only once.
        """
        pending = [storage for storage in wanted if storage not in have]
        if not pending:
            return []
        found: set[Node] = set()
        while pending:
            node = self.producer[pending.pop()]
            if node in found:
                continue
            if node not in self.recomputable:
                raise ValueError(f"{node.name} may run only once")
            found.add(node)
            pending.extend(s for s in self.forward_reads[node] if s not in have)
        return sorted(found, key=self.index.__getitem__)

    def repeats_between(
        self, resident: Mapping[int, frozenset[Storage]], *, eager: bool = True
    ) -> list[list[Node]]:
        """Lists what runs again before each base step, given what is resident at some time steps.

        Args:
            resident: For some time steps, the storages that stay from before until after them. What a time
                step reads is there in any case, and goes right after it unless it is named. Between two such
                time steps nothing that was made goes.
            eager: Whether to make everything that is to be resident at such a time step; else only when it is
                first read, unless it cannot be made of what stays.

        Raises:
            ValueError: when a storage would have to be made by an operation that may run only once.
        """
        have: set[Storage] = set()
        found: list[list[Node]] = []
        for time_step in range(self.time_steps):
            stays = resident.get(time_step)
            if time_step == len(self.forward):
                have -= self.transient
                stays = None if stays is None else stays - self.transient
            reads = self.read_at(time_step)
            now = (*reads, *self._made(stays or (), time_step))
            again: list[Node] = []
            if stays is not None and not eager:
                left = have & stays.union(reads)
                lost = self._lost(left)
                again = self.closure([s for s in now if s in lost], have)
                have = left
            have.update(self._made_by(again))
            again += self.closure(now if eager else reads, have)
            have.update(self._made_by(again))
            if stays is not None:
                have &= stays
            node = self.base_of(time_step)
            if node is not None:
                found.append(again)
                have.update(s for s in self.graph.allocates(node) if s in self.producer)
        return found

    def _made(self, storages: Iterable[Storage], time_step: int) -> Iterator[Storage]:
        """The storages that can be made again at a time step: those made before, and none at the loss."""
        if time_step != len(self.forward):
            yield from (s for s in storages if self.index[self.producer[s]] < time_step)

    def _made_by(self, nodes: Iterable[Node]) -> Iterator[Storage]:
        """The storages that come and go that some operations make."""
        return (s for node in nodes for s in self.graph.allocates(node) if s in self.producer)

    def _lost(self, have: AbstractSet[Storage]) -> AbstractSet[Storage]:
        """The storages that cannot be made of those that are there: an operation may run only once."""
        found: set[Storage] = set()
        for storage, node in self.producer.items():
            if storage in have:
                continue
            if node not in self.recomputable or not found.isdisjoint(self.forward_reads[node]):
                found.add(storage)
        return found

    def keeping(self, kept: Iterable[Storage]) -> Solution:
        """The schedule that keeps some storages for backward, and makes the others again when they are read.

        What only an operation that runs once can make must be among them, or follow from them. What is
        transient is made again in any case.
        """
        return self.simulate_recomputations(self.repeats_between({len(self.forward): frozenset(kept)}))

    def recomputations(self, solution: Solution) -> list[list[Node]]:
        """Lists what a schedule runs again before each step of the base order."""
        found: list[list[Node]] = []
        pending: list[Node] = []
        for node in solution.order:
            if len(found) < len(self.base) and node is self.base[len(found)]:
                found.append(pending)
                pending = []
            else:
                pending.append(node)
        assert not pending, "nothing runs again after the last step"
        return found

    def simulate_recomputations(self, recomputations: Recomputations) -> Solution:
        """Simulates the schedule that runs these operations again, with its memory and time."""
        split = len(self.forward)
        pairs = list(zip(self.base, recomputations, strict=True))
        forward = [n for node, before in pairs[:split] for n in (*before, node)]
        backward = [n for node, before in pairs[split:] for n in (*before, node)]
        return self.simulate_order(forward, backward)

    @cached_property
    def _overwrites(self) -> dict[Node, frozenset[Storage]]:
        """The storages whose memory each operation that overwrites any takes for its results."""
        taken = ((n, frozenset(v.storage for v in overwritten(n))) for n in self.graph.operations)
        return {node: storages for node, storages in taken if storages}

    def with_remade(
        self, forward: Sequence[Node], backward: Sequence[Node]
    ) -> tuple[Sequence[Node], Sequence[Node]]:
        """Adds to an order what makes again the storages that it reads after they were overwritten.

        Searches and strategies count as if what an operation overwrites stayed if they keep it. What they
        take for a bound holds for the orders that are left.

        Raises:
            ValueError: when such a storage would have to be made by an operation that may run only once.
        """
        if not self._overwrites:
            return forward, backward
        order = (*forward, *backward)
        split = len(forward)
        remade: list[list[Node]] = [[], []]
        gone: set[Storage] = set()

        def run(node: Node, half: list[Node]) -> None:
            half.append(node)
            gone.difference_update(self.graph.allocates(node))
            gone.update(self._overwrites.get(node, ()))

        for step, node in enumerate(order):
            half = remade[step >= split]
            lost = [s for s in self.graph.reads(node) if s in gone]
            if lost:
                resident = self._read_before_made(order[step:]) - gone
                for again in self.closure(lost, resident | self._made_once(order[:step]) - gone):
                    run(again, half)
            run(node, half)
        return remade[0], remade[1]

    def _read_before_made(self, order: Sequence[Node]) -> set[Storage]:
        """The storages that operations read before they make them."""
        read: set[Storage] = set()
        results: set[Storage] = set()
        for node in order:
            read.update(s for s in self.graph.reads(node) if s not in results)
            results.update(self.graph.allocates(node))
        return read

    def _made_once(self, order: Sequence[Node]) -> set[Storage]:
        """The storages that only one run makes, of operations that have run."""
        return {s for node in order if node not in self.recomputable for s in self.graph.allocates(node)}

    def simulate_order(self, forward: Sequence[Node], backward: Sequence[Node]) -> Solution:
        """Simulates the schedule that runs these operations before and after the loss, as `with_remade`."""
        forward, backward = self.with_remade(forward, backward)
        schedule = with_frees(self.graph, forward, backward)
        timeline = liveness(schedule, self.costs.workspace_bytes)
        order = (*forward, *backward)
        return Solution(
            schedule=schedule,
            peak_bytes=timeline.peak_bytes,
            seconds=math.fsum(self.costs.seconds[node] for node in order),
            during_bytes=_at_computations(schedule, timeline.during_bytes),
            order=order,
        )

    def peaks(self, solution: Solution) -> list[int]:
        """The most that is alive at each time step of a schedule, or while anything runs again before it."""
        found = [0] * self.time_steps
        time_step = 0
        for node, nbytes in zip(solution.order, solution.during_bytes, strict=True):
            if time_step == len(self.forward):
                time_step += 1  # what runs again before the first backward operation runs after the loss
            found[time_step] = max(found[time_step], nbytes)
            if time_step < self.time_steps and node is self.base_of(time_step):
                time_step += 1
        return found


def _at_computations(schedule: Schedule, during_bytes: Sequence[int]) -> tuple[int, ...]:
    pairs = zip(schedule.instructions, during_bytes, strict=True)
    return tuple(nbytes for instruction, nbytes in pairs if isinstance(instruction, Compute))
