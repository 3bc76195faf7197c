"""A machine is measured, stored and found again; plans are made for it, and for others."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import irc
from irc.ir import UsageError
from irc.passes import Machine, machine_named
from irc.passes.costs import measure_device, measure_tiers
from irc.passes.costs import this_machine as machine
from irc.passes.costs.measure_tiers import filesystem_of, measure_tier
from irc.passes.costs.this_machine import measure_machine, this_machine
from irc.tools import cli

torch.set_num_threads(1)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """A store of its own, and measurements that are short; what they find is not what is tested."""
    monkeypatch.setenv("IRC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "_QUICK_SECONDS", 0.05)
    monkeypatch.setattr(measure_device, "_STREAM_BYTES", 1 << 20)
    monkeypatch.setattr(measure_device, "_PRODUCT_SECONDS", 1e-3)
    monkeypatch.setattr(measure_tiers, "_PROBE_BYTES", 1 << 16)
    monkeypatch.setattr(measure_tiers, "_LARGEST_BLOCK_BYTES", 1 << 20)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `irc` in this process: its exit status, stdout and stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        status = cli.main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def check(found: Machine) -> None:
    """All that was measured is an amount."""
    assert min(found.flops, found.bandwidth_bytes, found.launch_seconds, found.capacity_bytes) > 0
    for tier in found.tiers:
        assert min(tier.out_bytes_per_second, tier.in_bytes_per_second, tier.latency_seconds) > 0
        assert tier.capacity_bytes > 0


# ---------------------------------------------------------------------- irc machine


@pytest.mark.default
def test_a_measured_machine_is_planned_for(command: Run, models: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    arguments = ["machine", "--quick", "--device", "cpu", "--scratch", tmp_path, "--name", "mine", "-o", path]
    status, text, err = command(*arguments)
    assert status == 0 and err == ""
    assert f"written  {path}" in text and "mine: " in text and "no tier host" in text
    assert f"disk: {tmp_path} (" in text and "out alone" in text
    found = machine_named(str(path))
    check(found)
    assert found.name == "mine" and [tier.name for tier in found.tiers] == ["disk"]
    measured = json.loads(path.read_text())["measured"]
    assert measured["tiers"]["disk"]["folder"] == str(tmp_path) and measured["seconds"] > 0
    assert min(measured["tiers"]["disk"][f"{way}_bytes_per_second_alone"] for way in ("out", "in")) > 0
    assert this_machine("cpu", tmp_path) is None, "it was stored elsewhere"
    planning = ["optimize", f"{models}:mlp", "--budget", "90%", "--time-limit", "1", "--costs", path]
    status, text, err = command(*planning, "--json")
    assert status == 0, err
    assert json.loads(text)["costs"] == "analytic:mine"


def test_what_was_measured_is_found_again(command: Run, tmp_path: Path) -> None:
    assert this_machine("cpu", tmp_path) is None
    status, text, _ = command("machine", "--quick", "--device", "cpu", "--scratch", tmp_path, "--json")
    assert status == 0
    (path,) = (tmp_path / "cache").iterdir()
    assert json.loads(path.read_text()) == json.loads(text)
    written, found = Machine.from_json(json.loads(text)), this_machine("cpu", tmp_path)
    assert found is not None and found.name == "this-machine"
    check(found)
    free = tuple(replace(tier, capacity_bytes=0) for tier in found.tiers)
    assert free == tuple(replace(tier, capacity_bytes=0) for tier in written.tiers)
    assert replace(found, tiers=()) == replace(written, tiers=())


def test_a_disk_counts_where_it_was_measured(command: Run, tmp_path: Path) -> None:
    command("machine", "--quick", "--device", "cpu", "--scratch", tmp_path, "-q")
    (path,) = (tmp_path / "cache").iterdir()
    data = json.loads(path.read_text())
    for folder in (tmp_path / "gone", "/proc"):  # a file system of its own
        data["measured"]["tiers"]["disk"]["folder"] = str(folder)
        path.write_text(json.dumps(data))
        found = this_machine("cpu", tmp_path)
        assert found is not None and found.tiers == (), folder
    del data["measured"]
    path.write_text(json.dumps(data))
    found = this_machine("cpu", tmp_path)
    assert found is not None and found.tiers == ()
    path.write_text("{}")
    with pytest.raises(UsageError) as raised:
        this_machine("cpu", tmp_path)
    assert raised.value.code == "IRC415" and str(path) in raised.value.message


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--device", "tpu"], "IRC419", "no device 'tpu'"),
        (["--device", "cuda:99"], "IRC419", "no device 'cuda:99'"),
        (["--scratch", "missing"], "IRC427", "missing"),
        (["-o", "missing/machine.json"], "IRC435", "no folder missing"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    command: Run, arguments: list[str], code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = command("machine", "--quick", *arguments)
    assert status == 2 and out == ""
    assert err.startswith(f"error[{code}]: ") and said in err and "\n  help: " in err


def test_a_store_that_cannot_be_written_is_named(command: Run, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    status, _, err = command("machine", "--quick", "--device", "cpu")
    assert status == 2 and err.startswith("error[IRC435]: ") and "cache" in err


def test_a_device_without_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise torch.OutOfMemoryError("no memory\nfor this")

    monkeypatch.setattr(machine, "memory_bandwidth", fail)
    with pytest.raises(UsageError, match="cpu cannot be measured: no memory") as raised:
        measure_machine("cpu", quick=True)
    assert raised.value.code == "IRC419" and "memory" in (raised.value.help or "")


# ---------------------------------------------------------------------- --profile MACHINE


@pytest.mark.default
def test_a_described_machine_is_planned_for(command: Run, models: Path) -> None:
    step: list[float] = []
    for name in ("cpu", "gtx1080"):
        status, text, err = command("inspect", f"{models}:mlp", "--json", "--costs", name)
        assert status == 0, err
        found = json.loads(text)
        assert found["costs"] == f"analytic:{name}"
        step.append(found["step_seconds"])
    assert step[1] < step[0]
    text = command("optimize", f"{models}:mlp", "--budget", "1MB", "--costs", "v100", "--print-passes")[1]
    assert "cost{profile=v100," in text


def test_the_module_takes_the_path_of_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(replace(machine_named("gtx1080"), name="lent").to_json()))
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    fitted = irc.optimize(layers, torch.randn(4, 8), "100%", costs=str(path), time_limit=1.0)
    assert fitted.plan.costs == "analytic:lent"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--costs", "abacus"], "IRC410", "no machine is called 'abacus'"),
        (["--costs", "missing.json"], "IRC414", "missing.json cannot be read"),
        (["--costs", "gtx1080", "--passes", "cost,plan-memory{budget=1GB}"], "IRC400", "exclude"),
    ],
)
def test_a_machine_that_is_none_is_refused(
    command: Run, models: Path, arguments: list[str], code: str, said: str
) -> None:
    status, out, err = command("optimize", f"{models}:mlp", *arguments)
    assert status == 2 and out == "" and err.startswith(f"error[{code}]: ") and said in err
    assert "\n  help: " in err


@pytest.mark.parametrize(
    ("old", "new"),
    [(["--profile", "v100"], "v100"), (["--no-profile"], "analytic"), (["--profile"], "thorough")],
)
def test_the_old_flags_are_taken_with_a_warning(command: Run, models: Path, old: list[str], new: str) -> None:
    asked = ("optimize", f"{models}:mlp", "--budget", "1MB", "--print-passes")
    status, text, err = command(*asked, *old)
    assert status == 0 and err == f"warning: {old[0]} is now --costs {new}\n"
    assert text == command(*asked, "--costs", new)[1]


def test_a_model_in_the_place_of_a_machine_is_named(command: Run, models: Path) -> None:
    _, _, err = command("optimize", "--profile", f"{models}:mlp", "--budget", "60%")
    assert "put --profile last" in err


# ---------------------------------------------------------------------- tiers


def test_a_disk_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    tier = measure_tier("disk", tmp_path, device="cpu", seconds=0.05)
    assert min(tier.out_bytes_per_second, tier.in_bytes_per_second, tier.latency_seconds) > 0
    assert tier.name == "disk" and tier.capacity_bytes > 0 and not tier.is_duplex
    assert list(tmp_path.iterdir()) == []
    assert measure_tier("disk", device="cpu", seconds=0.05).capacity_bytes > 0


def test_host_memory_is_no_tier_beside_a_cpu() -> None:
    with pytest.raises(UsageError, match="is the host's") as raised:
        measure_tier("host", device="cpu")
    assert raised.value.code == "IRC419" and "disk:/scratch" in (raised.value.help or "")
    with pytest.raises(UsageError, match="a tier 'tape'") as raised:
        measure_tier("tape", device="cpu")
    assert raised.value.code == "IRC419" and "host, disk" in (raised.value.help or "")


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def none(*_: object) -> int:
    return 0


@pytest.mark.parametrize(
    ("function", "stand_in", "said"),
    [("pwrite", full, "No space left"), ("preadv", none, "ended after 0 of")],
)
def test_a_disk_that_fails_is_named_and_nothing_stays(
    function: str, stand_in: Callable[..., int], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threading.active_count()
    monkeypatch.setattr(os, function, stand_in)
    with pytest.raises(UsageError, match=said) as raised:
        measure_tier("disk", tmp_path, device="cpu", seconds=0.05)
    assert raised.value.code == "IRC419" and raised.value.help
    assert list(tmp_path.iterdir()) == [] and threading.active_count() == threads


@pytest.mark.parametrize(
    ("filesystem", "answer", "note"),
    [
        ("tmpfs", None, "the host's memory, not a disk"),
        ("ext4", BlockingIOError(), None),
        ("ext4", OSError(errno.EOPNOTSUPP, "no"), "cannot be told here"),
        ("ext4", 1, "reads are from memory"),
    ],
)
def test_what_the_page_cache_does_is_said(
    filesystem: str,
    answer: object,
    note: str | None,
    tmp_path: Path,
    command: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preadv = os.preadv

    def asked(number: int, targets: list[memoryview], place: int, *flags: int) -> Any:
        if not flags:
            return preadv(number, targets, place)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
    monkeypatch.setattr(os, "preadv", asked)
    monkeypatch.setattr(measure_tiers, "filesystem_of", lambda _: filesystem)  # pyright: ignore[reportUnknownArgumentType]
    status, text, _ = command("machine", "--quick", "--device", "cpu", "--scratch", tmp_path)
    assert status == 0
    assert "note: " not in text if note is None else note in text


def test_the_file_system_of_a_folder() -> None:
    assert filesystem_of("/proc") in ("proc", "unknown")
    assert filesystem_of("/") != ""


# ---------------------------------------------------------------------- beside computations


def test_a_busy_device_computes_while_the_block_runs() -> None:
    product = measure_device.Product(torch.device("cpu"))
    threads = threading.active_count()
    with measure_device.busy(product) as seconds:
        time.sleep(0.05)
        assert threading.active_count() == threads + 1
    assert seconds and min(seconds) > 0 and threading.active_count() == threads
    with pytest.raises(ZeroDivisionError), measure_device.busy(product):
        raise ZeroDivisionError
    assert threading.active_count() == threads


def test_computations_that_fail_are_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    product = measure_device.Product(torch.device("cpu"))

    def fail() -> float:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(product, "seconds", fail)
    with pytest.raises(RuntimeError, match="gone"), measure_device.busy(product):
        pass


def test_a_container_has_the_memory_of_its_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_device, "_CONTROL_GROUP", tmp_path)
    whole = measure_device.total_host_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert measure_device.total_host_bytes() == whole and measure_device.free_host_bytes() > 5000
    (tmp_path / "memory.max").write_text("5000\n")
    assert measure_device.total_host_bytes() == 5000 and measure_device.free_host_bytes() == 4000
    assert measure_device.device_bytes(torch.device("cpu")) == (5000, 4000)
