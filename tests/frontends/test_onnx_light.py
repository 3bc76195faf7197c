"""The nine real topologies that ship inside the onnx package: outputs as onnxruntime's, weights by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from support.torch_cases import slow_among

from irc.frontends.onnx import OnnxModule, example_inputs, from_onnx

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
MODELS = sorted(path.stem for path in FOLDER.glob("*.onnx"))
LARGE = ("light_densenet121", "light_inception_v1", "light_inception_v2", "light_vgg19", "light_zfnet512")


def run_onnxruntime(path: Path, module: OnnxModule, inputs: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [name for name, _, _ in module.input_specs]
    outputs = session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
    return [np.asarray(output) for output in outputs]


def test_there_are_nine() -> None:
    assert len(MODELS) == 9


@pytest.mark.parametrize("name", slow_among(MODELS, *LARGE))
def test_outputs_are_those_of_onnxruntime(name: str) -> None:
    path = FOLDER / f"{name}.onnx"
    module = from_onnx(path)
    assert module.training
    inputs = example_inputs(module)
    [expected] = run_onnxruntime(path, module, inputs)
    with torch.no_grad():
        actual = module.eval()(*inputs)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-3, atol=1e-3)
    # Most of these end in a softmax of equal scores: the comparison must not be one of zeros.
    assert np.abs(expected).max() > 0


@pytest.mark.parametrize(
    "name", slow_among(["light_resnet50", "light_densenet121", "light_squeezenet"], *LARGE)
)
def test_weights_are_parameters_and_statistics_are_buffers(name: str) -> None:
    graph = onnx.load(str(FOLDER / f"{name}.onnx")).graph
    statistics = {i for node in graph.node if node.op_type == "BatchNormalization" for i in node.input[3:5]}
    weights = {i for node in graph.node if node.op_type in ("Conv", "Gemm") for i in node.input[1:]}
    weights |= {i for node in graph.node if node.op_type == "BatchNormalization" for i in node.input[1:3]}
    module = from_onnx(FOLDER / f"{name}.onnx")
    parameters = {name for name, _ in module.named_parameters()}
    assert weights <= parameters and parameters.isdisjoint(statistics)
    assert {key for key in module.state_dict() if key not in parameters} == statistics
    assert [spec[1] for spec in module.input_specs] == [(1, 3, 224, 224)]


def test_training_updates_statistics_as_torch_does() -> None:
    path = FOLDER / "light_resnet50.onnx"
    node = next(n for n in onnx.load(str(path)).graph.node if n.op_type == "BatchNormalization")
    momentum = next((a.f for a in node.attribute if a.name == "momentum"), 0.9)
    module = from_onnx(path)
    running = module.get_buffer(node.input[3])
    before, weight = running.clone(), module.get_parameter("gpu_0/conv1_w_0")
    [x] = example_inputs(module)
    loss = module(x).log()[0, 0]
    batch = torch.nn.functional.conv2d(x, weight, stride=2, padding=3).mean((0, 2, 3)).detach()
    torch.testing.assert_close(running, momentum * before + (1 - momentum) * batch, rtol=1e-4, atol=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in module.parameters())
