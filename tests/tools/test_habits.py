"""Small habits of the command line: help, suggestions, defaults of a project, the doctor, completions."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from irc.ir import UsageError
from irc.tools import cli, doctor
from irc.tools.config import KEYS, apply_config


def parsed(*argv: str, folder: Path) -> argparse.Namespace:
    known = cli.parser()
    apply_config(known.commands, folder, known.parse_args([*argv]))
    return known.parse_args([*argv])


def test_alone_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: irc") and "plan a training step within a budget" in out


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["optimise", "m.onnx"], "optimize"),
        (["optimize", "m.onnx", "--bugdet", "4GiB"], "--budget"),
        (["optimize", "m.onnx", "--compiler", "inductr"], "inductor"),
        (["expalin", "x"], "explain"),
    ],
)
def test_a_word_that_is_nearly_right_is_suggested(
    argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    assert f"help: did you mean {meant}? see irc" in capsys.readouterr().err


def test_a_word_that_is_like_none_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["zzzzzz"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_a_project_has_defaults_that_the_command_line_goes_before(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.irc]\nbudget = "4GB"\ntime-limit = 7\n[tool.irc.optimize]\nexact = "sums"\n'
        'swap = ["disk:/x:1GiB"]\n'
        "[tool.irc.compare]\ngap = 0.25\n"
    )
    (tmp_path / "inner").mkdir()
    options = parsed("optimize", "m.onnx", folder=tmp_path / "inner")
    assert (options.budget, options.exact, options.time_limit) == ("4GB", "sums", 7.0)
    assert options.swap == ["disk:/x:1GiB"]
    assert parsed("optimize", "m.onnx", "--budget", "60%", folder=tmp_path).budget == "60%"
    assert parsed("estimate", "m.onnx", folder=tmp_path).budget == "4GB"
    assert parsed("compare", "m.onnx", folder=tmp_path).gap == 0.25
    assert parsed("optimize", "m.onnx", folder=tmp_path).gap != 0.25
    whole = parsed("optimize", "m.onnx", "--passes", "cost,plan-memory", folder=tmp_path)
    assert whole.budget is None and whole.exact is None and not whole.swap
    devices = parsed("optimize", "m.onnx", "--stages", "2", "--device", "4GiB", folder=tmp_path)
    assert devices.budget is None and devices.time_limit == 7.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.irc]\ntrust = true", "has trust"),
        ('[tool.irc]\noutput = "x"', "has output"),
        ('[tool.irc.run]\noriginal = "evil.py:f"', "has original"),
        ('[tool.irc.nothing]\nbudget = "1"', "is of no command"),
        ('[tool.irc]\nexact = "nearly"', "exact is 'nearly'"),
        ("[tool.irc]\nbudget = true", "budget is True"),
        ('[tool.irc]\nbudget = ["1GB"]', "budget is a list"),
        ('[tool.irc.inspect]\nbudget = "1GB"', "irc inspect has no option --budget"),
        ("[tool]\nirc = 3", "is not a table"),
        ("[tool.irc", "it cannot be read"),
        ("a = " + "[" * 100_000, "it cannot be read: lists or tables lie too deep in one another"),
    ],
)
def test_what_a_project_may_not_say_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        parsed("inspect", "m.onnx", folder=tmp_path)
    assert caught.value.code == "IRC596" and message in caught.value.message


def test_no_default_names_code_to_run_or_a_file_to_write() -> None:
    assert not {"trust", "original", "output", "report", "trace", "weights", "save-weights"} & {*KEYS}


def test_the_doctor_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "irc-doctor-1"
    rows = {row["what"]: row for row in found["rows"]}
    assert rows["torch"]["found"] and not rows["[onnx]"]["missing"] and rows["cpu"]["found"]
    monkeypatch.setattr(doctor, "_version", lambda package: "" if package == "onnxruntime" else "1")
    assert cli.main(["doctor"]) == 0
    assert "onnx 1, onnx-ir 1 - missing for ONNX files in and out: pip install" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "_version", lambda package: "" if package == "ortools" else "1")
    assert cli.main(["doctor"]) == 1


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_can_complete(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "--forwards-in-flight" in out and "max-batch" in out


def test_the_file_of_the_defaults_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be that of a folder above, and of somebody else."""
    (tmp_path / "pyproject.toml").write_text("[tool.irc]\ngap = 0.25\n")
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    assert cli.main(["schedule", "--stages", "2", "--micro-batches", "2"]) == 0
    assert capsys.readouterr().err == f"defaults: {tmp_path / 'pyproject.toml'}\n"
    assert cli.main(["schedule", "--stages", "2", "--micro-batches", "2", "-q"]) == 0
    assert capsys.readouterr().err == ""
