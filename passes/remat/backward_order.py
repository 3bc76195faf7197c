"""The order of backward: gradients that are larger than what they are made from are made last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ir import Gradients, Graph, Node, Region, Storage, overwritten
from ..costs.table import Costs

__all__ = ["weight_gradients_last"]


def weight_gradients_last(graph: Graph, costs: Costs, least_ratio: float = 1.0) -> tuple[Node, ...]:
    """Orders the backward operations of `graph`: those that make large gradients of little come last.

    A gradient that is delivered stays until backward ends. If it is larger than what its operation reads and
    nothing else still needs, waiting with the operation takes less memory at every time step in between, and
    no time. A gradient that is released takes its bytes while nearly all of the step's values are alive; at
    the end they are gone. Operations that share what they read wait together or not at all. Among those that
    wait, the ones that take and free most besides come first, while few gradients are there. An operation
    does not wait if it, or what makes again what it reads, reads a parameter which something else's release
    updates; nor does one that reads what another overwrites.

    Args:
        graph: The training graph.
        costs: The costs of its operations.
        least_ratio: Operations wait if the gradient is larger than this many times what is held for it.

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024) delay the gradients of weights to fill a
        pipeline; here it is for memory.
    """
    backward = [node for node in graph.operations if node.region is Region.BACKWARD]
    waiting = {
        sink.node: sink
        for sinks in _groups(graph, backward)
        for sink in sinks
        if _ratio(graph, sinks) > least_ratio
    }
    moved = {node for sink in waiting.values() for node in (sink.node, *sink.releases)}

    def passing_bytes(sink: _Sink) -> int:
        return costs.workspace_bytes[sink.node] + sum(s.nbytes for s in sink.held)

    last = sorted(waiting.values(), key=passing_bytes, reverse=True)
    return (
        *(node for node in backward if node not in moved),
        *(node for sink in last for node in (sink.node, *sink.releases)),
    )


@dataclass(frozen=True)
class _Sink:
    """An operation that makes gradients alone, delivered or released, with the bytes held while it waits."""

    node: Node
    releases: tuple[Node, ...]
    held: frozenset[Storage]


def _ratio(graph: Graph, sinks: Sequence[_Sink]) -> float:
    """Bytes of the gradients for each byte that is held for them."""
    held = frozenset[Storage]().union(*(sink.held for sink in sinks))
    made_bytes = sum(s.nbytes for sink in sinks for s in graph.allocates(sink.node))
    return made_bytes / max(sum(s.nbytes for s in held), 1)


def _groups(graph: Graph, backward: Sequence[Node]) -> list[list[_Sink]]:
    """Groups the sinks by the largest storage that they read."""
    readers: dict[Storage, list[Node]] = {}
    for node in backward:
        for storage in graph.reads(node):
            readers.setdefault(storage, []).append(node)
    permanent = graph.static_storages | graph.tangent_storages | graph.output_storages
    updated = {n.operands[0].storage for n in graph.releases if n.releases is Gradients.APPLIED}
    reading = _updated_reads(graph, updated)
    gone = {value.storage: node for node in graph.operations for value in overwritten(node)}
    groups: dict[Storage, list[_Sink]] = {}
    for node in backward:
        made = graph.allocates(node)
        releases = tuple(dict.fromkeys(r for s in made for r in readers.get(s, ())))
        own = {release.operands[0].storage for release in releases}
        is_sink = (
            made
            and all(reader.releases is not None for reader in releases)
            and all((s in graph.output_storages) == (s not in readers) for s in made)
        )
        held = frozenset(graph.reads(node)) - permanent
        is_sink = is_sink and all(gone.get(storage, node) is node for storage in held)
        used = frozenset[Storage]().union(*(reading.get(s, ()) for s in graph.reads(node)))
        if is_sink and held and used <= own:
            key = max(held, key=lambda s: (s.nbytes, s.name))
            groups.setdefault(key, []).append(_Sink(node, releases, held))
    return list(groups.values())


def _updated_reads(graph: Graph, updated: set[Storage]) -> dict[Storage, frozenset[Storage]]:
    """For each storage, those of `updated` that it is, or that the operations read which make it again."""
    reading = {storage: frozenset({storage}) for storage in updated}
    for node in graph.operations if updated else ():
        if node.region is Region.FORWARD and node.is_recomputable:
            used = frozenset[Storage]().union(*(reading.get(s, ()) for s in graph.reads(node)))
            reading.update((storage, used) for storage in graph.allocates(node))
    return reading
