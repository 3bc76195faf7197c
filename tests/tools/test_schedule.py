"""`irc schedule`: table, JSON, trace and picture of pipeline schedules."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from support.pipelining import Sample, pipelines

from irc.compiler.report.pipeline_trace import trace_events
from irc.ir.pipeline.schedule import PipelineSchedule
from irc.ir.pipeline.timing import simulate_pipeline
from irc.passes.pipeline import SCHEDULES, pipeline_schedule
from irc.tools.cli import main
from irc.tools.schedule_report import EqualStages, simulate_known


def _output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["schedule", *arguments]) == 0
    return capsys.readouterr().out


def test_one_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    """Four devices, eight micro-batches of 3 s: (8 + 3) * 3 s, of which 3 / 11 are bubble."""
    text = _output(capsys, "--stages", "4", "--micro-batches", "8", "--schedule", "1f1b")
    assert "1f1b: 4 stages on 4 devices, 8 micro-batches, 33 s, bubble 27.3%" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert rows == [[str(r), str(r), "24", "s", "27.3%", *[str(4 - r)] * 3] for r in range(4)]


def test_all_schedules_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    text = _output(capsys, "--stages", "2", "--micro-batches", "3", "--held", "2MiB")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.strip()}
    assert rows["gpipe"] == "2 12 s 25.0% 6 MiB, 6 MiB"
    assert rows["1f1b"] == "2 12 s 25.0% 4 MiB, 2 MiB"
    assert rows["interleaved"] == "4 10.5 s 14.3% 6 MiB, 4 MiB"
    assert rows["zb-h1"] == "2 10 s 10.0% 4 MiB, 4 MiB"
    assert rows["zbv"] == "4 9.5 s 5.3% 4 MiB, 4 MiB"
    assert rows["dualpipev"].startswith("dualpipev on 2 devices takes 4 micro-batches or more")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--stages", "2", "--micro-batches", "4", "--json", "--forward", "2", "--transfer", "0.5"]
    found = json.loads(_output(capsys, *arguments))["steps"]
    assert [each["schedule"] for each in found] == list(SCHEDULES)
    for each in found:
        lines = [" ".join([f"device {d}:", *its["actions"]]) for d, its in enumerate(each["devices"])]
        devices = " ".join(map(str, each["device_of"]))
        header = (
            f"pipeline {each['schedule']}: {each['micro_batches']} micro-batches, stages on devices {devices}"
        )
        assert PipelineSchedule.parse("\n".join([header, *lines])) == pipeline_schedule(
            each["schedule"], 2, 4
        )
        assert all(its["busy_seconds"] == pytest.approx(16) for its in each["devices"])
        busy = sum(its["busy_seconds"] for its in each["devices"])
        assert each["bubble_fraction"] == pytest.approx(1 - busy / 2 / each["step_seconds"])
    gpipe = found[0]
    assert gpipe["step_seconds"] == pytest.approx((4 + 1) * 4 + 2 * 0.5)
    one = json.loads(_output(capsys, *arguments, "--schedule", "gpipe"))
    assert one["steps"] == [gpipe]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--schedule", "1f2b"], "error[IRC467]"),
        (["--stages", "0"], "error[IRC469]"),
        (["--schedule", "interleaved", "--micro-batches", "9"], "error[IRC468]"),
        (["--forward", "-1"], "error[IRC466]"),
        (["--held", "4Gb"], "error[IRC401]"),
        (["--held", "60%"], "error[IRC400]: 60% is not a number of bytes"),
        (["--picture", "x.gif"], "error[IRC400]: --picture x.gif is of no known kind"),
        (["--picture", "missing/x.svg"], "error[IRC435]: there is no folder missing"),
        (["--trace", "x.json"], "error[IRC400]: --trace is for one schedule"),
    ],
)
def test_wrong_commands(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--stages", "4", "--micro-batches", "8", *arguments]) == 2
    printed = capsys.readouterr()
    assert says in printed.err and "help: " in printed.err and not printed.out


# ---------------------------------------------------------------------- trace


def test_the_trace_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    arguments = ["--stages", "2", "--micro-batches", "2", "--schedule", "zbv", "--transfer", "0.25"]
    assert str(path) in _output(capsys, *arguments, "--trace", str(path))
    step = simulate_known("zbv", EqualStages(2, 2, transfer_seconds=0.25))
    assert json.loads(path.read_text()) == json.loads(json.dumps(trace_events(step.timeline)))


@given(pipelines())
def test_a_trace_says_all_of_the_step(sample: Sample) -> None:
    timeline = simulate_pipeline(sample.schedule, sample.costs, sample.transfers)
    events: list[dict[str, Any]] = trace_events(timeline)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    threads = {(event["pid"], event["tid"]) for event in slices}
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert threads <= named
    for thread in threads:
        mine = [event for event in slices if (event["pid"], event["tid"]) == thread]
        for before, after in itertools.pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"]
    for device, line in enumerate(sample.schedule.lines):
        computed = [event for event in slices if (event["pid"], event["tid"]) == (device, 0)]
        assert [event["name"] for event in computed] == [str(action) for action in line]
        busy = sum(event["dur"] for event in computed) / 1e6
        assert busy == pytest.approx(timeline.busy_seconds[device])
        counted = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == device]
        assert max(counted) == timeline.peak_bytes[device]
    sent = [event for event in slices if event["tid"] != 0]
    assert sum(event["dur"] for event in sent) / 1e6 == pytest.approx(
        sum(t.end_seconds - t.start_seconds for t in timeline.transfers)
    )
    assert sum(e["args"]["bytes"] for e in sent) == sum(t.transfer.nbytes for t in timeline.transfers)


# ---------------------------------------------------------------------- picture


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "begin"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_pictures_are_written(
    suffix: str, begin: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"steps.{suffix}"
    _output(capsys, "--stages", "2", "--micro-batches", "4", "--picture", str(path))
    first = path.read_bytes()
    assert first.startswith(begin)
    _output(capsys, "--stages", "2", "--micro-batches", "4", "--picture", str(path))
    assert path.read_bytes() == first
