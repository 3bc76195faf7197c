"""The benchmark keeps every row, holds irc to its promises, and goes on where it stopped."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Generator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import bench_points, bench_recompute
from benchmarks.bench_picture import draw
from benchmarks.bench_points import ModelResult, Planned, Point, Scope, Times, measure_model
from benchmarks.bench_recompute import main
from benchmarks.bench_report import render
from benchmarks.harness import Settings, TimeRatio
from benchmarks.journal import from_json
from irc.compiler.compare import Numbers
from irc.compiler.model_source import Loaded

QUICK = Settings(time_limit=2.0, repeats=2, costs="measured")
MIB = 2**20


@pytest.fixture(autouse=True)
def quiet_compiler() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    """torch's compiler warns about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.GELU())
            for _ in range(6)
        ]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


class Branching(nn.Module):
    """What neither irc nor torch's compiler can take as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return (y * 2 if y.sum().item() > 0 else y).square().mean()


def tiny() -> Loaded:
    return Loaded(Tiny(), (torch.randn(4, 8, 32, 32),))


# ---------------------------------------------------------------------- points


def test_every_method_has_a_row_and_irc_one_at_no_more_memory() -> None:
    scope = Scope(("sequential", "blocks", "selective", "budget"), (1.0, 0.5), (0.7, 0.01, "min"))
    lines: list[str] = []
    result = measure_model("tiny", tiny(), scope, QUICK, report=lines.append)
    theirs = {point.name: point for point in result.of("PyTorch")}
    assert list(theirs) == [
        "checkpoint_sequential 2",
        "checkpoint_sequential 3",
        "checkpoint_sequential 4",
        "checkpoint per block",
        "selective checkpoint per block",
        "activation_memory_budget 1",
        "activation_memory_budget 0.5",
    ]
    ours = {point.name: point for point in result.of("irc")}
    assert list(ours)[:3] == ["budget 0.7", "budget 0.01", "smallest budget"]
    refused = ours.pop("budget 0.01")
    assert refused.peak_bytes is None and refused.failures == ()
    assert "smallest budget is" in (refused.refusal or "")
    for point in ours.values():
        if point.plan is None:
            assert point.failures == (point.refusal,)
            continue
        assert point.failures == () and point.numbers is not None and point.numbers.agrees
        assert point.peak_bytes is not None and point.budget_bytes is not None
        assert point.peak_bytes <= point.plan.peak_bytes <= point.budget_bytes
        assert 1 <= point.plan.bound <= point.plan.time
    for point in theirs.values():
        assert point.peak_bytes is not None and point.times is not None and point.numbers is not None
        assert point.times.cpu.low > 0 and point.times.wall_seconds > 0
        rival = result.within(point.peak_bytes)
        assert rival is None or (rival.peak_bytes is not None and rival.peak_bytes <= point.peak_bytes)
    assert result.within(result.eager_bytes) is not None
    assert sum("checkpoint per block: 0." in line for line in lines) == 2
    assert result.operations is not None and min(result.operations) > 5
    assert from_json(ModelResult, json.loads(json.dumps(asdict(result)))) == result


def test_what_cannot_run_is_a_row_with_the_reason() -> None:
    loaded = Loaded(Branching(), (torch.randn(4, 8),))
    result = measure_model("branching", loaded, Scope(("blocks", "budget"), (0.5,), (0.5,)), QUICK)
    eager, blocks, compiled, ours = result.points
    assert eager.times is not None and eager.peak_bytes == result.eager_bytes > 0
    assert blocks.numbers is not None and blocks.numbers.agrees and blocks.times is not None
    assert compiled.refusal is not None and compiled.times is None and compiled.failures == ()
    assert (ours.system, ours.name) == ("irc", "capture") and ours.failures == (ours.refusal,)
    assert result.operations is None and result.capture_seconds is None
    assert from_json(ModelResult, json.loads(json.dumps(asdict(result)))) == result


def test_a_broken_promise_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = Scope((), (), (0.8,))
    right = bench_points.Original.peak_of
    monkeypatch.setattr(bench_points.Original, "peak_of", lambda self, module: right(self, module) * 2)  # pyright: ignore[reportUnknownLambdaType]
    [point] = measure_model("tiny", tiny(), scope, QUICK).of("irc")
    assert any("> predicted" in failure for failure in point.failures)


def test_wrong_numbers_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(NUMBERS, gradients=0.5, bit_equal=False)
    monkeypatch.setattr(bench_points.Original, "numbers", lambda *_: wrong)  # pyright: ignore[reportUnknownLambdaType]
    [point] = measure_model("tiny", tiny(), Scope((), (), (0.8,)), QUICK).of("irc")
    assert point.failures == ("numbers differ: gradients 0.5 of 1",)


# ---------------------------------------------------------------------- report


NUMBERS = Numbers(0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, True, True, True)


def times(median: float, wall: float | None = None) -> Times:
    cpu = TimeRatio(median, median, median - 0.02, median - 0.01, median + 0.01, median + 0.02)
    clock = replace(cpu, median=wall or median)
    return Times(2.0 * median, 1.0 * median, cpu, clock)


def planned(peak_bytes: int, time: float) -> Planned:
    return Planned(peak_bytes, time, time - 0.01, 0.01 / (time - 0.01), False, "eviction", 3.0)


def made_up() -> ModelResult:
    """Eager at 100 MiB; PyTorch at 60, at 40 with wrong numbers, and refused; irc at 80, 55, and refused."""
    wrong = replace(NUMBERS, gradients=math.inf, worst_gradient=math.inf, bit_equal=False)
    points = (
        Point("eager", "eager", peak_bytes=100 * MIB, times=times(1.0)),
        Point("PyTorch", "checkpoint per block", None, 60 * MIB, times(1.4), NUMBERS, None, 1.0),
        Point("PyTorch", "activation_memory_budget 0.5", None, 40 * MIB, times(1.2), wrong, None, 9.0),
        Point("PyTorch", "checkpoint_sequential 2", refusal="no chain"),
        Point("irc", "budget 0.8", 80 * MIB, 80 * MIB, times(1.03), NUMBERS, planned(80 * MIB, 1.02), 5.0),
        Point("irc", "budget 0.6", 60 * MIB, 55 * MIB, times(1.1), NUMBERS, planned(55 * MIB, 1.09), 5.0),
        Point("irc", "budget 0.4", 40 * MIB, refusal="too small", failures=("too small",)),
    )
    return ModelResult(
        "net", "2030-01-02T03:04:05+00:00", (0.1, 1.2), 1000, 7 * MIB, 100 * MIB, (10, 20), 1.0, 2.0, points
    )


def about(threads: int = 1) -> dict[str, Any]:
    return {
        "command": "bench it",
        "began": "2030-01-01T00:00:00+00:00",
        "measured": {
            "hardware": "abacus",
            "versions": {"torch": "9"},
            "options": {"threads": threads, "repeats": 2, "time_limit": 60.0},
        },
    }


def rows_of(text: str, start: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith(start)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_point_of_pytorch_stands_beside_irc_at_no_more_memory() -> None:
    text = render(about(), [made_up()], "a.svg")
    blocks, budget, refused = rows_of(text, "| net")
    assert blocks[1:5] == ["checkpoint per block", "0.600", "1.400 [1.390, 1.410]", "bit-equal"]
    assert blocks[5:] == ["0.550", "1.100 [1.090, 1.110]", "1.0900", "1.0800", "0.25"]
    assert budget[4].startswith("WRONG: gradients inf") and budget[-1] == "irc has no plan within this peak"
    assert refused[-1] == "refused: no chain"
    assert "within PyTorch's peak at 1 of 2 points and takes less time at 1 of these" in text
    assert "half of PyTorch's at 1 of the 1 points" in text and "not eager's at 1 of 2" in text
    assert "](a.svg)" in text and "`bench it`" in text and "2030-01-01 00:00:00 UTC on abacus" in text


def test_no_row_is_left_out() -> None:
    text = render(about(), [made_up()], None)
    rows = [*rows_of(text, "| eager"), *rows_of(text, "| PyTorch "), *rows_of(text, "| irc ")]
    assert [row[1] for row in rows] == [point.name for point in made_up().points]
    assert {len(row) for row in rows} == {14}
    assert rows[4][2:] == [
        *("80.0", "0.800", "2.060", "1.030 [1.020, 1.040]", "80.0 (+0.000%)", "1.0200"),
        *("1.0100 (eviction)", "0.99%", "3.0", "5.0", "bit-equal", "ok"),
    ]
    assert rows[6][-1] == "refused: too small FAILED" and "![" not in text


def test_several_threads_show_both_clocks() -> None:
    slow = made_up()
    points = tuple(
        replace(point, times=replace(point.times, wall=times(1.0, 1.7).wall)) if point.times else point
        for point in slow.points
    )
    text = render(about(threads=2), [replace(slow, points=points)], None)
    assert "clock time" in text and "CPU time" in text
    assert rows_of(text, "| net")[0][3].startswith("1.700")
    assert {len(row) for row in rows_of(text, "| irc ")} == {16}


def test_the_picture_names_models_and_methods() -> None:
    svg = draw([made_up(), replace(made_up(), model="other")], "svg", wall=False).decode()
    for text in ("net", "other", "PyTorch: checkpoint per block", "PyTorch: activation_memory_budget"):
        assert f">{text}<" in svg
    assert "hollow" in svg and "checkpoint_sequential" not in svg  # refused: not drawn
    assert (
        "CPU time" in svg
        and svg == draw([made_up(), replace(made_up(), model="other")], "svg", wall=False).decode()
    )
    assert draw([made_up()], "png", wall=True).startswith(b"\x89PNG")


# ---------------------------------------------------------------------- the command


FACTORY = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, depth):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(depth))
        self.layers = nn.Sequential(*layers)
    def forward(self, x):
        return self.layers(x).square().mean()

def short():
    return Model(4), (torch.randn(512, 32),)

def long():
    return Model(6), (torch.randn(512, 32),)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A quick command for the models `short` and `long` that writes `out.json`."""
    (tmp_path / "factory.py").write_text(FACTORY)
    return [
        *("--methods", "blocks", "--ratios", "0.9,min", "--repeats", "1", "--time-limit", "2"),
        *("--costs", "analytic", "--json", str(tmp_path / "out.json")),
        *("--journal", str(tmp_path / "rows.jsonl")),
    ]


def test_the_command_goes_on_where_it_stopped(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "page.svg"
    page.write_text("Prose.\n<!-- begin bench_recompute -->\nold\n<!-- end bench_recompute -->\nMore.\n")
    short, long = f"{tmp_path}/factory.py:short", f"{tmp_path}/factory.py:long"
    threads = torch.get_num_threads()
    assert main(["--models", short, *command]) in (0, 1)
    assert torch.get_num_threads() == threads
    first = json.loads((tmp_path / "out.json").read_text())
    assert [model["model"] for model in first["models"]] == ["short"]

    measured: list[str] = []

    def noted(name: str, *args: Any, **options: Any) -> ModelResult:
        measured.append(name)
        return measure_model(name, *args, **options)

    monkeypatch.setattr(bench_recompute, "measure_model", noted)
    models = ["--models", f"{short},{long}"]
    assert main([*models, *command, "--markdown", str(page), "--plot", str(picture)]) in (0, 1)
    second = json.loads((tmp_path / "out.json").read_text())
    assert measured == ["long"] and second["models"][0] == first["models"][0]
    text = page.read_text()
    assert text.startswith("Prose.\n") and text.endswith("\nMore.\n") and "old" not in text
    assert "### short" in text and "### long" in text and "](page.svg)" in text
    assert "<svg" in picture.read_text()
    assert "checkpoint per block" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--settings", "2"], "--settings '2'"),
        (["--ratios", "0.5,x"], "--ratios 'x'"),
        (["--methods", "blocks,magic"], "'magic'"),
        (["--models", "resnet51"], "resnet51"),
        (["--plot", "picture.bmp"], "picture.bmp"),
        (["--json", "no/such/folder/out.json"], "no/such/folder"),
        (["--markdown", str(Path(__file__).with_name("test_harness.py"))], "has no section bench_recompute"),
    ],
)
def test_a_wrong_command_is_told_before_anything_is_measured(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(bench_recompute, "measure_model", never)
    assert main(arguments) == 2
    assert told in capsys.readouterr().err


def test_failures_set_the_exit_status(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fine = replace(made_up(), points=made_up().points[:-1])
    command = command[: command.index("--journal")]
    for result, status in ((fine, 0), (made_up(), 1)):
        monkeypatch.setattr(bench_recompute, "measure_model", lambda *_, r=result, **__: r)  # pyright: ignore[reportUnknownLambdaType]
        assert main(["--models", "gpt2", *command]) == status
