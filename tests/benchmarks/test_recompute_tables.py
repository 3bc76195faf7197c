"""The published tables of recomputation: what is read, planned, run, kept and written."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.models import MODELS
from benchmarks.models.registry import Example
from benchmarks.recompute_tables import published
from benchmarks.recompute_tables.__main__ import main
from benchmarks.recompute_tables.page import ladder_section, resnet_section, searched_section
from benchmarks.recompute_tables.planned import Outcome, Planning, Point, captured
from benchmarks.recompute_tables.published import Resnet, ladder, resnets, searched
from benchmarks.recompute_tables.runs import Run, Trained, runs_section
from irc.passes import machine_named

GPU = machine_named("gtx1080ti")


def tiny(model: str, *, batch: int = 64, size: int = 96) -> Example:
    """A small network under any name."""
    if model == "plain_cnn":
        return MODELS[model](batch=batch // 8, size=size // 3, width=16, depth=6)
    return MODELS["resnet18"](batch=max(batch // 16, 2), size=64, classes=10, width=8, depths=(2, 1, 1, 1))


# ---------------------------------------------------------------------------------- the published numbers


def test_the_published_rows_are_read() -> None:
    rows = {row.model: row for row in searched()}
    assert len(rows) == 18 and rows.keys() <= MODELS.keys()
    alexnet, cells = rows["alexnet"], rows["nasnet_cifar"]
    assert (alexnet.batch, alexnet.size, alexnet.regular_bytes) == (1024, 224, 4955 << 20)
    assert (alexnet.cut, alexnet.overhead) == pytest.approx((1 - 3287 / 4955, 0.519 / 0.388 - 1))
    assert (cells.batch, cells.size, cells.run_batch) == (64, 32, 8)
    path = Path(published.__file__).with_name("ogc.csv")
    for row, line in zip(searched(), csv.DictReader(path.read_text().splitlines()), strict=True):
        assert abs(100 * row.cut - float(line["memory_cut_pct"])) < 1
        assert abs(100 * row.overhead - float(line["time_overhead_pct"])) < 1
    none_bytes, rungs = ladder()
    assert none_bytes == 3_300_000_000 and [rung.checkpoints for rung in rungs] == [0, 2, 4, 8, 16]
    assert (rungs[1].share, rungs[1].overhead) == pytest.approx((578 / 3300, 97 / 38 - 1))
    resnet = {(row.model, row.batch): row for row in resnets()}
    assert len(resnet) == 12 and resnet["resnet200", 32].overhead is None
    fifty = Resnet("resnet50", 32, 1_381_650_000, 3_015_520_000, 0.573 / 0.538 - 1)
    assert resnet["resnet50", 32] == fifty


# ----------------------------------------------------------------------------------- what the planner finds


def test_a_network_without_data_is_planned_at_cuts_and_within_a_time() -> None:
    made: list[Example] = []

    def kept(model: str, **keywords: Any) -> Example:
        made.append(tiny(model, **keywords))
        return made[-1]

    graph, released = captured("resnet18", kept, batch=64, size=64)
    module, args = made[0]
    assert all(type(tensor) is not torch.Tensor for tensor in args)
    held = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    planning, whole = Planning(released, GPU, 2.0), Planning(graph, GPU, 2.0)
    gradients = sum(parameter.nbytes for parameter in module.parameters())
    assert held <= whole.parameter_bytes <= 1.1 * held + 512 * 200
    assert planning.parameter_bytes - whole.parameter_bytes >= gradients
    cut, deepest = planning.at("cut", planning.cut_to(0.2)), planning.deepest("deepest")
    within = planning.within("within", 0.1)
    outcome = planning.outcome(cut, deepest, within)
    assert outcome.cut(cut.peak_bytes) >= 0.2 and cut.overhead is not None
    assert cut.bound <= cut.overhead
    assert within.overhead is not None and within.overhead <= 0.1
    assert deepest.peak_bytes <= within.peak_bytes < planning.baseline_bytes
    assert outcome.point("within") is within


# -------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("table", "network"), [("ogc", "resnet34"), ("ladder", "plain_cnn"), ("resnets", "resnet200")]
)
def test_the_command_writes_a_page_and_goes_on(
    table: str, network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []

    def counted(model: str, **keywords: Any) -> Example:
        made.append(model)
        return tiny(model, **keywords)

    page, journal = tmp_path / "page.md", tmp_path / "rows.jsonl"
    options = [table, "--seconds", "0.1", "--models", network, "--journal", str(journal)]
    assert main([*options, "--markdown", str(page)], make=counted) == 0
    assert network in made and capsys.readouterr().out
    text = page.read_text()
    assert text.startswith(f"<!-- begin recompute-{table} -->") and "Not planned yet" not in text
    assert text.count("\n## gtx1080") == (1 if table == "ladder" else 2)
    made.clear()
    assert main([*options, "--markdown", str(page)], make=counted) == 0
    assert network not in made and page.read_text() == text
    assert main([table, "--seconds", "1", *options[3:]], make=counted) == 2
    assert "IRC441" in capsys.readouterr().err


def test_a_network_is_run_by_both_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    options = ["runs", "--seconds", "1", "--models", "resnet18", "--markdown", str(page)]
    assert main(options, make=tiny) == 0
    text = page.read_text()
    assert "Broken promises: none." in text and re.search(r"\| resnet18 +\| 4 .*\| irc ", text)
    assert "| ogc " in text
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["ogc", "--models", "resnet19"], "IRC400.*no network in the table 'resnet19'"),
        (["resnets", "--seconds", "-1"], "IRC400.*--seconds is -1"),
    ],
)
def test_wrong_commands_are_refused(
    options: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options, make=tiny) == 2
    assert re.search(message, capsys.readouterr().err)


# ----------------------------------------------------------------------------------------------- the page


def outcome(*points: Point) -> Outcome:
    return Outcome(11_000, 2_500, 1_000, 1.0, 100, points)


def test_the_page_tells_what_is_met_and_what_is_impossible() -> None:
    rows = [
        row for row in searched() if row.model in ("resnet18", "resnet34", "resnet50", "resnet101", "vgg16")
    ]
    ogc = Point("ogc", 11_000, 7_000, 0.33, 0.0, 0.1)
    cuts = {
        "vgg16": Point("their cut", 8_000, 8_000, 0.01, 0.01, 1.0),
        "resnet18": Point("their cut", 8_000, 8_000, 0.2, 0.05, 1.0),
        "resnet34": Point("their cut", 8_000, 8_000, 0.2, 0.15, 1.0),
        "resnet50": Point("their cut", 2_000, 9_000, None, 0.0, 1.0),
        "resnet101": Point("their cut", 8_000, 9_000, None, 0.0, 1.0),
    }
    others = (Point("their time", 4_000, 4_000, 0.3, 0.1, 1.0), Point("deepest", 3_000, 3_000, 0.5, 0.1, 1.0))
    found = {f"gtx1080ti {name}": [outcome(ogc, cut, *others), outcome(cut)] for name, cut in cuts.items()}
    text = searched_section([GPU], rows, found)
    assert "within 4% of the published ones on 0 of 5" in text and "of the bounds 7.0%" in text
    assert "1 of 5; 2 are proved impossible for the graph that irc plans" in text
    verdicts = {row.split("|")[1].strip(): row for row in text.splitlines() if row.startswith("| ")}
    assert "| met " in verdicts["vgg16"] and "| **not met**" in verdicts["resnet18"]
    assert "| **not met**" in verdicts["resnet101"]  # nothing was found, and nothing is proved
    assert "impossible" in verdicts["resnet34"] and "does not fit" in verdicts["resnet50"]
    assert re.search(r"\| 70% +\| 80% +\| 0\.1 +\| 1\.0 +\|$", verdicts["vgg16"])
    missing = searched_section([GPU, replace(GPU, name="other")], rows, found)
    assert "Not planned yet: other vgg16" in missing


def test_the_other_pages_have_their_rows() -> None:
    rungs = ladder()[1]
    points = [
        outcome(
            Point(f"checkpoints-{rung.checkpoints}", 9, 5_000_000, 1.0, 0.0, 0.1),
            Point("its memory", 5_000_000, 4_000_000, 0.5, 0.1, 0.1),
            Point("their memory", 4_000_000, 4_000_000, 0.05, 0.01, 0.1),
            Point("their time", 3_000_000, 3_000_000, 0.2, 0.1, 0.1),
        )
        for rung in rungs
    ]
    text = ladder_section(GPU, {"gtx1080ti": points})
    assert "5 of 5" in text and text.count("| met") == 10 and "Not planned" not in text
    assert ladder_section(GPU, {}) == "Not planned yet: gtx1080ti."
    eighteen, two_hundred = (
        row for row in resnets() if row.batch == 32 and row.model in ("resnet18", "resnet200")
    )
    own = [Point(name, 9, 9, 0.3, 0.0, 0.1) for name in ("sqrt-n", "ogc")]
    own += [Point(f"gradient-checkpointing-{mode}", 9, 9, 0.3, 0.0, 0.1) for mode in ("memory", "speed")]
    fits = Point("their memory", 9, 9, 0.02, 0.01, 0.1)
    found = {
        "gtx1080ti resnet18-32": [outcome(*own, fits, replace(fits, question="their part"))],
        "gtx1080ti resnet200-32": [outcome(*own, fits)],
    }
    text = resnet_section([GPU], [eighteen, two_hundred], found)
    assert text.count("impossible") == 1 and "-18.0%" in text


def test_a_broken_promise_stands_below_the_runs() -> None:
    row = next(row for row in searched() if row.model == "vgg16")
    run = Run("smallest", 10 << 20, 11 << 20, 0.1, 1.2, 1.1, 1.3, ("measured 11 > predicted 10 bytes",))
    text = runs_section([row], {"vgg16": [Trained(8, 20 << 20, 2.0, (run,))]})
    assert "to the byte, in 0 of 1 runs" in text
    assert "irc, smallest" in text and "vgg16: measured 11 > predicted 10 bytes" in text
    assert "Not run yet: vgg16." in runs_section([row], {})
