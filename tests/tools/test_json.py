"""The page on JSON names every format, and every field of the objects that commands print."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.model_files import MODELS

from irc.compiler.onnx_export.export import ExportReport
from irc.compiler.pipeline.run import PipelineReport, RankReport
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
    assert written - {"irc-points-3", "irc-plan-1"} == set(FIELDS)  # which are only read
    assert all(f"[`{name}`](#{name})" in SECTIONS[0] for name in FIELDS)


COMMANDS: list[list[str]] = [
    ["doctor"],
    ["passes"],
    ["schedule", "--stages", "2", "--micro-batches", "4"],
    ["inspect", "MODEL", "--costs", "analytic"],
    ["explain", "WRITTEN", "--why", "mm", "--top", "1"],
    ["run", "WRITTEN", "--steps", "1"],
    ["run", "WRITTEN", "--steps", "1", "--check", "--trust"],
    ["optimize", "MODEL", "--budget", "80%", *FAST],
    ["optimize", "MODEL", "--budget", "1GiB", "--stages", "2", "--micro-batches", "2", "--costs", "cpu"],
    ["estimate", "MODEL", "--machine", "a100"],
    ["max-batch", "MODEL", "--budget", "40KiB", "--costs", "analytic"],
    ["pareto", "MODEL", "--points", "2", *FAST],
    ["compare", "MODEL", "--strategies", "keep-all", "--budgets", "100%", *FAST],
]

SOMETIMES = {
    "irc-front-1": {"code", "reason"},  # of budgets that no plan fits in
    "irc-inspection-1": {"inputs", "outputs", "weights"},  # of ONNX files
    "irc-machine-1": {"measured", "product_workspace_bytes", "half_flops_per_second"},
    "irc-passes-1": {"group"},
    "irc-pipeline-2": {"considered"},
    "irc-plan-2": {"text", "tensors", "is_more", "name", "terms", "bound"},  # of roundings
    "irc-run-1": {"parameter_difference", "parameter_scale"},
}


def test_the_fields_are_those_of_the_page(folder: Path, irc: Callable[..., tuple[int, str, str]]) -> None:
    places = {"MODEL": f"{folder}/models.py:mlp", "WRITTEN": str(folder / "written")}
    top: dict[str, set[str]] = defaultdict(set)
    every: dict[str, set[str]] = defaultdict(set)
    found = [
        json.loads((folder / "written" / "timeline.json").read_text()),
        machine_named("a100").to_json(),
        ExportReport(Path("x.onnx"), 1, "", None, "").to_json(),
        PipelineReport((RankReport(1, 1, 1),), (), (), (), 0.0, True).to_json(),
    ]
    for command in COMMANDS:
        _, out, err = irc(*(places.get(word, word) for word in command), "--json")
        assert out, err
        found.append(json.loads(out))
    for data in found:
        name = data.pop("format")
        top[name] |= set(data)
        every[name] |= set(_keys(data))
    assert set(top) == set(FIELDS)
    for name, fields in FIELDS.items():
        words = SOMETIMES.get(name, set()) | WORDS
        assert fields - every[name] <= words, (name, fields - every[name])
        if name != "irc-plan-2":  # the rest is in the docstring of the class, to which the page links
            assert top[name] <= fields, (name, top[name] - fields)


WORDS = {"null", "true", "false", "keep", "recompute", "swap", "free", "followed", "modelled"}
"""Values, which the page writes as it writes names."""


def _keys(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        yield from data
    for each in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _keys(each)
