"""What of resampling onnxruntime does not tell: other element types, gradients, and which code runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.onnx_nodes import Const, check, imported, model_of, run

_RNG = np.random.default_rng(0)
_SIZES = Const([1, 2, 3, 7], np.int64)


def plane(dtype: Any = np.float32) -> np.ndarray:
    return (_RNG.standard_normal((1, 2, 6, 5)) * 50).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.uint8, np.int32])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_every_element_type_is_the_references(dtype: Any, mode: str, tmp_path: Path) -> None:
    check(tmp_path, "Resize", 19, [plane(dtype), None, None, _SIZES], mode=mode)


@pytest.mark.parametrize("transform", ["align_corners", "half_pixel_symmetric", "half_pixel"])
def test_lengths_with_a_fraction_are_the_references(transform: str, tmp_path: Path) -> None:
    operands = [plane(), None, Const([1, 1, 0.6, 1.3], np.float32)]
    check(tmp_path, "Resize", 19, operands, mode="linear", coordinate_transformation_mode=transform)


@pytest.mark.parametrize("more", [{"antialias": 1}, {"cubic_coeff_a": -0.5, "exclude_outside": 1}])
def test_gradients(more: dict[str, Any], tmp_path: Path) -> None:
    operands = [plane(np.float64), None, None, _SIZES]
    module = imported(model_of("Resize", 19, operands, mode="cubic", **more), tmp_path)
    assert torch.autograd.gradcheck(module, [torch.from_numpy(operands[0]).requires_grad_()])


@pytest.mark.parametrize(
    ("attributes", "native"),
    [
        ({"mode": "cubic"}, True),
        ({"mode": "cubic", "coordinate_transformation_mode": "align_corners"}, True),
        ({"mode": "cubic", "cubic_coeff_a": -0.5}, False),
        ({"mode": "linear", "antialias": 1, "exclude_outside": 1}, True),
        ({"mode": "linear", "antialias": 1}, False),
        ({"mode": "linear", "exclude_outside": 1}, True),
    ],
)
def test_torchs_own_runs_where_it_means_the_same(
    attributes: dict[str, Any], native: bool, tmp_path: Path
) -> None:
    operands = [plane(), None, None, _SIZES]
    module = imported(model_of("Resize", 19, operands, **attributes), tmp_path)
    with mock.patch.object(F, "interpolate", wraps=F.interpolate) as interpolate:
        run(module, operands)
    assert interpolate.called == native
