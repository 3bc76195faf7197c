"""The scripts as people write them: all ways are known, and what a row says is measured."""

import importlib

import pytest
import torch

from benchmarks.user_scripts.__main__ import SCRIPTS, Row, measure, page, ways


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_trains_and_has_its_ways(script: str) -> None:
    module = importlib.import_module(f"benchmarks.user_scripts.{script}")
    found = ways(module)
    assert {f"irc.optimize {budget}" for budget in ("100%", "60%", "40%")} <= found.keys()
    assert all(0 < lines <= 4 for lines, _ in found.values())
    torch.manual_seed(0)
    steps = module.steps(module.model())
    assert next(steps) is None
    loss = next(steps)
    assert loss is not None and loss.isfinite()


@pytest.mark.slow
def test_a_planned_script_has_the_original_s_losses_and_less_memory() -> None:
    row = measure("convnext_bf16", "irc.optimize 60%")
    assert not row.refused and row.is_equal and row.lines == 2
    assert 0 < row.peak_bytes < 0.8 * row.original_bytes
    assert row.planned_bytes is not None and row.peak_bytes <= row.planned_bytes


def test_the_page_has_a_table_for_each_script_and_keeps_what_is_refused() -> None:
    rows = [
        Row("packed_tagger", "irc.optimize 60%", 1, refused="refused: error[IRC332]"),
        Row("packed_tagger", "irc.backend", 1, 2.0, 3 << 20, 4 << 20, 1.25, is_equal=True),
    ]
    text = page(rows)
    assert "## packed bi-LSTM tagger, clipping" in text and "The original takes 4.0 MiB." in text
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "irc." in line]
    assert ["irc.optimize 60%", "1", "-", "-", "-", "-", "-", "refused: error[IRC332]"] in cells
    assert ["irc.backend", "1", "2.0", "3.0", "75%", "1.25", "equal", ""] in cells
