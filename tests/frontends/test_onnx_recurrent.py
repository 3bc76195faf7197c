"""Recurrent layers in all their options against onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from support.onnx_nodes import Const, check, imported, inputs_of, model_of, run

import irc

_RNG = np.random.default_rng(0)
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_STATES = {"LSTM": 2, "GRU": 1, "RNN": 1}
_TIME, _BATCH, _IN, _HIDDEN = 5, 3, 2, 4


def normal(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(np.float32)


def operands_of(op: str, directions: int, lengths: Any = None, peepholes: bool = False) -> list[Any]:
    gates = _GATES[op] * _HIDDEN
    found: list[Any] = [
        normal(_TIME, _BATCH, _IN),
        Const(normal(directions, gates, _IN)),
        Const(normal(directions, gates, _HIDDEN)),
        Const(normal(directions, 2 * gates)),
        lengths,
    ]
    found += [normal(directions, _BATCH, _HIDDEN) for _ in range(_STATES[op])]
    return [*found, Const(normal(directions, 3 * _HIDDEN))] if peepholes else found


def check_with_onnxruntime(
    folder: Path, op: str, operands: list[Any], outputs: int, **attributes: Any
) -> None:
    model = onnx.shape_inference.infer_shapes(
        model_of(op, 14, operands, outputs, hidden_size=_HIDDEN, **attributes)
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    expected = session.run(None, inputs_of(operands))
    actual = run(imported(model, folder), operands)
    assert len(actual) == len(expected) == outputs
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), np.asarray(theirs), rtol=1e-4, atol=1e-5)


_DIRECTIONS = [("forward", 1), ("reverse", 1), ("bidirectional", 2)]
_LENGTHS = np.array([2, 5, 0], np.int32)
_ACTIVATIONS: dict[str, list[tuple[list[str], list[float], list[float]]]] = {
    "LSTM": [
        (["HardSigmoid", "LeakyRelu", "ScaledTanh"], [0.3, 0.1, 0.9], [0.4, 1.2]),
        (["Sigmoid", "Softsign", "Affine"], [0.7], [0.1]),
    ],
    "GRU": [(["HardSigmoid", "Elu"], [0.3, 0.8], [0.45]), (["Sigmoid", "ThresholdedRelu"], [0.2], [])],
    "RNN": [(["Relu"], [], []), (["Softplus"], [], []), (["LeakyRelu"], [], [])],
}


@pytest.mark.parametrize(("direction", "count"), _DIRECTIONS)
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_lengths(op: str, fixed: bool, direction: str, count: int, tmp_path: Path) -> None:
    lengths = Const(_LENGTHS) if fixed else _LENGTHS
    more = {"linear_before_reset": 1} if op == "GRU" else {}
    for outputs in {2, 1 + _STATES[op]}:  # all states of an LSTM need its steps
        check_with_onnxruntime(
            tmp_path, op, operands_of(op, count, lengths), outputs, direction=direction, **more
        )


@pytest.mark.parametrize(
    ("op", "which"), [(op, i) for op, all_ in _ACTIVATIONS.items() for i in range(len(all_))]
)
def test_activations(op: str, which: int, tmp_path: Path) -> None:
    names, alpha, beta = _ACTIVATIONS[op][which]
    attributes: dict[str, Any] = {"activations": names * 2, "direction": "bidirectional"}
    if alpha:
        attributes["activation_alpha"] = alpha * 2
    if beta:
        attributes["activation_beta"] = beta * 2
    check_with_onnxruntime(tmp_path, op, operands_of(op, 2), 1 + _STATES[op], **attributes)


@pytest.mark.parametrize("lengths", [None, Const(_LENGTHS)])
@pytest.mark.parametrize(("direction", "count"), _DIRECTIONS)
def test_peepholes_and_coupled_gates(direction: str, count: int, lengths: Any, tmp_path: Path) -> None:
    operands = operands_of("LSTM", count, lengths, peepholes=True)
    for coupled in (0, 1):
        check_with_onnxruntime(tmp_path, "LSTM", operands, 3, direction=direction, input_forget=coupled)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_clip(op: str, after: int, tmp_path: Path) -> None:
    more = {"linear_before_reset": after} if op == "GRU" else {}
    check_with_onnxruntime(tmp_path, op, operands_of(op, 1), 1 + _STATES[op], clip=0.4, **more)


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_layout_with_the_batch_first_is_the_references(op: str, tmp_path: Path) -> None:
    operands = [x.swapaxes(0, 1) if isinstance(x, np.ndarray) else x for x in operands_of(op, 1)]
    check(tmp_path, op, 22, operands, 1 + _STATES[op], hidden_size=_HIDDEN, layout=1)


@pytest.mark.parametrize("attributes", [{}, {"clip": 0.5}], ids=["fused", "stepwise"])
@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_gradients_with_lengths(op: str, attributes: dict[str, Any], tmp_path: Path) -> None:
    operands = [x.array if isinstance(x, Const) else x for x in operands_of(op, 2)]
    operands = [None if x is None else x.astype(np.float64) for x in operands]
    operands[4] = Const(_LENGTHS)
    if op == "GRU":
        attributes = {**attributes, "linear_before_reset": 1}
    model = model_of(op, 14, operands, 2, direction="bidirectional", hidden_size=_HIDDEN, **attributes)
    module = imported(model, tmp_path)
    leaves = [torch.from_numpy(x).requires_grad_() for x in inputs_of(operands).values()]
    assert torch.autograd.gradcheck(module, leaves, fast_mode=True)


def test_torchs_layer_runs_where_it_means_the_same(tmp_path: Path) -> None:
    operands = operands_of("LSTM", 2, _LENGTHS)
    module = imported(model_of("LSTM", 14, operands, 2, direction="bidirectional"), tmp_path)
    with mock.patch.object(torch._VF, "lstm", wraps=torch._VF.lstm) as layer:  # pyright: ignore
        run(module, operands)
    assert layer.call_count == 2


@pytest.mark.parametrize("op", _GATES)
@pytest.mark.parametrize(
    ("index", "shape", "name"),
    [
        (1, (1, 8, _IN), "W"),
        (1, (2, None, _IN), "W"),
        (2, (1, None, 3), "W"),
        (3, (1, 5), "B"),
        (5, (1, _BATCH, 3), "initial_h"),
        (5, (1, 1, _HIDDEN), "initial_h"),
        (5, (2, _BATCH, _HIDDEN), "initial_h"),
    ],
)
def test_operands_that_do_not_fit_each_other_are_refused(
    tmp_path: Path, op: str, index: int, shape: tuple[int | None, ...], name: str
) -> None:
    """torch's layers take them, and read beyond their ends."""
    operands = operands_of(op, 1)
    gates = _GATES[op] * _HIDDEN
    changed = normal(*(gates if size is None else size for size in shape))
    operands[index] = Const(changed) if index < 5 else changed
    model = model_of(op, 14, operands, 2, hidden_size=_HIDDEN)
    with pytest.raises(irc.IrcError, match=rf"IRC30\d.*{op}") as caught:
        run(imported(model, tmp_path), operands)
    assert name in str(caught.value) or "shape" in str(caught.value)
