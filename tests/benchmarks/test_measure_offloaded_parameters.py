"""The measurements of training with parameters and optimizer state on a disk, on a tiny model."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import measure_offloaded_parameters
from benchmarks.measure_offloaded_parameters import HEADER, ParametersRow, measure_row


def perceptron() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Parameters and their state are most of what a step takes."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(96, 96), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(4, 96),)


MODEL = f"{__file__}:perceptron"


@pytest.mark.parametrize(("plan", "budget"), [("device", "100%"), ("disk", "70%"), ("disk", "min")])
def test_a_row_keeps_its_promises(plan: str, budget: str, tmp_path: Path) -> None:
    row = measure_row(MODEL, budget, plan, str(tmp_path), time_limit=2, repeats=1, costs="analytic")
    assert row.is_equal and not row.has_failed
    assert 0 < row.measured_bytes <= row.predicted_bytes <= row.baseline_bytes
    assert (row.offloaded_bytes > 0) == (row.in_bytes > 0) == (plan == "disk")
    if budget == "min":
        assert row.predicted_bytes < row.trained_bytes
    assert len(row.cells()) == len(HEADER)
    assert replace(row, measured_bytes=row.predicted_bytes + 1).has_failed
    assert replace(row, is_equal=False).has_failed
    assert list(tmp_path.iterdir()) == []


def test_the_command_measures_both_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        assert command[2] == "benchmarks.measure_offloaded_parameters"
        assert measure_offloaded_parameters.main(command[3:]) == 0
        return subprocess.CompletedProcess(command, 0, capsys.readouterr().out)

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "rows.json"
    options = ["--models", MODEL, "--budgets", "60%", "--scratch", str(tmp_path), "--costs", "analytic"]
    options += ["--time-limit", "2", "--repeats", "1", "--json", str(out)]
    assert measure_offloaded_parameters.main(options) == 0
    device, disk = (ParametersRow(**row) for row in json.loads(out.read_text()))
    assert device.failure.startswith("needs ") and not device.has_failed
    assert disk.plan == "disk" and disk.offloaded_bytes > 0
    assert "0 of 2 rows failed" in capsys.readouterr().out
