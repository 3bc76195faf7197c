"""The cases of the backend suite in the onnx wheel, and the subsets that they are counted in."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    numpy_helper,
)
from onnx.backend.test import loader, runner

__all__ = ["GROUPS", "SUBSETS", "Case", "DataSet", "fed_inputs", "load_cases"]

GROUPS = ("node", "simple", "pytorch-converted", "pytorch-operator", "real")
SUBSETS = ("original", "expanded", "torch-types", "core")
"""Of the group `node`; a case may be in several."""

DataSet = tuple[list[Any], list[Any]]
"""Inputs, in the graph's order, and expected outputs: arrays, lists of them, or None."""

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16})
_INTEGERS = (TensorProto.UINT8, TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64)
_TORCH_TYPES = _FLOATS | {*_INTEGERS, TensorProto.BOOL}
_CORE_OPSET = 13
# As `RANDOM` of the importer: this runs where irc is not installed, too.
_DRAWS = frozenset(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)


@dataclass(frozen=True)
class Case:
    """One case of the suite.

    Args:
        name: In the suite; unique within the group.
        group: One of `GROUPS`.
        rtol: Relative tolerance, the suite's own.
        atol: Absolute tolerance.
        model: The model.
        read: Makes or reads the data sets.
    """

    name: str
    group: str
    rtol: float
    atol: float
    model: ModelProto
    read: Callable[[], list[DataSet]]

    @cached_property
    def operators(self) -> tuple[str, ...]:
        """The operators of the graph and of graphs within it; of other domains as `domain::Name`."""
        found = {f"{node.domain}::{node.op_type}".removeprefix("::") for node in _nodes(self.model.graph)}
        return tuple(sorted(found))

    @property
    def opset(self) -> int | None:
        """Version of the default operator set; None where the model imports another alone."""
        return next((i.version for i in self.model.opset_import if i.domain in ("", "ai.onnx")), None)

    @cached_property
    def subsets(self) -> tuple[str, ...]:
        """Those of `SUBSETS` that the case is in.

        `original` is what is no `expanded` function body; `torch-types` has the default domain alone, and
        tensors of element types that torch computes in; `core` is the original ones of these from opset 13
        on, with a float among the inputs and among the outputs.
        """
        if self.group != "node":
            return ()
        is_expanded = "_expanded" in self.name
        found = ["expanded" if is_expanded else "original"]
        if self._is_of_torch():
            found.append("torch-types")
            graph = self.model.graph
            is_float = all(
                any(v.type.tensor_type.elem_type in _FLOATS for v in values)
                for values in (graph.input, graph.output)
            )
            if not is_expanded and is_float and (self.opset or 0) >= _CORE_OPSET:
                found.append("core")
        return tuple(found)

    def _is_of_torch(self) -> bool:
        graph = self.model.graph
        types = [value.type for value in (*graph.input, *graph.output)]
        elements = {t.tensor_type.elem_type for t in types} | {t.data_type for t in graph.initializer}
        return (
            all(i.domain in ("", "ai.onnx") for i in self.model.opset_import)
            and all(t.WhichOneof("value") == "tensor_type" for t in types)
            and elements <= _TORCH_TYPES
        )

    @property
    def is_random(self) -> bool:
        """Whether the outputs are drawn, so that no other implementation can have the expected ones.

        So it is with the generators, and with a Dropout whose operand `training_mode` is true, unless its
        ratio is 0.
        """
        return not _DRAWS.isdisjoint(self.operators) or any(
            node.op_type == "Dropout" and self._drops(node) for node in self.model.graph.node
        )

    def _drops(self, node: NodeProto) -> bool:
        given = dict(zip((v.name for v in self.model.graph.input), self.read()[0][0], strict=False))
        _, ratio, training, *_ = (*(given.get(name) for name in node.input), None, None, None)
        return bool(training) and (ratio is None or bool(ratio))


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _nodes(attribute.g)
            for inner in attribute.graphs:
                yield from _nodes(inner)


def fed_inputs(model: ModelProto, count: int) -> list[str]:
    """The names of the inputs that `count` values of a data set are for.

    Older models list their initializers as inputs too; the suite has no values for these.

    Args:
        model: The model.
        count: Number of values.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input]
    free = [name for name in names if name not in stored]
    return free if len(free) == count else names[:count]


def load_cases(groups: Sequence[str] = GROUPS) -> list[Case]:
    """The cases of these groups, by name within each group.

    The group `node` is made when it is asked for: about ten seconds.
    """
    found: list[Case] = []
    for group in groups:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the suite's own code warns while it makes the data
            tests = loader.load_model_tests(kind=group)
        found += [_case(test, group) for test in sorted(tests, key=lambda test: test.name)]
    return found


def _case(test: Any, group: str) -> Case:
    if test.model is not None:
        made: list[DataSet] = [(_values(i), _values(o)) for i, o in test.data_sets]
        return Case(test.name, group, test.rtol, test.atol, test.model, lambda: made)
    if test.model_dir is not None:
        folder = Path(test.model_dir)
        model = onnx.load(folder / "model.onnx")
        return Case(test.name, group, test.rtol, test.atol, model, lambda: _stored(folder, model))
    path = Path(onnx.__file__).parent.parent / test.url
    model = onnx.load(path)
    return Case(test.name, group, test.rtol, test.atol, model, lambda: [_ramp(path, model)])


def _values(items: Sequence[Any]) -> list[Any]:
    return [_value(item) for item in items]


def _value(item: Any) -> Any:
    if isinstance(item, TensorProto):
        return numpy_helper.to_array(item)
    return np.asarray(item) if isinstance(item, np.generic) else item


def _stored(folder: Path, model: ModelProto) -> list[DataSet]:
    """The data sets of a case that is a folder of files."""
    graph, found = model.graph, list[DataSet]()
    for data in sorted(folder.glob("test_data_set*")):
        inputs = _from_files(data, "input", graph.input)
        found.append((inputs, _from_files(data, "output", graph.output)))
    return found


def _from_files(data: Path, kind: str, values: Sequence[ValueInfoProto]) -> list[Any]:
    number = len(list(data.glob(f"{kind}_*.pb")))  # there are none for initializers
    return [_from_file(data / f"{kind}_{i}.pb", values[i].type) for i in range(number)]


def _from_file(path: Path, kind: TypeProto) -> Any:
    content = path.read_bytes()
    if kind.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(content))
    if kind.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(content))
    return numpy_helper.to_array(TensorProto.FromString(content))


def _ramp(path: Path, model: ModelProto) -> DataSet:
    """The data of a light model: the input is a ramp, the outputs are stored beside the file."""
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [
        runner.Runner.generate_dummy_data(value) for value in model.graph.input if value.name not in stored
    ]
    stem = os.fspath(path.with_suffix(""))
    outputs = [
        numpy_helper.to_array(onnx.load_tensor(f"{stem}_output_{i}.pb"))
        for i in range(len(model.graph.output))
    ]
    return inputs, outputs
