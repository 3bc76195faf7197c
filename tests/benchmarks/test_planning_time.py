"""The table of planning times: one tiny row through the command, and which goals a row misses."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import planning_time
from benchmarks.models.registry import Instance
from benchmarks.planning_time import HEADER, MODELS, Row, eager_seconds, import_seconds, main, measure

torch.set_num_threads(1)


def tiny() -> Instance:
    return Instance(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), (torch.randn(64, 8),))


def test_a_row_is_measured_and_the_page_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget that is too small is replaced by the smallest, in another process."""
    asked: list[str] = []

    def alone(options: argparse.Namespace, name: str, row: Sequence[str]) -> dict[str, Any]:
        assert name == "planning_time"
        asked.append(row[2])
        if row[1] == "eager":
            return {"eager": eager_seconds(MODELS[row[0]])}
        return asdict(measure(row[0], row[1], row[2], MODELS[row[0]], options.time_limit))

    monkeypatch.setenv("IRC_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(MODELS, "tiny", tiny)
    monkeypatch.setattr(planning_time, "run_row_alone", alone)
    monkeypatch.setattr(planning_time, "import_seconds", lambda: (1.25, 1.5))
    page, journal = tmp_path / "page.md", tmp_path / "rows.jsonl"
    arguments = [
        "--models",
        "tiny",
        "--budgets",
        "100%,1%",
        "--markdown",
        str(page),
        "--journal",
        str(journal),
    ]
    assert main(arguments) in (0, 1)
    text = page.read_text()
    assert asked[:3] == ["100%", "eager", "1%"] and asked[3].isdecimal() and len(asked) == 4
    assert "| tiny " in text and "| 1%, smallest " in text and "capture alone" in text
    monkeypatch.setattr(planning_time, "run_row_alone", None)
    capsys.readouterr()
    main(arguments)
    assert page.read_text() == text, "what the journal holds is not measured again"


ROW = Row("m", "60%", 400, 0.6, 0.2, 9.0, 1.5, 1.0, 0.5, 1.0, 0.1, 0.004)


def test_parts_add_up_and_a_goal_is_of_all_of_it() -> None:
    assert ROW.total == 4.0 and ROW.goal == "5 s, gap 1%" and not ROW.has_failed
    assert len(ROW.cells()) == len(HEADER) and ROW.cells()[2] == "60%" and ROW.cells()[-1] == "met"
    assert ROW.cells()[3:11] == ("0.2", "9.0", "1.5", "1.0", "0.5", "1.0", "4.0", "13.0")
    assert replace(ROW, search=2.5).has_failed and replace(ROW, gap=0.011).has_failed
    longer = replace(ROW, operations=501, search=10.0)
    assert longer.goal.startswith("15 s") and not longer.has_failed
    assert replace(longer, search=13.0).has_failed


def test_nothing_is_asked_of_larger_graphs_unless_everything_is_kept() -> None:
    large = replace(ROW, operations=1501, search=100.0, gap=0.5)
    assert not large.has_failed and large.goal == "" and large.cells()[-2:] == ("-", "-")
    whole = replace(large, asked="100%", share=1.0)
    assert whole.goal == "capture alone" and whole.has_failed
    assert not replace(whole, measuring=0.2, search=0.3).has_failed


def test_a_row_that_found_no_plan_stays_and_is_missed() -> None:
    refused = Row("m", "40%", minimum_bytes=7)
    assert refused.has_failed and refused.goal == "a plan" and len(refused.cells()) == len(HEADER)
    assert refused.cells()[2] == "40%, refused" and refused.cells()[-1] == "missed"


def test_there_are_twenty_models() -> None:
    assert len(MODELS) == 20
    assert not any("," in name for name in MODELS), "--models takes names with commas between"


def test_torch_and_the_rest_are_imported_in_another_process() -> None:
    assert all(seconds > 0 for seconds in import_seconds())
