"""The floor of a problem, taken apart: what is alive at the moment below which no schedule can go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ...ir import Gradients, Graph, InputRole, Node, OutputRole, Storage, format_bytes, operation_of
from .problem import CheckpointProblem

__all__ = ["Floor"]

_SHOWN = 8
"""The number of groups that are shown by name."""

_NOTICED = 1000
"""Groups of less than this part of the floor are not worth advice."""

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
        groups = Counter[str]()
        for name, nbytes in _groups(problem, node):
            groups[name] += nbytes
        groups["the loss" if node is None else f"workspace of {operation_of(node)}"] += (
            problem.floor_bytes - groups.total()
        )
        groups = +groups
        lower: list[str] = []
        if groups.get("gradients") and problem.graph.gradients is Gradients.RETURNED:
            lower.append(
                "take the optimizer's steps in backward (optimizer_in_backward=; its state then counts)"
            )
        if groups["outputs that the caller holds"] * _NOTICED > problem.floor_bytes:
            lower.append("return less than all that forward computes")
        return Floor(node, tuple(groups.most_common()), tuple(lower))

    def __str__(self) -> str:
        texts = [f"{format_bytes(nbytes)} {name}" for name, nbytes in self.groups[:_SHOWN]]
        others = self.groups[_SHOWN:]
        if others:
            texts.append(f"{format_bytes(sum(nbytes for _, nbytes in others))} in {len(others)} more groups")
        return ", ".join(texts)


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
    if node is not None:
        touched = (*problem.forward_reads.get(node, ()), *graph.reads(node), *graph.allocates(node))
        for storage in touched:
            yield f"of {_origin(graph, storage)}", fresh(iter([storage]))
    waiting = {storage for later in order[last:] for storage in graph.reads(later)}
    for maker in order[:last]:
        once = ", which runs once" if maker in problem.index else ""
        stay = (s for s in graph.allocates(maker) if s in waiting and s not in problem.producer)
        yield f"of {operation_of(maker)}{once}, for later operations", fresh(stay)


def _origin(graph: Graph, storage: Storage) -> str:
    maker = graph.producers.get(storage)
    if maker is None:
        return storage.name
    place = "" if maker.at is None else str(maker.at)
    return f"{operation_of(maker)} ({place})" if place else operation_of(maker)
