"""onnxruntime's own operators against onnxruntime, with the gradients that reach their float operands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

from irc.frontends.onnx import OnnxModule, from_onnx
from irc.ir.errors import UnsupportedError

F, I4 = np.float32, np.int32
_RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(F)


def positive(*shape: int) -> np.ndarray:
    return np.abs(normal(*shape)) + F(0.5)


def whole(dtype: Any, *shape: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    return _RNG.integers(limits.min, limits.max + 1, shape).astype(dtype)


def signed_weights(*shape: int) -> np.ndarray:
    """Draws weights of half the range: on some processors onnxruntime adds products with bytes in 16 bits."""
    return whole(np.int8, *shape) // np.int8(2)


class Const:
    """An operand that stands in the file."""

    def __init__(self, value: Any, dtype: Any = None) -> None:
        self.array = np.asarray(value, dtype)


def model_of(op: str, operands: list[Any], outputs: str, attributes: dict[str, Any]) -> onnx.ModelProto:
    """One node; `outputs` has a letter for the element type of each output, and `-` for one left out."""
    names, inputs, initializers = list[str](), list[onnx.ValueInfoProto](), list[onnx.TensorProto]()
    for i, operand in enumerate(operands):
        names.append("" if operand is None else f"x{i}")
        if isinstance(operand, Const):
            initializers.append(numpy_helper.from_array(operand.array, f"x{i}"))
        elif operand is not None:
            kind = helper.np_dtype_to_tensor_dtype(operand.dtype)
            inputs.append(helper.make_tensor_value_info(f"x{i}", kind, operand.shape))
    kinds = {"f": TensorProto.FLOAT, "i": TensorProto.INT32, "u": TensorProto.UINT8, "s": TensorProto.INT8}
    results = ["" if kind == "-" else f"y{i}" for i, kind in enumerate(outputs)]
    domain = "" if op in ("SimplifiedLayerNormalization", "LayerNormalization") else "com.microsoft"
    node = helper.make_node(op, names, results, name="the_node", domain=domain, **attributes)
    values = [
        helper.make_tensor_value_info(n, kinds[k], None) for n, k in zip(results, outputs, strict=True) if n
    ]
    graph = helper.make_graph([node], "g", inputs, values, initializers)
    opsets = [helper.make_opsetid("", 16), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def imported(model: onnx.ModelProto, folder: Path) -> OnnxModule:
    onnx.save(model, str(folder / "m.onnx"))
    return from_onnx(folder / "m.onnx")


C = Const
X = normal(2, 5, 8)
B8, W8 = C(normal(8)), C(positive(8))
IDS = np.array([[1, 2, 0, 3, 4], [5, 6, 6, 0, 1]], I4)
QKV = [normal(2, 5, 8), C(normal(8, 24)), C(normal(24))]
MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], I4)
BIAS = normal(1, 2, 5, 5)
PAST = normal(2, 2, 2, 3, 4)
HEADS = {"num_heads": 2}
KEYS, CACHES = normal(2, 5, 32), [C(normal(9, 8)), C(normal(9, 8))]

# operator, operands, kinds of the outputs, attributes
FLOAT: list[tuple[str, list[Any], str, dict[str, Any]]] = [
    *[
        ("FusedConv", [normal(1, 2, 6, 6), C(normal(3, 2, 3, 3)), C(normal(3))], "f", attributes)
        for attributes in (
            {"activation": "Relu", "pads": [1, 1, 1, 1]},
            {"activation": "LeakyRelu", "activation_params": [0.2], "strides": [2, 2]},
            {"activation": "Clip", "activation_params": [-0.5, 0.5]},
            {"activation": "HardSigmoid", "activation_params": [0.2, 0.5]},
            {"activation": "Tanh"},
        )
    ],
    (
        "FusedConv",
        [normal(1, 2, 6, 6), C(normal(3, 2, 3, 3)), C(normal(3)), normal(1, 3, 4, 4)],
        "f",
        {"activation": "Relu"},
    ),
    ("FusedGemm", [normal(3, 4), C(normal(5, 4)), C(normal(5))], "f", {"transB": 1, "activation": "Relu"}),
    (
        "FusedGemm",
        [normal(3, 4), C(normal(4, 5))],
        "f",
        {"alpha": 0.5, "activation": "LeakyRelu", "activation_alpha": 0.2},
    ),
    ("FusedMatMul", [normal(2, 4, 3), normal(2, 5, 4)], "f", {"transA": 1, "transB": 1, "alpha": 0.5}),
    (
        "FusedMatMul",
        [normal(4, 2, 3), normal(5, 2, 3)],
        "f",
        {"transBatchA": 1, "transBatchB": 1, "transB": 1},
    ),
    ("FusedMatMul", [normal(4, 2, 7, 3), normal(2, 7, 4, 5)], "f", {"transBatchA": 1, "transA": 1}),
    ("Gelu", [X], "f", {}),
    ("BiasGelu", [X, B8], "f", {}),
    ("FastGelu", [X], "f", {}),
    ("FastGelu", [X, B8], "f", {}),
    ("QuickGelu", [X], "f", {"alpha": 1.2}),
    ("LayerNormalization", [X, W8, B8], "f", {"epsilon": 0.1}),
    ("SimplifiedLayerNormalization", [X, W8], "f", {"epsilon": 0.1}),
    ("SkipLayerNormalization", [X, normal(2, 5, 8), W8, B8, B8], "f--f", {"epsilon": 0.1}),
    ("SkipLayerNormalization", [X, normal(1, 5, 8), W8], "f", {}),
    ("SkipSimplifiedLayerNormalization", [X, normal(2, 5, 8), W8, B8], "f--f", {"epsilon": 0.1}),
    (
        "EmbedLayerNormalization",
        [IDS, IDS % 2, C(normal(7, 8)), C(normal(9, 8)), C(normal(2, 8)), W8, B8, MASK],
        "fif",
        {"epsilon": 0.1, "mask_index_type": 1},
    ),
    (
        "EmbedLayerNormalization",
        [IDS, None, C(normal(7, 8)), C(normal(9, 8)), None, W8, B8, None, IDS + 1],
        "fi",
        {},
    ),
    ("Attention", QKV, "f", HEADS),
    ("Attention", [*QKV, MASK], "f", HEADS),
    ("Attention", [*QKV, np.array([3, 5], I4)], "f", HEADS),
    ("Attention", [*QKV, np.array([4, 5, 1, 0], I4)], "f", HEADS),
    ("Attention", [*QKV, MASK], "f", {**HEADS, "unidirectional": 1, "scale": 0.3}),
    ("Attention", [*QKV, None, PAST], "ff", {**HEADS, "unidirectional": 1}),
    ("Attention", [*QKV, MASK, None, BIAS], "f", HEADS),
    (
        "Attention",
        [normal(2, 5, 8), C(normal(8, 20)), C(normal(20))],
        "f",
        {**HEADS, "qkv_hidden_sizes": [8, 8, 4]},
    ),
    ("MultiHeadAttention", [X, normal(2, 6, 8), normal(2, 6, 8)], "f", HEADS),
    ("MultiHeadAttention", [X, X, X, C(normal(24)), MASK, BIAS], "f", HEADS),
    ("MultiHeadAttention", [X, X, X], "f", {**HEADS, "unidirectional": 1, "scale": 0.2}),
    (
        "MultiHeadAttention",
        [normal(2, 1, 8), normal(2, 1, 8), normal(2, 1, 8), None, None, None, PAST[0], PAST[1]],
        "fff",
        HEADS,
    ),
    *[
        ("RotaryEmbedding", [x, positions, C(normal(9, n)), C(normal(9, n))], "f", attributes)
        for x, positions, n, attributes in (
            (normal(2, 2, 5, 8), np.array([3], np.int64), 4, {}),
            (normal(2, 2, 5, 8), IDS.astype(np.int64), 4, {"interleaved": 1}),
            (X, IDS.astype(np.int64), 2, {}),
            (normal(2, 5, 16), IDS.astype(np.int64), 2, {"num_heads": 2, "rotary_embedding_dim": 4}),
        )
    ],
    *[
        (
            "GroupQueryAttention",
            [*operands, None, None, np.array([2, 4], I4), C(5, I4), *more],
            "fff",
            {"num_heads": 4, "kv_num_heads": 2, **attributes},
        )
        for operands, more, attributes in (
            ([normal(2, 5, 64), KEYS, KEYS], [], {}),
            ([normal(2, 5, 64), KEYS, KEYS], CACHES, {"do_rotary": 1, "rotary_interleaved": 1}),
            ([normal(2, 5, 128), None, None], CACHES, {"do_rotary": 1, "local_window_size": 2}),
            ([normal(2, 5, 64), KEYS, KEYS], [], {"softcap": 2.0, "scale": 0.3}),
            ([normal(2, 5, 64), KEYS, KEYS], [None, None, None, normal(1, 1, 5, 5)], {}),
        )
    ],
    (
        "DynamicQuantizeMatMul",
        [normal(3, 8), C(signed_weights(8, 5)), C(positive(5) / 99), C(np.zeros(5, np.int8)), C(normal(5))],
        "f",
        {},
    ),
    *[
        ("MatMulNBits", [normal(3, 40), C(whole(np.uint8, 6, 3, 8)), C(normal(6, 3)), *zero], "f", more)
        for zero, more in (
            ([], {"K": 40, "N": 6, "bits": 4, "block_size": 16}),
            ([C(whole(np.uint8, 6, 2))], {"K": 40, "N": 6, "bits": 4, "block_size": 16}),
        )
    ],
]


def scale(size: float, zero: int, dtype: Any = np.uint8) -> list[Const]:
    """A scale and a zero point."""
    return [C(size, F), C(zero, dtype)]


PLANES = [whole(np.uint8, 1, 30, 6, 30), *scale(0.0513, 120), *scale(0.0297, 100)]
WHOLE: list[tuple[str, list[Any], str, dict[str, Any]]] = [
    *[
        (
            op,
            [whole(np.uint8, 2, 30), *scale(0.1117, 120), whole(np.uint8, 30), *scale(0.2311, 9), *result],
            "u",
            {},
        )
        for op, result in (("QLinearAdd", scale(0.3019, 100)), ("QLinearMul", scale(2.5131, 100)))
    ],
    (
        "QLinearSigmoid",
        [whole(np.int8, 4, 5), *scale(0.0513, 3, np.int8), *scale(0.0041, -128, np.int8)],
        "s",
        {},
    ),
    (
        "QLinearLeakyRelu",
        [whole(np.uint8, 4, 5), *scale(0.0513, 120), *scale(0.0297, 30)],
        "u",
        {"alpha": 0.1},
    ),
    (
        "QLinearSoftmax",
        [whole(np.uint8, 4, 5), *scale(0.02, 120), *scale(1 / 256, 0)],
        "u",
        {"axis": -1, "opset": 13},
    ),
    ("QLinearGlobalAveragePool", PLANES, "u", {"channels_last": 0}),
    ("QLinearGlobalAveragePool", PLANES, "u", {"channels_last": 1}),
    ("QLinearAveragePool", PLANES, "u", {"kernel_shape": [3, 3], "strides": [2, 1], "pads": [1, 1, 1, 1]}),
    (
        "QLinearConcat",
        [
            *scale(0.0997, 100),
            whole(np.uint8, 2, 30),
            *scale(0.1313, 90),
            whole(np.uint8, 2, 20),
            *scale(0.0707, 128),
        ],
        "u",
        {"axis": 1},
    ),
    (
        "MatMulIntegerToFloat",
        [whole(np.uint8, 3, 8), C(signed_weights(8, 5)), C(0.1, F), C(positive(5)), C(120, np.uint8)],
        "f",
        {},
    ),
    (
        "QGemm",
        [
            *(whole(np.uint8, 3, 8), *scale(0.0997, 120)),
            *(C(signed_weights(5, 8)), C(positive(5) / 99), C(whole(np.int8, 5))),
            *(C(whole(np.int8, 5).astype(I4)), *scale(0.4019, 128)),
        ],
        "u",
        {"transB": 1, "alpha": 0.5},
    ),
]


def _id(case: tuple[Any, ...]) -> str:
    op, _, _, attributes = case
    shown = ",".join(f"{k}={v}" for k, v in attributes.items())
    return op + (f"[{shown}]" if shown else "")


def onnxruntimes(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(y) for y in session.run(None, feeds)]


def compared(case: tuple[Any, ...], folder: Path) -> tuple[OnnxModule, dict[str, torch.Tensor], list[Any]]:
    """The module, its inputs and its outputs, whose values are onnxruntime's."""
    op, operands, outputs, attributes = case
    model = model_of(op, operands, outputs, attributes)
    feeds = {f"x{i}": x for i, x in enumerate(operands) if x is not None and not isinstance(x, Const)}
    module = imported(model, folder)
    inputs = {k: torch.from_numpy(x) for k, x in feeds.items()}
    for x in inputs.values():
        x.requires_grad_(x.is_floating_point())
    results = module(*inputs.values())
    results = list(results) if isinstance(results, tuple) else [results]
    for ours, theirs in zip(results, onnxruntimes(model, feeds), strict=True):
        values = ours.detach().numpy()
        assert values.dtype == theirs.dtype and values.shape == theirs.shape
        if values.dtype.kind == "f":
            np.testing.assert_allclose(values, theirs, rtol=1e-4, atol=1e-5)
        else:  # where a value lies half-way between two numbers, float32 may fall on either side
            difference = np.abs(values.astype(int) - theirs.astype(int))
            assert difference.max() <= 1 and np.mean(difference > 0) < 0.02
    return module, inputs, results


@pytest.mark.parametrize("case", FLOAT, ids=_id)
def test_float_operators_are_onnxruntimes_and_train(case: tuple[Any, ...], tmp_path: Path) -> None:
    module, inputs, results = compared(case, tmp_path)
    torch.stack([(y * torch.randn_like(y)).sum() for y in results if y.is_floating_point()]).sum().backward()
    trained = [x for x in inputs.values() if x.requires_grad] + list(module.parameters())
    assert trained and all(x.grad is not None and bool(x.grad.any()) for x in trained)


@pytest.mark.parametrize("case", WHOLE, ids=_id)
def test_operators_on_whole_numbers_are_onnxruntimes(case: tuple[Any, ...], tmp_path: Path) -> None:
    module, _, _ = compared(case, tmp_path)
    assert not list(module.parameters())


def test_sixteen_bit_pairs_pass_gradients(tmp_path: Path) -> None:
    """onnxruntime's quantiser writes these into its own domain before version 21."""
    text = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (float[2,4] x) => (float[2,4] y) {
        s = Constant<value_float=0.001>()
        q = com.microsoft.QuantizeLinear(x, s, z)
        y = com.microsoft.DequantizeLinear(q, s, z) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.array(30000, np.uint16), "z"))
    x = normal(2, 4)
    module, data = imported(model, tmp_path), torch.from_numpy(x).requires_grad_()
    y = module(data)
    np.testing.assert_allclose(y.detach().numpy(), onnxruntimes(model, {"x": x})[0], atol=1e-6)
    (grad,) = torch.autograd.grad(y.sum(), data)
    assert torch.equal(grad, torch.ones(2, 4))


class _Calibration(CalibrationDataReader):
    """Gives the same input once."""

    def __init__(self, x: np.ndarray) -> None:
        self._feeds = iter([{"x": x}])

    def get_next(self) -> Any:
        return next(self._feeds, None)


@pytest.mark.parametrize("kind", ["QDQ", "QOperator", "dynamic"])
def test_what_onnxruntimes_quantiser_writes_trains(kind: str, tmp_path: Path) -> None:
    """The gradient that passes it is near that of the model in floats, and none is lost."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[2,3,8,8] x) => (float[2,5] y) {
        scaled = Mul(x, gain)
        a = Conv<pads=[1,1,1,1]>(scaled, w, b)
        r = LeakyRelu<alpha=0.2>(a)
        s = Sigmoid(r)
        c = Concat<axis=1>(r, s)
        p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(c)
        m = GlobalAveragePool(p)
        f = Flatten(m)
        y = Gemm<transB=1>(f, v, u) }""")
    model.graph.node[0].name = "scale"
    rng = np.random.default_rng(1)
    shapes = {"gain": (3, 1, 1), "w": (4, 3, 3, 3), "b": (4,), "v": (5, 8), "u": (5,)}
    weights = {name: rng.standard_normal(shape).astype(F) for name, shape in shapes.items()}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    x = rng.standard_normal((2, 3, 8, 8)).astype(F)
    source, target = tmp_path / "float.onnx", tmp_path / "quantised.onnx"
    onnx.save(model, str(source))
    if kind == "dynamic":
        quantize_dynamic(source, target)
    else:
        quantize_static(
            str(source),
            str(target),
            _Calibration(1.5 * x),  # so that nothing is cut, which would have no gradient
            quant_format=getattr(QuantFormat, kind),
            weight_type=QuantType.QInt8,
            nodes_to_exclude=["scale"],
        )
    grads: list[torch.Tensor] = []
    for path in (source, target):
        module = from_onnx(path)
        y = module(torch.from_numpy(x))
        (y * torch.arange(1.0, 6)).sum().backward()
        assert all(p.grad is not None for p in module.parameters())
        grads.append(module.get_parameter("gain").grad)  # type: ignore[arg-type]
        if path == target:
            expected = onnxruntimes(onnx.load(str(path)), {"x": x})[0]
            np.testing.assert_allclose(y.detach().numpy(), expected, atol=0.02)
    assert float((grads[1] - grads[0]).norm() / grads[0].norm()) < 0.1


REFUSED = [
    ("FusedConv", [normal(1, 2, 6, 6), C(normal(3, 2, 3, 3))], "f", {"activation": "Swoosh"}, "Swoosh"),
    ("MultiHeadAttention", [normal(2, 5, 2, 3, 4)], "f", HEADS, "packed"),
    ("Attention", QKV, "f", {**HEADS, "do_rotary": 1}, "do_rotary"),
    ("SkipLayerNormalization", [X, X, W8], "ff", {}, "statistics"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0]}-{case[4]}")
def test_what_is_not_exact_is_refused_by_name(case: tuple[Any, ...], tmp_path: Path) -> None:
    op, operands, outputs, attributes, words = case
    with pytest.raises(UnsupportedError) as caught:
        imported(model_of(op, operands, outputs, attributes), tmp_path)
    assert caught.value.code == "IRC302" and f"com.microsoft::{op}" in str(caught.value)
    assert words in str(caught.value)
