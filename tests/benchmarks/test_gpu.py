"""The command for a GPU: on a CPU it runs what it can, and names what it leaves out and what is broken."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import irc
from benchmarks.gpu import checks
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.checks import CHECKS, Found


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    """Runs the command on the CPU; returns its status, the page and the data."""

    def run(*args: str) -> tuple[int, str, dict[str, Any]]:
        page, data = tmp_path / "gpu.md", tmp_path / "gpu.json"
        given = ["--device", "cpu", "--time-limit", "1", "--repeats", "1"]
        status = main([*given, "--markdown", str(page), "--json", str(data), *args])
        assert page.read_text() in capsys.readouterr().out
        return status, page.read_text(), json.loads(data.read_text())

    return run


def test_on_a_cpu_all_that_can_runs_and_the_rest_is_named(run: Callable[..., Any]) -> None:
    status, page, data = run()
    assert status == 0 and "**No promise was broken.**" in page and "no GPU was used" in page
    rows = {row["path"]: row["found"] for row in data["rows"]}
    needs_gpu = {"a stream of the caller's", "allocator", "tests"}
    assert {name for name, found in rows.items() if found is None} == needs_gpu
    assert page.count("left out: needs a GPU") == len(needs_gpu)
    for check in CHECKS:
        assert f"- {check.name}: {check.on_gpu}" in page
    exact = [found for found in rows.values() if found and found["measured_bytes"] is not None]
    assert len(exact) == 10
    assert all(found["measured_bytes"] == found["predicted_bytes"] for found in exact)
    assert "flash attention" in rows["flash attention"]["figures"]
    assert "to disk and back" in rows["copies to a tier"]["figures"]
    systems = [point["name"] for point in data["models"][0]["points"]]
    assert {"eager", "checkpoint per block", "activation_memory_budget 0.5", "save_on_cpu"} < set(systems)


def one_more_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: Any = checks.measured_peak_bytes
    monkeypatch.setattr(checks, "measured_peak_bytes", lambda *args: measured(*args) + 1)


def other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_step: Any = checks.compare_step
    monkeypatch.setattr(checks, "compare_step", lambda *args: replace(compare_step(*args), bit_equal=False))


def drawing_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    optimize: Any = irc.optimize

    def draws(*args: Any, **options: Any) -> Any:
        torch.rand(1)
        return optimize(*args, **options)

    monkeypatch.setattr(irc, "optimize", draws)


def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    optimize: Any = irc.optimize
    monkeypatch.setattr(
        irc, "optimize", lambda *args, swap, strategy, **options: optimize(*args[:2], "100%", **options)
    )


def lost_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_halved", lambda gradient: gradient)


def broken_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Found:
        raise RuntimeError("CUDA error: misaligned address\nand more")

    monkeypatch.setattr(checks, "compare", fail)


@pytest.mark.parametrize(
    ("only", "breaks", "said"),
    [
        ("capture", one_more_byte, "B, predicted "),
        ("capture", other_numbers, "BROKEN: numbers differ: "),
        ("random operations", drawing_planner, "BROKEN: planning moved a random generator"),
        ("copies", no_copies, "BROKEN: the plan copies nothing"),
        ("pipeline", lost_gradient, "BROKEN: the gradient of net.0.weight differs"),
        (
            "optimizer",
            broken_check,
            "BROKEN: RuntimeError: CUDA error: misaligned address",
        ),
    ],
)
def test_a_broken_promise_is_named_and_ends_with_status_1(
    only: str,
    breaks: Callable[[pytest.MonkeyPatch], None],
    said: str,
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    breaks(monkeypatch)
    status, page, _ = run("--only", only)
    assert status == 1 and said in page and "**1 of 1 rows broke a promise.**" in page


def test_settings_and_generators_are_as_before(run: Callable[..., Any]) -> None:
    torch.manual_seed(7)
    random.seed(7)
    before = torch.get_rng_state(), random.getstate()
    run("--only", "convolutions, recomputed")
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_on_a_gpu_no_promise_is_broken(check: checks.Check) -> None:
    with checks.deterministic():
        assert check.run(torch.device("cuda"), 3.0).failures == ()
