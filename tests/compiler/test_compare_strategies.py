"""`irc.compare`: each strategy at each budget, above one bound, and who needs more."""

import csv
import io
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import irc
from irc.compiler.comparison.comparison import FILES
from irc.tools.cli import main

FACTORY = """
import torch
from torch import nn


def factory():
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers), (torch.randn(4096, 16),)
"""


def chain() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(4096, 16)


def test_no_strategy_beats_the_bound_and_each_says_what_it_takes() -> None:
    found = irc.compare(*chain(), budgets=["95%", "85%", "min"], costs="analytic", time_limit=1.0)
    assert len(found.budgets) == 3 and found.minimum_bytes in found.budgets
    planned = [cell for cell in found.cells if cell.overhead is not None]
    assert {"auto", "rotor", "revolve", "ogc", "sqrt-n"} <= {cell.strategy for cell in planned}
    for cell in found.cells:
        if cell.overhead is None or cell.peak_bytes is None or cell.gap is None:
            assert cell.code in ("IRC204", "IRC205", "IRC206")
            assert (cell.code == "IRC204") == (cell.smallest_bytes is not None)
            assert cell.smallest_bytes is None or cell.smallest_bytes > cell.budget_bytes
        else:
            assert cell.peak_bytes <= cell.budget_bytes and cell.gap >= -1e-9
    best = {c.budget_bytes: c.overhead for c in planned if c.strategy == "auto" and c.overhead is not None}
    assert all(best[c.budget_bytes] <= (c.overhead or 0.0) + 0.006 for c in planned if c.budget_bytes in best)
    table = found.table()
    assert "from bound" in table and "need more:" in table and "proved" not in table
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert len(rows) == len(found.cells) == len(found.to_json()["cells"])


def test_plans_are_measured_if_asked() -> None:
    strategies = ["auto", "revolve", "keep-all"]
    found = irc.compare(
        *chain(), budgets=["100%", "90%"], strategies=strategies, measure=True, time_limit=1.0
    )
    planned = [cell for cell in found.cells if cell.peak_bytes is not None]
    assert len(planned) >= 4 and "measured overhead" in found.table()
    assert "measured_peak_bytes" in found.to_csv()
    for cell in planned:
        assert cell.measured is not None and cell.peak_bytes is not None
        assert 0.95 * cell.peak_bytes < cell.measured.peak_bytes <= cell.peak_bytes


def test_a_strategy_that_cannot_hold_a_graph_says_so_once() -> None:
    budgets = ["100%", "99%"]
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    found = irc.compare(model, x, budgets=budgets, strategies=["rotor", "keep-all"], costs="analytic")
    assert all(cell.code == "IRC403" for cell in found.cells if cell.strategy == "rotor")
    assert found.table().count("this graph is none") == 1


def test_the_command_writes_a_table_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.py"
    model.write_text(FACTORY)
    asked = [
        "compare",
        f"{model}:factory",
        "--time-limit",
        "1",
        "--budgets",
        "80%,min",
        "--strategies",
        "auto,ogc,checkpoints-2",
    ]
    assert main([*asked, "--costs", "analytic", "-o", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert "checkpoints-2" in output and "written:" in output
    assert all((tmp_path / "out" / name).stat().st_size > 100 for name in FILES)
    saved = json.loads((tmp_path / "out" / FILES[0]).read_text())
    assert saved["format"] == "irc-comparison-1" and len(saved["cells"]) == 6


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"strategies": ["checkpoints-x"]}, "IRC403"),
        ({"strategies": []}, "IRC403"),
        ({"budgets": ["lots"]}, "IRC401"),
        ({"time_limit": -1.0}, "IRC403"),
    ],
)
def test_malformed_options_are_refused(options: dict[str, object], code: str) -> None:
    with pytest.raises(irc.UsageError, match=code):
        irc.compare(*chain(), **options)  # pyright: ignore[reportArgumentType]
