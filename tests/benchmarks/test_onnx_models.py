"""Packages with small models in them: which rows train, which are refused, and which fail."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from benchmarks import onnx_models
from benchmarks.onnx_models import Model, main

PACKAGE = "small-models==1.0"


def onnx_bytes(*nodes: onnx.NodeProto, opsets: Sequence[str] = ("",), **weights: Any) -> bytes:
    """A model from `x` to `y`."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(weight), name) for name, weight in weights.items()],
    )
    imports = [helper.make_opsetid(name, 1 if name else 17) for name in opsets]
    return helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()


def node(op: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], name=f"n_{output}", **attributes)


def weight(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


W1, W2 = weight(4, 8), weight(8, 3)
FILES = {
    "layers": onnx_bytes(
        node("MatMul", "x w1", "a"), node("Relu", "a", "b"), node("MatMul", "b w2", "y"), w1=W1, w2=W2
    ),
    "table": onnx_bytes(node("Cast", "x", "i", to=TensorProto.INT64), node("Gather", "w i", "y"), w=W2),
    "odd": onnx_bytes(node("Odd", "x", "y", domain="own"), opsets=("", "own")),
    "noise": onnx_bytes(
        node("MatMul", "x w", "a"), node("RandomNormalLike", "a", "b"), node("Add", "a b", "y"), w=W1
    ),
    "broken": b"not a model",
}


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "small_models-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in FILES.items():
            wheel.writestr(f"models/{name}.onnx", data)
    return tmp_path


def measured(
    packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *models: Model
) -> tuple[int, list[list[str]]]:
    """The exit status, and the cells of each row."""
    monkeypatch.setattr(onnx_models, "MODELS", models)
    status = main(["--packages", str(packages)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| small-models")]
    return status, [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def model(name: str, rows: int = 6, high: int | None = None) -> Model:
    return Model(PACKAGE, f"models/{name}.onnx", {"x": (rows, 4)}, high={} if high is None else {"x": high})


def test_a_model_trains_and_another_is_refused_by_name(
    packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = model("layers"), model("table", high=8), model("odd")
    status, (layers, table, odd) = measured(packages, monkeypatch, capsys, *models)
    assert status == 0
    assert layers[0] == "small-models: layers" and layers[1] == "2 (56)" and layers[-1] == "trains"
    assert layers[6] == "1.0000" and float(layers[3]) < 1e-5 and float(layers[8]) < 1e-5
    first, last = map(float, layers[7].split(" to "))
    assert last < first
    assert table[1] == "1 (24)" and table[-1] == "trains"
    assert odd[-1].startswith("refused: IRC301 the operator own::Odd ") and odd[3] == odd[8] == "-"


@pytest.mark.parametrize(
    ("failing", "why"),
    [
        (model("broken"), "FAIL: IRC311 "),
        (Model(PACKAGE, "models/layers.onnx", {"x": (6, 5)}), "FAIL: IRC315 shape [6, 5] contradicts"),
        (model("noise"), " from onnxruntime; "),
        (model("noise"), "; written back, not compared: RandomNormalLike n_b draws at random"),
        (model("table", high=80), "FAIL: InvalidArgument: "),
    ],
    ids=["broken", "usage", "difference", "not-compared", "onnxruntime"],
)
def test_whatever_else_goes_wrong_is_a_failure(
    failing: Model,
    why: str,
    packages: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, (row,) = measured(packages, monkeypatch, capsys, failing)
    assert status == 1 and row[-1].startswith("FAIL: ") and why in row[-1]


def test_an_error_of_a_run_is_a_failure(
    packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """onnxruntime counts a negative row from the end; a table of weights does not."""

    def below(module: Any, model: Model) -> tuple[torch.Tensor, ...]:
        return (-torch.ones(6, 4),)

    monkeypatch.setattr(onnx_models, "made_inputs", below)
    status, (row,) = measured(packages, monkeypatch, capsys, model("table"))
    assert status == 1 and "FAIL: IRC318 ai.onnx::Gather (opset 17) cannot run on these values" in row[-1]


def test_a_package_without_the_file(
    packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnx_models, "MODELS", (model("absent"),))
    assert main(["--packages", str(packages)]) == 2
    assert f"error[IRC439]: {PACKAGE} has no models/absent.onnx" in capsys.readouterr().err


def test_the_table_goes_into_a_page_and_some_are_chosen(
    packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = packages / "page.md"
    page.write_text("before\n<!-- begin models -->\nold\n<!-- end models -->\nafter\n")
    monkeypatch.setattr(onnx_models, "MODELS", (model("odd"), model("layers")))
    assert main(["--packages", str(packages), "--only", "odd", "--markdown", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert "small-models: odd" in text and "layers" not in text and ", 1 models." in text
