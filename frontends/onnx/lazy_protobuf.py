"""A model file read without its large weights, which stay in the file until they are asked for.

Parsed as a whole, a file is in memory once as a message and once more as tensors. Here the message is cut out
of a memory-mapped file around the elements of large initializers; each is told by where it lies. The format
is that of Protocol Buffers: fields of a number, a kind and a length (protobuf.dev, "Encoding").
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir

from .graphs import subgraphs

__all__ = ["InPlace", "parse"]

_LARGE_BYTES = 1 << 16
"""Smaller weights are part of the message."""

# Which fields of a message hold which messages: those that lead to weights.
_INNER: dict[str, dict[int, str]] = {
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph"},
}
# Fields of TensorProto.
_RAW_DATA = 9
_ELSEWHERE = (3, 13, 14)  # segment, external_data, data_location

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class InPlace:
    """The weights that stay in the file.

    Args:
        path: The file, with no symbolic link in its path.
        mark: The text that stands in the message for the file's name; no file can know it beforehand.
    """

    path: str
    mark: str = field(default_factory=lambda: f"in-place-{secrets.token_hex(16)}")

    def resolve(self, graph: ir.Graph) -> None:
        """Point the weights of a graph, and of the graphs in it, to the file, or to the folder it is in.

        Data beside a link to the file may be links to that folder (see `check_proto`).
        """
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.const_value = self._resolved(value.const_value)
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if isinstance(attribute.value, ir.ExternalTensor):
                    node.attributes[name] = ir.AttrTensor(name, self._resolved(attribute.value))
            for inner in subgraphs(node):
                self.resolve(inner)

    def _resolved(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        if not isinstance(tensor, ir.ExternalTensor):
            return tensor
        beside = os.path.join(tensor.base_dir, tensor.location)
        path = self.path if tensor.location == self.mark else os.path.realpath(beside)
        folder, name = os.path.split(path)
        if folder != os.path.dirname(self.path):
            return tensor
        return ir.ExternalTensor(
            name,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name or "",
            base_dir=folder,
        )


def parse(path: str) -> tuple[onnx.ModelProto, InPlace]:
    """The model in a file, with large weights as external data of the file itself.

    Args:
        path: The file. What is not of the format is left to the parser, and to its error.

    Raises:
        Exception: The error that the parser raises for a file that is not a model.
    """
    place = InPlace(os.path.realpath(path))
    with open(path, "rb") as file:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with whole:
        try:
            message = b"".join(_message(whole, "model", 0, len(whole), place.mark))
        except Exception:  # the parser says what is wrong
            message = whole[:]
    return onnx.load_model_from_string(message), place


def _message(whole: mmap.mmap, kind: str, begin: int, stop: int, mark: str) -> Iterator[bytes]:
    """A message without the large weights in it, in pieces."""
    for number, wire, start, value, end in _fields(whole, begin, stop):
        inner = _INNER[kind].get(number) if wire == _BYTES and end - value >= _LARGE_BYTES else None
        if inner is None:
            yield whole[start:end]
        elif inner == "tensor":
            yield from _as_field(number, _tensor(whole, value, end, mark))
        else:
            yield from _as_field(number, list(_message(whole, inner, value, end, mark)))


def _tensor(whole: mmap.mmap, begin: int, stop: int, mark: str) -> list[bytes]:
    """The tensor, told by its place if it is what it declares; an ill one is left for the checks."""
    fields = list(_fields(whole, begin, stop))
    raw = [(value, end) for number, kind, _, value, end in fields if (number, kind) == (_RAW_DATA, _BYTES)]
    if len(raw) != 1 or any(number in _ELSEWHERE for number, *_ in fields):
        return [whole[begin:stop]]
    offset, length = raw[0][0], raw[0][1] - raw[0][0]
    rest = [whole[start:end] for number, _, start, _, end in fields if number != _RAW_DATA]
    tensor = onnx.TensorProto.FromString(b"".join(rest))
    if not _is_whole(tensor, length):
        return [whole[begin:stop]]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, text in (("location", mark), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=text)
    return [tensor.SerializeToString()]


def _is_whole(tensor: onnx.TensorProto, length: int) -> bool:
    try:
        bits = ir.DataType(tensor.data_type).bitwidth
    except (ValueError, TypeError):
        return False
    return all(n >= 0 for n in tensor.dims) and -(-math.prod(tensor.dims) * bits // 8) == length


def _as_field(number: int, parts: list[bytes]) -> list[bytes]:
    return [_varint(number << 3 | _BYTES), _varint(sum(map(len, parts))), *parts]


def _varint(number: int) -> bytes:
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _read_varint(whole: mmap.mmap, at: int) -> tuple[int, int]:
    number = shift = 0
    while shift < 70:
        byte = whole[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
        shift += 7
    raise ValueError("no number")


def _fields(whole: mmap.mmap, at: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Number, kind, and the positions of each field, its value and its end."""
    while at < stop:
        start = at
        key, at = _read_varint(whole, at)
        number, kind = key >> 3, key & 7
        value = at
        if kind == _VARINT:
            _, at = _read_varint(whole, at)
        elif kind == _BYTES:
            length, value = _read_varint(whole, at)
            at = value + length
        elif kind in (_FIXED32, _FIXED64):
            at += 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("an old kind of field")
        if at > stop:
            raise ValueError("a field is cut off")
        yield number, kind, start, value, at
