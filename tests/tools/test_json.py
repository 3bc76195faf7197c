"""The page on JSON names every format, and every field of the objects that commands print."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.model_files import MODELS

from irc.compiler.onnx_export.export import ExportReport
from irc.passes import machine_named
from irc.tools import cli

ROOT = Path(__file__).parents[2]
SECTIONS = re.split(r"^## ", (ROOT / "docs" / "reference" / "json.md").read_text(), flags=re.MULTILINE)
FIELDS = {
    section.split("\n", 1)[0]: set(re.findall(r"`([a-z_0-9]+)`", section.split("\n", 1)[1]))
    for section in SECTIONS[1:]
}
FAST = ("--costs", "analytic", "--time-limit", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`models.py`, and a plan of a model of it in `written`."""
    path = tmp_path_factory.mktemp("json")
    (path / "models.py").write_text(MODELS)
    written = str(path / "written")
    assert cli.main(["optimize", f"{path}/models.py:mlp", "--budget", "80%", *FAST, "-q", "-o", written]) == 0
    return path


def test_each_format_has_a_section() -> None:
    written = {
        found
        for room in ("ir", "passes", "frontends", "backends", "compiler", "tools")
        for path in (ROOT / room).rglob("*.py")
        for found in re.findall(r'"(irc-[a-z-]+-\d+)"', path.read_text())
    }
    assert written - {"irc-points-3"} == set(FIELDS)
    assert all(f"[`{name}`](#{name})" in SECTIONS[0] for name in FIELDS)


@pytest.mark.parametrize(
    "command",
    [
        ["doctor"],
        ["passes"],
        ["schedule", "--stages", "2", "--micro-batches", "4"],
        ["inspect", "MODEL", "--costs", "analytic"],
        ["explain", "WRITTEN"],
        ["explain", "WRITTEN", "--why", "mm"],
        ["run", "WRITTEN", "--steps", "1"],
        ["run", "WRITTEN", "--steps", "1", "--check", "--trust"],
        ["optimize", "MODEL", "--budget", "80%", *FAST],
        ["optimize", "MODEL", "--budget", "1GiB", "--stages", "2", "--micro-batches", "2", "--costs", "cpu"],
        ["estimate", "MODEL", "--machine", "a100"],
        ["max-batch", "MODEL", "--budget", "40KiB", "--costs", "analytic"],
        ["pareto", "MODEL", "--points", "2", *FAST],
        ["compare", "MODEL", "--strategies", "keep-all", "--budgets", "100%", *FAST],
    ],
    ids=lambda command: " ".join(command[:3]),
)
def test_each_field_is_documented(
    command: list[str], folder: Path, irc: Callable[..., tuple[int, str, str]]
) -> None:
    places = {"MODEL": f"{folder}/models.py:mlp", "WRITTEN": str(folder / "written")}
    _, out, err = irc(*(places.get(word, word) for word in command), "--json")
    assert out, err
    _hold(json.loads(out))


def test_each_field_of_files_is_documented(folder: Path) -> None:
    _hold(json.loads((folder / "written" / "timeline.json").read_text()))
    _hold(machine_named("a100").to_json())
    _hold(ExportReport(Path("x.onnx"), 1, "", None, "").to_json())


def _hold(data: dict[str, Any]) -> None:
    name = data.pop("format")
    fields = FIELDS[name]
    if name == "irc-plan-1":  # the rest is in the docstring of the class, to which the page links
        assert fields & set(data)
    else:
        assert set(data) <= fields
