"""Nodes held against the operator specification: their operands, results, attributes and bodies."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import onnx.defs
import onnx_ir as ir
import torch

from ...ir.errors import Location, UsageError
from .coverage import domain_of
from .graphs import node_name, subgraphs
from .lowerings import NodeInfo

__all__ = ["check_kinds", "check_nodes"]


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


_TYPES = onnx.defs.OpSchema.AttrType
_NAMES = {getattr(_TYPES, kind.name): kind.name for kind in ir.AttributeType if hasattr(_TYPES, kind.name)}


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

    options = onnx.defs.OpSchema.FormalParameterOption
    needed = schema.min_input
    while 0 < needed <= len(schema.inputs) and schema.inputs[needed - 1].option == options.Optional:
        needed -= 1  # what may be empty may be left out at the end
    for what, count, least, most in (
        ("operands", len(node.inputs), needed, schema.max_input),
        ("results", len(node.outputs), schema.min_output, schema.max_output),
    ):
        if not least <= count <= most:
            up_to = f"{least} to {most}" if most < 1 << 30 else f"{least} or more"
            raise refuse(f"has {count} {what}; it takes {least if least == most else up_to}")
    for index, (given, formal) in enumerate(zip(node.inputs, schema.inputs, strict=False)):
        if formal.option == options.Single and (given is None or not given.name):
            raise refuse(f"lacks its operand {index} ({formal.name})")
    for name, wanted in schema.attributes.items():
        attribute = node.attributes.get(name)
        if attribute is None:
            if wanted.required:
                raise refuse(f"lacks its attribute {name!r}")
        elif attribute.type.name != _NAMES[wanted.type] and not (_is_empty(attribute) and _is_list(wanted)):
            raise refuse(
                f"has the attribute {name!r} of type {attribute.type.name}; it takes {_NAMES[wanted.type]}"
            )

    problem = _body_problem(node)
    if problem is not None:
        raise refuse(problem)


def _is_empty(attribute: ir.Attr) -> bool:
    """An empty list has no type to be wrong about."""
    value = attribute.value
    return isinstance(value, list | tuple) and not value


def _is_list(wanted: onnx.defs.OpSchema.Attribute) -> bool:
    return _NAMES[wanted.type].endswith("S")


def _body_problem(node: ir.Node) -> str | None:
    """Says how the subgraphs of a node differ from it in operands or results, if they do."""
    given, made = len(node.inputs), len(node.outputs)
    bodies = list(subgraphs(node))
    counts = [(len(body.inputs), len(body.outputs)) for body in bodies]
    if node.op_type == "If":
        wrong = [outputs for _, outputs in counts if outputs != made]
        return f"has {made} results and a branch of {wrong[0]}" if wrong else None
    if node.op_type == "Loop":
        carried = max(given - 2, 0)
        for inputs, outputs in counts:
            if inputs != carried + 2 or outputs != made + 1 or made < carried:
                return (
                    f"carries {carried} values to {made} results, and its body takes {inputs} and gives"
                    f" {outputs}: {carried + 2} and {made + 1} are needed"
                )
    if node.op_type in ("Scan", "SequenceMap"):
        for inputs, outputs in counts:
            if inputs not in (given, given - 1) or outputs != made:
                return f"has {given} operands and {made} results, and its body {inputs} and {outputs}"
    if node.op_type == "Scan":
        scanned = node.attributes["num_scan_inputs"].as_int()
        if not 1 <= scanned <= given:
            return f"scans {scanned} of its {given} operands"
    return None


@functools.cache
def _kinds(op: str, version: int) -> tuple[str | None, ...]:
    """Returns `integers` or `booleans` for each operand that takes nothing else."""
    schema = _schema(op, version)
    if schema is None:
        return ()
    kinds: list[str | None] = []
    for formal in schema.inputs:
        if formal.types and set(formal.types) <= {"tensor(int32)", "tensor(int64)"}:
            kinds.append("integers")
        else:
            kinds.append("booleans" if set(formal.types) == {"tensor(bool)"} else None)
    return tuple(kinds)


def check_kinds(info: NodeInfo, dtypes: Sequence[torch.dtype | None]) -> None:
    """Refuse numbers of another kind if a node takes indices or conditions alone.

    Args:
        info: The node.
        dtypes: The element types of its operands, as far as they are known.

    Raises:
        UsageError: IRC305.
    """
    if info.domain:
        return
    for index, (kind, dtype) in enumerate(zip(_kinds(info.op, info.version), dtypes, strict=False)):
        if kind is None or dtype is None:
            continue
        integer = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
        if not (integer if kind == "integers" else dtype is torch.bool):
            raise UsageError(
                "IRC305",
                f"{info.title} has an operand {index} of {dtype}; it takes {kind}",
                at=Location(onnx_node=info.name),
                help="the operator's page at onnx.ai/onnx/operators says what it takes; mend the file",
            )
