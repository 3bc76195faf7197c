"""Trained weights go back into the file that they came from, and nothing else in it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file
from torch import Tensor

import irc
from irc.__main__ import main
from irc.frontends.onnx import example_inputs
from irc.ir.errors import UsageError
from irc.tools import export

FLOAT = TensorProto.FLOAT


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def model_file(path: Path) -> Path:
    """Weights in an initializer, in a Constant, in a ConstantOfShape, in a branch; and metadata."""

    def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(op, inputs, outputs, name=f"n_{outputs[0]}", **attributes)

    inner = helper.make_graph(
        [node("Mul", ["t3", "inner"], ["t4"])],
        "inner",
        [],
        [helper.make_tensor_value_info("t4", FLOAT, (2, 3))],
        [numpy_helper.from_array(array(3, seed=3), "inner")],
    )
    nodes = [
        node("Constant", [], ["b"], value=numpy_helper.from_array(array(3, seed=1))),
        node("ConstantOfShape", ["size"], ["w2"], value=numpy_helper.from_array(np.full(1, 0.5, np.float32))),
        node("MatMul", ["x", "w"], ["t1"]),
        node("Add", ["t1", "b"], ["t2"]),
        node("MatMul", ["t2", "w2"], ["t3"]),
        node("If", ["yes"], ["y"], then_branch=inner, else_branch=inner),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, (2, 4))],
        [helper.make_tensor_value_info("y", FLOAT, (2, 3))],
        [
            numpy_helper.from_array(array(4, 3), "w"),
            numpy_helper.from_array(np.array([3, 3]), "size"),
            numpy_helper.from_array(np.array(True), "yes"),
        ],
        doc_string="a graph",
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model.producer_name = "somebody"
    helper.set_model_props(model, {"author": "me"})
    onnx.save(model, str(path / "m.onnx"))
    return path / "m.onnx"


def trained(module: torch.nn.Module, *inputs: Tensor) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(*inputs).square().mean().backward()
    optimizer.step()


def test_all_kinds_of_weights_go_back_and_nothing_else_changes(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    module = irc.from_onnx(path)
    (x,) = example_inputs(module)
    fitted: Any = irc.optimize(module, (x,), budget="1MiB", profile=False)
    trained(fitted, x)
    report = irc.export_onnx(fitted, tmp_path / "tuned.onnx")
    assert report.written == 4 and report.difference is not None and report.difference < 1e-6
    assert "onnxruntime" in report.text()
    session = ort.InferenceSession(str(tmp_path / "tuned.onnx"), providers=["CPUExecutionProvider"])
    y: Any = session.run(None, {"x": x.numpy()})[0]
    np.testing.assert_allclose(y, fitted.eval()(x).detach().numpy(), rtol=1e-6)

    before, after = onnx.load(str(path)), onnx.load(str(tmp_path / "tuned.onnx"))
    onnx.checker.check_model(after)
    assert after.producer_name == "somebody" and after.metadata_props == before.metadata_props
    assert after.opset_import == before.opset_import and after.ir_version == before.ir_version
    assert after.graph.doc_string == "a graph" and after.graph.input == before.graph.input
    assert [n.name for n in after.graph.node] == [n.name for n in before.graph.node if n.name != "n_w2"]
    assert {i.name for i in after.graph.initializer} == {"w", "yes", "w2"}
    weights = {i.name: numpy_helper.to_array(i) for i in after.graph.initializer}
    assert np.array_equal(weights["w"], fitted.w.detach().numpy()) and not np.array_equal(
        weights["w"], array(4, 3)
    )
    again = irc.from_onnx(tmp_path / "tuned.onnx")
    assert dict(again.onnx_names) == dict(module.onnx_names)
    for name, tensor in fitted.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_a_dequantised_weight_goes_back_as_floats(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["w"], name="unpack"),
        helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
    ]
    stored = {"codes": np.ones((4, 3), np.int8), "scale": np.array(0.5, np.float32)}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, (2, 4))],
        [helper.make_tensor_value_info("y", FLOAT, (2, 3))],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        tmp_path / "m.onnx",
    )
    module = irc.from_onnx(tmp_path / "m.onnx")
    trained(module, *example_inputs(module))
    irc.export_onnx(module, tmp_path / "tuned.onnx")
    after = onnx.load(tmp_path / "tuned.onnx").graph
    assert [n.name for n in after.node] == ["product"] and [i.name for i in after.initializer] == ["w"]
    assert np.array_equal(
        numpy_helper.to_array(after.initializer[0]), module.get_parameter("w").detach().numpy()
    )


def test_large_models_keep_their_weights_beside_them(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    module = irc.from_onnx(path)
    trained(module, *example_inputs(module))
    (tmp_path / "out").mkdir()
    irc.export_onnx(module, tmp_path / "out" / "tuned.onnx")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["tuned.onnx", "tuned.onnx.data"]
    again = irc.from_onnx(tmp_path / "out" / "tuned.onnx")
    assert torch.equal(again.get_parameter("w"), module.get_parameter("w"))


def test_the_command_line_trains_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder, tuned = model_file(tmp_path), tmp_path / "fitted", tmp_path / "tuned.safetensors"
    assert main(["optimize", str(path), "--budget", "1MiB", "--no-profile", "-o", str(folder), "-q"]) == 0
    assert main(["run", str(folder), "--steps", "2", "--save-weights", str(tuned), "-q"]) == 0
    out = tmp_path / "tuned.onnx"
    assert main(["export", str(folder), "--weights", str(tuned), "-o", str(out)]) == 0
    assert f"written: {out} (4 weights); onnxruntime" in capsys.readouterr().out
    exported = irc.from_onnx(out)
    for name, tensor in load_file(tuned).items():
        assert torch.equal(exported.state_dict()[name], tensor)
    assert not torch.equal(exported.get_parameter("w"), irc.from_onnx(path).get_parameter("w"))
    torch.save({"w": torch.zeros(5, 5)}, tmp_path / "other.pt")
    assert main(["export", str(folder), "--weights", str(tmp_path / "other.pt"), "-o", str(out)]) == 2
    assert "error[IRC323]" in capsys.readouterr().err
    (tmp_path / "no.pt").write_bytes(b"nothing")
    assert main(["export", str(folder), "--weights", str(tmp_path / "no.pt"), "-o", str(out)]) == 2
    assert "error[IRC323]" in capsys.readouterr().err


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    module = irc.from_onnx(path)
    for target, why in (
        (path, "the original itself"),
        (tmp_path, "no name"),
        (tmp_path / "no" / "a.onnx", "no folder"),
    ):
        with pytest.raises(UsageError, match=why) as caught:
            irc.export_onnx(module, target)
        assert caught.value.code == "IRC320" and caught.value.help
    with pytest.raises(UsageError, match="came from no ONNX file") as caught:
        irc.export_onnx(torch.nn.Linear(2, 2), tmp_path / "a.onnx")
    assert caught.value.code == "IRC321"
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "other",
        [helper.make_tensor_value_info("x", FLOAT, (2, 4))],
        [helper.make_tensor_value_info("y", FLOAT, (2, 4))],
    )
    onnx.save(helper.make_model(graph), str(path))
    with pytest.raises(UsageError, match="is not stored in a graph") as caught:
        irc.export_onnx(module, tmp_path / "a.onnx")
    assert caught.value.code == "IRC321" and not (tmp_path / "a.onnx").exists()


def test_a_file_that_computes_something_else_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = irc.from_onnx(model_file(tmp_path))
    real: Any = export._run  # pyright: ignore[reportPrivateUsage]

    def spoilt(path: Path, feed: Any) -> tuple[str, list[Any]]:
        return ("onnxruntime", [np.zeros((2, 3))]) if path.name == "tuned.onnx" else real(path, feed)

    monkeypatch.setattr(export, "_run", spoilt)
    with pytest.raises(irc.VerificationError, match="computes other outputs") as caught:
        irc.export_onnx(module, tmp_path / "tuned.onnx")
    assert caught.value.code == "IRC322" and [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_numbers_that_are_loose_in_the_original_may_be_as_loose(tmp_path: Path) -> None:
    """A variance as a difference of squares: onnxruntime is far from the module with the old weights too."""

    def node(op: str, inputs: list[str], outputs: list[str]) -> onnx.NodeProto:
        return helper.make_node(op, inputs, outputs, name=f"n_{outputs[0]}")

    nodes = [
        node("MatMul", ["x", "w"], ["far"]),
        node("Mul", ["far", "far"], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["m2"], axes=[1]),
        helper.make_node("ReduceMean", ["far"], ["m"], axes=[1]),
        node("Mul", ["m", "m"], ["mm"]),
        node("Sub", ["m2", "mm"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, (4, 64))],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(1e4 + array(64, 256), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, tmp_path / "m.onnx")
    report = irc.export_onnx(irc.from_onnx(tmp_path / "m.onnx"), tmp_path / "tuned.onnx")
    assert report.difference is not None and report.difference > 1e-3
