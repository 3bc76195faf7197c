"""Small questions about nodes and graphs."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

__all__ = ["inputs_behind", "node_name", "subgraphs", "wanted"]


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


# These read no element of their operands, only sizes and types.
_OF_SHAPES = ("Shape", "Size")


def inputs_behind(value: ir.Value) -> set[ir.Value]:
    """The values without a producer whose elements decide a value; sizes are not elements."""
    seen, pending = set[ir.Value](), [value]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        node = current.producer()
        if node is not None and node.op_type not in _OF_SHAPES:
            pending += [v for v in node.inputs if v is not None]
            pending += [v for graph in subgraphs(node) for v in graph.outputs]
    return {v for v in seen if v.producer() is None}
