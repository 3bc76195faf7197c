"""Files that fix their batch size, loaded for another one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from irc.frontends.onnx import example_inputs, from_onnx
from irc.ir import UsageError


def save(folder: Path, nodes: list[onnx.NodeProto], shape: tuple[int, ...], **constants: np.ndarray) -> Path:
    weights = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(
        nodes,
        "fixed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    path = folder / "fixed.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), str(path))
    return path


def classifier(folder: Path, batch: int, target: list[int]) -> Path:
    nodes = [
        helper.make_node("Reshape", ["x", "target"], ["flat"], name="flatten"),
        helper.make_node("MatMul", ["flat", "w"], ["y"]),
    ]
    weight = np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32)
    return save(folder, nodes, (batch, 3, 4), target=np.array(target, dtype=np.int64), w=weight)


@pytest.mark.parametrize(("old", "new"), [(1, 4), (1, 3), (2, 6), (4, 2), (4, 1)])
@pytest.mark.parametrize("tail", [12, -1])
def test_each_sample_comes_out_as_before(tmp_path: Path, old: int, new: int, tail: int) -> None:
    path = classifier(tmp_path, old, [old, tail])
    module = from_onnx(path, batch=new)
    (x,) = example_inputs(module)
    assert module.input_specs[0][1] == (new, 3, 4) and module(x).shape == (new, 5)
    weight = dict(module.named_parameters())["w"]
    torch.testing.assert_close(module(x), x.reshape(new, 12) @ weight)


def test_a_target_that_leaves_the_batch_open_stays_as_it_is(tmp_path: Path) -> None:
    module = from_onnx(classifier(tmp_path, 1, [-1, 12]), batch=3)
    assert module(*example_inputs(module)).shape == (3, 5)


def test_a_batch_that_would_mix_is_refused(tmp_path: Path) -> None:
    centred = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["x", "mean"], ["centred"]),
        helper.make_node("Add", ["centred", "w"], ["y"]),
    ]
    path = save(tmp_path, centred, (1, 4), w=np.ones((1, 4), dtype=np.float32))
    with pytest.raises(UsageError, match=r"IRC316.*depends on the others"):
        from_onnx(path, batch=3)


def test_an_output_without_a_batch_axis_is_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["scaled"]),
        helper.make_node("ReduceSum", ["scaled"], ["y"], keepdims=0),
    ]
    path = save(tmp_path, nodes, (1, 4), w=np.ones((1, 4), dtype=np.float32))
    with pytest.raises(UsageError, match=r"IRC316.*no batch axis"):
        from_onnx(path, batch=2)
