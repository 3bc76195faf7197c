"""Reports of a plan: pages, traces, snapshots and pictures that hold what the timeline holds."""

from __future__ import annotations

import base64
import json
import pickle
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.deep import made
from support.language import Language, batch
from torch.cuda import _memory_viz  # pyright: ignore[reportPrivateUsage]

import irc
from irc.compiler.report.front import PLAN, front_of, next_budget
from irc.compiler.report.page import page
from irc.compiler.report.pipeline_page import pipeline_page
from irc.compiler.report.traces import chrome_trace, memory_snapshot
from irc.ir import Kind, MemoryTimeline, Plan, Resident, StepMemory, TimelineStep, UsageError
from irc.ir.pipeline.plan import PipelinePlan
from irc.passes import PassManager, Program, parse_passes
from irc.tools import cli


@pytest.fixture(scope="module")
def fitted() -> Any:
    least = irc.optimize(Language(), batch(), "100%", costs="analytic").plan.minimum_budget_bytes
    return irc.optimize(Language(), batch(), least, costs="analytic", swap="disk:1GiB")


def data_of(text: str) -> dict[str, Any]:
    packed = re.search(r'id="data">([A-Za-z0-9+/=]*)</script>', text)
    assert packed is not None
    return json.loads(zlib.decompress(base64.b64decode(packed[1])))


def test_a_page_holds_every_byte_of_both_timelines(fitted: Any) -> None:
    memory: StepMemory = fitted.plan.timeline()
    data = data_of(page("Model", fitted.plan, memory))
    for drawn, timeline in zip(data["timelines"], (memory.original, memory.planned), strict=True):
        during = [step[4] + step[5] for step in drawn["steps"]]
        for _, band, nbytes, first, last, _ in drawn["residents"]:
            assert 0 <= band < len(data["bands"])
            for step in range(first, last + 1):
                during[step] += nbytes
        assert tuple(during) == timeline.during_bytes
        assert [data["texts"][step[0]] for step in drawn["steps"]] == [s.name for s in timeline.steps]
    kept = sum(d.nbytes for d in fitted.plan.decisions if d.action == "keep")
    assert sum(row[1] for row in data["modules"]) == kept
    assert [row[0] for row in data["rows"]] == [name for name, _ in fitted.plan.rows()]


def test_a_page_needs_nothing_from_elsewhere_and_runs_nothing_of_a_model(fitted: Any) -> None:
    memory: StepMemory = fitted.plan.timeline()
    hostile = '</script><img src="http://example.com/x" onerror="alert(1)">'
    steps = tuple(replace(step, name=hostile, module=hostile) for step in memory.planned.steps)
    text = page(hostile, fitted.plan, replace(memory, planned=replace(memory.planned, steps=steps)))
    assert hostile not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert hostile in data_of(text)["texts"] and "innerHTML" not in text
    assert "default-src 'none'" in text


def test_a_page_of_ten_thousand_storages_is_below_a_megabyte(fitted: Any) -> None:
    count = 10_000
    steps = tuple(
        TimelineStep(
            f"addmm_{i}", "aten.addmm.default", "forward", i, i + 1, i, 0, f"layers.{i % 80}", "m.py:1"
        )
        for i in range(count)
    )
    stays = tuple(Resident(f"s{i}", Kind.FORWARD, 7 * i, i, min(i + 9, count - 1), i) for i in range(count))
    timeline = MemoryTimeline(steps, stays)
    assert len(page("Model", fitted.plan, StepMemory(timeline, timeline))) < 1 << 20


def test_a_trace_has_the_operations_the_copies_and_the_memory(fitted: Any) -> None:
    timeline = fitted.plan.timeline().planned
    events = chrome_trace({"planned": timeline})["traceEvents"]
    runs = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert sum(event["dur"] for event in runs) == pytest.approx(1e6 * timeline.step_seconds, rel=1e-6)
    counted = [sum(event["args"].values()) for event in events if event["ph"] == "C"]
    assert tuple(counted) == timeline.during_bytes
    copies = [event for event in events if event.get("cat") == "copy"]
    assert len(copies) == len(timeline.copies)


def test_a_snapshot_has_the_peak_of_the_plan_and_is_drawn_by_torch(fitted: Any) -> None:
    timeline = fitted.plan.timeline().planned
    snapshot = memory_snapshot(timeline)
    (trace,) = snapshot["device_traces"]
    alive = peak = 0
    there: dict[int, int] = {}
    for event in trace:
        if event["action"] == "alloc":
            assert event["addr"] not in there
            there[event["addr"]] = event["size"]
        else:
            assert there.pop(event["addr"]) == event["size"]
        alive = sum(there.values())
        peak = max(peak, alive)
    assert peak == timeline.peak_bytes and not there
    assert "html" in _memory_viz.trace_plot(snapshot)


@pytest.mark.parametrize("suffix", [".html", ".svg", ".png", ".json", ".pickle"])
def test_a_report_is_written_by_its_suffix(suffix: str, fitted: Any, tmp_path: Path) -> None:
    path = tmp_path / f"report{suffix}"
    irc.report(fitted, path)
    content = path.read_bytes()
    begins = {".html": b"<!doctype html>", ".svg": b"<?xml", ".png": b"\x89PNG", ".json": b'{"traceEvents"'}
    assert content.startswith(begins.get(suffix, b"\x80"))
    if suffix == ".pickle":
        assert pickle.loads(content).keys() == {"segments", "device_traces"}


def test_another_suffix_and_a_module_without_a_plan_are_refused(fitted: Any, tmp_path: Path) -> None:
    for what, path in ((fitted, "report.pdf"), (Language(), "report.html"), (fitted, "report")):
        with pytest.raises(UsageError) as caught:
            irc.report(what, tmp_path / path)
        assert caught.value.code == "IRC400" and not list(tmp_path.iterdir())
    with pytest.raises(UsageError) as caught:
        irc.report(fitted, tmp_path / "none" / "report.html")
    assert caught.value.code == "IRC442"


def test_a_front_has_the_plan_among_cheaper_and_dearer_ones() -> None:
    from irc.frontends.torch import capture

    passes = parse_passes("cost{profile=cpu},plan-memory{budget=40%}")
    program = PassManager(passes).run(Program(capture(*made()).graph))
    assert program.plan is not None
    front = front_of(program, program.plan, passes[-1])  # type: ignore[arg-type]
    assert front[PLAN] is program.plan and len(front) > 4
    overheads = [plan.overhead for plan in front.values()]
    assert overheads == sorted(overheads, reverse=True)
    assert all(plan.lower_bound_overhead <= plan.overhead for plan in front.values())
    assert "would end all recomputation" in next_budget(front)


# ---------------------------------------------------------------------- command line


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `irc optimize -o plan --report first.html`."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "made.py").write_text("from support.deep import made\n")
    command = ["optimize", f"{folder / 'made.py'}:made", "--budget", "60%", "--costs", "analytic", "-q"]
    assert cli.main([*command, "-o", str(folder / "plan"), "--report", str(folder / "first.html")]) == 0
    return folder


@pytest.fixture
def written(planned: Path, tmp_path: Path) -> Path:
    """The folder of the plan, to be changed."""
    return Path(shutil.copytree(planned / "plan", tmp_path / "plan"))


def test_a_folder_is_reported_and_explained(
    planned: Path, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.load(written / "plan.json")
    out = tmp_path / "second.html"
    assert cli.main(["report", str(written), "-o", str(out), "-o", str(tmp_path / "t.json")]) == 0
    data = data_of(out.read_text())
    assert any(name == PLAN and peak == plan.peak_bytes for _, peak, _, _, name in data["front"])
    first = data_of((planned / "first.html").read_text())
    assert first["timelines"] == data["timelines"] and first["modules"] == data["modules"]
    capsys.readouterr()
    shown: dict[tuple[str, ...], str] = {}
    for options in (
        (),
        ("--by", "line"),
        ("--by", "storage", "--top", "1"),
        ("--floor",),
        ("--why", "blocks.3"),
    ):
        assert cli.main(["explain", str(written), *options]) == 0
        shown[options] = capsys.readouterr().out
    assert "(model)" in shown[()] and "blocks.*" in shown[()] and "deep.py:" in shown["--by", "line"]
    assert "parameters" in shown["--floor",] and "backward reads it" in shown["--why", "blocks.3"]
    assert cli.main(["explain", str(written), "--gradient", "blocks.0.0.weight"]) == 0
    assert "gradient of blocks.0.0.weight: 4 KiB, made by mm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: data["planned"]["residents"].pop(0), "IRC129"),
        (lambda data: data["planned"]["residents"][0].__setitem__(2, "much"), "IRC431"),
        (lambda data: data.pop("original"), "IRC431"),
        (lambda data: data["planned"]["residents"][0].__setitem__(1, "nothing"), "IRC431"),
    ],
)
def test_a_folder_whose_memory_is_not_the_plans_is_refused(
    change: Callable[[Any], object], code: str, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads((written / "timeline.json").read_text())
    change(data)
    (written / "timeline.json").write_text(json.dumps(data))
    assert cli.main(["report", str(written), "-o", str(written.parent / "x.html")]) != 0
    assert f"error[{code}]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["report", "DIR", "-o", "x.txt"],
        ["explain", "DIR", "--why", "nowhere"],
        ["explain", "DIR", "--gradient", "nothing"],
        ["explain", "DIR", "--top", "0"],
        ["explain", "DIR", "--json", "--floor"],
        ["explain", "DIR", "--json", "--by", "line"],
        ["explain", "DIR", "--why", "mm", "--by", "line"],
        ["run", "DIR", "--trace", "x.txt"],
    ],
)
def test_what_nobody_can_report_is_refused(
    command: list[str], written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(written) if word == "DIR" else word for word in command]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error[IRC400]") and "help:" in err


def test_a_measured_step_stands_beside_the_predicted_one(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    assert cli.main(["run", str(written), "--steps", "1", "--trace", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    kinds = Counter((isinstance(e.get("pid"), int) and e["pid"] > 1_000_000, e["ph"]) for e in events)
    assert kinds[True, "X"] and kinds[False, "X"] and kinds[True, "C"]
    measured = [e for e in events if e.get("name") == "aten::mm"]
    predicted = [e for e in events if e.get("args", {}).get("operation") == "aten.mm.default"]
    assert measured and predicted


# ---------------------------------------------------------------------- pipelines


@pytest.fixture(scope="module")
def pipeline() -> Any:
    module, (x,) = made()
    return irc.pipeline(module, (x,), "2MiB", stages=2, micro_batches=4, schedule="zb-h1", costs="analytic")


def test_a_page_of_a_pipeline_has_each_piece_of_work(pipeline: Any) -> None:
    plan: PipelinePlan = pipeline.plan
    timeline = plan.timeline
    assert timeline is not None
    data = data_of(pipeline_page("Model", plan, timeline))
    drawn = [len(device["actions"]) for device in data["devices"]]
    assert drawn == [len(line) for line in timeline.lines] and sum(drawn) == 2 * 4 * 3
    assert sum(len(link["transfers"]) for link in data["links"]) == len(timeline.transfers)
    assert [device["peak"] for device in data["devices"]] == list(plan.peak_bytes)
    assert [row[4] for row in data["stages"]] == [stage.parameter_bytes for stage in plan.stages]


def test_a_pipelines_step_reads_back(pipeline: Any) -> None:
    plan: PipelinePlan = pipeline.plan
    again = PipelinePlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan and again.timeline is not None and plan.timeline is not None
    assert (again.timeline.lines, again.timeline.memory) == (plan.timeline.lines, plan.timeline.memory)
    for change in ("lines", "memory"):
        data = json.loads(json.dumps(plan.to_json()))
        data["timeline"][change].reverse() if change == "lines" else data["timeline"][change].pop()
        with pytest.raises(ValueError, match="simulated step"):
            PipelinePlan.from_json(data)
    old = {name: value for name, value in plan.to_json().items() if name != "timeline"}
    assert PipelinePlan.from_json(old).timeline is None


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(peak_bytes=""),
        lambda data: data.update(speeds=data["speeds"][:1]),
        lambda data: data["stages"][0].update(first=[[]]),
        lambda data: data["stages"][0].update(in_flight="1"),
    ],
)
def test_a_pipelines_plan_of_other_devices_or_types_is_refused(pipeline: Any, change: Any) -> None:
    data = json.loads(json.dumps(pipeline.plan.to_json()))
    change(data)
    with pytest.raises((TypeError, ValueError), match=r"have other lengths|first is|in_flight is"):
        PipelinePlan.from_json(data)


@pytest.mark.parametrize("suffix", [".html", ".svg", ".json", ".pickle"])
def test_pipelines_are_reported_by_suffix(suffix: str, pipeline: Any, tmp_path: Path) -> None:
    path = tmp_path / f"report{suffix}"
    if suffix == ".pickle":
        with pytest.raises(UsageError) as caught:
            irc.report(pipeline, path)
        assert caught.value.code == "IRC400" and not path.exists()
        return
    irc.report(pipeline, path)
    assert path.stat().st_size > 1000
    with pytest.raises(UsageError) as caught:
        irc.report(replace(pipeline.plan, timeline=None), path)
    assert caught.value.code == "IRC595"


def test_a_written_pipeline_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "made.py").write_text("from support.deep import made\n")
    first, second = tmp_path / "first.html", tmp_path / "second.html"
    command = ["optimize", f"{tmp_path / 'made.py'}:made", "--stages", "2", "--micro-batches", "4", "-q"]
    more = ["--budget", "2MiB", "--costs", "analytic", "-o", str(tmp_path / "plan"), "--report", str(first)]
    assert cli.main([*command, *more]) == 0
    assert cli.main(["report", str(tmp_path / "plan"), "-o", str(second)]) == 0
    assert first.read_text() == second.read_text()
