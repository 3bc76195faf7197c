"""Gradients of windows and regions, regions that only a run tells, and what onnxruntime does not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.onnx_nodes import Const, check, imported, inputs_of, model_of, run

_RNG = np.random.default_rng(0)
_REGIONS = np.array([[0.5, 1, 4, 6.5], [-3, -2, 5, 9], [3, 2, 3.5, 2.25]])
_IMAGES = np.array([1, 0, 1])


def normal(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape)


GRADIENTS: list[tuple[str, int, list[Any], dict[str, Any]]] = [
    *[
        ("RoiAlign", 16, [normal(2, 2, 7, 8), Const(_REGIONS), Const(_IMAGES)], {"output_height": 2, **more})
        for more in ({}, {"mode": "max"}, {"sampling_ratio": 2})
    ],
    ("MaxRoiPool", 22, [normal(2, 2, 7, 8), Const(np.c_[_IMAGES, _REGIONS])], {"pooled_shape": [2, 3]}),
    (
        "DeformConv",
        22,
        [normal(1, 2, 3, 4), normal(2, 1, 2, 2), normal(1, 8, 2, 3), normal(2), normal(1, 4, 2, 3)],
        {"group": 2},
    ),
    ("Col2Im", 18, [normal(1, 6, 6), Const([3, 4]), Const([2, 3])], {"pads": [0, 1, 0, 0]}),
    ("MaxUnpool", 22, [normal(1, 1, 2, 2), Const([[[[1, 3], [4, 6]]]])], {"kernel_shape": [2, 2]}),
    ("LpPool", 22, [normal(1, 2, 4, 5)], {"kernel_shape": [2, 3], "p": 3, "pads": [1, 0, 0, 0]}),
    ("CenterCropPad", 18, [normal(3, 4), Const([2, 7])], {}),
]


@pytest.mark.parametrize("case", GRADIENTS, ids=[f"{c[0]}-{i}" for i, c in enumerate(GRADIENTS)])
def test_gradients(case: tuple[str, int, list[Any], dict[str, Any]], tmp_path: Path) -> None:
    op, opset, operands, attributes = case
    module = imported(model_of(op, opset, operands, **attributes), tmp_path)
    leaves = [torch.from_numpy(x).requires_grad_() for x in inputs_of(operands).values()]
    assert torch.autograd.gradcheck(module, leaves, fast_mode=True)


def test_norm_of_a_window_of_zeros_hands_on_no_gradient(tmp_path: Path) -> None:
    operands = [np.zeros((1, 1, 2, 2), np.float32)]
    module = imported(model_of("LpPool", 18, operands, kernel_shape=[2, 2]), tmp_path)
    x = torch.from_numpy(operands[0]).requires_grad_()
    module(x).sum().backward()
    assert x.grad is not None and not x.grad.any()


@pytest.mark.parametrize("op", ["RoiAlign", "MaxRoiPool"])
def test_regions_that_only_a_run_tells(op: str, tmp_path: Path) -> None:
    x, regions = normal(2, 2, 7, 8).astype(np.float32), _REGIONS.astype(np.float32)
    boxes = np.c_[_IMAGES, regions].astype(np.float32)
    attributes: dict[str, Any] = {} if op == "RoiAlign" else {"pooled_shape": [2, 3]}
    free = [x, regions, _IMAGES] if op == "RoiAlign" else [x, boxes]
    fixed = [x, *(Const(operand) for operand in free[1:])]
    expected = run(imported(model_of(op, 22, fixed, **attributes), tmp_path), fixed)
    actual = run(imported(model_of(op, 22, free, **attributes), tmp_path), free)
    torch.testing.assert_close(actual, expected)


REFERENCE: list[tuple[str, int, list[Any], dict[str, Any]]] = [
    (
        "MaxUnpool",
        22,
        [normal(1, 1, 2, 2), Const([[[[5, 7], [13, 15]]]]), Const([1, 1, 5, 5])],
        {
            "kernel_shape": [2, 2],
            "strides": [2, 2],
        },
    ),
    *[
        ("GridSample", 22, [normal(2, 3, 5), normal(2, 4, 1)], {"mode": mode, "align_corners": 1})
        for mode in ("linear", "cubic")
    ],
    ("ReduceMax", 20, [np.zeros((2, 0), np.int32), Const([1])], {}),
    ("ReduceMin", 20, [np.zeros((2, 0), bool), Const([1])], {}),
    *[(op, 18, [np.array([[1, 2, 4], [7, 5, 3]]), Const([1])], {}) for op in ("ReduceL2", "ReduceMean")],
]


@pytest.mark.parametrize("case", REFERENCE, ids=[f"{c[0]}-{i}" for i, c in enumerate(REFERENCE)])
def test_operator_is_the_references(case: tuple[str, int, list[Any], dict[str, Any]], tmp_path: Path) -> None:
    op, opset, operands, attributes = case
    check(tmp_path, op, opset, operands, **attributes)


def test_layer_normalization_of_16_bits_tells_its_statistics_in_32(tmp_path: Path) -> None:
    data, factors = normal(2, 3, 4).astype(np.float16), normal(2, 4).astype(np.float16)
    operands = [data, *map(Const, factors)]
    module = imported(model_of("LayerNormalization", 17, operands, 3), tmp_path)
    y, mean, deviation = run(module, operands)
    x = torch.from_numpy(data).float()
    scale, bias = torch.from_numpy(factors)
    assert (y.dtype, mean.dtype, deviation.dtype) == (torch.float16, torch.float32, torch.float32)
    torch.testing.assert_close(mean, x.mean(-1, keepdim=True))
    torch.testing.assert_close(deviation, (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt())
    torch.testing.assert_close(y, ((x - mean) * deviation).half() * scale + bias)


def test_batch_normalization_of_16_bits_updates_its_statistics_in_32(tmp_path: Path) -> None:
    x = (normal(8, 3, 4) * 2 + 1).astype(np.float16)
    scale, bias, mean = normal(3), normal(3), np.zeros(3)
    var = np.ones(3)
    operands = [x, *(Const(v, np.float32) for v in (scale, bias, mean, var))]
    check(tmp_path, "BatchNormalization", 15, operands)
    module = imported(model_of("BatchNormalization", 15, operands), tmp_path).train()
    (y,) = run(module, operands)
    layer = torch.nn.BatchNorm1d(3)
    layer.load_state_dict({"weight": torch.tensor(scale), "bias": torch.tensor(bias)}, strict=False)
    expected = layer(torch.from_numpy(x).float())
    torch.testing.assert_close(y.float(), expected, rtol=1e-3, atol=1e-3)
    buffers = dict(module.named_buffers())
    assert [b.dtype for b in buffers.values()] == [torch.float32] * 2
    for name, b in zip(("running_mean", "running_var"), buffers.values(), strict=True):
        torch.testing.assert_close(b, getattr(layer, name))


_HALVES: list[tuple[str, int, list[Any], dict[str, Any]]] = [
    ("AveragePool", 22, [normal(1, 2, 4, 5, 4)], {"kernel_shape": [2, 3, 2]}),
    ("LRN", 13, [normal(2, 5, 3, 3)], {"size": 3}),
    ("GridSample", 22, [normal(1, 2, 4, 5), normal(1, 3, 3, 2) / 2], {"mode": "cubic"}),
]


@pytest.mark.parametrize("case", _HALVES, ids=lambda case: case[0])
def test_16_bits_where_torch_has_none_or_rounds_early(case: Any, tmp_path: Path) -> None:
    op, opset, operands, attributes = case
    results = [
        run(imported(model_of(op, opset, typed, **attributes), tmp_path), typed)[0].float()
        for typed in ([x.astype(dtype) for x in operands] for dtype in (np.float16, np.float32))
    ]
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)


_SCALES = Const([1, 1, 2, 3], np.float32)
_FIRST_VERSIONS: list[tuple[str, dict[str, Any], int, list[Any], dict[str, Any]]] = [
    ("LpPool", {"kernel_shape": [2, 3], "p": 3.0}, 18, [], {"kernel_shape": [2, 3], "p": 3}),
    ("GlobalLpPool", {"p": 3.0}, 13, [], {"p": 3}),
    ("Upsample", {"height_scale": 2.0, "width_scale": 3.0}, 9, [_SCALES], {}),
]


@pytest.mark.parametrize("case", _FIRST_VERSIONS, ids=lambda case: case[0])
def test_first_versions_say_the_same_otherwise(case: Any, tmp_path: Path) -> None:
    op, first, opset, more, attributes = case
    x = [normal(1, 2, 5, 4).astype(np.float32)]
    old = run(imported(model_of(op, 1, x, **first), tmp_path), x)
    new = run(imported(model_of(op, opset, [*x, *more], **attributes), tmp_path), x)
    torch.testing.assert_close(old, new)
