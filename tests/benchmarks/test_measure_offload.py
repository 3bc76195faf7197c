"""The measurements of plans that copy to a disk, on tiny models."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import measure_offload
from benchmarks.harness import Settings
from benchmarks.measure_offload import HEADER, Row, measure_row


def perceptron() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Parameters and their state are most of what a step takes."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(96, 96), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(4, 96),)


BLOCKS = f"{Path(__file__).parents[1] / 'compiler' / 'test_tiers.py'}:blocks"
PERCEPTRON = f"{__file__}:perceptron"
SETTINGS = Settings(time_limit=1, repeats=1, costs="analytic")


@pytest.mark.parametrize(
    ("model", "plan", "budget"),
    [
        (BLOCKS, "recompute", "55%"),
        (BLOCKS, "swap", "55%"),
        (PERCEPTRON, "device", "100%"),
        (PERCEPTRON, "disk", "min"),
    ],
)
def test_a_row_keeps_its_promises(model: str, plan: str, budget: str, tmp_path: Path) -> None:
    row = measure_row(model, budget, plan, str(tmp_path), SETTINGS)
    assert row.is_equal and not row.has_failed
    assert 0 < row.measured_bytes <= row.predicted_bytes <= row.budget_bytes <= row.baseline_bytes
    assert (row.out_bytes > 0) == (row.in_bytes > 0) == (plan in ("swap", "disk"))
    assert (row.offloaded_bytes > 0) == (plan == "disk")
    if budget == "min":
        assert row.predicted_bytes < row.trained_bytes
    assert len(row.cells()) == len(HEADER)
    assert replace(row, measured_bytes=row.predicted_bytes + 1).has_failed
    assert replace(row, is_equal=False).has_failed
    assert list(tmp_path.iterdir()) == []


def test_the_command_starts_a_process_for_each_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        assert options["env"]["MALLOC_TRIM_THRESHOLD_"] == "65536"
        capsys.readouterr()
        assert measure_offload.main(command[3:]) == 0
        return subprocess.CompletedProcess(command, 0, capsys.readouterr().out)

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "rows.json"
    options = ["--models", PERCEPTRON, "--plans", "device,disk", "--budgets", "60%", "--costs", "analytic"]
    options += ["--scratch", str(tmp_path), "--time-limit", "1", "--repeats", "1", "--json", str(out)]
    assert measure_offload.main(options) == 0
    device, disk = rows = [Row(**row) for row in json.loads(out.read_text())]
    assert [row.plan for row in rows] == [command[6] for command in commands] == ["device", "disk"]
    assert device.failure.startswith("needs ") and not device.has_failed
    assert len(device.cells()) == len(HEADER) and disk.offloaded_bytes > 0
    assert "0 of 2 rows failed" in capsys.readouterr().out


def test_a_row_that_fails_ends_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 3, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert measure_offload.main(["--models", "no_such_model", "--budgets", "60%"]) == 2
    assert "IRC452" in capsys.readouterr().err
    assert measure_offload.main(["--row", "no_such_model", "60%", "swap"]) == 2
    assert "IRC420" in capsys.readouterr().err
