"""Trained weights back into the ONNX graph that they came from.

The graph stays as it is: names, operator sets, metadata, nodes and their order. Only the elements of weights
change. A weight that a node made (`ConstantOfShape`, a dequantised one) becomes an initializer of the same
name in place of the node.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx_ir as ir
from torch import Tensor

from ...ir.errors import UsageError
from .export_target import check_export_target
from .graphs import subgraphs
from .reader import read
from .tensors import onnx_tensor, torch_dtype

__all__ = ["write_back"]

_MAKERS = ("Constant", "ConstantOfShape", "DequantizeLinear")
"""Nodes whose result can be a weight."""
_MOST_INLINE_BYTES = 1 << 30
"""Weights beyond this go into a file beside the model: protobuf ends at 2 GiB."""


def write_back(
    source: str | os.PathLike[str], weights: Mapping[str, Tensor], target: str | os.PathLike[str]
) -> None:
    """Writes the graph of one file with other weights to another file, which appears when it is whole.

    Args:
        source: The original.
        weights: The weights to write, by ONNX name; others stay. Each is cast to the file's element type.
        target: The new file; of large models the weights lie beside it, as `<target>.data`.

    Raises:
        UsageError: IRC310 to IRC312 when the original cannot be read, IRC320 when the target cannot be
            written, IRC321 when a weight is not in the file, or of another shape there.
    """
    check_export_target(target, source)
    model = read(source, in_place=False)
    places = {value.name or "": value for graph in _graphs(model.graph) for value in _stored(graph)}
    external = _is_external(model)
    for name, tensor in weights.items():
        if name not in places:
            raise UsageError(
                "IRC321",
                f"the weight {name!r} is not stored in a graph of {os.fspath(source)}",
                help="weights inside functions of the model cannot be written back: inline them first",
            )
        _replace(places[name], name, tensor)
    nbytes = sum(
        v.const_value.nbytes for g in _graphs(model.graph) for v in g.initializers.values() if v.const_value
    )
    _save(model, Path(target), external or nbytes > _MOST_INLINE_BYTES)


def _graphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    yield graph
    for node in graph:
        for inner in subgraphs(node):
            yield from _graphs(inner)


def _stored(graph: ir.Graph) -> Iterator[ir.Value]:
    """The values whose elements stand in the graph."""
    yield from graph.initializers.values()
    for node in graph:
        if node.domain in ("", "ai.onnx", "com.microsoft") and node.op_type in _MAKERS:
            yield node.outputs[0]


def _is_external(model: ir.Model) -> bool:
    return any(
        isinstance(value.const_value, ir.ExternalTensor)
        for graph in _graphs(model.graph)
        for value in graph.initializers.values()
    )


def _replace(value: ir.Value, name: str, tensor: Tensor) -> None:
    node = value.producer()
    stored = value.const_value if node is None else None
    if node is not None and node.op_type == "Constant":
        given = node.attributes.get("value")
        stored = None if given is None else given.as_tensor()
    new = _as_onnx(name, tensor, stored)
    if node is None:
        value.const_value = new
    elif node.op_type == "Constant":
        node.attributes.clear()
        node.attributes["value"] = ir.AttrTensor("value", new)
    else:
        _in_place_of(node, value, new)


def _as_onnx(name: str, tensor: Tensor, stored: ir.TensorProtocol | None) -> ir.TensorProtocol:
    dtype = tensor.dtype if stored is None else torch_dtype(stored.dtype)
    shape = None if stored is None else list(stored.shape.numpy())
    if shape is not None and shape != list(tensor.shape):
        raise UsageError(
            "IRC321",
            f"the weight {name!r} is of shape {list(tensor.shape)}; in the file it is {shape}",
            help="write back the weights of a module that came from this file",
        )
    return onnx_tensor(tensor.to(dtype or tensor.dtype), name)


def _in_place_of(node: ir.Node, value: ir.Value, tensor: ir.TensorProtocol) -> None:
    """An initializer of the same name, if a node made the weight."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    name = value.name
    weight = ir.Value(
        name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy())
    )
    ir.convenience.replace_all_uses_with(value, weight, replace_graph_outputs=True)
    inputs = [v for v in node.inputs if v is not None]
    graph.remove(node, safe=True)
    for idle in inputs:
        if (
            idle.is_initializer()
            and not idle.uses()
            and not (idle.is_graph_input() or idle.is_graph_output())
        ):
            graph.initializers.pop(idle.name or "", None)
    value.name = None
    graph.register_initializer(weight)


def _save(model: ir.Model, target: Path, external: bool) -> None:
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.stem}-", dir=target.absolute().parent))
    except OSError as error:
        raise _cannot_write(target, error) from error
    try:
        data = f"{target.name}.data" if external else None
        ir.save(model, folder / target.name, external_data=data)
        for name in (data, target.name):
            if name is not None and (folder / name).exists():
                os.replace(folder / name, target.absolute().parent / name)
    except OSError as error:
        raise _cannot_write(target, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cannot_write(target: Path, error: OSError) -> UsageError:
    return UsageError("IRC320", f"{target} cannot be written: {error}", help="choose another folder")
