"""An ONNX graph as it evaluates: what a node says of training is taken out, and random nodes are found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from ...frontends.onnx.lowerings import RANDOM

__all__ = ["evaluate", "random_node"]

_DOMAINS = ("", "ai.onnx")
_MEAN, _VAR = 3, 4
"""Operands of BatchNormalization."""


def evaluate(model: onnx.ModelProto) -> list[str]:
    """Makes a model that was stored in training mode evaluate, as the module does in eval mode; in place.

    `training_mode` goes from BatchNormalization and Dropout, and so does Dropout's third operand.
    BatchNormalization has one output when it evaluates; its other ones become the statistics that it reads.
    Subgraphs and the model's own functions are changed too.

    Returns:
        Operator and name of each node that was changed.
    """
    changed = _evaluate(model.graph)
    for function in model.functions:
        changed += _evaluate(function)
    return changed


def _evaluate(graph: onnx.GraphProto | onnx.FunctionProto) -> list[str]:
    changed: list[str] = []
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for inner in _subgraphs(node):
            changed += _evaluate(inner)
        nodes.append(node)
        if node.domain in _DOMAINS and node.op_type in ("BatchNormalization", "Dropout"):
            before = node.SerializeToString()
            nodes.extend(_settle(node))
            if node.SerializeToString() != before:
                changed.append(_title(node))
    if len(nodes) != len(graph.node):
        del graph.node[:]
        graph.node.extend(nodes)
    return changed


def _settle(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Takes training out of a node; what it computed for training only, as nodes to put after it."""
    kept = [a for a in node.attribute if a.name != "training_mode"]
    if len(kept) != len(node.attribute):
        del node.attribute[:]
        node.attribute.extend(kept)
    if node.op_type == "Dropout":
        del node.input[2:]
        return
    extra = list(node.output[1:])
    del node.output[1:]
    for operand, name in zip((_MEAN, _VAR), extra, strict=False):
        if name:
            yield onnx.helper.make_node("Identity", [node.input[operand]], [name])


def random_node(model: onnx.ModelProto) -> str | None:
    """Operator and name of the first node that draws at random; subgraphs and functions count."""
    for graph in (model.graph, *model.functions):
        for node in _nodes(graph.node):
            if node.domain in _DOMAINS and node.op_type in RANDOM:
                return _title(node)
    return None


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for inner in _subgraphs(node):
            yield from _nodes(inner.node)


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _title(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name or next(iter(node.output), '')}"
