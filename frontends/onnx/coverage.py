"""Finds the operators of a model that are covered, and names nodes for messages."""

from __future__ import annotations

import collections

import onnx_ir as ir

from ...ir.errors import Location, UnsupportedError
from .graphs import node_name
from .lowerings import find, newest_opset

__all__ = ["STRUCTURE", "check_covered", "domain_of", "refusal", "title", "version_of"]

# The importer itself gives these their meaning.
STRUCTURE = ("Constant", "If", "Loop", "Scan", "SequenceMap")


# What to do without operators that have no lowering.
_INSTEAD = {
    ("com.microsoft", "DynamicQuantizeLSTM"): "take the file from before dynamic quantisation: its LSTM has"
    " float weights, which can be trained (quantize_dynamic of onnxruntime made this node; leave LSTM out of"
    " its op_types_to_quantize)"
}


def domain_of(node: ir.Node) -> str:
    """The node's domain; empty for the default one."""
    return "" if node.domain == "ai.onnx" else node.domain


def version_of(model: ir.Model, domain: str) -> int:
    """The operator set version that the model imports for a domain."""
    imports = {("" if d == "ai.onnx" else d): v for d, v in model.opset_imports.items()}
    return imports.get(domain, 1)


def title(model: ir.Model, node: ir.Node) -> str:
    """Operator with domain and version, such as `ai.onnx::Conv (opset 17)`."""
    domain = domain_of(node)
    return f"{domain or 'ai.onnx'}::{node.op_type} (opset {version_of(model, domain)})"


def refusal(model: ir.Model, node: ir.Node, what: str, do: str) -> UnsupportedError:
    """The error that declines a node by name."""
    return UnsupportedError(
        "IRC302",
        f"{title(model, node)} {what} is not supported",
        at=Location(onnx_node=node_name(node)),
        help=do,
    )


def check_covered(model: ir.Model, graph: ir.Graph | None = None) -> None:
    """Refuse the graph when an operator in it has no lowering.

    Args:
        model: The model, for its versions.
        graph: The graph to look at; the model's own without it.

    Raises:
        UnsupportedError: IRC301 names the first such node and counts the others; IRC303: the set is too new.
    """
    version = version_of(model, "")
    if version > newest_opset:
        raise UnsupportedError(
            "IRC303",
            f"the model uses opset {version}, and irc knows them up to {newest_opset}",
            help=f"export with opset_version={newest_opset} or lower",
        )
    if version < 1:
        raise UnsupportedError(
            "IRC303",
            f"the model uses opset {version}, and they count from 1",
            help=f"export with opset_version={newest_opset} or lower",
        )
    missing = [
        node
        for node in graph or model.graph
        if not (domain_of(node) == "" and node.op_type in STRUCTURE)
        and find(domain_of(node), node.op_type, version_of(model, domain_of(node))) is None
    ]
    if not missing:
        return
    first, others = missing[0], missing[1:]
    more = collections.Counter(title(model, node).split(" ")[0] for node in others)
    counted = ", ".join(f"{op} x{n}" for op, n in more.most_common())
    raise UnsupportedError(
        "IRC301",
        f"the operator {title(model, first)} is not supported"
        + (f"; {len(others)} more: {counted}" if others else ""),
        at=Location(onnx_node=node_name(first)),
        help=_INSTEAD.get((domain_of(first), first.op_type))
        or "export the model without it; `irc.frontends.onnx.operators()` lists what is covered",
    )
