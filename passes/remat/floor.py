"""The floor of a problem, taken apart: what is alive at the moment below which no schedule can go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...ir import Gradients, InputRole, Node, OutputRole, Storage, format_bytes
from .problem import CheckpointProblem

__all__ = ["Floor"]

_ROLES = {
    InputRole.PARAMETER: "parameters",
    InputRole.BUFFER: "buffers",
    InputRole.INPUT: "inputs",
    InputRole.CONSTANT: "constants",
}


@dataclass(frozen=True, slots=True)
class Floor:
    """The moment that needs most under every schedule.

    Args:
        node: The operation that runs then; None for the loss.
        groups: Bytes that are alive then, by what they are for; they add up to the floor.
        lower: Options that lower one of the groups.
    """

    node: Node | None
    groups: tuple[tuple[str, int], ...]
    lower: tuple[str, ...]

    @staticmethod
    def of(problem: CheckpointProblem) -> Floor:
        """Takes the floor of a problem apart."""
        demand = problem.demand_bytes
        node = max(demand, key=demand.__getitem__, default=None)
        if node is None or demand[node] < problem.floor_bytes:
            node = None
        groups = {name: nbytes for name, nbytes in _groups(problem, node) if nbytes}
        rest = problem.floor_bytes - sum(groups.values())
        if rest > 0:
            groups["the loss" if node is None else f"read and made by {node.op}"] = rest
        lower: list[str] = []
        if groups.get("gradients") and problem.graph.gradients is Gradients.RETURNED:
            lower.append("take the optimizer's steps in backward (optimizer_in_backward=)")
        if groups.get("outputs that the caller holds"):
            lower.append("return less than all that forward computes")
        return Floor(node, tuple(sorted(groups.items(), key=lambda group: -group[1])), tuple(lower))

    def __str__(self) -> str:
        return ", ".join(f"{format_bytes(nbytes)} {name}" for name, nbytes in self.groups)


def _groups(problem: CheckpointProblem, node: Node | None) -> Iterator[tuple[str, int]]:
    """Yields bytes that are alive whatever is kept, while an operation or the loss runs."""
    graph = problem.graph
    counted: set[Storage] = set(graph.offloaded_of)

    def fresh(storages: Iterator[Storage]) -> int:
        found = set(storages) - counted
        counted.update(found)
        return sum(storage.nbytes for storage in found)

    for role, name in _ROLES.items():
        yield name, fresh(entry.value.storage for entry in graph.inputs if entry.role is role)
    what = "optimizer state" if graph.gradients is Gradients.APPLIED else "gradients from step to step"
    yield what, graph.reserved_bytes
    order = (*problem.forward, *problem.backward)
    last = len(problem.forward) if node is None else order.index(node) + 1
    made = {storage for earlier in order[:last] for storage in graph.allocates(earlier)}
    delivered = [o for o in graph.outputs if o.value is not None and o.value.storage in made]
    yield (
        "outputs that the caller holds",
        fresh(o.value.storage for o in delivered if o.value and o.role is OutputRole.OUTPUT),
    )
    yield (
        "gradients",
        fresh(o.value.storage for o in delivered if o.value and o.role is not OutputRole.OUTPUT),
    )
    if last >= len(problem.forward):
        yield "gradients of outputs", fresh(iter(graph.tangent_storages))
