"""Reads a file into a complete, inlined and ordered ONNX graph, or raises one clear error."""

from __future__ import annotations

import os

import onnx
import onnx_ir as ir
from onnx_ir.external_data import set_base_dir
from onnx_ir.passes.common import InlinePass, RemoveUnusedNodesPass, TopologicalSortPass

from ...ir.errors import Location, UsageError, first_line
from ..quiet import quiet
from .checking import check_proto
from .graphs import node_name, subgraphs
from .lazy_protobuf import InPlace, parse

__all__ = ["normalise", "read"]

_BROKEN = "IRC311"
_BROKEN_HELP = "check that the file was copied or downloaded whole; `onnx.checker.check_model` says more"


def read(path: str | os.PathLike[str], *, in_place: bool = True) -> ir.Model:
    """The model in a file.

    Args:
        path: The file.
        in_place: Whether large weights stay in the file until they are asked for, as those beside it do.

    Raises:
        UsageError: IRC310 when there is no such file, IRC311 when it is not a whole ONNX model, IRC306,
            IRC308 and IRC312 as `check_proto`.
        UnsupportedError: IRC307 as `check_proto`.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise UsageError("IRC310", f"no such file: {path}", help="give the path of an .onnx file")
    if os.path.isdir(path):
        raise UsageError(
            "IRC310", f"a folder, not a file: {path}", help="give the path of an .onnx file inside it"
        )
    if os.path.getsize(path) == 0:
        raise UsageError(_BROKEN, f"{path} is empty", help=_BROKEN_HELP)
    try:
        if in_place:
            proto, place = parse(path)
        else:
            proto, place = onnx.load(path, load_external_data=False), InPlace(os.path.realpath(path))
    except Exception as error:
        raise _not_whole(path, error) from error
    check_proto(proto, path, place.mark)
    try:
        with quiet("onnx_ir"):
            model = ir.from_proto(proto)
    except Exception as error:
        raise _not_whole(path, error) from error
    set_base_dir(model.graph, os.path.dirname(os.path.abspath(path)))
    place.resolve(model.graph)
    _check(model, path)
    return model


def _not_whole(path: str, error: Exception) -> UsageError:
    return UsageError(_BROKEN, f"{path} is not a whole ONNX model: {first_line(error)}", help=_BROKEN_HELP)


def _check(model: ir.Model, path: str) -> None:
    """Refuses files that lack what every ONNX model has: random bytes, and truncated files."""
    graph = model.graph
    if not model.ir_version or not (model.opset_imports or graph.opset_imports):
        raise UsageError(_BROKEN, f"{path} is not an ONNX model: it names no operator set", help=_BROKEN_HELP)
    if not graph.outputs:
        raise UsageError(
            _BROKEN, f"{path} is not a whole ONNX model: its graph has no outputs", help=_BROKEN_HELP
        )
    _check_wiring(graph, path)
    for output in graph.outputs:
        if output.producer() is None and not (output.is_graph_input() or output.is_initializer()):
            raise UsageError(
                _BROKEN, f"{path}: nothing computes the output {output.name!r}", help=_BROKEN_HELP
            )


def _check_wiring(graph: ir.Graph, path: str) -> None:
    for node in graph:
        for value in node.inputs:
            if value is None or not value.name:
                continue
            if value.producer() is None and not (value.is_graph_input() or value.is_initializer()):
                raise UsageError(
                    _BROKEN,
                    f"{path}: {node.op_type} reads {value.name!r}, which nothing computes",
                    at=Location(onnx_node=node_name(node)),
                    help=_BROKEN_HELP,
                )
        for inner in subgraphs(node):
            _check_wiring(inner, path)


def normalise(model: ir.Model) -> None:
    """Inline the model's own functions, put nodes in order, and drop what no output needs; in place.

    Raises:
        UsageError: IRC308 when functions call themselves, or a value is computed from itself.
    """
    if model.functions:
        try:
            InlinePass()(model)
        except Exception as error:
            raise UsageError(
                "IRC308",
                f"the model's functions cannot be inlined: {first_line(error.__cause__ or error)}",
                help="inline them before: `onnx.inliner.inline_local_functions`",
            ) from error
    try:
        if not _sorted(model.graph):
            TopologicalSortPass()(model)
        # The pass switches training_mode off if running statistics are unread; this importer ignores it.
        RemoveUnusedNodesPass()(model)
    except Exception as error:
        raise UsageError(
            "IRC308",
            f"the graph cannot be put in order: {first_line(error.__cause__ or error)}",
            help="no value may be computed from itself",
        ) from error


def _sorted(graph: ir.Graph) -> bool:
    done: set[ir.Value] = set()
    for node in graph:
        for value in node.inputs:
            if (
                value is not None
                and value.producer() is not None
                and value.graph is graph
                and value not in done
            ):
                return False
        done.update(node.outputs)
    return True
