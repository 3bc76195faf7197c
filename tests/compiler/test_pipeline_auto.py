"""What `auto` chooses is the best of what it could choose, and it says why it did not choose the others."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import pipeline_models
from support.planned_pipelines import captured_once

import irc
from irc.compiler.pipeline.api import pipeline
from irc.compiler.pipeline.auto import Considered, considered_lines
from irc.compiler.pipeline.plan import MicroBatch, devices_of
from irc.compiler.pipeline.request import AUTO, PipelineRequest
from irc.ir import BudgetError
from irc.passes.pipeline import LinearPartition
from irc.tools.cli import main

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32) for _ in range(8)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))


@pytest.mark.slow
def test_no_other_way_has_a_shorter_plan() -> None:
    x = torch.randn(4, 32)
    options: dict[str, Any] = {"costs": "cpu", "link": "1TB"}
    found = pipeline(
        model(), (x,), ["64MiB", "64MiB@0.5"], stages=AUTO, schedule=AUTO, time_limit=60, **options
    )
    planned = [one for one in found.considered if one.step_seconds is not None]
    assert found.plan.step_seconds == planned[0].step_seconds
    assert (found.plan.devices, found.plan.micro_batches) == (planned[0].devices, planned[0].micro_batches)
    looked_at = {(one.devices, one.micro_batches, one.schedule) for one in found.considered}
    assert looked_at == {(2, m, name) for m in (1, 2, 4) for name in NAMES} | {
        (1, m, "1f1b") for m in (1, 2, 4)
    }
    for one in found.considered:
        if one.step_seconds is not None:
            assert one.bound_seconds is not None and one.bound_seconds <= one.step_seconds
        budgets = ["64MiB", "64MiB@0.5"][: one.devices]
        try:
            alone = pipeline(
                model(),
                (x,),
                budgets,
                stages=one.devices,
                micro_batches=one.micro_batches,
                schedule=one.schedule,
                time_limit=1,
                **options,
            )
        except irc.UsageError:
            assert one.why_not and one.bound_seconds is None
            continue
        assert found.plan.step_seconds <= alone.plan.step_seconds * (1 + 1e-9)
        if one.bound_seconds is not None:
            assert one.bound_seconds == pytest.approx(alone.plan.bound_seconds)


@pytest.mark.slow
def test_what_was_chosen_trains_as_the_original() -> None:
    module, args = pipeline_models.tied()
    twin = copy.deepcopy(module)
    pipe = pipeline(module, args, ["64MiB", "64MiB"], stages=AUTO, schedule=AUTO, costs="cpu", time_limit=3)
    losses = pipe.start().step(*args)
    assert len(losses) == pipe.plan.micro_batches
    twin(*args).backward()
    for mine, its in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


@pytest.mark.slow
def test_some_numbers_may_be_given() -> None:
    x = torch.randn(6, 32)
    pipe = pipeline(model(), (x,), "64MiB", stages=2, schedule="gpipe", costs="cpu", time_limit=5)
    assert {(one.devices, one.schedule) for one in pipe.considered} == {(2, "gpipe")}
    assert {one.micro_batches for one in pipe.considered} == {1, 2, 3, 6}
    pipe = pipeline(
        model(), (x,), "64MiB", stages=2, micro_batches=3, schedule=AUTO, costs="cpu", time_limit=5
    )
    assert {(one.devices, one.micro_batches) for one in pipe.considered} == {(2, 3)}
    assert {one.schedule for one in pipe.considered} == set(NAMES)


@pytest.mark.slow
def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(BudgetError, match="IRC486"):
        pipeline(model(), (torch.randn(4, 32),), ["8KiB", "8KiB"], stages=AUTO, costs="cpu", time_limit=3)


def test_micro_batches_that_the_model_does_not_take_are_left_out() -> None:
    """BatchNorm has no statistics of a single row."""
    rows = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    options: dict[str, Any] = {"stages": AUTO, "schedule": AUTO, "costs": "cpu", "time_limit": 5}
    pipe = pipeline(rows, (torch.randn(4, 8),), ["64MiB", "64MiB"], **options)
    assert pipe.plan.micro_batches in (1, 2)
    others = [one for one in pipe.considered if one.micro_batches == 4 and one.devices == 1]
    assert others and all("Expected more than 1 value per channel" in one.why_not for one in others)
    assert len({(one.devices, one.micro_batches, one.schedule) for one in pipe.considered}) == len(
        pipe.considered
    )
    with pytest.raises(irc.UsageError, match=r"IRC349.*more than 1 value per channel"):
        pipeline(rows, (torch.randn(1, 8),), ["64MiB", "64MiB"], **options)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (PipelineRequest("many", 4, "1GiB"), "IRC469.*stages are 'many'"),
        (PipelineRequest(AUTO, 0, "1GiB"), "IRC469.*micro-batches are 0"),
        (PipelineRequest(2, "many", "1GiB"), "IRC469.*micro-batches are 'many'"),
        (PipelineRequest(2.5, 4, "1GiB"), r"IRC469.*stages are 2\.5"),  # pyright: ignore[reportArgumentType]
        (PipelineRequest(2, 4, "1GiB", AUTO, chunks=0), "IRC469.*chunks are 0"),
        (PipelineRequest(AUTO, AUTO, []), "IRC482.*0 budgets"),
        (PipelineRequest(AUTO, AUTO, "1GiB"), "IRC482.*one budget gives none"),
        (PipelineRequest(2, 4, ["cuda:0=1GiB", "cuda:0=1GiB"]), "IRC482.*device cuda:0 is there twice"),
        (PipelineRequest(2, 4, "1GiB", time_limit=-1.0), "IRC403.*time limit is -1"),
        (PipelineRequest(2, 4, "1GiB", strategy="none"), "IRC403.*no strategy 'none'"),
        (PipelineRequest(2, 4, "1GiB", link="cuda:0=10GB@0.5"), "IRC401.*'cuda:0=10GB@0.5'"),
        (PipelineRequest(2, 4, "1GiB", link="50%"), "IRC482.*the link takes 50%"),
        (PipelineRequest(AUTO, AUTO, "1GiB", "no-such"), "IRC467"),
    ],
)
def test_malformed_requests_are_refused(request_: PipelineRequest, code: str) -> None:
    with pytest.raises(irc.UsageError, match=code):
        request_.check()


@pytest.mark.slow
def test_a_slow_device_with_enough_memory_is_found() -> None:
    """The fast one has no room for a stage."""
    module, args = pipeline_models.tied()
    budgets = ["cpu:0=40KiB@4", "cpu:1=64MiB"]
    pipe = pipeline(module, args, budgets, stages=AUTO, micro_batches=4, costs="cpu", time_limit=3)
    assert pipe.plan.device_names == ("cpu:1",)


@pytest.mark.parametrize(
    "given",
    ["--micro-batches 4", "--schedule gpipe", "--checkpoint always", "--partition time", "--link 1GB"],
)
def test_options_of_pipelines_ask_for_stages(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = f"{pipeline_models.__file__}:tied"
    assert main(["optimize", source, "--budget", "1GiB", *given.split()]) == 2
    said = capsys.readouterr().err
    assert f"error[IRC400]: {given.split()[0]} without --stages or --device" in said


def test_no_micro_batches_are_no_choice(capsys: pytest.CaptureFixture[str]) -> None:
    source = f"{pipeline_models.__file__}:tied"
    assert main(["optimize", source, "--stages", "2", "--micro-batches", "0", "--budget", "1GiB"]) == 2
    assert "error[IRC469]: micro-batches are 0" in capsys.readouterr().err


def test_without_a_batch_nothing_is_chosen() -> None:
    with pytest.raises(irc.UsageError, match="IRC487"):
        pipeline(model(), (torch.randn(0, 32),), "64MiB", stages=2, costs="cpu")


def test_ways_without_a_plan_are_summed_up() -> None:
    rows = [
        Considered(2, 4, "1f1b", 1.0, 1.5, 1 << 20),
        Considered(1, 4, "1f1b", 2.0, why_not="slow"),
        Considered(1, 2, "1f1b", 2.0, why_not="slow"),
        Considered(1, 1, "1f1b", why_not="no"),
    ]
    which = ("16 GiB", "cuda:1=8 GiB@0.5")
    (line,) = considered_lines([replace(rows[0], which=which)])
    assert line.startswith("2 devices (16 GiB, cuda:1=8 GiB@0.5), 4 micro-batches, 1f1b: ")
    assert considered_lines(rows) == [
        "2 devices, 4 micro-batches, 1f1b: 1.5 s, largest peak 1 MiB",
        "2 other ways: slow",
        "1 device, 1 micro-batch, 1f1b: no",
    ]


@pytest.mark.slow
def test_the_command_says_what_it_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = f"{pipeline_models.__file__}:tied"
    usual = ["optimize", source, "--stages", "auto", "--costs", "cpu", "--time-limit", "3"]
    devices = ["--device", "64MiB", "--device", "cpu=64MiB"]
    assert main([*usual, *devices, "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "considered  " in said and "other ways: " in said
    assert main(["run", str(tmp_path / "out"), "--check", "--trust", "--steps", "1", "-q"]) == 0
    assert main([*usual, *devices, "--json", "-q"]) == 0
    rows = json.loads(capsys.readouterr().out)["considered"]
    assert {"devices", "micro_batches", "schedule", "bound_seconds", "why_not"} <= rows[0].keys()
    assert main([*usual, *devices, "--budget", "1GiB"]) == 2
    assert "error[IRC400]: --budget and --device exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize("model_name", ["tied", "skips", "translator"])
@pytest.mark.parametrize("schedule", NAMES)
def test_what_comes_first_is_estimated_as_it_is_planned(model_name: str, schedule: str) -> None:
    request = PipelineRequest(2, 4, "64MiB", schedule, costs="cpu", time_limit=0.5, link="1000TB")
    micro_batch = MicroBatch.measured(captured_once(model_name, 4), request)
    partition = LinearPartition(
        micro_batch.linear_order, request.order(), devices_of(request), micro_batch.optimizer_steps
    )
    planned_seconds = micro_batch.plan(request, 0.5).plan.step_seconds
    assert partition.simulated_seconds() == pytest.approx(planned_seconds, rel=0.1)
