"""The benchmark of lengths: a small case, and what a missed goal looks like."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import lengths

torch.set_num_threads(1)


class Small(nn.Module):
    """The loss of a small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, 16), nn.Linear(16, 1000)

    def forward(self, words: Tensor) -> Tensor:
        scores = self.head(self.embedding(words).tanh())
        return nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())


@pytest.mark.slow
def test_a_small_case_keeps_its_promises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lengths, "CASES", {"small": lengths.Case(Small, 8, 40, 6, rows=2)})
    monkeypatch.setattr(lengths, "_EXACT", 2)
    monkeypatch.setattr(lengths, "_BUDGET", "100%")
    page = tmp_path / "lengths.md"
    status = lengths.main(["--markdown", str(page)])
    text = page.read_text()
    assert "| small | 6 of 8 to 40" in " ".join(text.split()) and "6 of 6" in text
    assert status == ("1 of 1 models" not in text)


def test_what_misses_a_goal_is_said() -> None:
    row = lengths.Row("a", (2, 9, 3), 1.0, 2, 0.001, 100, 90, 0, 3, 0.1, (0.1, 0.1), 1.0, ())
    assert not row.has_failed and row.cells()[-1] == "ok"
    failed = replace(row, failures=("1 over the budget",))
    assert failed.has_failed and failed.cells()[-1] == "1 over the budget"
