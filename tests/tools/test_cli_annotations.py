"""`--keep` and `--recompute` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from irc.ir import Plan, parse_program
from irc.tools import cli

FAST = ["--costs", "analytic", "--time-limit", "1"]


def test_a_factory_s_modules_are_kept_and_recomputed(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    annotations = ["--keep", "5", "--recompute", "1", "--recompute", "2"]
    target = f"{models}:mlp"
    assert (
        cli.main(["optimize", target, "--budget", "150%", *FAST, *annotations, "-o", str(tmp_path / "out")])
        == 0
    )
    assert "annotations  irc.recompute(1), irc.recompute(2), irc.keep(5); " in capsys.readouterr().out
    plan = Plan.load(tmp_path / "out" / "plan.json")
    assert [annotation.policy for annotation in plan.annotations] == ["recompute", "recompute", "keep"]
    program = parse_program((tmp_path / "out" / "program.irc").read_text())
    assert [annotation.by for annotation in program.graph.annotations] == [
        annotation.by for annotation in plan.annotations
    ]
    assert cli.main(["run", str(tmp_path / "out"), "--steps", "1", "--check", "--trust", "-q"]) == 0


def test_the_smallest_budget_is_that_under_the_annotations(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[int] = []
    for options in ([], [part for k in range(16) for part in ("--keep", str(k))]):
        assert cli.main(["inspect", f"{models}:mlp", "--costs", "analytic", "--json", *options]) == 0
        report = json.loads(capsys.readouterr().out)
        found.append(report["minimum_budget_bytes"])
        baseline = report["baseline_peak_bytes"]
    free, kept = found
    assert free < kept <= baseline


@pytest.mark.parametrize(
    ("annotations", "code", "text"),
    [
        (["--keep", "layer9"], "IRC553", "the model has no submodule 'layer9'"),
        (["--keep", "3", "--recompute", "3"], "IRC400", "--keep and --recompute both name '3'"),
        (["--recompute", ""], "IRC400", "an empty path names no submodule"),
    ],
)
def test_annotations_that_make_no_sense_are_refused(
    annotations: list[str], code: str, text: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["optimize", f"{models}:mlp", "--budget", "90%", *FAST, *annotations]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error[{code}]: {text}") and "\n  help: " in error
