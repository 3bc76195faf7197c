"""The command: every exit status, every error line, and what it prints."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import irc as package
from irc import BudgetError, Plan
from irc.passes import PassManager, parse_passes
from irc.tools import cli

FAST = ["--costs", "analytic", "--time-limit", "1"]

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])}

Run = Callable[..., tuple[int, str, str]]


def refused(result: tuple[int, str, str], status: int, code: str, text: str) -> str:
    """Checks a refusal: its exit status, one line that says what is wrong, and a help line."""
    found, out, err = result
    assert found == status and out == ""
    lines = err.splitlines()
    assert lines[0].startswith(f"error[{code}]: ") and text in lines[0], err
    assert all(re.match(r"  (-->|help:|note:) ", line) for line in lines[1:]), err
    assert any(line.startswith("  help: ") for line in lines) and "Traceback" not in err
    return err


def save_onnx(
    path: Path, nodes: list[onnx.NodeProto] | None = None, shape: tuple[int | str, ...] = ("n", 8)
) -> Path:
    """Three layers by default."""
    nodes = nodes or [
        helper.make_node("MatMul", ["x", "w0"], ["a"]),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w1"], ["c"]),
        helper.make_node("Sigmoid", ["c"], ["d"]),
        helper.make_node("MatMul", ["d", "w2"], ["y"]),
    ]
    draw = np.random.default_rng(0)
    weights = [numpy_helper.from_array(draw.standard_normal((8, 8), np.float32), f"w{i}") for i in range(3)]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [value], [result], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(path))
    return path


# ---------------------------------------------------------------------- 0: done


def test_the_journey_of_a_factory(irc: Run, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, text, err = irc("optimize", f"{models}:mlp", "--budget", "70%", "--time-limit", 1, "-o", out)
    assert status == 0 and err == ""
    for row in ("budget", "predicted peak", "baseline peak", "overhead", "smallest budget", "written"):
        assert re.search(rf"^ +{row}  ", text, re.MULTILINE), text
    assert sorted(p.name for p in out.iterdir()) == [
        "model.py",
        "plan.json",
        "program.irc",
        "timeline.json",
        "weights.safetensors",
    ]
    plan = Plan.load(out / "plan.json")
    assert plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
    status, text, err = irc("run", out, "--steps", 2, "--check", "--trust")
    assert status == 0 and err == ""
    assert "step 2: loss" in text and "bit-equal" in text and "not bit-equal" not in text
    assert f"<= predicted {plan.peak_bytes:,} <= budget {plan.budget_bytes:,} bytes" in text


def test_the_journey_of_an_onnx_file(irc: Run, tmp_path: Path) -> None:
    path, out = save_onnx(tmp_path / "m.onnx"), tmp_path / "out"
    argv: list[object] = [
        "optimize",
        path,
        "--batch",
        16,
        "--budget",
        "90%",
        "--time-limit",
        1,
        "-q",
        "-o",
        out,
    ]
    assert irc(*argv) == (0, "", "")
    assert irc("run", out, "--check", "--trust", "-q") == (0, "", "")
    status, text, _ = irc("inspect", path, "--input", "x=16x8", "--costs", "analytic")
    assert status == 0 and "float32[16, 8]" in text


def test_optimize_as_json(irc: Run, models: Path) -> None:
    status, text, _ = irc("optimize", f"{models}:mlp", "--budget", "80%", "--json", *FAST)
    plan = json.loads(text)
    assert status == 0 and plan["format"] == "irc-plan-2"
    wanted = """budget_bytes peak_bytes baseline_peak_bytes static_bytes minimum_budget_bytes floor_bytes
        step_seconds overhead lower_bound_overhead proven_optimal strategy costs decisions gap
        seconds_to_plan"""
    assert set(wanted.split()) <= set(plan)
    keys = {
        "storage",
        "operation",
        "nbytes",
        "action",
        "runs_again",
        "seconds",
        "reason",
        "location",
        "annotation",
    }
    assert plan["decisions"] and set(plan["decisions"][0]) == keys


def test_a_file_with_open_axes(irc: Run, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"]),
        helper.make_node("Concat", ["a", "a"], ["y"], axis=0),
    ]
    path = save_onnx(tmp_path / "m.onnx", nodes)
    status, text, err = irc("inspect", path)
    assert status == 0 and err == ""
    lines = [line.split() for line in text.splitlines()]
    assert lines[:2] == [["input", "x", "float32[n,", "8]"], ["output", "y", "[2*n,", "8]"]]
    assert ["parameter", "w0", "float32[8,", "8]"] in [line[:4] for line in lines]
    assert text.endswith("to see what a step needs, bind n with --batch or --input\n")
    report = json.loads(irc("inspect", path, "--json")[1])
    assert report["inputs"] == {"x": "float32[n, 8]"} and report["outputs"] == {"y": ["2*n", 8]}
    assert [row["name"] for row in report["weights"]] == ["w0"] and "baseline_peak_bytes" not in report
    bound = json.loads(irc("inspect", path, "--batch", 3, "--json", "--costs", "analytic")[1])
    assert bound["outputs"] == {"y": [6, 8]} and bound["baseline_peak_bytes"] > 0


def test_a_file_with_a_list_as_input(irc: Run, tmp_path: Path) -> None:
    path = save_onnx(tmp_path / "m.onnx", [helper.make_node("ConcatFromSequence", ["x"], ["y"], axis=0)])
    model = onnx.load(str(path))
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    model.graph.input[0].type.CopyFrom(kind)
    onnx.save(model, str(path))
    status, text, err = irc("inspect", path)
    assert (status, err) == (0, "") and "no example is drawn for x" in text


def test_inspect_as_json_and_quiet(irc: Run, models: Path) -> None:
    status, text, _ = irc("inspect", f"{models}:mlp", "--json", "--costs", "analytic", "--top", 3)
    found = json.loads(text)
    assert status == 0 and len(found["largest"]) == 3
    assert found["roles"]["parameter"] == {"count": 16, "bytes": 8 * (32 * 32 + 32) * 4}
    assert found["floor_bytes"] <= found["minimum_budget_bytes"] < found["baseline_peak_bytes"]
    assert irc("inspect", f"{models}:mlp", "--costs", "analytic", "-q") == (0, "", "")


@pytest.mark.slow
def test_the_journey_of_a_front(irc: Run, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "front"
    command = ["pareto", f"{models}:mlp", "--budgets", "100%,90%,80%,1kB", "-o", out, *FAST]
    status, text, err = irc(*command)
    assert status == 0 and err == ""
    rows = text.splitlines()
    assert rows[0].split()[:4] == ["budget", "KiB", "of", "baseline"]
    assert re.search(r"^ +[\d.]+ +100\.0% +100\.0% .* 0\.00% +0\.00% +proved +keep-all ", text, re.MULTILINE)
    assert "refused, IRC204: a training step needs" in text and "\nknee: " in text
    names = ["front.csv", "front.json", "front.png", "front.svg", "points.jsonl"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert str(out / "front.svg") in rows[-1]
    status, shown, err = irc(*command, "--json")
    assert status == 0 and err == "" and json.loads(shown) == json.loads((out / "front.json").read_text())
    assert json.loads(shown)["model"] == "mlp"
    assert irc(*command, "-q") == (0, "", "")
    status, _, err = irc(*command, "-v", "--restart")
    assert status == 0 and len(re.findall(r"^budget .*: overhead .* s$", err, re.MULTILINE)) == 3
    assert len(re.findall(r"^budget 1000 B: refused: IRC204", err, re.MULTILINE)) == 1
    refused(irc(*command, "--strategy", "sqrt-n"), 2, "IRC441", "other options")


@pytest.mark.slow
def test_the_journey_of_a_front_with_copies(irc: Run, models: Path, tmp_path: Path) -> None:
    out, scratch = tmp_path / "front", tmp_path / "my scratch"
    scratch.mkdir()
    command = ["pareto", f"{models}:mlp", "--points", 4, "-o", out, *FAST]
    options = ["--swap", f"disk:{scratch}:1MiB"]
    status, text, err = irc(*command, *options)
    assert status == 0 and err == "" and "from disk KiB" in text.splitlines()[0]
    assert "\ndisk: 1 MiB, copies at 1 GB/s there and 2 GB/s back " in text
    knee = re.search(r"^knee: .* plan it with (--budget \d+ --swap .*)$", text, re.MULTILINE)
    assert knee is not None, text
    asked = shlex.split(knee[1])
    assert asked[2:] == ["--swap", f"disk:{scratch}:{1 << 20}"]
    status, plan, _ = irc("optimize", f"{models}:mlp", *asked, *FAST, "--json")
    assert status == 0 and json.loads(plan)["peak_bytes"] <= int(asked[1])
    assert "with copies to disk" in (out / "front.svg").read_text()
    rows = list(csv.DictReader((out / "front.csv").read_text().splitlines()))
    assert len(rows) == 4 and any(int(row["disk_out_bytes"]) for row in rows)
    assert irc(*command, *options, "--json")[0] == 0
    refused(irc(*command), 2, "IRC441", "other tiers")
    refused(irc(*command, "--swap", f"disk:{scratch}:2MiB"), 2, "IRC441", "other tiers")


def test_a_front_of_an_onnx_file_where_nothing_fits(irc: Run, tmp_path: Path) -> None:
    command = ["pareto", save_onnx(tmp_path / "m.onnx"), "--batch", 16, *FAST]
    match = re.search(
        r"help: give a budget of (\d+) bytes", refused(irc(*command, "--budgets", "1kB"), 3, "IRC443", "1000")
    )
    assert match is not None
    status, text, _ = irc(*command, "--budgets", match[1], "--json")
    front = json.loads(text)
    assert status == 0 and front["model"] == "m" and front["points"][0]["peak_bytes"] <= int(match[1])


def test_an_interrupted_front_says_what_is_kept(
    irc: Run, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("irc.compiler.pareto.sweep._plan_within", interrupt)
    status, out, err = irc("pareto", f"{models}:mlp", "--points", 3, "-o", tmp_path / "out", *FAST)
    assert (status, out) == (1, "")
    assert err.splitlines() == [
        "error[IRC001]: interrupted",
        "  note: 0 of 3 points are finished; the same command goes on from there",
    ]


def test_run_as_json(irc: Run, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    irc("optimize", f"{models}:mlp", "--budget", "80%", "--time-limit", 1, "-q", "-o", out)
    plain = """format budget_bytes predicted_bytes measured_bytes predicted_overhead losses seconds failures
        optimizer"""
    status, text, _ = irc("run", out, "--json")
    assert status == 0 and set(json.loads(text)) == set(plain.split())
    status, text, _ = irc("run", out, "--json", "--check", "--trust")
    beside = """original_bytes original_losses time_ratio loss_difference gradient_difference gradient_scale
        output_difference buffer_difference bit_equal"""
    report = json.loads(text)
    assert status == 0 and set(report) == {*plain.split(), *beside.split()}
    assert report["bit_equal"] and report["failures"] == []
    assert report["measured_bytes"] <= report["predicted_bytes"] < report["original_bytes"]


def test_verbose_says_what_took_how_long(irc: Run, models: Path) -> None:
    status, out, err = irc("optimize", f"{models}:mlp", "--budget", "80%", "-v", *FAST)
    assert status == 0 and "pass plan-memory: " in err and "pass cost: " in err
    assert "storage " in out and "recompute" in out


def test_the_pipeline_is_printed_back(irc: Run) -> None:
    status, text, _ = irc("optimize", "m.py:f", "--budget", "4GiB", "--strategy", "every-4", "--print-passes")
    assert status == 0
    assert str(PassManager(parse_passes(text.strip()))) == text.strip()
    assert "plan-memory{budget=4GiB,strategy=every-4,time-limit=60.0,offload=none,gap=0.005}" in text
    again = irc("optimize", "m.py:f", "--passes", text.strip(), "--print-passes")
    assert again == (0, text, "")


def test_a_pipeline_as_text_is_what_runs(irc: Run, models: Path) -> None:
    passes = "cost{profile=a100},plan-memory{budget=100%,strategy=keep-all}"
    status, text, _ = irc("optimize", f"{models}:mlp", "--passes", passes)
    assert status == 0 and "keep-all, costs analytic:a100" in text


# ---------------------------------------------------------------------- 2: the command is wrong


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        ("train", "IRC400", "invalid choice: 'train'"),
        ("optimize {m}:mlp --budget 4Gb", "IRC401", "'4Gb'"),
        ("optimize {m}:mlp --budget 0", "IRC401", "must be positive"),
        ("optimize {m}:mlp --budget -5", "IRC401", "'-5'"),
        ("optimize {m}:mlp --budget much", "IRC401", "'much'"),
        ("optimize {m}:mlp --budget " + 5000 * "9", "IRC401", "out of all proportion"),
        ("optimize {m}:mlp", "IRC400", "the budget is missing"),
        ("optimize {m}:mlp --budget 60% --strategy best", "IRC403", "'best'"),
        ("optimize {m}:mlp --budget 60% --strategy every-0", "IRC403", "'every-0'"),
        ("optimize {m}:mlp --budget 60% --time-limit -1", "IRC403", "-1.0 seconds"),
        ("optimize {m}:mlp --budget 60% --time-limit inf", "IRC403", "inf seconds"),
        ("optimize {m}:mlp --budget 60% --time-limit soon", "IRC400", "'soon'"),
        ("optimize {m}:mlp --budget 60% -v -q", "IRC400", "not allowed with"),
        ("optimize {m}:mlp --budget 60% --passes cost", "IRC400", "exclude each other"),
        ("optimize {m}:mlp --passes cost{{profile=tpu}},plan-memory", "IRC410", "'tpu'"),
        ("optimize {m}:mlp --passes cost,fuse", "IRC404", "'fuse'"),
        ("optimize {m}:mlp --passes cost{{speed=1}}", "IRC404", "'speed=1'"),
        ("optimize {m}:mlp --passes cost", "IRC405", "chooses a schedule"),
        ("optimize {m}:mlp --budget 60% --batch 4", "IRC420", "for ONNX files"),
        ("optimize {m}:mlp --budget 60% --batch 0", "IRC400", "not positive"),
        ("optimize {m}:mlp --budget 60% --input x", "IRC421", "'x'"),
        ("optimize {m}:nothing --budget 60%", "IRC420", "no function 'nothing'"),
        ("optimize nowhere.py:f --budget 60%", "IRC420", "no file nowhere.py"),
        ("optimize no.where:f --budget 60%", "IRC420", "no module 'no.where'"),
        ("optimize nowhere.onnx --budget 60%", "IRC310", "no such file: nowhere.onnx"),
        ("optimize {m} --budget 60%", "IRC420", "no ONNX file and no factory"),
        ("pareto {m}:mlp --points 1", "IRC440", "a front of 1 points"),
        ("pareto {m}:mlp --points few", "IRC400", "'few'"),
        ("pareto {m}:mlp --points 3 --budgets 60%", "IRC400", "not allowed with"),
        ("pareto {m}:mlp --budgets 60%,", "IRC401", "''"),
        ("pareto {m}:mlp --budgets 60%," + 5000 * "9", "IRC401", "out of all proportion"),
        ("pareto {m}:mlp --time-limit -1", "IRC403", "-1.0 seconds"),
        ("pareto {m}:mlp --restart", "IRC400", "without a folder"),
        ("pareto {m}:none --swap tape:1GiB", "IRC424", "'tape'"),
        ("pareto {m}:none --swap disk:/nowhere/at/all", "IRC427", "/nowhere/at/all"),
        ("pareto {m}:none --swap disk --swap disk", "IRC426", "2 times"),
        ("pareto {m}:mlp --strategy lms", "IRC403", "strategy lms copies"),
        ("pareto {m}:mlp -o {m}", "IRC442", "Not a directory"),
        ("inspect nowhere", "IRC420", "no ONNX file and no factory"),
        ("inspect {m}:mlp --top -1", "IRC400", "negative"),
        ("run nowhere", "IRC431", "nowhere is not a folder"),
        ("run nowhere --steps 0", "IRC400", "not positive"),
        ("optimize {m}:mlp --budget 60% -o {m}", "IRC430", "is a file"),
    ],
)
def test_wrong_commands(irc: Run, models: Path, argv: str, code: str, text: str) -> None:
    refused(irc(*argv.format(m=models).split()), 2, code, text)


def test_wrong_onnx_files(irc: Run, tmp_path: Path) -> None:
    path = save_onnx(tmp_path / "m.onnx")

    def optimize(path: Path, *argv: object) -> tuple[int, str, str]:
        return irc("optimize", path, "--budget", "90%", *FAST, *argv)

    (tmp_path / "cut.onnx").write_bytes(path.read_bytes()[:300])
    refused(optimize(tmp_path / "cut.onnx"), 2, "IRC311", "not a whole ONNX model")
    (tmp_path / "text.onnx").write_text("this is a text\n" * 20)
    refused(optimize(tmp_path / "text.onnx"), 2, "IRC311", "not a")
    (tmp_path / "empty.onnx").touch()
    refused(optimize(tmp_path / "empty.onnx"), 2, "IRC311", "is empty")
    assert "'x'" in refused(optimize(path, "--input", "z=4x8"), 2, "IRC314", "no input 'z'")
    refused(optimize(path, "--input", "x=4x9"), 2, "IRC315", "axis 1 is fixed at 8")
    refused(optimize(path, "--input", "x=4"), 2, "IRC315", "1 axes for 2")
    assert "--batch N" in refused(optimize(path), 2, "IRC317", "axis 0 (n)")


# ---------------------------------------------------------------------- 3, 4, 5 and 1


@pytest.mark.parametrize("strategy", [pytest.param("auto", marks=pytest.mark.slow), "eviction", "sqrt-n"])
def test_what_does_not_fit_names_the_budget_that_does(irc: Run, models: Path, strategy: str) -> None:
    command = ["optimize", f"{models}:mlp", "--strategy", strategy, *FAST, "--budget"]
    minimum = least(irc(*command, "1kB"))
    status, out, _ = irc(*command, minimum)
    assert status == 0 and f"({minimum:,} bytes" in out
    refused(irc(*command, minimum - 1), 3, "IRC204", f"({minimum} bytes)")


def test_an_unsupported_operation(irc: Run, models: Path, tmp_path: Path) -> None:
    path = save_onnx(
        tmp_path / "m.onnx",
        [helper.make_node("Fancy", ["x"], ["y"], name="odd", domain="com.acme")],
        (3, 8, 8),
    )
    err = refused(irc("optimize", path, "--budget", "90%", *FAST), 4, "IRC301", "com.acme::Fancy")
    assert "ONNX node odd" in err
    err = refused(irc("inspect", f"{models}:branching"), 4, "IRC332", "depend on the values")
    assert "models.py" in err


def least(result: tuple[int, str, str]) -> int:
    """The budget that a refusal offers."""
    match = re.search(
        r"help: raise the budget to (\d+) bytes", refused(result, 3, "IRC204", "over the budget")
    )
    assert match is not None
    return int(match[1])


@pytest.mark.slow
def test_the_time_limit_ends_before_a_plan(irc: Run, models: Path, tmp_path: Path) -> None:
    command = ["optimize", f"{models}:mlp", "--costs", "analytic", "-o", tmp_path / "out", "--time-limit"]
    with_time, at_once = (least(irc(*command, seconds, "--budget", "1kB")) for seconds in (2, 0))
    assert with_time < at_once, "eviction reaches lower than the rules that are always tried"
    refused(irc(*command, 0, "--budget", with_time), 5, "IRC205", "the time limit of 0 s ended")
    assert not (tmp_path / "out").exists()
    assert irc(*command, 0, "--budget", at_once)[0] == 0


def test_an_internal_error_is_one_line(irc: Run, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr("irc.compiler.captured_call.capture", fail)
    command = ["optimize", f"{models}:mlp", "--budget", "60%"]
    refused(irc(*command), 1, "IRC000", "internal error: ZeroDivisionError: division by zero")
    monkeypatch.setenv("IRC_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        irc(*command)


def test_an_interrupt_is_one_line(irc: Run, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("irc.compiler.captured_call.capture", interrupt)
    status, out, err = irc("optimize", f"{models}:mlp", "--budget", "60%")
    assert (status, out, err) == (1, "", "error[IRC001]: interrupted\n")


def test_notes_are_shown(irc: Run, models: Path) -> None:
    _, _, err = irc("optimize", f"{models}:mlp", "--budget", "1kB", *FAST)
    assert "  note: in pass plan-memory{budget=1kB" in err
    assert BudgetError.exit_status == 3


# ---------------------------------------------------------------------- real processes


def test_help_says_what_the_exit_statuses_mean() -> None:
    command = [sys.executable, "-m", "irc", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    text = " ".join(done.stdout.split())
    assert "0 done; 1 " in text and "5 the time limit" in text and "optimize" in text
    assert done.stderr == ""


def on_terminal(command: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, bytes]:
    """Runs a command with a terminal for its stderr: its exit status, and what the terminal was sent."""
    leader, follower = pty.openpty()
    with ThreadPoolExecutor(1) as aside, monkeypatch.context() as patch:
        shown = aside.submit(_read, leader)
        with open(follower, "w") as terminal:
            patch.setenv("TERM", "xterm")
            patch.setattr(sys, "stderr", terminal)
            status = cli.main(command)
        return status, shown.result()


def _read(leader: int) -> bytes:
    """What a terminal is sent until its other end is closed."""
    shown = b""
    with open(leader, "rb", buffering=0) as terminal:
        while True:
            try:
                piece = terminal.read(4096)
            except OSError:  # so it ends on Linux
                return shown
            if not piece:
                return shown
            shown += piece


@pytest.mark.slow
def test_a_piped_run_has_no_escape_codes_and_a_terminal_shows_progress(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimize = ["optimize", "models.py:mlp", "--budget", "85%", *FAST, "-o", "out"]
    command = [sys.executable, "-m", "irc", *optimize]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout
    assert (tmp_path / "out" / "model.py").exists()
    monkeypatch.chdir(tmp_path)
    status, shown = on_terminal(optimize, monkeypatch)
    assert status == 0 and b"loading models.py:mlp" in shown and b"\x1b" in shown
    status, shown = on_terminal(["pareto", "models.py:mlp", "--points", "3", *FAST], monkeypatch)
    assert status == 0 and b"smallest budget" in shown and b"3/3" in shown
    assert re.search(rb"budget [\d.]+ KiB.*0:00:0\d", shown)
