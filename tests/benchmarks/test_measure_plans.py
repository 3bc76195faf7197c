"""Measured rows of tiny models: promises kept, refusals shown, and differences not overlooked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from benchmarks import planned_rows
from benchmarks.harness import Settings
from benchmarks.measure_plans import main
from benchmarks.planned_rows import Ladder, measure_model
from irc.compiler.model_source import Loaded

QUICK = Settings(time_limit=0.5, repeats=1, costs="measured")


class Tiny(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.2))
            for _ in range(depth)
        ]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def tiny() -> tuple[nn.Module, tuple[Tensor]]:
    return Tiny(), (torch.randn(4, 8, 16, 16),)


FACTORY = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)))
    def forward(self, x):
        return self.layers(x).square().mean()

def model():
    torch.manual_seed(0)
    return Model(), (torch.randn(512, 32),)
"""


def test_rows_keep_what_the_plans_promise() -> None:
    torch.manual_seed(0)
    module, args = tiny()
    before = {name: tensor.clone() for name, tensor in module.named_parameters()}
    full, less, smallest, never = measure_model(
        "tiny", Loaded(module, args), ("100%", "80%", "min", "1%"), QUICK
    )
    for row in (full, less, smallest):
        assert row.failures == () and row.refusal is None
        assert (
            row.measured_bytes is not None
            and row.predicted_bytes is not None
            and row.budget_bytes is not None
        )
        assert row.original_bytes is not None and row.numbers is not None
        assert row.measured_bytes <= row.predicted_bytes <= row.budget_bytes
        assert row.predicted_bytes <= 1.005 * row.measured_bytes
        assert row.measured_bytes <= row.original_bytes
        assert row.numbers.bit_equal and row.numbers.same_generator and row.numbers.gradient_scale > 0
        assert len(row.cells()) == len(never.cells())
    assert full.predicted_bytes is not None and full.baseline_bytes is not None
    assert full.predicted_time == 1.0 and full.predicted_bytes <= full.baseline_bytes
    assert smallest.budget_bytes == full.minimum_bytes
    assert never.refusal is not None and never.minimum_bytes == full.minimum_bytes and never.failures == ()
    assert "smallest budget" in never.cells()[-1]
    for name, parameter in module.named_parameters():
        assert parameter.grad is None and torch.equal(parameter, before[name])


def test_a_ladder_climbs_from_the_smallest_budget_and_notices_a_rung_that_is_worse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, args = tiny()
    rows = list(measure_model("tiny", Loaded(module, args), Ladder(4), QUICK))
    assert [row.failures for row in rows] == [()] * 4 and rows[-1].asked == "100.0%"
    assert rows[0].budget_bytes == rows[0].minimum_bytes and rows[-1].predicted_time == 1.0
    assert sorted(row.measured_bytes or 0 for row in rows) == [row.measured_bytes for row in rows]
    backwards = [(str(row.asked), row.budget_bytes or 0) for row in reversed(rows)]
    monkeypatch.setattr(planned_rows.Ladder, "of", lambda _self, _fitter: iter(backwards))
    downhill = list(measure_model("tiny", Loaded(module, args), Ladder(4), QUICK))
    text = " ".join(failure for row in downhill for failure in row.failures)
    assert "predicted time is over that at 100.0%" in text and "measured peak is below that at 100.0%" in text


def test_the_command_writes_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "factory.py"
    file.write_text(FACTORY)
    out, table = tmp_path / "out.json", tmp_path / "out.md"
    arguments = ["--models", f"{file}:model", "--budgets", "100%,80%", "--repeats", "1", "--time-limit", "2"]
    threads = torch.get_num_threads()
    assert main([*arguments, "--costs", "analytic", "--json", str(out), "--markdown", str(table)]) == 0
    assert torch.get_num_threads() == threads
    data = json.loads(out.read_text())
    assert [row["asked"] for row in data["rows"]] == ["100%", "80%"]
    assert data["rows"][1]["numbers"]["bit_equal"] and data["tolerance"] == 1e-5
    assert table.read_text().startswith("| model") and "0 of 2 rows failed" in capsys.readouterr().out


def test_a_broken_promise_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "factory.py"
    file.write_text(FACTORY)
    monkeypatch.setattr("benchmarks.harness.measured_peak_bytes", lambda *_: 10**12)  # pyright: ignore[reportUnknownLambdaType]
    assert (
        main(["--models", f"{file}:model", "--budgets", "80%", "--repeats", "1", "--costs", "analytic"]) == 1
    )


def test_unknown_models_are_a_wrong_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--models", "resnet51"]) == 2
    assert "resnet51" in capsys.readouterr().err


# ---------------------------------------------------------------------- ONNX


def write_onnx(path: Path, width: int, side: int) -> None:
    """Convolutions with constant weights in ConstantOfShape nodes, as the light models have them."""
    nodes: list[onnx.NodeProto] = []
    initializers: list[onnx.TensorProto] = []
    last = "x"
    for index in range(4):
        shape = numpy_helper.from_array(np.array([width, width, 3, 3], np.int64), f"shape{index}")
        initializers.append(shape)
        value = helper.make_tensor("value", TensorProto.FLOAT, [1], [0.02])
        nodes.append(helper.make_node("ConstantOfShape", [f"shape{index}"], [f"w{index}"], value=value))
        nodes.append(helper.make_node("Conv", [last, f"w{index}"], [f"c{index}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Sigmoid", [f"c{index}"], [f"s{index}"]))
        nodes.append(helper.make_node("Tanh", [f"s{index}"], [f"t{index}"]))
        last = f"r{index}"
        nodes.append(helper.make_node("Softplus", [f"t{index}"], [last]))
    shape = ["N", width, side, side]
    graph = helper.make_graph(
        nodes,
        "light",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, *shape[1:]])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, shape)],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(path))


def test_onnx_files_are_trained_with_drawn_weights(tmp_path: Path) -> None:
    write_onnx(tmp_path / "light_fits.onnx", 16, 32)
    out = tmp_path / "out.json"
    assert main(["--onnx", str(tmp_path), "--repeats", "1", "--time-limit", "2", "--json", str(out)]) == 0
    [row] = json.loads(out.read_text())["rows"]
    assert row["model"] == "fits" and row["refusal"] is None and row["numbers"]["bit_equal"]
    assert row["measured_bytes"] <= row["budget_bytes"]
    assert any("4 of 4 parameters have gradients" in note for note in row["notes"])
    assert any("onnxruntime" in note for note in row["notes"])


def test_onnx_files_that_cannot_fit_are_tried_with_a_larger_batch(tmp_path: Path) -> None:
    write_onnx(tmp_path / "light_heavy.onnx", 64, 2)
    out = tmp_path / "out.json"
    assert main(["--onnx", str(tmp_path), "--repeats", "1", "--time-limit", "2", "--json", str(out)]) == 0
    first, second = json.loads(out.read_text())["rows"]
    assert "smallest budget" in first["refusal"] and first["minimum_bytes"] > 0
    assert second["model"] == "heavy batch 4"
