"""Checks what a file declares against its content, before anything of the declared size is made."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import onnx
import onnx_ir as ir

from ...ir.errors import IrcError, Location, UnsupportedError, UsageError
from .bounds import MOST_AXES

__all__ = ["MOST_NODES", "check_proto"]

MOST_NODES = 200_000
"""Nodes that a graph may have once its functions are inlined."""
_MOST_NESTED = 100
"""Functions that may call one another in a chain."""

_HELP = "check that the file was copied or downloaded whole; `onnx.checker.check_model` says more"
_EXTERNAL_HELP = "keep the model's external data beside it, under the same names"

_FunctionId: TypeAlias = tuple[str, str, str]


def check_proto(model: onnx.ModelProto, path: str, in_place: str) -> None:
    """Refuse a model that contradicts itself.

    Sizes are compared with the bytes that are there, so that reading a tensor afterwards takes no more memory
    than the file does.

    Args:
        model: The model as it was parsed; no external data is read.
        path: The file, for messages and for what is stored beside it, or linked from there to where the file
            itself is linked.
        in_place: The name by which weights that are left in the file refer to it; their size is right.

    Raises:
        UsageError: IRC306 when a tensor is not what it declares, IRC308 when a name is given twice or
            functions call themselves, IRC312 when external data lie elsewhere or are too short.
        UnsupportedError: IRC307 when functions expand to too many nodes.
    """
    folder, store = os.path.dirname(os.path.abspath(path)), os.path.dirname(os.path.realpath(path))
    in_functions = (graph for f in model.functions for node in f.node for graph in _inner(node))
    for graph in (*_graphs(model.graph), *in_functions):
        _check_names(graph.name, graph.node, graph.input, graph.initializer, graph.output)
        for tensor in graph.initializer:
            if not _is_in(tensor, in_place):
                _check_tensor(tensor, f"the weight {tensor.name!r}", folder, store)
        for sparse in graph.sparse_initializer:
            for part in (sparse.values, sparse.indices):
                _check_tensor(part, f"the sparse weight {sparse.values.name!r}", folder, store)
        _check_types(graph)
        _check_attributes(graph.node, folder, store, in_place)
    for function in model.functions:
        _check_names(function.name, function.node, (), (), ())
        repeated = [n for n, k in Counter(function.input).items() if k > 1]
        if repeated:
            raise _twice(f"the function {function.name!r} has two inputs", repeated[0])
        _check_attributes(function.node, folder, store, in_place)
        defaults = onnx.NodeProto(name=function.name, attribute=function.attribute_proto)
        _check_attributes([defaults], folder, store, in_place)
    _check_functions(model)


# Graphs and names


def _inner(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield from _graphs(attribute.g)
        for graph in attribute.graphs:
            yield from _graphs(graph)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and those within it; the parser has bounded how deep they lie."""
    yield graph
    for node in graph.node:
        yield from _inner(node)


def _twice(what: str, name: str, at: str | None = None) -> UsageError:
    return UsageError("IRC308", f"{what} named {name!r}", at=Location(onnx_node=at), help=_HELP)


def _check_names(
    title: str,
    nodes: Iterable[onnx.NodeProto],
    inputs: Iterable[onnx.ValueInfoProto],
    initializers: Iterable[onnx.TensorProto],
    outputs: Iterable[onnx.ValueInfoProto],
) -> None:
    given = Counter(value.name for value in inputs)
    stored = Counter(tensor.name for tensor in initializers)
    for what, names in (
        ("inputs", given),
        ("weights", stored),
        ("outputs", Counter(v.name for v in outputs)),
    ):
        repeated = [name for name, count in names.items() if count > 1]
        if repeated:
            raise _twice(f"the graph {title!r} has two {what}", repeated[0])
    made: dict[str, str] = {}
    for node in nodes:
        for name in node.output:
            if not name:
                continue
            mine = node.name or name
            if name in made:
                raise _twice(f"the nodes {made[name]!r} and {mine!r} both compute a value", name, mine)
            if name in given or name in stored:
                what = "an input" if name in given else "a weight"
                raise _twice(f"the node {mine!r} computes a value that is {what} too,", name, mine)
            made[name] = mine


# Types


def _check_types(graph: onnx.GraphProto) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type
        for _ in range(_MOST_NESTED):
            if kind.HasField("sequence_type"):
                kind = kind.sequence_type.elem_type
            elif kind.HasField("optional_type"):
                kind = kind.optional_type.elem_type
            else:
                break
        if kind.HasField("tensor_type"):
            _check_element(kind.tensor_type.elem_type, f"the value {value.name!r}")
            _check_rank(len(kind.tensor_type.shape.dim), f"the value {value.name!r}")


def _check_element(code: int, what: str) -> None:
    try:
        ir.DataType(code)
    except ValueError as error:
        raise UsageError(
            "IRC306", f"{what} is of element type {code}, which ONNX has not", help=_HELP
        ) from error


def _check_rank(rank: int, what: str) -> None:
    if rank > MOST_AXES:
        raise UsageError(
            "IRC306", f"{what} has {rank:,} axes, and tensors have at most {MOST_AXES}", help=_HELP
        )


# Tensors

_BITS_PER_ELEMENT = {
    d: d.bitwidth for d in ir.DataType if d not in (ir.DataType.UNDEFINED, ir.DataType.STRING)
}
_IN_FLOATS = {ir.DataType.FLOAT: 1, ir.DataType.COMPLEX64: 2}
_IN_DOUBLES = {ir.DataType.DOUBLE: 1, ir.DataType.COMPLEX128: 2}
_IN_UNSIGNED = (ir.DataType.UINT32, ir.DataType.UINT64)


def _check_attributes(nodes: Iterable[onnx.NodeProto], folder: str, store: str, in_place: str) -> None:
    for node in nodes:
        at = node.name or next((o for o in node.output if o), node.op_type)
        for attribute in node.attribute:
            what = f"the attribute {attribute.name!r} of {at!r}"
            tensors = [attribute.t] if attribute.HasField("t") else []
            tensors += attribute.tensors
            if attribute.HasField("sparse_tensor"):
                tensors += [attribute.sparse_tensor.values, attribute.sparse_tensor.indices]
            try:
                for tensor in tensors:
                    if not _is_in(tensor, in_place):
                        _check_tensor(tensor, what, folder, store)
            except IrcError as error:
                error.at = Location(onnx_node=at)
                raise


def _is_in(tensor: onnx.TensorProto, location: str) -> bool:
    return any(entry.value == location for entry in tensor.external_data)


def _check_tensor(tensor: onnx.TensorProto, what: str, folder: str, store: str) -> None:
    _check_element(tensor.data_type, what)
    _check_rank(len(tensor.dims), what)
    dims, dtype = list(tensor.dims), ir.DataType(tensor.data_type)
    if any(n < 0 for n in dims):
        raise UsageError("IRC306", f"{what} has the shape {dims}: sizes are not negative", help=_HELP)
    if dtype is ir.DataType.UNDEFINED:
        raise UsageError("IRC306", f"{what} has no element type", help=_HELP)
    if tensor.HasField("segment"):
        raise UnsupportedError("IRC306", f"{what} is stored in segments", help="store it whole")
    count = math.prod(dims)
    if dtype is ir.DataType.STRING:
        _compare(what, dims, count, len(tensor.string_data), "strings")
        return
    nbytes = -(-count * _BITS_PER_ELEMENT[dtype] // 8)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        _check_external(tensor, what, folder, store, nbytes)
    elif tensor.HasField("raw_data"):
        _compare(what, dims, nbytes, len(tensor.raw_data), "B")
    else:
        needed, present = _typed(tensor, dtype, count)
        _compare(what, dims, needed, present, "numbers")


def _typed(tensor: onnx.TensorProto, dtype: ir.DataType, count: int) -> tuple[int, int]:
    """Returns the number of elements that the typed field must have, and the number that it has."""
    if dtype in _IN_FLOATS:
        return count * _IN_FLOATS[dtype], len(tensor.float_data)
    if dtype in _IN_DOUBLES:
        return count * _IN_DOUBLES[dtype], len(tensor.double_data)
    if dtype is ir.DataType.INT64:
        return count, len(tensor.int64_data)
    if dtype in _IN_UNSIGNED:
        return count, len(tensor.uint64_data)
    bits = _BITS_PER_ELEMENT[dtype]
    return (-(-count * bits // 8) if bits < 8 else count), len(tensor.int32_data)


def _compare(what: str, dims: list[int], needed: int, present: int, unit: str) -> None:
    if needed != present:
        raise UsageError(
            "IRC306",
            f"{what} of shape {dims} needs {needed:,} {unit}, and the file has {present:,}",
            help=_HELP,
        )


def _check_external(tensor: onnx.TensorProto, what: str, folder: str, store: str, nbytes: int) -> None:
    def refuse(why: str) -> UsageError:
        return UsageError("IRC312", f"{what} is stored in {location!r}, {why}", help=_EXTERNAL_HELP)

    fields = {entry.key: entry.value for entry in tensor.external_data}
    location = fields.get("location", "")
    if not location or "\0" in location:
        raise refuse("which is not the name of a file")
    path = os.path.join(folder, location)
    if not _is_beside(location, folder, store):
        raise refuse(f"which is not in the model's folder {folder}")
    try:
        offset = int(fields.get("offset") or 0)
        length = int(fields["length"]) if fields.get("length") else nbytes
    except ValueError:
        raise refuse("at an offset or of a length that is not a number") from None
    if offset < 0 or length < 0:
        raise refuse(f"at offset {offset:,} with {length:,} B: neither can be negative")
    if length != nbytes:
        raise refuse(f"as {length:,} B; the shape {list(tensor.dims)} needs {nbytes:,} B")
    if not os.path.lexists(path):
        raise refuse("which is missing")
    if not os.path.isfile(path):
        raise refuse("which is not a file")
    present = os.path.getsize(path)
    if present < offset + length:
        raise refuse(f"which has {present:,} B of the {offset + length:,} B needed")


def _is_beside(location: str, folder: str, store: str) -> bool:
    """Whether external data lie in the model's folder, or are linked from it to where the model is linked.

    A cache that keeps files by their hashes links the model and its data into one store. The file names no
    more than the link: no name in it leads out of the folder.
    """
    if os.path.isabs(location):
        return False
    real, root = os.path.realpath(os.path.join(folder, location)), os.path.realpath(folder)
    if os.path.commonpath([real, root]) == root:
        return True
    return ".." not in location.split(os.sep) and os.path.dirname(real) == store


# Functions


def _check_functions(model: onnx.ModelProto) -> None:
    """Functions must not call themselves, and what they expand to is bounded."""
    bodies: dict[_FunctionId, tuple[int, Counter[_FunctionId]]] = {}
    ids = {(f.domain, f.name, f.overload) for f in model.functions}
    for function in model.functions:
        mine = (function.domain, function.name, function.overload)
        if mine in bodies:
            raise _twice("the model has two functions", function.name)
        bodies[mine] = _calls(function.node, ids)
    sizes: dict[_FunctionId, int] = {}
    for start in bodies:
        _expand(start, bodies, sizes)
    own, calls = _calls(model.graph.node, ids)
    _check_size("the graph", own + sum(sizes[f] * n for f, n in calls.items()))


def _calls(nodes: Iterable[onnx.NodeProto], ids: set[_FunctionId]) -> tuple[int, Counter[_FunctionId]]:
    """The nodes of a body that call nothing, and how often it calls each function."""
    own, calls = 0, Counter[_FunctionId]()
    nodes = list(nodes)
    for node in (*nodes, *(n for outer in nodes for graph in _inner(outer) for n in graph.node)):
        called = (node.domain, node.op_type, node.overload)
        if called in ids:
            calls[called] += 1
        else:
            own += 1
    return own, calls


def _expand(
    start: _FunctionId,
    bodies: dict[_FunctionId, tuple[int, Counter[_FunctionId]]],
    sizes: dict[_FunctionId, int],
) -> None:
    """The nodes that a function and those it calls expand to, deepest first."""
    chain: list[tuple[_FunctionId, Iterator[_FunctionId]]] = []
    depth: dict[_FunctionId, int] = {}
    pending: list[_FunctionId] = [start]
    while pending or chain:
        if pending:
            current = pending.pop()
            if current in sizes:
                continue
            if current in depth:
                names = [name for (_, name, _), _ in chain[depth[current] :]]
                raise UsageError(
                    "IRC308",
                    f"functions call themselves: {' -> '.join([*names, current[1]])}",
                    help="a graph cannot hold recursion: write it as a Loop",
                )
            if len(chain) >= _MOST_NESTED:
                raise UnsupportedError(
                    "IRC307",
                    f"functions call one another more than {_MOST_NESTED} deep, from {start[1]!r} on",
                    help="inline them before: `onnx.inliner.inline_local_functions`",
                )
            depth[current] = len(chain)
            chain.append((current, iter(bodies[current][1])))
        current, callees = chain[-1]
        callee = next(callees, None)
        if callee is not None:
            pending.append(callee)
            continue
        chain.pop()
        del depth[current]
        own, calls = bodies[current]
        sizes[current] = own + sum(sizes[f] * n for f, n in calls.items())
        _check_size(f"the function {current[1]!r}", sizes[current])


def _check_size(what: str, nodes: int) -> None:
    if nodes > MOST_NODES:
        raise UnsupportedError(
            "IRC307",
            f"{what} expands to {nodes:,} nodes, and irc imports at most {MOST_NODES:,}",
            help="export the model with fewer or smaller functions",
        )
