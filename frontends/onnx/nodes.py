"""Nodes held against the operator specification: how many operands and results, and attributes of which type."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import onnx.defs
import onnx_ir as ir

from ...ir.errors import Location, UsageError
from .coverage import domain_of
from .reader import node_name, subgraphs

__all__ = ["check_nodes"]


def check_nodes(model: ir.Model) -> None:
    """Refuse nodes that are not as their operator is specified, in the graph, its branches and its functions.

    Operators that the specification does not know are left to their lowerings.

    Raises:
        UsageError: IRC305.
    """
    _check(model.graph, model.opset_imports)
    for function in model.functions.values():
        _check(function, {**model.opset_imports, **function.opset_imports})


def _check(nodes: Iterable[ir.Node], versions: Mapping[str, int]) -> None:
    for node in nodes:
        version = versions.get("", versions.get("ai.onnx", 1))
        if domain_of(node) == "":
            schema = _schema(node.op_type, version)
            if schema is not None:
                _check_node(node, schema, f"ai.onnx::{node.op_type} (opset {version})")
        for inner in subgraphs(node):
            _check(inner, versions)


@functools.cache
def _schema(op: str, version: int) -> onnx.defs.OpSchema | None:
    try:
        schema = onnx.defs.get_schema(op, version, "")
    except (onnx.defs.SchemaError, TypeError):  # no such operator, or a version beyond 31 bits
        return None
    return None if schema.deprecated else schema


def _check_node(node: ir.Node, schema: onnx.defs.OpSchema, title: str) -> None:
    def refuse(why: str) -> UsageError:
        return UsageError(
            "IRC305",
            f"{title} {why}",
            at=Location(onnx_node=node_name(node)),
            help="the operator's page at onnx.ai/onnx/operators says what it takes; mend the file",
        )

    for what, count, least, most in (
        ("operands", len(node.inputs), schema.min_input, schema.max_input),
        ("results", len(node.outputs), schema.min_output, schema.max_output),
    ):
        if not least <= count <= most:
            takes = (
                str(least)
                if least == most
                else f"{least} to {most}"
                if most < 1 << 30
                else f"{least} or more"
            )
            raise refuse(f"has {count} {what}, where it takes {takes}")
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    for index, (given, formal) in enumerate(zip(node.inputs, schema.inputs, strict=False)):
        if formal.option == single and (given is None or not given.name):
            raise refuse(f"lacks its operand {index} ({formal.name})")
    for name, wanted in schema.attributes.items():
        attribute = node.attributes.get(name)
        if attribute is None:
            if wanted.required:
                raise refuse(f"lacks its attribute {name!r}")
        elif attribute.type.name != wanted.type.name and not _is_empty(attribute):
            raise refuse(
                f"has the attribute {name!r} of type {attribute.type.name}, where it takes {wanted.type.name}"
            )


def _is_empty(attribute: ir.Attr) -> bool:
    """An empty list has no type to be wrong about."""
    value = attribute.value
    return isinstance(value, list | tuple) and not value
