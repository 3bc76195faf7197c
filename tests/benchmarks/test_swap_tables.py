"""The published tables of swapping: what is read, planned, kept and written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.models import resnet18
from benchmarks.models.registry import Example
from benchmarks.swap_tables.__main__ import main
from benchmarks.swap_tables.page import Fitted, to_section
from benchmarks.swap_tables.published import Case, Published, cases, largest_batches
from benchmarks.swap_tables.simulated import (
    Entry,
    captured,
    entries,
    fitted,
    largest_original,
    program_on,
)
from irc.ir import Graph, UsageError
from irc.passes import Machine, Planner, machine_named

GPU = machine_named("gtx1080")


def tiny(model: str, batch: int) -> Example:
    """A small network under any name."""
    return resnet18(batch=batch // 4, size=64, classes=10, width=8, depths=(2, 1, 1, 1))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return captured("resnet18", 64, tiny)


# ---------------------------------------------------------------------------------- the published numbers


def test_the_published_rows_are_read() -> None:
    assert len(cases()) == 13
    assert [case.name for case in cases()[:3]] == ["resnet18-32", "resnet34-32", "resnet50-32"]
    by_name = {case.name: case for case in cases()}
    fifty = by_name["resnet50-32"]
    assert fifty.published["ome"] == Published(1_230_800_000, 3_860_000_000, 0.600)
    assert fifty.slow_down("ome") == pytest.approx(0.600 / 0.538 - 1)
    assert by_name["resnet200-32"].slow_down("ome") is None
    assert by_name["resnet200-128"].published.keys() == {"recompute", "ome"}
    assert by_name["inception_v4-24"].published["swap"].host_bytes == 7_853_000_000
    assert (
        largest_batches()["ome"].batch == 214 and largest_batches()["original"].device_bytes == 7_109_550_000
    )


# ----------------------------------------------------------------------------------- what the planner finds


def case_of(planner: Planner, parts: dict[str, float]) -> Case:
    """A case whose published memory is these parts of the original's."""
    rows = {
        name: Published(int(planner.baseline_bytes * part), 0, 1.0 + part) for name, part in parts.items()
    }
    return Case("resnet18", 64, rows)


def test_entries_are_within_their_budgets_and_joint_is_the_fastest(graph: Graph) -> None:
    planner = Planner(program_on(graph, GPU))
    case = case_of(planner, {"original": 1.0, "recompute": 0.8, "swap": 0.9, "ome": 0.75})
    found = list(entries(planner, case, 1.0))
    assert [entry.strategy for entry in found] == [
        *("original", "recompute", "recompute", "lms", "lms", "lms", "swap", "ome", "pofo", "joint", "joint")
    ]
    first = found[0]
    assert (first.peak_bytes, first.host_bytes) == (planner.baseline_bytes, 0)
    assert first.seconds == planner.problem.step_seconds
    here = [entry for entry in found if entry.budget_bytes == case.published["ome"].device_bytes]
    assert len(here) >= 6
    joint = here[-1]
    assert joint.strategy == "joint" and joint.seconds is not None
    for entry in here:
        if entry.seconds is None:
            assert entry.peak_bytes > entry.budget_bytes
        else:
            assert entry.peak_bytes <= entry.budget_bytes
            assert joint.seconds <= entry.seconds * (1 + 1e-9)
            assert entry.host_bytes > 0 or entry.strategy not in ("lms", "swap")
            assert entry.host_bytes == 0 or entry.strategy != "recompute"
    assert joint.bound_seconds <= joint.seconds * (1 + 1e-9)


def test_one_rate_is_fitted(graph: Graph) -> None:
    machine = fitted(GPU, graph, 0.25)
    step = Planner(program_on(graph, machine)).problem.step_seconds
    assert step == pytest.approx(0.25, rel=1e-6)
    assert replace(machine, name=GPU.name, flops=GPU.flops) == GPU
    with pytest.raises(UsageError, match=r"no rate of operations makes .* gtx1080 take 1e-06 s") as caught:
        fitted(GPU, graph, 1e-6)
    assert caught.value.code == "IRC400"


@pytest.mark.parametrize("start", [1, 7, 87, 400])
def test_the_largest_batch_of_the_original(start: int) -> None:
    seen: list[int] = []

    def baseline(batch: int) -> int:
        seen.append(batch)
        return 120 + 75 * batch + batch // 10

    assert largest_original(baseline, 7109, start) == 93
    assert len(seen) < 8
    assert largest_original(baseline, 100, start) == 0


# -------------------------------------------------------------------------------------------- the command


def test_the_command_writes_a_page_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[tuple[str, int]] = []

    def counted(model: str, batch: int) -> Example:
        made.append((model, batch))
        return tiny(model, batch)

    page, journal = tmp_path / "tables.md", tmp_path / "rows.jsonl"
    options = ["--quick", "--models", "resnet50", "--seconds", "0.1", "--journal", str(journal)]
    assert main([*options, "--markdown", str(page)], make=counted) == 0
    assert made == [("resnet50", 32)]
    printed = capsys.readouterr().out
    assert printed.count("strategy='joint'") == 4 and printed.count("gtx1080") == 2
    text = page.read_text()
    assert text.startswith("<!-- begin swap-tables -->") and "Not planned yet" not in text
    assert "## gtx1080, fitted" in text
    made.clear()
    assert main([*options, "--markdown", str(page)], make=counted) == 0
    assert made == [("resnet50", 32)] and page.read_text() == text
    assert capsys.readouterr().out == ""
    assert main([*options[:4], "2", *options[5:]], make=tiny) == 2
    assert "IRC441" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "resnet19"], "IRC400.*no published model 'resnet19'"),
        (["--seconds", "-1"], "IRC400.*--seconds is -1"),
        (["--costs", "cpu"], "IRC408.*machine cpu has no tier host"),
    ],
)
def test_wrong_commands_are_refused(
    options: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options, make=tiny) == 2
    assert re.search(message, capsys.readouterr().err)


ENTRY = Entry("original", 0, 10_000_000, 0, 1.0, 0.0, 0.0, "80")


# ----------------------------------------------------------------------------------------------- the page


def machines() -> tuple[Fitted, Fitted]:
    fifty = next(case for case in cases() if case.name == "resnet50-32")
    slow: Machine = replace(GPU, name="gtx1080, fitted", flops=1e12)
    return Fitted(GPU, None), Fitted(slow, (fifty, 0.538))


def test_the_page_says_what_is_met_and_what_is_missing() -> None:
    fifty = next(case for case in cases() if case.name == "resnet50-32")
    ome_bytes = fifty.published["ome"].device_bytes
    joint = Entry("joint", ome_bytes, ome_bytes, 5_000_000, 1.057, 1.01, 1.0, "joint")
    late = replace(joint, seconds=1.059)
    found = {"gtx1080 resnet50-32": [ENTRY, joint], "gtx1080, fitted resnet50-32": [ENTRY, late]}
    text = to_section(machines(), [fifty], found)
    assert "| resnet50 | 32    | 11.5%         | 5.8%       | 5.7%, met      | 5.9%, **not met**" in text
    assert "1.0%" in text and "Not planned yet" not in text
    missing = to_section(machines(), [fifty], {"gtx1080 resnet50-32": [ENTRY, joint]})
    assert "Not planned yet: gtx1080, fitted resnet50-32." in missing


def test_the_page_has_what_does_not_fit_and_the_largest_batches() -> None:
    fifty = next(case for case in cases() if case.name == "resnet50-32")
    misfit = Entry("lms", fifty.published["ome"].device_bytes, 2_000_000_000, 0, None, 0.0, 1.0, "IRC204")
    joint = Entry("joint", 7_109_550_000, 7_000_000_000, 1, 1.08, 1.02, 1.0, "joint")
    found = {
        "gtx1080 resnet50-32": [ENTRY, misfit],
        "gtx1080 resnet50 original": [ENTRY],
        "gtx1080 resnet50 batch 197": [ENTRY, joint],
    }
    text = to_section(machines(), [fifty], found)
    assert "does not fit" in text
    assert "the original's is 80 here" in text
    row = next(line for line in text.splitlines() if "joint, gtx1080 " in line and "| 197" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")][2:] == ["197", "2.46", "7,000", "8.0%"]
