"""Quantisation: the values against onnxruntime, and the straight-through gradient against torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import irc
from irc.frontends.onnx import OnnxModule, from_onnx
from irc.ir.errors import UnsupportedError

_RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(np.float32)


def whole(dtype: Any, *shape: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    return _RNG.integers(limits.min, limits.max + 1, shape).astype(dtype)


def signed_weights(*shape: int) -> np.ndarray:
    """Draws weights of half the range: on some processors onnxruntime adds products with bytes in 16 bits."""
    return whole(np.int8, *shape) // np.int8(2)


def model_of(body: str, weights: dict[str, Any] | None = None, opset: int = 21) -> onnx.ModelProto:
    """A model in ONNX's text form, with initializers beside it."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {body}')
    for name, value in (weights or {}).items():
        tensor = value if isinstance(value, onnx.TensorProto) else numpy_helper.from_array(np.asarray(value))
        tensor.name = name
        model.graph.initializer.append(tensor)
    return model


def imported(model: onnx.ModelProto, folder: Path) -> OnnxModule:
    onnx.save(model, str(folder / "m.onnx"))
    return from_onnx(folder / "m.onnx")


def onnxruntimes(model: onnx.ModelProto, *inputs: np.ndarray) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {i.name: x for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return [np.asarray(y) for y in session.run(None, feeds)]


def references(model: onnx.ModelProto, *inputs: np.ndarray) -> list[np.ndarray]:
    names = [i.name for i in model.graph.input]
    return list(ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True))))  # type: ignore


def same(module: OnnxModule, expected: list[np.ndarray], *inputs: np.ndarray) -> None:
    actual = module(*map(torch.from_numpy, inputs))
    actual = actual if isinstance(actual, tuple) else (actual,)
    for ours, theirs in zip(actual, expected, strict=True):
        values = ours.detach().numpy()
        assert values.dtype == theirs.dtype and values.shape == theirs.shape
        np.testing.assert_allclose(values, theirs, rtol=1e-5, atol=1e-6)


_X = normal(2, 3, 4) * 40


@pytest.mark.parametrize(
    ("zero", "scale", "attributes"),
    [
        (np.uint8(100), np.float32(0.3), ""),
        (np.int8(-5), np.float32(0.3), ""),
        (np.uint16(30000), np.float32(0.001), ""),
        (np.array([0, 9, -9], np.int8), np.array([0.1, 0.2, 0.3], np.float32), "axis=1"),
        (whole(np.int8, 2, 3, 2), np.abs(normal(2, 3, 2)) + 1, "axis=-1, block_size=2"),
    ],
)
def test_quantised_is_onnxruntimes(zero: Any, scale: Any, attributes: str, tmp_path: Path) -> None:
    kind = np.asarray(zero).dtype.name
    attributes = f"<{attributes}>" if attributes else ""
    body = f"g (float[2,3,4] x) => ({kind}[2,3,4] q, float[2,3,4] y) {{ q = QuantizeLinear{attributes}"
    body += f"(x, s, z) y = DequantizeLinear{attributes}(q, s, z) }}"
    model = model_of(body, {"s": scale, "z": zero})
    same(imported(model, tmp_path), onnxruntimes(model, _X), _X)


@pytest.mark.parametrize("axis", [None, 1])
def test_a_pair_has_the_gradient_of_fake_quantisation(axis: int | None, tmp_path: Path) -> None:
    """To data and to scale; the pair reaches across operators that move data."""
    scale = np.array([0.25], np.float32) if axis is None else np.array([0.25, 0.5, 0.125], np.float32)
    zero = np.array([10], np.int8) if axis is None else np.array([10, 0, -10], np.int8)
    model = model_of(
        f"""g (float[2,3,4] x, float[{len(scale)}] s) => (float[2,4,3] y) {{
            q = QuantizeLinear(x, s, z)
            t = Transpose<perm=[0,2,1]>(q)
            y = DequantizeLinear<axis=2>(t, s, z) }}""",
        {"z": zero},
    )
    x, s = torch.from_numpy(_X).requires_grad_(), torch.from_numpy(scale).requires_grad_()
    actual = imported(model, tmp_path)(x, s)
    np.testing.assert_allclose(actual.detach(), onnxruntimes(model, _X, scale)[0])
    weight = torch.randn_like(actual)
    found = torch.autograd.grad((actual * weight).sum(), (x, s))
    kind = "tensor" if axis is None else "channel"
    fake: Any = getattr(torch, f"_fake_quantize_learnable_per_{kind}_affine")
    if axis is None:
        zeros = torch.tensor([10.0], requires_grad=True)
        expected = fake(x, s, zeros, -128, 127)
    else:
        zeros = torch.tensor([10.0, 0, -10], requires_grad=True)
        expected = fake(x, s, zeros, 1, -128, 127)
    wanted = torch.autograd.grad((expected.transpose(1, 2) * weight).sum(), (x, s))
    torch.testing.assert_close(actual, expected.transpose(1, 2))
    assert 0 < int((wanted[0] == 0).sum()) < x.numel(), "some are cut, some are not"
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_quantised_training_runs_within_a_plan(tmp_path: Path) -> None:
    w = normal(8, 4)
    model = model_of(
        """g (float[2,4] x) => (float[2,8] y) {
            wq = QuantizeLinear<axis=0>(w, ws, wz)
            wd = DequantizeLinear<axis=0>(wq, ws, wz)
            xq = QuantizeLinear(x, xs, xz)
            xd = DequantizeLinear(xq, xs, xz)
            y = Gemm<transB=1>(xd, wd, b) }""",
        {
            "w": w,
            "b": normal(8),
            "ws": np.abs(normal(8)) / 50 + 0.01,
            "wz": np.zeros(8, np.int8),
            "xs": np.float32(0.02),
            "xz": np.uint8(128),
        },
    )
    module, x = imported(model, tmp_path), normal(2, 4)
    assert {n for n, _ in module.named_parameters()} == {"w", "b"}
    same(module, onnxruntimes(model, x), x)
    data = torch.from_numpy(x)
    module(data).square().sum().backward()
    plain = {n: p.grad for n, p in module.named_parameters()}
    assert all(g is not None and bool(g.any()) for g in plain.values())
    module.zero_grad()
    irc.optimize(module, data, "100%", costs="analytic")(data).square().sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name])


DYNAMIC = {
    "MatMulInteger": ("float[3,4]", "float[3,5]", signed_weights(4, 5), np.int8(3)),
    "ConvInteger": ("float[1,4,6,5]", "float[1,6,4,3]", whole(np.uint8, 6, 4, 3, 3), np.uint8(120)),
}


@pytest.mark.parametrize("op", DYNAMIC)
def test_dynamic_quantisation_passes_gradients(op: str, tmp_path: Path) -> None:
    """As the same product of floats that are not rounded."""
    shape, result, w, zero = DYNAMIC[op]
    model = model_of(
        f"""g ({shape} x) => ({result} y) {{
            q, s, z = DynamicQuantizeLinear(x)
            p = {op}(q, w, z, wz)
            f = Cast<to=1>(p)
            y = Mul(f, s) }}""",
        {"w": w, "wz": zero},
    )
    x = normal(*map(int, shape[6:-1].split(",")))
    module, data = imported(model, tmp_path), torch.from_numpy(x).requires_grad_()
    same(module, onnxruntimes(model, x), x)
    real = torch.from_numpy(w).float() - float(zero)
    y = module(data)
    smooth = data @ real if op == "MatMulInteger" else torch.nn.functional.conv2d(data, real)
    weight = torch.randn_like(y)
    found, wanted = (torch.autograd.grad((v * weight).sum(), data) for v in (y, smooth))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("kind", ["INT4", "UINT4"])
def test_four_bits_are_held_wider(kind: str, tmp_path: Path) -> None:
    """As constants that are dequantised, and between a pair."""
    code = getattr(onnx.TensorProto, kind)
    low, high = (-8, 8) if kind == "INT4" else (0, 16)
    packed = helper.make_tensor("w", code, (4, 6), _RNG.integers(low, high, 24).tolist())
    zero = helper.make_tensor("z", code, (), [3])
    model = model_of(
        """g (float[2,4] x) => (float[2,6] y) {
            w0 = DequantizeLinear<axis=0, block_size=2>(w, s)
            q = QuantizeLinear(x, t, z)
            d = DequantizeLinear(q, t, z)
            y = MatMul(d, w0) }""",
        {"w": packed, "z": zero, "s": np.abs(normal(2, 6)), "t": np.float32(0.25)},
    )
    x = normal(2, 4) * 3
    same(imported(model, tmp_path), onnxruntimes(model, x), x)


def test_four_bits_elsewhere_are_refused(tmp_path: Path) -> None:
    zero = helper.make_tensor("z", onnx.TensorProto.INT4, (), [3])
    model = model_of(
        "g (float[2] x) => (int4[2] y) { y = QuantizeLinear(x, s, z) }", {"s": np.float32(1), "z": zero}
    )
    with pytest.raises(UnsupportedError) as caught:
        imported(model, tmp_path)
    assert caught.value.code == "IRC304" and "INT4" in str(caught.value)


def test_float8_pair_is_the_references(tmp_path: Path) -> None:
    zero = helper.make_tensor("z", onnx.TensorProto.FLOAT8E4M3FN, (), [0.0])
    model = model_of(
        """g (float[2,3,4] x) => (float[2,3,4] y) {
            q = QuantizeLinear(x, s, z)
            y = DequantizeLinear(q, s, z) }""",
        {"s": np.float32(0.1), "z": zero},
    )
    module = imported(model, tmp_path)
    same(module, references(model, _X), _X)
    x = torch.from_numpy(_X).requires_grad_()
    (grad,) = torch.autograd.grad(module(x).sum(), x)
    torch.testing.assert_close(grad, (x.abs() <= 44.8).float())


WHOLE: list[tuple[str, dict[str, Any], np.ndarray]] = [
    (
        "g (uint8[2,3,4] x) => (uint8[2,3,5] y) { y = QLinearMatMul(x, xs, xz, w, ws, wz, ys, yz) }",
        {"w": whole(np.uint8, 4, 5), "ws": np.float32(0.02), "wz": np.uint8(120)},
        whole(np.uint8, 2, 3, 4),
    ),
    (
        "g (uint8[1,4,6,5] x) => (uint8[1,6,?,?] y) { y = QLinearConv<group=2, pads=[1,0,2,1], strides=[2,1]>"
        "(x, xs, xz, w, ws, wz, ys, yz, b) }",
        {
            "w": signed_weights(6, 2, 3, 3),
            "ws": np.abs(normal(6)) / 100,
            "wz": np.zeros(6, np.int8),
            "b": whole(np.int16, 6).astype(np.int32),
        },
        whole(np.uint8, 1, 4, 6, 5),
    ),
    (
        "g (uint8[2,3,4] x) => (int32[2,3,5] y) { y = MatMulInteger(x, w, xz, wz) }",
        {"w": signed_weights(4, 5), "wz": np.int8(3)},
        whole(np.uint8, 2, 3, 4),
    ),
    (
        "g (uint8[1,4,6,5] x) => (int32[1,6,?,?] y) { y = ConvInteger<pads=[1,1,1,1]>(x, w, xz, wz) }",
        {"w": whole(np.uint8, 6, 4, 3, 3), "wz": np.uint8(120)},
        whole(np.uint8, 1, 4, 6, 5),
    ),
    (
        "g (float[3,4] x) => (uint8[3,4] y, float s, uint8 z) { y, s, z = DynamicQuantizeLinear(x) }",
        {},
        normal(3, 4),
    ),
]


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case[0].split(" = ")[1].split("(")[0].split("<")[0])
def test_products_of_whole_numbers_are_onnxruntimes(
    case: tuple[str, dict[str, Any], np.ndarray], tmp_path: Path
) -> None:
    body, weights, x = case
    common = {"xs": np.float32(0.03), "xz": np.uint8(110), "ys": np.float32(0.4), "yz": np.uint8(128)}
    used = {
        k: v
        for k, v in common.items()
        if k in body.replace("(", " ").replace(",", " ").replace(")", " ").split()
    }
    model = model_of(body, {**used, **weights})
    same(imported(model, tmp_path), onnxruntimes(model, x), x)


def test_scales_are_no_parameters_and_a_dequantised_weight_is_one(tmp_path: Path) -> None:
    model = model_of(
        "g (float[2,4] x) => (float[2,5] y) { w = DequantizeLinear<axis=1>(q, s) y = MatMul(x, w) }",
        {"q": whole(np.int8, 4, 5), "s": np.abs(normal(5))},
    )
    module, x = imported(model, tmp_path), normal(2, 4)
    assert [name for name, _ in module.named_parameters()] == ["w"]
    same(module, onnxruntimes(model, x), x)
