"""Each operator alone against onnxruntime, over versions and attributes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from irc.frontends.onnx import from_onnx, operators
from irc.ir.errors import UnsupportedError

F, I = np.float32, np.int64  # noqa: E741
_RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(F)


def positive(*shape: int) -> np.ndarray:
    return np.abs(normal(*shape)) + F(0.5)


def ints(*values: int) -> np.ndarray:
    return np.array(values, I)


class Const:
    """An operand that stands in the file."""

    def __init__(self, value: Any, dtype: Any = None) -> None:
        self.array = np.asarray(value, dtype)


def model_of(op: str, opset: int, operands: list[Any], outputs: int, **attributes: Any) -> onnx.ModelProto:
    names, inputs, initializers = list[str](), list[onnx.ValueInfoProto](), list[onnx.TensorProto]()
    for i, operand in enumerate(operands):
        name = "" if operand is None else f"x{i}"
        names.append(name)
        if isinstance(operand, Const):
            initializers.append(numpy_helper.from_array(operand.array, name))
        elif operand is not None:
            inputs.append(
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(operand.dtype), operand.shape
                )
            )
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, names, results, name="the_node", **attributes)
    values = [helper.make_value_info(name, onnx.TypeProto()) for name in results]
    graph = helper.make_graph([node], "g", inputs, values, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    inferred = onnx.shape_inference.infer_shapes(model)
    for output in inferred.graph.output:
        if not output.type.WhichOneof("value"):
            output.type.tensor_type.elem_type = TensorProto.FLOAT
    return inferred


C = Const
X4 = (2, 4, 6, 5)
# operator, opset, operands, attributes, and optionally the number of outputs
CASES: list[tuple[Any, ...]] = [
    *[
        (op, 17, [normal(2, 3)], {})
        for op in ("Abs", "Neg", "Exp", "Erf", "Sin", "Cos", "Floor", "Ceil", "Round", "Sign")
    ],
    *[(op, 17, [positive(2, 3)], {}) for op in ("Log", "Sqrt", "Reciprocal")],
    *[
        (op, 17, [normal(2, 3)], {})
        for op in ("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "HardSwish")
    ],
    *[(op, 17, [normal(2, 3)], {"alpha": 0.3}) for op in ("LeakyRelu", "Elu", "HardSigmoid")],
    ("Selu", 17, [normal(2, 3)], {}),
    ("Mish", 18, [normal(2, 3)], {}),
    ("Gelu", 20, [normal(2, 3)], {}),
    ("Gelu", 20, [normal(2, 3)], {"approximate": "tanh"}),
    ("PRelu", 17, [normal(2, 3, 4), C(positive(3, 1))], {}),
    ("PRelu", 17, [normal(2, 3, 4), C(positive(1, 1, 4))], {}),
    *[(op, 17, [normal(2, 3), normal(3)], {}) for op in ("Add", "Sub", "Mul", "Div")],
    *[(op, 17, [normal(2, 3), C(2.5, F)], {}) for op in ("Add", "Sub", "Mul", "Div")],
    *[(op, 17, [C(2.5, F), positive(2, 3)], {}) for op in ("Add", "Sub", "Mul", "Div", "Pow")],
    ("Div", 17, [ints(-7, 7, -8), ints(2, -2, 3)], {}),
    ("Mod", 17, [ints(-7, 7, -8), ints(2, -2, 3)], {}),
    ("Mod", 17, [normal(5), positive(5)], {"fmod": 1}),
    ("Pow", 17, [positive(2, 3), C(3.0, F)], {}),
    ("Pow", 17, [positive(2, 3), C(2, I)], {}),
    ("Pow", 17, [ints(1, 2, 3), C(2.0, F)], {}),
    *[(op, 17, [normal(2, 3), normal(3), normal(2, 1)], {}) for op in ("Sum", "Mean", "Min", "Max")],
    *[
        (op, 17, [normal(4), normal(4)], {})
        for op in ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual")
    ],
    *[(op, 17, [normal(4) > 0, normal(4) > 0], {}) for op in ("And", "Or", "Xor")],
    ("Not", 17, [normal(4) > 0], {}),
    ("Where", 17, [normal(2, 3) > 0, normal(2, 3), C(-1.5, F)], {}),
    ("Clip", 6, [normal(3, 4)], {"min": -0.5, "max": 0.5}),
    ("Clip", 17, [normal(3, 4), C(-0.5, F), None], {}),
    ("Clip", 17, [normal(3, 4), None, C(0.5, F)], {}),
    ("IsNaN", 17, [np.array([1, np.nan], F)], {}),
    ("IsInf", 17, [np.array([1, np.inf, -np.inf], F)], {"detect_negative": 0}),
    ("MatMul", 17, [normal(2, 3, 4), C(normal(4, 5))], {}),
    ("Gemm", 17, [normal(3, 4), C(normal(5, 4)), C(normal(5))], {"transB": 1}),
    ("Gemm", 17, [normal(4, 3), C(normal(4, 5)), C(normal(3, 1))], {"transA": 1, "alpha": 0.5, "beta": 2.0}),
    ("Gemm", 17, [normal(3, 4), C(normal(4, 5))], {"alpha": 0.5}),
    ("Einsum", 17, [normal(2, 3, 4), normal(2, 4, 5)], {"equation": "bij, bjk -> bik"}),
    ("Softmax", 9, [normal(2, 3, 4)], {}),
    ("Softmax", 11, [normal(2, 3, 4)], {"axis": -2}),
    ("Softmax", 13, [normal(2, 3, 4)], {}),
    ("LogSoftmax", 9, [normal(2, 3, 4)], {"axis": 1}),
    ("LogSoftmax", 13, [normal(2, 3, 4)], {"axis": 1}),
    ("Conv", 11, [normal(*X4), C(normal(6, 2, 3, 3)), C(normal(6))], {"group": 2, "pads": [1, 0, 2, 1]}),
    ("Conv", 11, [normal(*X4), C(normal(6, 4, 3, 2))], {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    ("Conv", 11, [normal(*X4), C(normal(6, 4, 3, 2))], {"auto_pad": "SAME_UPPER", "strides": [1, 2]}),
    ("Conv", 11, [normal(*X4), C(normal(6, 4, 3, 2))], {"auto_pad": "VALID", "dilations": [2, 1]}),
    ("Conv", 11, [normal(2, 4, 9), C(normal(6, 4, 3))], {"pads": [1, 1]}),
    ("Conv", 11, [normal(1, 2, 4, 5, 6), C(normal(3, 2, 2, 2, 2)), C(normal(3))], {"strides": [1, 2, 2]}),
    (
        "ConvTranspose",
        11,
        [normal(*X4), C(normal(4, 3, 3, 3)), C(normal(3))],
        {"strides": [2, 2], "pads": [1, 1, 1, 1]},
    ),
    (
        "ConvTranspose",
        11,
        [normal(*X4), C(normal(4, 3, 3, 3)), C(normal(3))],
        {"strides": [2, 2], "pads": [1, 0, 0, 2]},
    ),
    (
        "ConvTranspose",
        11,
        [normal(*X4), C(normal(4, 3, 3, 3)), C(normal(3))],
        {"strides": [2, 2], "output_padding": [1, 1]},
    ),
    (
        "ConvTranspose",
        11,
        [normal(*X4), C(normal(4, 3, 3, 3))],
        {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
    ),
    (
        "ConvTranspose",
        11,
        [normal(*X4), C(normal(4, 3, 3, 3))],
        {"strides": [2, 2], "output_shape": [12, 10]},
    ),
    *[
        (op, 11, [normal(2, 3, 10, 9)], {"kernel_shape": [3, 3], **more})
        for op in ("MaxPool", "AveragePool")
        for more in (
            {"strides": [2, 2], "pads": [1, 1, 1, 1]},
            {"strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1},
            {"strides": [2, 2], "pads": [0, 1, 1, 0]},
            {"strides": [2, 2], "pads": [2, 2, 2, 2]},
            {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
            {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
            {"strides": [3, 2], "ceil_mode": 1},
        )
    ],
    (
        "AveragePool",
        11,
        [normal(2, 3, 9, 9)],
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1},
    ),
    (
        "AveragePool",
        11,
        [normal(2, 3, 9, 9)],
        {"kernel_shape": [3, 3], "pads": [0, 1, 1, 0], "count_include_pad": 1},
    ),
    ("MaxPool", 11, [normal(2, 3, 9, 9)], {"kernel_shape": [2, 3], "dilations": [2, 1]}),
    ("MaxPool", 11, [normal(2, 3, 9, 9)], {"kernel_shape": [3, 3], "strides": [2, 2]}, 2),
    *[
        (
            "MaxPool",
            12,
            [normal(2, 3, *size)],
            {"kernel_shape": [3] * len(size), "strides": [2] * len(size), "storage_order": 1, "pads": pads},
            2,
        )
        for size, pads in (((9, 8), [1, 1, 1, 1]), ((9, 8), [0, 1, 1, 0]), ((5, 6, 7), [1, 0, 1, 1, 0, 1]))
    ],
    ("MaxPool", 12, [normal(1, 2, 7) * 9], {"kernel_shape": [3], "ceil_mode": 1, "strides": [2]}, 2),
    *[
        ("LpPool", 18, [normal(2, 3, 9, 8)], {"kernel_shape": [3, 2], "strides": [2, 2], **more})
        for more in ({}, {"p": 3, "pads": [1, 0, 1, 1]}, {"ceil_mode": 1}, {"dilations": [2, 1], "p": 1})
    ],
    (
        "MaxUnpool",
        11,
        [normal(1, 2, 2, 2), np.array([5, 7, 13, 15, 16, 19, 25, 30], I).reshape(1, 2, 2, 2)],
        {"kernel_shape": [2, 2], "strides": [2, 2]},
    ),
    *[
        (
            "RoiAlign",
            16,
            [
                normal(2, 3, 7, 8),
                C([[0.5, 1, 4, 6.5], [-3, -2, 5, 9], [3, 2, 3.5, 2.25]], F),
                C(ints(1, 0, 1)),
            ],
            {"output_height": 3, "output_width": 2, "spatial_scale": 0.9, **more},
        )
        for more in (
            {},
            {"sampling_ratio": 2},
            {"coordinate_transformation_mode": "output_half_pixel"},
            {"sampling_ratio": 1, "mode": "max"},
            {"mode": "max"},
        )
    ],
    (
        "MaxRoiPool",
        1,
        [normal(2, 3, 7, 8), C([[0, 1, 1, 5, 6], [1, -2, -1, 4, 20], [1, 3, 3, 3, 3]], F)],
        {"pooled_shape": [3, 2], "spatial_scale": 0.8},
    ),
    *[
        ("DeformConv", 19, [normal(2, 4, 5, 6), C(normal(6, 2, 2, 3)), *operands], more)
        for operands, more in (
            (
                [normal(2, 12, 4, 6), C(normal(6)), normal(2, 6, 4, 6)],
                {"group": 2, "kernel_shape": [2, 3], "pads": [0, 1, 0, 1]},
            ),
            (
                [normal(2, 24, 2, 4) * 3],
                {"group": 2, "offset_group": 2, "strides": [2, 1], "kernel_shape": [2, 3]},
            ),
        )
    ],
    (
        "Col2Im",
        18,
        [normal(2, 12, 12), C(ints(5, 6)), C(ints(2, 3))],
        {"pads": [0, 1, 1, 0], "dilations": [2, 1], "strides": [1, 2]},
    ),
    ("CenterCropPad", 18, [normal(5, 4, 3), C(ints(2, 7))], {"axes": [0, -1]}),
    *[(f"Reduce{m}", 20, [np.zeros((2, 0, 3), F), C(ints(1))], {"keepdims": 0}) for m in ("Max", "Min")],
    ("ReduceMean", 18, [np.array([[1, -2, 4], [-1, -4, -3]], np.int32), C(ints(1))], {}),
    *[
        ("GridSample", 20, [normal(2, 3, 4, 5, 3), normal(2, 2, 3, 2, 3)], {"mode": mode})
        for mode in ("linear", "nearest")
    ],
    ("GlobalAveragePool", 11, [normal(2, 3, 5, 4)], {}),
    ("GlobalMaxPool", 11, [normal(2, 3, 5, 4)], {}),
    *[("LRN", 13, [normal(2, 7, 3, 3)], {"size": n, "alpha": 0.5, "beta": 0.6, "bias": 1.5}) for n in (3, 5)],
    *[
        (
            "BatchNormalization",
            v,
            [normal(2, 3, 4), C(normal(3)), C(normal(3)), C(normal(3)), C(positive(3))],
            {"epsilon": 0.01},
        )
        for v in (9, 15)
    ],
    ("LayerNormalization", 17, [normal(2, 3, 4), C(normal(4)), C(normal(4))], {}),
    ("LayerNormalization", 17, [normal(2, 3, 4), C(normal(3, 4))], {"axis": 1, "epsilon": 0.1}, 3),
    ("InstanceNormalization", 17, [normal(2, 3, 4, 5), C(normal(3)), C(normal(3))], {"epsilon": 0.1}),
    ("GroupNormalization", 21, [normal(2, 6, 4), C(normal(6)), C(normal(6))], {"num_groups": 3}),
    ("Dropout", 17, [normal(2, 3), C(0.3, F)], {}),
    *[
        (f"Reduce{name}", 13, [positive(2, 3, 4)], {"axes": [0, -1], "keepdims": keep})
        for name in ("Mean", "Max", "Min", "Prod", "L1", "L2", "LogSumExp", "SumSquare", "LogSum")
        for keep in (0, 1)
    ],
    *[
        (f"Reduce{name}", 18, [positive(2, 3, 4), C(ints(1))], {})
        for name in ("Sum", "Mean", "Max", "L2", "LogSumExp")
    ],
    ("ReduceSum", 13, [normal(2, 3)], {}),
    ("ReduceSum", 13, [normal(2, 3)], {"noop_with_empty_axes": 1}),
    ("ArgMax", 13, [normal(3, 4)], {"axis": -1, "keepdims": 0}),
    ("ArgMin", 13, [np.array([[1, 0, 0]], F)], {"axis": 1, "select_last_index": 1}),
    ("TopK", 11, [np.array([[1, 3, 3, 2]], F), C(ints(3))], {}, 2),
    ("TopK", 11, [normal(3, 5), C(ints(2))], {"axis": 0, "largest": 0}, 2),
    ("CumSum", 14, [normal(3, 4), C(1, np.int32)], {"exclusive": 1, "reverse": 1}),
    ("Reshape", 5, [normal(2, 3, 4), C(ints(0, -1))], {}),
    ("Flatten", 13, [normal(2, 3, 4)], {"axis": 2}),
    ("Squeeze", 11, [normal(1, 3, 1)], {"axes": [0, -1]}),
    ("Squeeze", 13, [normal(1, 3, 1), C(ints(-1))], {}),
    ("Unsqueeze", 11, [normal(2, 3)], {"axes": [0, 3]}),
    ("Unsqueeze", 13, [normal(2, 3), C(ints(-1, 0))], {}),
    ("Transpose", 13, [normal(2, 3, 4)], {"perm": [2, 0, 1]}),
    ("Transpose", 13, [normal(2, 3, 4)], {}),
    ("Expand", 13, [normal(3, 1), C(ints(2, 1, 4))], {}),
    ("Tile", 13, [normal(2, 3), C(ints(2, 1))], {}),
    ("Concat", 13, [normal(2, 3), normal(2, 1)], {"axis": -1}),
    ("Split", 11, [normal(5, 2)], {"split": [2, 3]}, 2),
    ("Split", 13, [normal(6, 2)], {}, 3),
    ("Split", 18, [normal(2, 5)], {"axis": 1, "num_outputs": 2}, 2),
    ("Slice", 9, [normal(4, 5)], {"starts": [1, -3], "ends": [9, -1]}),
    ("Slice", 13, [normal(4, 5), C(ints(3)), C(ints(-(2**62))), C(ints(0)), C(ints(-2))], {}),
    ("Slice", 13, [normal(4, 5), C(ints(0, 1)), C(ints(4, 5)), C(ints(0, 1)), C(ints(3, 2))], {}),
    ("Gather", 13, [normal(4, 5), C(ints(-1, 0, 2))], {}),
    ("Gather", 13, [normal(4, 5), C(ints(1, 2))], {"axis": 1}),
    ("Gather", 13, [normal(4, 5), C(-2, I)], {"axis": 1}),
    ("Gather", 13, [normal(4, 5), np.array([[0, -1], [2, 1]], I)], {"axis": 1}),
    ("Gather", 13, [C(normal(4, 5)), np.array([[0, 3], [2, 1]], I)], {}),
    ("GatherElements", 13, [normal(3, 3), np.array([[0, -1], [2, 1]], I)], {"axis": 1}),
    ("GatherND", 13, [normal(2, 3, 4), np.array([[1, 2], [0, -1]], I)], {}),
    ("GatherND", 13, [normal(2, 3, 4), np.array([[2], [0]], I)], {"batch_dims": 1}),
    ("ScatterElements", 16, [normal(3, 3), C(np.array([[0, 2, -1]], I)), normal(1, 3)], {"axis": 1}),
    (
        "ScatterElements",
        16,
        [normal(3, 3), C(np.array([[0, 2, 2]], I)), normal(1, 3)],
        {"axis": 1, "reduction": "add"},
    ),
    ("ScatterND", 16, [normal(4, 3), C(np.array([[1], [-1]], I)), normal(2, 3)], {}),
    ("ScatterND", 16, [normal(4, 3), C(np.array([[1], [1]], I)), normal(2, 3)], {"reduction": "add"}),
    ("OneHot", 11, [ints(0, 2, -1, 7), C(4, I), C([0.5, 2.0], F)], {"axis": 0}),
    ("Trilu", 14, [normal(3, 4), C(1, I)], {"upper": 0}),
    ("Pad", 10, [normal(2, 3)], {"pads": [0, 1, 2, 0], "value": 1.5}),
    ("Pad", 13, [normal(2, 3, 4), C(ints(0, 1, -1, 0, 0, 2)), C(7.0, F)], {}),
    ("Pad", 13, [normal(1, 2, 4, 5), C(ints(0, 0, 1, 2, 0, 0, 3, 1))], {"mode": "reflect"}),
    ("Pad", 13, [normal(3, 4), C(ints(1, 2, 2, 1))], {"mode": "reflect"}),
    ("Pad", 13, [normal(3, 4), C(ints(1, 2, 2, 1))], {"mode": "edge"}),
    ("Pad", 18, [normal(3, 4), C(ints(1, 2)), None, C(ints(-1))], {}),
    ("DepthToSpace", 13, [normal(2, 8, 2, 3)], {"blocksize": 2}),
    ("DepthToSpace", 13, [normal(2, 8, 2, 3)], {"blocksize": 2, "mode": "CRD"}),
    ("SpaceToDepth", 13, [normal(2, 2, 4, 6)], {"blocksize": 2}),
    ("Cast", 13, [normal(2, 3) * 5], {"to": TensorProto.INT32}),
    ("Upsample", 9, [normal(1, 2, 3, 4), C([1, 1, 2, 3], F)], {"mode": "nearest"}),
    ("Upsample", 9, [normal(1, 2, 3, 4), C([1, 1, 2, 2], F)], {"mode": "linear"}),
    ("Resize", 10, [normal(1, 2, 3, 4), C([1, 1, 2, 2], F)], {"mode": "nearest"}),
    *[
        ("Resize", 13, [normal(1, 2, 4, 5), None, None, C(ints(1, 2, *out))], {"mode": mode, **more})
        for out in ((8, 10), (3, 7), (2, 2))
        for mode, more in (
            ("nearest", {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
            ("nearest", {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "ceil"}),
            ("nearest", {"nearest_mode": "round_prefer_floor"}),
            ("nearest", {"nearest_mode": "round_prefer_ceil"}),
            ("linear", {}),
            ("linear", {"coordinate_transformation_mode": "pytorch_half_pixel"}),
            ("linear", {"coordinate_transformation_mode": "align_corners"}),
            ("linear", {"coordinate_transformation_mode": "asymmetric"}),
        )
    ],
    ("Resize", 13, [normal(1, 2, 4, 5), None, C([1, 1, 2, 2.5], F)], {"mode": "linear"}),
    *[
        ("Resize", 18, [normal(1, 2, 9, 5), None, None, C(ints(1, 2, *out))], {"mode": mode, **more})
        for out in ((13, 10), (3, 4))
        for mode, more in (
            ("cubic", {}),
            ("cubic", {"coordinate_transformation_mode": "asymmetric"}),
            ("cubic", {"coordinate_transformation_mode": "align_corners"}),
            ("cubic", {"cubic_coeff_a": -0.5, "exclude_outside": 1}),
            ("cubic", {"antialias": 1}),
            ("cubic", {"antialias": 1, "cubic_coeff_a": -0.5, "exclude_outside": 1}),
            ("linear", {"antialias": 1}),
            ("linear", {"antialias": 1, "exclude_outside": 1}),
        )
    ],
    ("Resize", 18, [normal(1, 2, 4, 4), None, C([1, 1, 0.8, 0.6], F)], {"mode": "cubic"}),
    ("Resize", 18, [normal(4, 6), None, None, C(ints(3))], {"mode": "linear", "axes": [-1], "antialias": 1}),
    *[
        (
            "Resize",
            18,
            [normal(1, 1, 6, 7), None, None, C(ints(5, 3))],
            {"axes": [2, 3], "keep_aspect_ratio_policy": policy},
        )
        for policy in ("not_larger", "not_smaller")
    ],
    (
        "Resize",
        13,
        [normal(1, 1, 4, 5), C([0, 0, 0.4, -0.2, 1, 1, 1.2, 0.7], F), None, C(ints(1, 1, 3, 4))],
        {
            "mode": "linear",
            "coordinate_transformation_mode": "tf_crop_and_resize",
            "extrapolation_value": 9.0,
        },
    ),
    ("Upsample", 9, [normal(2, 3), C([1.5, 2], F)], {"mode": "linear"}),
    *[
        (
            "LSTM",
            14,
            [
                normal(5, 2, 3),
                C(normal(n, 16, 3)),
                C(normal(n, 16, 4)),
                C(normal(n, 32)),
                None,
                normal(n, 2, 4),
                normal(n, 2, 4),
            ],
            {"hidden_size": 4, "direction": d},
            3,
        )
        for d, n in (("forward", 1), ("reverse", 1), ("bidirectional", 2))
    ],
    *[
        (
            "GRU",
            14,
            [normal(5, 2, 3), C(normal(n, 12, 3)), C(normal(n, 12, 4)), C(normal(n, 24))],
            {"hidden_size": 4, "direction": d, "linear_before_reset": late},
            2,
        )
        for d, n in (("forward", 1), ("reverse", 1), ("bidirectional", 2))
        for late in (0, 1)
    ],
    (
        "RNN",
        14,
        [normal(5, 2, 3), C(normal(1, 4, 3)), C(normal(1, 4, 4))],
        {"hidden_size": 4, "direction": "reverse"},
        2,
    ),
    (
        "RNN",
        14,
        [normal(5, 2, 3), C(normal(1, 4, 3)), C(normal(1, 4, 4))],
        {"hidden_size": 4, "activations": ["Relu"]},
        2,
    ),
    ("SoftmaxCrossEntropyLoss", 13, [normal(3, 5), ints(1, 0, 4)], {"ignore_index": 0}),
    ("Shape", 15, [normal(2, 3, 4)], {"start": -2}),
    ("Mod", 17, [np.array([7, 60000], np.uint16), np.array([2, 7], np.uint16)], {}),
    ("Add", 17, [np.array([7, 2**32 - 1], np.uint32), np.array([2, 7], np.uint32)], {}),
    ("Greater", 17, [np.array([7, 2**64 - 1], np.uint64), np.array([2**63, 7], np.uint64)], {}),
    ("Max", 17, [np.array([7, 2**64 - 1], np.uint64), np.array([2**63, 7], np.uint64)], {}),
    *[
        (
            "BitShift",
            11,
            [np.array([2**63 + 5, 9, 1], np.uint64), np.array([1, 0, 63], np.uint64)],
            {"direction": d},
        )
        for d in ("LEFT", "RIGHT")
    ],
    ("Det", 11, [normal(2, 3, 3)], {}),
    ("Unique", 11, [np.array([2, 1, 1, 3, 4, 3], F)], {"sorted": 0}, 4),
    ("Unique", 11, [np.array([[2, 1], [0, 1], [2, 1]], F)], {"axis": 0}, 4),
    ("Compress", 11, [normal(3, 4), np.array([True, False, True])], {"axis": -1}),
    ("Compress", 11, [normal(3, 4), C([False, True, True])], {}),
    ("ReverseSequence", 10, [normal(4, 3, 2), ints(1, 4, 3)], {}),
    ("ReverseSequence", 10, [normal(3, 4, 2), ints(1, 0, 3)], {"batch_axis": 0, "time_axis": 1}),
    *[
        (
            "NonMaxSuppression",
            11,
            [positive(2, 20, 4), normal(2, 3, 20), C(ints(5)), C([0.3], F), C([-0.5], F)],
            {"center_point_box": centred},
        )
        for centred in (0, 1)
    ],
    ("DFT", 17, [normal(2, 8, 1)], {"onesided": 1}),
    ("DFT", 17, [normal(2, 3, 7, 2), C(9, I)], {"axis": 2}),
    ("DFT", 20, [normal(2, 3, 8, 2), None, C(1, I)], {"inverse": 1}),
    ("STFT", 17, [normal(2, 32, 1), C(5, I), C(positive(8))], {}),
    ("STFT", 17, [normal(2, 32, 1), C(5, I), None, C(8, I)], {"onesided": 0}),
    *[
        (f"{name}Window", 17, [C(9, I)], {"periodic": periodic})
        for name in ("Hann", "Hamming", "Blackman")
        for periodic in (0, 1)
    ],
    ("MelWeightMatrix", 17, [C(8, I), C(64, I), C(8192, I), C(100.0, F), C(4000.0, F)], {}),
    ("Size", 13, [normal(2, 3, 4)], {}),
]


def _id(case: tuple[Any, ...]) -> str:
    op, opset, _, attributes = case[:4]
    shown = ",".join(f"{k}={v}" for k, v in attributes.items())
    return f"{op}-{opset}" + (f"[{shown}]" if shown else "")


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_operator_is_onnxruntimes(case: tuple[Any, ...], tmp_path: Path) -> None:
    op, opset, operands, attributes = case[:4]
    outputs = case[4] if len(case) > 4 else 1
    model = model_of(op, opset, operands, outputs, **attributes)
    path = tmp_path / "model.onnx"
    onnx.save(model, str(path))
    feeds = {f"x{i}": x for i, x in enumerate(operands) if x is not None and not isinstance(x, Const)}
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    expected = [np.asarray(y) for y in session.run(None, feeds)]
    module = from_onnx(path).eval()
    actual = module(*(torch.from_numpy(x) for x in feeds.values()))
    actual = actual if isinstance(actual, tuple) else (actual,)
    assert len(actual) == len(expected) == outputs
    for ours, theirs in zip(actual, expected, strict=True):
        values = ours.detach().numpy()
        assert values.dtype == theirs.dtype and values.shape == theirs.shape
        np.testing.assert_allclose(values, theirs, rtol=1e-4, atol=1e-5)


def test_lrn_of_an_even_window_is_the_standards(tmp_path: Path) -> None:
    """onnxruntime refuses even windows, so the standard's own sum stands here."""
    x = normal(2, 7, 3, 3)
    sums = np.stack([(x[:, max(0, i - 1) : i + 3] ** 2).sum(1) for i in range(7)], 1)
    expected = x / (1.5 + 0.5 / 4 * sums) ** 0.6
    model = model_of("LRN", 13, [x], 1, size=4, alpha=0.5, beta=0.6, bias=1.5)
    onnx.save(model, str(tmp_path / "model.onnx"))
    actual = from_onnx(tmp_path / "model.onnx")(torch.from_numpy(x))
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-4, atol=1e-5)


REFUSED: list[tuple[Any, ...]] = [
    (
        "Resize",
        18,
        [normal(1, 2, 4, 5), None, None, C(ints(1, 2, 8, 10))],
        {"mode": "nearest", "antialias": 1},
        "antialias",
    ),
    (
        "MaxPool",
        12,
        [normal(1, 1, 9)],
        {"kernel_shape": [1], "strides": [3], "auto_pad": "SAME_UPPER"},
        "windows that leave gaps",
    ),
    (
        "GRU",
        14,
        [normal(5, 2, 3), C(normal(1, 12, 3)), C(normal(1, 12, 4))],
        {"hidden_size": 4, "activations": ["Affine", "Tanh"]},
        "affine without activation_alpha",
    ),
    (
        "LSTM",
        14,
        [normal(5, 2, 3), C(normal(1, 16, 3)), C(normal(1, 16, 4))],
        {"hidden_size": 4, "activations": ["Elu", "Tanh", "Elu"], "activation_alpha": [1.0]},
        "activation_alpha",
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=_id)
def test_what_is_not_exact_is_refused_by_name(case: tuple[Any, ...], tmp_path: Path) -> None:
    op, opset, operands, attributes, words = case
    path = tmp_path / "model.onnx"
    onnx.save(model_of(op, opset, operands, 1, **attributes), str(path))
    with pytest.raises(UnsupportedError) as caught:
        from_onnx(path)
    assert (
        caught.value.code == "IRC302" and words in str(caught.value) and f"ai.onnx::{op}" in str(caught.value)
    )
    assert caught.value.at is not None and caught.value.at.onnx_node == "the_node"


def test_table_is_versioned() -> None:
    table = operators()
    assert table["Softmax"] == (1, 13) and table["Clip"] == (1, 11) and len(table) >= 148
