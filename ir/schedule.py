"""A schedule: one straight line of instructions that carries out a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .graph import Graph, Node
from .types import Storage

__all__ = ["Compute", "Fetch", "Free", "Instruction", "Loss", "Offload", "Schedule", "Wait", "with_frees"]


@dataclass(frozen=True, slots=True)
class Compute:
    """Run `node`; of the storages that it allocates, hold on to `retained` and drop the rest at once."""

    node: Node
    retained: frozenset[Storage]


@dataclass(frozen=True, slots=True)
class Free:
    """Give `storage` back to the allocator."""

    storage: Storage


@dataclass(frozen=True, slots=True)
class Loss:
    """Forward ends: the outputs leave, the caller computes its loss, the tangents arrive."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Begin to copy `storage` to the tier. It stays on the device until it is freed, after a `Wait`."""

    storage: Storage
    tier: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Allocate `storage` on the device and begin to copy it back from the tier, which keeps its copy."""

    storage: Storage
    tier: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on once the copy of `storage` that was begun last has ended."""

    storage: Storage


Instruction = Compute | Free | Loss | Offload | Fetch | Wait


@dataclass(eq=False, frozen=True)
class Schedule:
    """Instructions for one training step of `graph`."""

    graph: Graph
    instructions: tuple[Instruction, ...]

    @property
    def computed(self) -> tuple[Node, ...]:
        """The nodes run, in order; a recomputed node stands there more than once."""
        return tuple(i.node for i in self.instructions if isinstance(i, Compute))

    @property
    def loss_index(self) -> int:
        """The position of the loss among the instructions."""
        return next(k for k, instruction in enumerate(self.instructions) if isinstance(instruction, Loss))

    @property
    def halves(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """The nodes run before the loss and after it."""
        before, after = self.instructions[: self.loss_index], self.instructions[self.loss_index :]
        return (
            tuple(i.node for i in before if isinstance(i, Compute)),
            tuple(i.node for i in after if isinstance(i, Compute)),
        )


def with_frees(graph: Graph, forward: Sequence[Node], backward: Sequence[Node]) -> Schedule:
    """The schedule that runs `forward`, the loss, `backward`, and frees each storage after its last read.

    A read binds to the latest run of the node that allocates the storage, so a storage that is
    computed again is freed after its last read before that. What is delivered to the caller (an output,
    a gradient) is never freed, and later runs of its node drop their own copy.

    Args:
        graph: The graph that the nodes belong to.
        forward: Operations to run before the loss.
        backward: Operations to run after it: backward nodes, and forward nodes that are recomputed.
    """
    order = (*forward, *backward)
    permanent = graph.static_storages | graph.tangent_storages | graph.output_storages
    wanted: set[Storage] = set()
    """The storages that are read after a step before they are allocated again."""
    ends: list[tuple[list[Storage], list[Storage]]] = []
    """For each step from the last one on, the storages that it makes for later steps, and reads last."""
    for node in reversed(order):
        allocated, read = graph.allocates(node), graph.reads(node)
        ends.append(
            (
                [s for s in allocated if s in wanted and s not in permanent],
                [s for s in read if s not in wanted and s not in permanent],
            )
        )
        wanted.difference_update(allocated)
        wanted.update(read)
    instructions: list[Instruction] = []
    delivered: set[Storage] = set()
    for step, (node, (kept, last_read)) in enumerate(zip(order, reversed(ends), strict=True)):
        if step == len(forward):
            instructions.append(Loss())
        for storage in graph.allocates(node):
            if storage in graph.output_storages and storage not in delivered:
                delivered.add(storage)
                kept.append(storage)
        instructions.append(Compute(node, frozenset(kept)))
        instructions.extend(map(Free, last_read))
    if len(forward) == len(order):
        instructions.append(Loss())
    return Schedule(graph, tuple(instructions))
