"""Known architectures fitted and trained: the table counts what works, and a wrong one fails the command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import architectures
from benchmarks.architectures import main
from benchmarks.models.architectures import ARCHITECTURES, Instance

torch.set_num_threads(1)


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


def test_each_call_makes_the_same_model_and_batch_and_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    some, again = ARCHITECTURES["momentum-contrast"](), ARCHITECTURES["momentum-contrast"]()
    assert torch.equal(torch.get_rng_state(), before) and some.module.training
    tensors = [[*made.module.state_dict().values(), *made.args] for made in (some, again)]
    assert all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))


NAMES = ("gpt2", "normalizing-flow", "vq-vae")


def test_architectures_of_every_kind_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of transformers, one with checks of data, one that writes buffers."""
    rows_of_both = torch.arange(-3.0, 9.0).view(3, 4)  # one is dropped, two stay
    monkeypatch.setitem(ARCHITECTURES, "choosing", lambda: Instance(_Choosing(), (rows_of_both,)))
    out, page = tmp_path / "rows.json", tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- begin architectures -->\nold\n<!-- end architectures -->\nafter\n")
    chosen = ["--only", ",".join((*NAMES, "choosing")), "--time-limit", "0.5"]
    files = ["--journal", str(tmp_path / "rows.jsonl"), "--json", str(out), "--markdown", str(page)]
    arguments = [*chosen, *files]
    assert main(arguments) == 0
    rows = rows_of(out)
    for name in NAMES:
        row = rows[name]
        assert row["refusal"] is None and row["failures"] == [], name
        assert row["measured_bytes"] <= row["predicted_bytes"] <= row["budget_bytes"], name
        assert row["asked"] == pytest.approx(0.6, abs=0.001) or row["minimum"] == row["asked"] > 0.6, name
        assert row["measured_bytes"] < row["original_bytes"] and len(row["numbers"]) == 3, name
        assert all(numbers["bit_equal"] and numbers["same_generator"] for numbers in row["numbers"]), name
        assert max(numbers["gradient_scale"] for numbers in row["numbers"]) > 0
    assert rows["normalizing-flow"]["specialize_branches"] and not rows["gpt2"]["specialize_branches"]
    assert "IRC332" in rows["choosing"]["refusal"] and "nonzero" in rows["choosing"]["refusal"]
    printed, text = capsys.readouterr().out, page.read_text()
    with monkeypatch.context() as patch:  # what is in the file is not measured again
        patch.setattr(architectures, "measure", None)
        assert main(arguments) == 0 and capsys.readouterr().out == printed
    assert "4 of 4 architectures work, 1 are refused, 0 fail." in printed
    assert text.startswith("# Page") and text.endswith("after\n") and "old" not in text
    assert (
        "| gpt2 " in text
        and "works with specialize_branches" in text
        and "irc.optimize refuses it: IRC332" in text
    )


class _Choosing(nn.Module):
    """Keeps the rows that are positive: a shape that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x[x[:, 0] > 0])


class _Counting(nn.Module):
    """Scales by what it keeps in the environment: what no plan can see."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        os.environ[_CALLS] = str(int(os.environ.get(_CALLS, "0")) + 1)
        return self.lin(x).tanh() * int(os.environ[_CALLS])


_CALLS = "IRC_TEST_CALLS"


def test_wrong_numbers_fail_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_CALLS, "0")
    monkeypatch.setitem(ARCHITECTURES, "wrong", lambda: Instance(_Counting(), (torch.randn(64, 4),)))
    assert main(["--only", "wrong", "--json", str(tmp_path / "rows.json")]) == 1
    [row] = rows_of(tmp_path / "rows.json").values()
    assert "numbers of step" in row["failures"][0] and row["refusal"] is None
    assert "FAIL: numbers of step" in (printed := capsys.readouterr().out)
    assert "0 of 1 architectures work, 0 are refused, 1 fail." in printed


@pytest.mark.parametrize(
    ("measured", "said"), [(10**12, "measured 1000000000000 > predicted"), (None, "RuntimeError: no such")]
)
def test_a_peak_over_the_prediction_or_an_error_fails_the_command(
    measured: int | None, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def peak(*_: Any, **__: Any) -> int:
        if measured is None:
            raise RuntimeError("no such thing\nsecond line")
        return measured

    monkeypatch.setattr(architectures, "measured_peak_bytes", peak)
    assert main(["--only", "word2vec"]) == 1
    assert f"FAIL: {said}" in capsys.readouterr().out


def test_a_wrong_command_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--only", "gpt2,gpt-2"]) == 2
    assert "IRC345" in (said := capsys.readouterr().err) and "'gpt-2'" in said and "word2vec" in said
    assert main(["--only", "neural-ode", "--json", str(tmp_path / "none" / "rows.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert main(["--only", "bert"]) == 2
    assert "pip install transformers" in capsys.readouterr().err
