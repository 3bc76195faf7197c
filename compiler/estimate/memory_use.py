"""The memory of a step at its peak, by what it is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...ir import (
    Compute,
    Fetch,
    Gradients,
    Graph,
    InputRole,
    Loss,
    Node,
    OutputRole,
    Region,
    Schedule,
    Storage,
    liveness,
    resident_before,
)

__all__ = ["KINDS", "MemoryUse", "memory_use", "use_after_backward"]

KINDS: tuple[str, ...] = (
    "parameters",
    "buffers",
    "inputs",
    "gradients",
    "optimizer state",
    "activations",
    "logits",
    "gradients of activations",
    "workspaces",
)
"""The kinds of memory, in the order in which they are shown. Logits are what stands behind a softmax or a
loss over classes, with their copies and gradients. Workspaces are what operations, the loss and other
forwards in flight take beside storages."""

_ROLES = {
    InputRole.PARAMETER: "parameters",
    InputRole.BUFFER: "buffers",
    InputRole.INPUT: "inputs",
    InputRole.CONSTANT: "buffers",
}
_OVER_CLASSES = ("log_softmax", "nll_loss", "cross_entropy")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of a step at its peak.

    Args:
        peak_bytes: All of it.
        kinds: The bytes of each kind that is there, in the order of `KINDS`; they add up to the peak.
    """

    peak_bytes: int
    kinds: Mapping[str, int]


def memory_use(
    schedule: Schedule, workspace_bytes: Mapping[Node, int], *, peak_bytes: int = 0, state_bytes: int = 0
) -> MemoryUse:
    """Takes the peak of a schedule apart.

    Args:
        schedule: The schedule.
        workspace_bytes: The bytes that each operation takes beside its results.
        peak_bytes: The peak, if it is known to be higher than that of the schedule: the rest counts as
            activations, which Python holds longer than autograd.
        state_bytes: The optimizer's state, if an optimizer steps after the step.
    """
    timeline = liveness(schedule, workspace_bytes)
    found = dict.fromkeys(KINDS, 0)
    kind_of = _Kinds(schedule.graph)
    for storage in _alive(schedule, timeline.peak_index):
        found[kind_of(storage)] += storage.nbytes
    reserved = "optimizer state" if schedule.graph.gradients is Gradients.APPLIED else "gradients"
    found[reserved] += schedule.graph.reserved_bytes
    found["workspaces"] += timeline.peak_bytes - sum(found.values())
    found["activations"] += max(peak_bytes - timeline.peak_bytes, 0)
    found["optimizer state"] += state_bytes
    kinds = {kind: nbytes for kind, nbytes in found.items() if nbytes}
    return MemoryUse(sum(kinds.values()), kinds)


def use_after_backward(graph: Graph, steps: Mapping[str, int]) -> MemoryUse:
    """The memory of an optimizer's step after backward, when all gradients are there.

    Args:
        graph: The step, which delivers its gradients.
        steps: The bytes of `optimizer state`, and of the `workspaces` of one parameter's step.
    """
    found = dict.fromkeys(KINDS, 0)
    kind_of = _Kinds(graph)
    outputs = (o.value for o in graph.outputs if o.role is OutputRole.GRADIENT)
    delivered = dict.fromkeys(value.storage for value in outputs if value is not None)
    for storage in dict.fromkeys((*graph.static_storages, *delivered)):
        found[kind_of(storage)] += storage.nbytes
    for kind, nbytes in steps.items():
        found[kind] += nbytes
    kinds = {kind: nbytes for kind, nbytes in found.items() if nbytes}
    return MemoryUse(sum(kinds.values()), kinds)


def _alive(schedule: Schedule, index: int) -> Iterator[Storage]:
    """Yields the storages on the device while an instruction runs."""
    graph, instruction = schedule.graph, schedule.instructions[index]
    alive = resident_before(schedule, index)
    match instruction:
        case Compute(node, _):
            alive.update(graph.allocates(node))
        case Loss():
            alive |= graph.tangent_storages
        case Fetch(storage):
            alive.add(storage)
        case _:
            pass
    yield from graph.static_storages
    yield from alive - graph.static_storages


class _Kinds:
    """Tells the kind of a storage of a graph."""

    def __init__(self, graph: Graph) -> None:
        self._known: dict[Storage, str] = {}
        for entry in graph.inputs:
            if entry.role in _ROLES:
                self._known.setdefault(entry.value.storage, _ROLES[entry.role])
        outputs = (o.value for o in graph.outputs if o.role is OutputRole.GRADIENT)
        gradients = {value.storage for value in outputs if value is not None}
        gradients.update(node.operands[1].storage for node in graph.releases)
        self._known.update((storage, "gradients") for storage in gradients if storage not in self._known)
        sizes = {
            size for node in graph.operations if node.region is Region.FORWARD for size in _classes(node)
        }
        for node in graph.operations:
            kind = "activations" if node.region is Region.FORWARD else "gradients of activations"
            for storage in graph.allocates(node):
                self._known.setdefault(storage, kind)
            for value in node.values:
                is_wide = len(value.type.shape) > 1 and value.type.shape[-1] in sizes
                if is_wide and self._known.get(value.storage) == kind:
                    self._known[value.storage] = "logits"

    def __call__(self, storage: Storage) -> str:
        return self._known.get(storage, "gradients of activations")


def _classes(node: Node) -> Iterator[int]:
    """Yields the number of classes of an operation over them, the last dimension of its operand."""
    if any(name in node.op for name in _OVER_CLASSES) and node.operands:
        shape = node.operands[0].type.shape
        if len(shape) == 2:
            yield shape[-1]
