"""The order of backward: gradients that are large beside what they are made from are made last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..ir import Gradients, Graph, Node, Region, Storage
from .costs import Costs

__all__ = ["weight_gradients_last"]


def weight_gradients_last(graph: Graph, costs: Costs) -> tuple[Node, ...]:
    """The backward operations of `graph`, where it saves memory with those last that only deliver gradients.

    A gradient that is delivered stays until backward ends. Where it is larger than what its operation
    reads and nothing else still needs, waiting with the operation takes less memory at every moment
    in between, and no time. Operations that share what they read wait together or not at all; of those
    that wait, the ones that take and free most besides come first, while few gradients are there. What
    reads a parameter that backward updates does not wait.

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024) delay the gradients of weights to fill a
        pipeline; here it is for memory.
    """
    backward = [node for node in graph.operations if node.region is Region.BACKWARD]
    waiting = _worth_waiting(graph, backward)

    def passing_bytes(node: Node) -> int:
        return costs.workspace_bytes[node] + sum(s.nbytes for s in waiting[node])

    last = sorted((n for n in backward if n in waiting), key=passing_bytes, reverse=True)
    return (*(n for n in backward if n not in waiting), *last)


def _worth_waiting(graph: Graph, backward: Sequence[Node]) -> dict[Node, set[Storage]]:
    """The operations that wait, each with what it reads that is held for it."""
    readers = Counter(storage for node in backward for storage in graph.reads(node))
    permanent = graph.static_storages | graph.tangent_storages | graph.output_storages
    updated = {n.operands[0].storage for n in graph.releases if n.releases is Gradients.APPLIED}
    groups: dict[Storage, list[Node]] = {}
    for node in backward:
        made = graph.allocates(node)
        if (
            made
            and updated.isdisjoint(graph.reads(node))
            and all(s in graph.output_storages and not readers[s] for s in made)
        ):
            key = max(
                (s for s in graph.reads(node) if s not in permanent), key=lambda s: s.nbytes, default=None
            )
            if key is not None:
                groups.setdefault(key, []).append(node)
    found: dict[Node, set[Storage]] = {}
    for nodes in groups.values():
        held = {s for node in nodes for s in graph.reads(node)} - permanent
        made_bytes = sum(s.nbytes for node in nodes for s in graph.allocates(node))
        if sum(s.nbytes for s in held) < made_bytes:
            found.update({node: held.intersection(graph.reads(node)) for node in nodes})
    return found
