"""What an extra lacks is named, with the command that installs it, before anything is done."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import irc
from irc.__main__ import main
from irc.compiler.pareto.front import Front
from irc.compiler.pareto.points import Survey
from irc.ir import EXTRAS, UsageError, require

ROOT = Path(__file__).parents[2]
FRONT = Front("a model", Survey(8, 4, 6, 6, 1.0, "costs", "options", (8,)), ())


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed


def test_the_extras_are_those_of_the_distribution() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: {re.split("[<>=]", package)[0] for package in declared[extra]} for extra in EXTRAS}
    assert names == {extra: set(packages) for extra, packages in EXTRAS.items()}
    assert f"irc-compiler[{','.join(EXTRAS)},examples]" in declared["dev"]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require("onnx", "a test")
    without(monkeypatch, "onnx_ir", "onnxruntime")
    with pytest.raises(UsageError) as caught:
        require("onnx", "a test")
    assert caught.value.code == "IRC448"
    assert caught.value.message == "a test needs packages that are not installed: onnx-ir, onnxruntime"
    assert caught.value.help == "install the extra: pip install 'irc-compiler[onnx]'"


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("onnx_ir", lambda folder: irc.from_onnx(folder / "x.onnx")),
        ("onnx_ir", lambda folder: irc.export_onnx(nn.Identity(), folder / "x.onnx")),
        ("matplotlib", lambda folder: FRONT.draw(folder / "x.svg")),
        ("matplotlib", lambda folder: FRONT.save(folder / "front")),
        ("matplotlib", lambda folder: irc.pareto(nn.Identity(), (), folder=folder / "front")),
    ],
)
def test_the_api_refuses_before_it_does_anything(
    module: str, use: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, module)
    with pytest.raises(UsageError, match="packages that are not installed") as caught:
        use(tmp_path)
    assert caught.value.code == "IRC448"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("onnx", "inspect x.onnx"),
        ("onnx", "optimize x.onnx --budget 60%"),
        ("onnx", "export folder -o y.onnx"),
        ("matplotlib", "schedule --stages 2 --micro-batches 2 --picture x.svg"),
        ("matplotlib", "pareto x.py:model -o front"),
    ],
)
def test_commands_refuse_without_a_traceback(
    module: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    without(monkeypatch, module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("folder/plan.json", "x.onnx", "x.py"):
        (tmp_path / name).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    assert main(command.split()) == 2
    said = capsys.readouterr()
    extra = "plot" if module == "matplotlib" else "onnx"
    assert said.out == "" and said.err.startswith("error[IRC448]: ")
    assert said.err.endswith(
        f"not installed: {module}\n  help: install the extra: pip install 'irc-compiler[{extra}]'\n"
    )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.default
@pytest.mark.parametrize(
    "command", ["inspect models.py:mlp --costs analytic", "schedule --stages 2 --micro-batches 2"]
)
def test_commands_that_need_no_extra_run_without(
    command: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "onnx", "onnx_ir", "onnxruntime", "matplotlib")
    monkeypatch.chdir(models.parent)
    assert main(command.split()) == 0
