"""Casts between element types, by value and by bits, against the reference evaluator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from irc.frontends.onnx import OnnxModule, from_onnx
from irc.ir.errors import UnsupportedError

X = np.array([0, 0.3, -1.7, 464, 465, 1e6, -1e6, np.inf, -np.inf, np.nan, 1e-3, 3, 200], np.float32)
FLOAT8 = ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")


def model_of(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 12, opset_import: ["" : 26]> g (float[13] x) => {body}')


def imported(model: onnx.ModelProto, folder: Path) -> OnnxModule:
    onnx.save(model, str(folder / "m.onnx"))
    return from_onnx(folder / "m.onnx")


CASTS = [
    *[f"Cast<to={getattr(TensorProto, kind)}, saturate={s}>(x)" for kind in FLOAT8 for s in (0, 1)],
    *[
        f'Cast<to={TensorProto.FLOAT8E8M0}, saturate=1, round_mode="{mode}">(a)'
        for mode in ("up", "down", "nearest")
    ],
]


@pytest.mark.parametrize("cast", CASTS)
def test_floats_of_eight_bits_are_the_references(cast: str, tmp_path: Path) -> None:
    """There and back; of the type that has exponents only, positive numbers within its range."""
    model = model_of(
        "(float[13] y) { o = Constant<value_float=0.1>() m = Abs(x) a = Clip(m, o) "
        f"b = {cast} y = Cast<to=1>(b) }}"
    )
    x = np.nan_to_num(X, nan=5.0, posinf=7.0, neginf=9.0) if "round_mode" in cast else X
    [expected] = ReferenceEvaluator(model).run(None, {"x": x})  # type: ignore[misc]
    actual = imported(model, tmp_path)(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(actual, expected)


def test_bits_are_kept(tmp_path: Path) -> None:
    module = imported(model_of("(int32[13] y) { y = BitCast<to=6>(x) }"), tmp_path)
    assert np.array_equal(module(torch.from_numpy(X)).numpy(), X.view(np.int32))


def test_bits_of_another_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"BitCast .* from torch.float32 to torch.int64"):
        imported(model_of("(int64[13] y) { y = BitCast<to=7>(x) }"), tmp_path)


def test_a_type_that_torch_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"Cast .* to INT4"):
        imported(model_of(f"(int4[13] y) {{ y = Cast<to={TensorProto.INT4}>(x) }}"), tmp_path)
