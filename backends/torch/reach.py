"""Which values of backward come from the gradients of which outputs."""

from __future__ import annotations

from ...ir import Graph, InputRole, Value

__all__ = ["reached_by"]


def reached_by(graph: Graph) -> dict[Value, frozenset[int]]:
    """The values that tangents reach, each with the indices of their outputs."""
    reached: dict[Value, frozenset[int]] = {
        i.value: frozenset([int(i.target)]) for i in graph.inputs if i.role is InputRole.TANGENT
    }
    nothing = frozenset[int]()
    for node in graph.nodes:
        through = nothing.union(*(reached.get(value, nothing) for value in node.operands))
        if through:
            reached.update(dict.fromkeys(node.values, through))
    return reached
