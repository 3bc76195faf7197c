"""Attention and its relatives against the reference evaluator of the standard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import parser
from support.onnx_nodes import Const, check, imported, model_of, run
from torch.overrides import TorchFunctionMode

from irc.ir.errors import UnsupportedError

F = np.float32
_RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(F)


def qkv(rows: int = 3, columns: int = 5, groups: int = 2) -> list[np.ndarray]:
    return [normal(2, 4, rows, 8), normal(2, 4 // groups, columns, 8), normal(2, 4 // groups, columns, 6)]


_FIRST_HALF = np.arange(5) < np.array([[3], [5], [0]])  # the last query sees nothing
CASES: dict[str, tuple[Any, ...]] = {
    "plain": (23, qkv(), {}),
    "flat": (
        23,
        [normal(2, 3, 32), normal(2, 5, 16), normal(2, 5, 12)],
        {"q_num_heads": 4, "kv_num_heads": 2},
    ),
    "capped": (23, qkv(), {"softcap": 0.7, "scale": 0.9, "qk_matmul_output_mode": 1}, 4),
    "biased scores": (23, [*qkv(), normal(3, 5)], {"is_causal": 1, "qk_matmul_output_mode": 2}, 4),
    "empty row": (24, [*qkv(), Const(_FIRST_HALF)], {"qk_matmul_output_mode": 3}, 4),
    "short mask": (24, [*qkv(), normal(4, 1, 4)], {}),
    "past": (23, [*qkv(3, 3, 1), None, normal(2, 4, 2, 8), normal(2, 4, 2, 6)], {"is_causal": 1}, 3),
    "cache": (24, [*qkv(), None, None, None, np.array([4, 2])], {"is_causal": 1}),
    "cache and mask": (24, [*qkv(), Const(np.tri(3, 5, 2) > 0), None, None, np.array([4, 5])], {}),
    "window": (25, qkv(), {"left_window_size": 1, "right_window_size": 2}),
    "left window": (25, [*qkv(), normal(3, 5)], {"left_window_size": 1, "is_causal": 1}),
    "window on a cache": (25, [*qkv(), None, None, None, np.array([5, 3])], {"left_window_size": 1}),
    "precision": (23, [x.astype(np.float16) for x in qkv()], {"softmax_precision": 1}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_is_the_references(case: tuple[Any, ...], tmp_path: Path) -> None:
    opset, operands, attributes, *outputs = case
    check(tmp_path, "Attention", opset, operands, *outputs, **attributes)


class _Calls(TorchFunctionMode):
    """Which of torch's functions are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["plain", "flat", "short mask", "past", "cache", "window"])
def test_torchs_own_attention_runs_where_it_means_the_same(name: str, tmp_path: Path) -> None:
    opset, operands, attributes, *outputs = CASES[name]
    module = imported(model_of("Attention", opset, operands, *outputs, **attributes), tmp_path)
    with _Calls() as calls:
        run(module, operands)
    assert "scaled_dot_product_attention" in calls.names


@pytest.mark.parametrize("name", ["plain", "window", "left window", "window on a cache"])
def test_16_bits_run_step_by_step_on_a_cpu_alone(name: str, tmp_path: Path) -> None:
    opset, operands, attributes = CASES[name]
    operands = [x.astype(np.float16) if x is not None and x.dtype == F else x for x in operands]
    module = imported(model_of("Attention", opset, operands, **attributes), tmp_path)
    inputs = [torch.from_numpy(x) for x in operands if x is not None]
    for device in ("cpu", "meta"):  # the second stands for any accelerator
        with _Calls() as calls:
            y = module.to(device)(*(x.to(device) for x in inputs))
        assert y.shape == (2, 4, 3, 6) and y.dtype is torch.float16
        assert ("scaled_dot_product_attention" in calls.names) == (device == "meta")


def test_steps_have_the_gradients_of_torchs_own(tmp_path: Path) -> None:
    operands = [*qkv(), Const(_FIRST_HALF)]
    gradients: list[list[torch.Tensor]] = []
    for outputs in (1, 4):  # with its scores as an output it is computed step by step
        module = imported(model_of("Attention", 24, operands, outputs), tmp_path)
        leaves = [torch.from_numpy(x).requires_grad_() for x in operands[:3]]
        results = module(*leaves)
        y = results[0] if outputs == 4 else results
        (y * torch.arange(y.numel()).reshape(y.shape)).sum().backward()
        gradients.append([leaf.grad for leaf in leaves if leaf.grad is not None])
    for fused, stepped in zip(*gradients, strict=True):
        assert torch.isfinite(stepped).all()
        torch.testing.assert_close(stepped, fused, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "operands",
    [
        [*qkv(), normal(3, 1)],  # repeated, or extended by keys that are not seen
        [*qkv(), None, normal(2, 2, 2, 8)],
    ],
    ids=["mask of one key", "half a past"],
)
def test_what_has_two_meanings_is_refused(operands: list[Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Attention"):
        imported(model_of("Attention", 24, operands), tmp_path)


_LINEAR = [normal(2, 3, 8), normal(2, 3, 4), normal(2, 3, 6), normal(2, 2, 2, 3)]
_DECAY, _RATE = -np.abs(normal(2, 3, 2)), np.abs(normal(2, 3, 1))


@pytest.mark.parametrize(
    ("rule", "more"),
    [
        ("linear", []),
        ("gated", [-np.abs(normal(2, 3, 4))]),
        ("delta", [None, _RATE]),
        ("gated_delta", [_DECAY, np.abs(normal(2, 3, 2))]),
    ],
)
def test_linear_attention_is_the_references(rule: str, more: list[Any], tmp_path: Path) -> None:
    heads = {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": rule}
    check(tmp_path, "LinearAttention", 27, [*_LINEAR, *more], 2, **heads)


def test_linear_attention_has_its_gradients(tmp_path: Path) -> None:
    operands = [x.astype(np.float64) for x in (*_LINEAR, _DECAY, _RATE)]
    model = model_of("LinearAttention", 27, operands, 2, q_num_heads=4, kv_num_heads=2)
    module = imported(model, tmp_path)
    leaves = [torch.from_numpy(x).requires_grad_() for x in operands]
    assert torch.autograd.gradcheck(module, leaves)


@pytest.mark.parametrize("past", [True, False])
def test_causal_convolution_is_the_references(past: bool, tmp_path: Path) -> None:
    operands = [normal(2, 3, 2), Const(normal(3, 1, 4)), Const(normal(3))]
    operands += [normal(2, 3, 3)] if past else []
    check(tmp_path, "CausalConvWithState", 27, operands, 2, activation="silu")


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_cache_update_is_the_references(mode: str, tmp_path: Path) -> None:
    start = np.array([1, 3 if mode == "circular" else 2])
    check(tmp_path, "TensorScatter", 24, [normal(2, 3, 4, 5), normal(2, 3, 2, 5), start], mode=mode)
    check(tmp_path, "TensorScatter", 24, [normal(2, 4, 5), normal(2, 2, 5)], axis=1)


def test_swiglu_is_the_references(tmp_path: Path) -> None:
    check(tmp_path, "SwiGLU", 28, [normal(2, 3), normal(2, 3)], alpha=1.7)


def test_graphs_of_flex_attention_change_scores_and_shares(tmp_path: Path) -> None:
    scores = parser.parse_graph(
        "g (float[2,4,3,5] s) => (float[2,4,3,5] t) { two = Constant<value_float=2.0>() t = Mul(s, two) }"
    )
    shares = parser.parse_graph(
        "g (float[2,4,3,5] s) => (float[2,4,3,5] t) { half = Constant<value_float=0.5>() t = Sub(s, half) }"
    )
    operands = qkv()
    check(tmp_path, "FlexAttention", 1, operands, domain="ai.onnx.preview", score_mod=scores, prob_mod=shares)
    check(tmp_path, "FlexAttention", 1, operands, domain="ai.onnx.preview", scale=0.3)
    halves = [x.astype(np.float16) for x in operands]
    check(tmp_path, "FlexAttention", 1, halves, domain="ai.onnx.preview")
