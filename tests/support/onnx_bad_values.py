"""Models of one node with settings that are wrong in one place, and what onnxruntime says of each.

Settings are integers: attributes, and operands that stand in the file. Each number is replaced by others,
left out, doubled, or joined by one more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

__all__ = ["CASES", "Case", "runtime_result", "spoiled"]

_NUMBERS = (-100, -7, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 100)


@dataclass(frozen=True)
class Case:
    """One node that is right.

    Args:
        op: The operator.
        shapes: The shape of each input.
        attributes: The attributes; those that are integers are spoiled.
        settings: The operands that stand in the file, by place; those of int64 are spoiled.
        opset: The version of the operator set.
        results: The number of results.
        inputs: The inputs that are not of float32, by place.
    """

    op: str
    shapes: Sequence[tuple[int, ...]]
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    settings: Mapping[int, Any] = field(default_factory=dict[int, Any])
    opset: int = 17
    results: int = 1
    inputs: Mapping[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])

    def feed(self) -> dict[str, np.ndarray]:
        """The inputs by name."""
        rng = np.random.default_rng(0)
        feed = {f"x{i}": rng.random(shape, np.float32) for i, shape in enumerate(self.shapes)}
        return feed | {f"x{i}": array for i, array in self.inputs.items()}

    def model(self) -> onnx.ModelProto:
        """The node as a model."""
        feed = self.feed()
        given = {*feed, *(f"x{i}" for i in self.settings)}
        last = max(int(name[1:]) for name in given)
        names = [f"x{i}" if f"x{i}" in given else "" for i in range(last + 1)]
        outputs = [f"y{i}" for i in range(self.results)]
        node = helper.make_node(self.op, names, outputs, name="the_node", **self.attributes)
        graph = helper.make_graph(
            [node],
            "g",
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
                for name, x in feed.items()
            ],
            [helper.make_value_info(name, onnx.TypeProto()) for name in outputs],
            [numpy_helper.from_array(np.asarray(v), f"x{i}") for i, v in self.settings.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


_X, _IMAGE, _LINE = (2, 3, 4), (2, 4, 6, 5), (2, 4, 7)
_WEIGHT, _TURNED = np.ones((6, 2, 3, 2), np.float32), np.ones((4, 3, 3, 2), np.float32)
_WINDOW = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}
_INDICES = _ints(0, 1)

CASES = (
    *(Case(op, [_X], {"axis": 1}, opset=o) for op in ("Softmax", "LogSoftmax", "Hardmax") for o in (12, 17)),
    *(Case(op, [_X], {"axes": [1], "keepdims": 1}) for op in ("ReduceMean", "ReduceMax", "ReduceL2")),
    Case("ReduceSum", [_X], {"keepdims": 0}, {1: _ints(0, 2)}),
    *(Case(op, [_X], {"axis": 1, "keepdims": 1, "select_last_index": 0}) for op in ("ArgMax", "ArgMin")),
    Case("Unsqueeze", [_X], settings={1: _ints(0, 3)}),
    Case("Unsqueeze", [_X], {"axes": [0, 3]}, opset=11),
    Case("Squeeze", [(1, 3, 1)], settings={1: _ints(0, 2)}),
    Case("Squeeze", [(1, 3, 1)], {"axes": [0, 2]}, opset=11),
    Case("CumSum", [_X], {"exclusive": 0, "reverse": 0}, {1: np.array(1)}),
    Case("Flatten", [_X], {"axis": 1}),
    Case("Transpose", [_X], {"perm": [1, 0, 2]}),
    Case("Concat", [_X, _X], {"axis": 1}),
    Case("Split", [_X], {"axis": 1}, {1: _ints(1, 2)}, results=2),
    Case("Split", [_X], {"axis": 1, "split": [1, 2]}, opset=11, results=2),
    Case("Split", [_X], {"axis": 2}, results=2),
    Case("Reshape", [_X], {"allowzero": 0}, {1: _ints(6, 4)}),
    Case("Reshape", [_X], settings={1: _ints(0, -1)}),
    Case("Expand", [(3, 1)], settings={1: _ints(2, 3, 4)}),
    Case("Tile", [_X], settings={1: _ints(1, 2, 1)}),
    *(Case("Pad", [_X], {"mode": m}, {1: _ints(0, 1, 1, 0, 1, 2)}) for m in ("constant", "reflect", "edge")),
    Case("Pad", [_X], {}, {1: _ints(1, 2), 2: np.float32(0), 3: _ints(1)}, opset=18),
    Case("Pad", [_X], {"pads": [0, 1, 1, 0, 1, 2]}, opset=10),
    Case("Slice", [_X], settings={1: _ints(0, 1), 2: _ints(2, 4), 3: _ints(1, 2), 4: _ints(1, 2)}),
    Case("Slice", [_X], {"starts": [0, 1], "ends": [2, 4], "axes": [1, 2]}, opset=9),
    Case("Gather", [_X], {"axis": 1}, {1: _INDICES}),
    Case("GatherElements", [_X], {"axis": 1}, {1: np.zeros((1, 1, 2), np.int64)}),
    Case("GatherND", [_X], {}, {1: np.zeros((2, 2), np.int64)}),
    Case(
        "ScatterElements", [_X], {"axis": 1}, {1: np.zeros((1, 1, 1), np.int64), 2: np.ones((1, 1, 1), "f")}
    ),
    Case("ScatterND", [_X], {}, {1: np.zeros((1, 1), np.int64), 2: np.ones((1, 3, 4), "f")}),
    Case("OneHot", [], {"axis": 1}, {1: np.array(3), 2: np.array([0, 1], "f")}, inputs={0: _ints(0, 2)}),
    Case("TopK", [_X], {"axis": 1, "largest": 1}, {1: _ints(2)}, results=2),
    Case("DepthToSpace", [_IMAGE], {"blocksize": 2}),
    Case("SpaceToDepth", [(2, 4, 6, 4)], {"blocksize": 2}),
    Case("Trilu", [_X], {"upper": 1}, {1: np.array(0)}),
    Case("Shape", [_X], {"start": 0, "end": 2}),
    Case("ConstantOfShape", [], settings={0: _ints(2, 3)}),
    Case("EyeLike", [(3, 3)], {"k": 0}),
    Case("Range", [], settings={0: np.array(0), 1: np.array(5), 2: np.array(2)}),
    Case("Conv", [_IMAGE], {**_WINDOW, "dilations": [1, 1], "group": 2}, {1: _WEIGHT}),
    Case("Conv", [_LINE], {"kernel_shape": [3], "pads": [1, 1]}, {1: np.ones((2, 4, 3), "f")}),
    Case(
        "ConvTranspose",
        [_IMAGE],
        {**_WINDOW, "dilations": [1, 1], "output_padding": [1, 0]},
        {1: _TURNED},
    ),
    Case("ConvTranspose", [_IMAGE], {"strides": [2, 2], "output_shape": [12, 10]}, {1: _TURNED}),
    Case("MaxPool", [_IMAGE], {**_WINDOW, "dilations": [1, 1], "ceil_mode": 0, "storage_order": 0}),
    Case("MaxPool", [_IMAGE], {**_WINDOW, "ceil_mode": 1}, results=2),
    Case("AveragePool", [_IMAGE], {**_WINDOW, "ceil_mode": 0, "count_include_pad": 1}),
    Case("LpPool", [_IMAGE], {**_WINDOW, "p": 2}),
    Case("BatchNormalization", [_IMAGE], {}, {i: np.ones(4, "f") for i in range(1, 5)}, opset=15),
    Case("LayerNormalization", [_X], {"axis": -1}, {1: np.ones(4, "f")}),
    Case("LRN", [_IMAGE], {"size": 3}),
    Case("Gemm", [(2, 3), (3, 4)], {"transA": 0, "transB": 0}),
    Case("LpNormalization", [_X], {"axis": 1, "p": 2}),
    Case("Resize", [_IMAGE], {"mode": "nearest"}, {3: _ints(2, 4, 3, 10)}, opset=18),
    Case("Resize", [_IMAGE], {"mode": "nearest", "axes": [2, 3]}, {3: _ints(3, 10)}, opset=18),
    Case("ReverseSequence", [_X], {"batch_axis": 1, "time_axis": 0}, {1: _ints(1, 2, 2)}),
    Case("LSTM", [(5, 2, 3)], {"hidden_size": 2}, {1: np.ones((1, 8, 3), "f"), 2: np.ones((1, 8, 2), "f")}),
    Case("GridSample", [_IMAGE, (2, 3, 3, 2)], {"align_corners": 0}),
)


def _spoiled_list(numbers: Sequence[int], *, is_shortened: bool) -> Iterator[list[int]]:
    for i, other in itertools.product(range(len(numbers)), _NUMBERS):
        if other != numbers[i]:
            yield [*numbers[:i], other, *numbers[i + 1 :]]
    if numbers:
        yield [*numbers, numbers[-1]]
        yield [*numbers, 0]
        if is_shortened:
            yield list(numbers[:-1])
            yield []


def spoiled(case: Case) -> Iterator[Case]:
    """The node with one setting changed."""
    shortened = case.op != "Split"  # onnxruntime crashes on a list with fewer sizes than results
    for name, value in case.attributes.items():
        if isinstance(value, int):
            for other in _NUMBERS:
                yield _with(case, attributes={**case.attributes, name: other})
        elif isinstance(value, list):
            for numbers in _spoiled_list(value, is_shortened=shortened):  # pyright: ignore[reportUnknownArgumentType]
                if numbers:
                    yield _with(case, attributes={**case.attributes, name: numbers})
    for place, value in case.settings.items():
        array = np.asarray(value)
        if array.dtype != np.int64:
            continue
        flat = [int(n) for n in array.reshape(-1)]
        for numbers in _spoiled_list(flat, is_shortened=shortened):
            if len(numbers) != array.size and array.ndim != 1:
                continue
            shape = array.shape if len(numbers) == array.size else (len(numbers),)
            yield _with(case, settings={**case.settings, place: np.array(numbers, np.int64).reshape(shape)})


def _with(case: Case, **changes: Any) -> Case:
    return Case(**{**vars(case), **changes})


def runtime_result(case: Case) -> list[np.ndarray] | str:
    """The results of onnxruntime, or the first line of its refusal."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(
            case.model().SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return [np.asarray(result) for result in session.run(None, case.feed())]
    except Exception as error:  # onnxruntime has many
        return str(error).splitlines()[0]
