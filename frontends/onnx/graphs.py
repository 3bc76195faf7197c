"""Small questions about nodes and graphs."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

__all__ = ["node_name", "subgraphs", "wanted"]


def node_name(node: ir.Node) -> str:
    """The node's name, or its first output's when it has none."""
    if node.name:
        return node.name
    return next((o.name for o in node.outputs if o.name), node.op_type)


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs that a node carries as attributes."""
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def wanted(node: ir.Node) -> tuple[bool, ...]:
    """Returns which outputs of a node are read."""
    return tuple(bool(o.name) and (bool(o.uses()) or o.is_graph_output()) for o in node.outputs)
