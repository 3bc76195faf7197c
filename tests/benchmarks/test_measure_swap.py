"""The measurements of plans that copy, on a tiny model."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure_swap
from benchmarks.harness import Settings
from benchmarks.measure_swap import HEADER, SwapRow, measure_row

MODEL = f"{Path(__file__).parents[1] / 'compiler' / 'test_tiers.py'}:blocks"
SETTINGS = Settings(time_limit=1, repeats=1, costs="analytic")


@pytest.mark.parametrize("plan", ["recompute", "swap"])
def test_a_row_keeps_its_promises(plan: str, tmp_path: Path) -> None:
    row = measure_row(MODEL, "55%", plan, str(tmp_path), SETTINGS)
    assert row.is_equal and row.agrees and not row.has_failed
    assert 0 < row.measured_bytes <= row.predicted_bytes <= row.budget_bytes < row.baseline_bytes
    assert (row.out_bytes > 0) == (plan == "swap")
    assert len(row.cells()) == len(HEADER)
    assert replace(row, measured_bytes=row.predicted_bytes + 1).has_failed
    assert replace(row, is_close=False).has_failed
    assert list(tmp_path.iterdir()) == []


def test_a_budget_that_does_not_fit_is_a_row_of_its_own(tmp_path: Path) -> None:
    row = measure_row(MODEL, "1%", "swap", str(tmp_path), SETTINGS)
    assert row.failure.startswith("needs ") and not row.has_failed and len(row.cells()) == len(HEADER)


def test_the_command_starts_a_process_for_each_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        assert options["env"]["MALLOC_TRIM_THRESHOLD_"] == "65536"
        capsys.readouterr()
        assert measure_swap.main(command[3:]) == 0
        return subprocess.CompletedProcess(command, 0, capsys.readouterr().out)

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "rows.json"
    options = ["--models", MODEL, "--budgets", "55%", "--scratch", str(tmp_path), "--costs", "analytic"]
    options += ["--time-limit", "1", "--repeats", "1", "--json", str(out)]
    assert measure_swap.main(options) == 0
    rows = [SwapRow(**row) for row in json.loads(out.read_text())]
    assert [row.plan for row in rows] == [command[6] for command in commands] == ["recompute", "swap"]
    text = capsys.readouterr().out
    assert "0 of 2 rows failed" in text and "equal" in text


def test_a_row_that_fails_ends_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 3, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert measure_swap.main(["--models", "no_such_model", "--budgets", "60%"]) == 2
    assert "IRC452" in capsys.readouterr().err
    assert measure_swap.main(["--row", "no_such_model", "60%", "swap"]) == 2
    assert "IRC420" in capsys.readouterr().err
