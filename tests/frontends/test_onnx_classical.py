"""Operators of classical models against onnxruntime, with the gradients of what they compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from irc.frontends.onnx import OnnxModule, from_onnx
from irc.ir.errors import UnsupportedError

X = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)


def model_of(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 1]> g (float[5,3] x) => {body}'
    )


def imported(model: onnx.ModelProto, folder: Path) -> OnnxModule:
    onnx.save(model, str(folder / "m.onnx"))
    return from_onnx(folder / "m.onnx")


CASES = [
    "(float[5,3] y) { y = ai.onnx.ml.Binarizer<threshold=0.5>(x) }",
    "(float[5,3] y) { y = ai.onnx.ml.Scaler<offset=[1.0,2.0,3.0], scale=[0.5,2.0,4.0]>(x) }",
    *[f'(float[5,3] y) {{ y = ai.onnx.ml.Normalizer<norm="{n}">(x) }}' for n in ("L1", "L2")],
    "(float[5,2] y) { y = ai.onnx.ml.LinearRegressor<targets=2, coefficients=[1.0,2.0,3.0,4.0,5.0,6.0],"
    " intercepts=[0.5,-0.5]>(x) }",
    "(int64[5] y, float[5,3] z) { y, z = ai.onnx.ml.LinearClassifier<classlabels_ints=[7,8,9],"
    ' post_transform="SOFTMAX", coefficients=[1.0,2.0,3.0,4.0,5.0,6.0,7.0,8.0,-9.0],'
    " intercepts=[0.5,-0.5,1.0]>(x) }",
    "(float[5,2] y) { i = Constant<value_ints=[2,0]>() y = ai.onnx.ml.ArrayFeatureExtractor(x, i) }",
]


@pytest.mark.parametrize("body", CASES)
def test_classical_operators_are_onnxruntimes(body: str, tmp_path: Path) -> None:
    model = model_of(body)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = [np.asarray(y) for y in session.run(None, {"x": X})]
    module, x = imported(model, tmp_path), torch.from_numpy(X).requires_grad_()
    actual = module(x)
    actual = actual if isinstance(actual, tuple) else (actual,)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.detach().numpy().dtype == theirs.dtype
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-5, atol=1e-6)
    assert ("Binarizer" in body) == (not actual[-1].requires_grad)


def test_labels_that_are_words_are_refused(tmp_path: Path) -> None:
    body = (
        '(string[5] y, float[5,3] z) { y, z = ai.onnx.ml.LinearClassifier<classlabels_strings=["a","b","c"],'
    )
    with pytest.raises(UnsupportedError, match="whole numbers"):
        imported(model_of(body + " coefficients=[1.0,2.0,3.0,4.0,5.0,6.0,7.0,8.0,9.0]>(x) }"), tmp_path)


@pytest.mark.parametrize("op", ["Momentum", "Adam"])
def test_optimisers_are_refused_by_name(op: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "ai.onnx.preview.training" : 1]>'
        "g (float r, int64 t, float[2] x) => (float[2] y) "
        f"{{ y = ai.onnx.preview.training.{op}(r, t, x, x, x, x) }}"
    )
    with pytest.raises(UnsupportedError, match=rf"IRC301.*ai.onnx.preview.training::{op}"):
        imported(model, tmp_path)
