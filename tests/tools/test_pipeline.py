"""Pipelines on several ranks train as the original on one device, within the memory that was predicted."""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pipeline_models
import pytest
import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import StorageWeakRef

import irc
from irc.frontends.torch import Captured
from irc.ir import ACCUMULATE_GRADIENT, RECEIVE, SEND, InputRole
from irc.passes.allocations import peak_bytes
from irc.passes.pipeline import Devices, LinePartition
from irc.passes.pipeline.device_order import device_order
from irc.passes.pipeline.placement import Dataflow
from irc.passes.pipeline.stage_graphs import cut
from irc.passes.release_gradients import release_gradients
from irc.tools.cli import main
from irc.tools.loading import Source
from irc.tools.optimizers import parse_optimizer
from irc.tools.pipeline import Pipeline, pipeline
from irc.tools.pipeline_call import micro_batches_of
from irc.tools.pipeline_folder import read_pipeline, write_pipeline
from irc.tools.pipeline_planning import MicroBatch, captured_micro_batch, devices_of, plan_stages
from irc.tools.pipeline_request import PipelineRequest
from irc.tools.pipeline_run import run_pipeline

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

MODELS = ("tied", "skips", "translator")
CASES = [
    (2, "gpipe", 4),
    (2, "1f1b", 4),
    (2, "1f1b", 1),
    (2, "interleaved", 4),
    (2, "zb-h1", 4),
    (2, "zbv", 4),
    (2, "dualpipev", 4),
    (4, "gpipe", 8),
    (4, "1f1b", 8),
    (4, "1f1b", 2),
    (4, "zb-h1", 8),
    (4, "zbv", 8),
]

ADAM = parse_optimizer("adamw:lr=1e-2")
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("gpipe", {"checkpoint": "except_last", "optimizer": ADAM}),
    ("zbv", {"checkpoint": "always", "optimizer": parse_optimizer("sgd:lr=1e-2,momentum=0.9")}),
    ("1f1b", {"checkpoint": "never", "optimizer": ADAM}),
]


def source_of(model: str) -> Source:
    return Source(f"{pipeline_models.__file__}:{model}")


def planned(
    model: str,
    ranks: int,
    schedule: str,
    micro_batches: int,
    budget: str | list[str] = "64MiB",
    **options: Any,
) -> Pipeline:
    """As `irc.pipeline`; a model is captured once for each number of micro-batches."""
    request = PipelineRequest(
        ranks, micro_batches, budget, schedule, profile=False, time_limit=0.5, **options
    )
    request.check()
    captured = captured_once(model, micro_batches)
    return Pipeline(getattr(pipeline_models, model)()[0], captured, plan_stages(captured, request))


@functools.cache
def captured_once(model: str, micro_batches: int) -> Captured:
    module, args = getattr(pipeline_models, model)()
    return captured_micro_batch(module, micro_batches_of(args, micro_batches)[0], None)


def written(folder: Path, model: str, pipe: Pipeline) -> Path:
    write_pipeline(folder, pipe, source_of(model), getattr(pipeline_models, model)()[1])
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_as_one_device(ranks: int, tmp_path: Path) -> None:
    """All in one test: the ranks are started once."""
    folders: list[str] = []
    for model in MODELS:
        for count, schedule, micro_batches in CASES:
            if count == ranks:
                name = tmp_path / f"{model}-{schedule}-{micro_batches}"
                folders.append(str(written(name, model, planned(model, ranks, schedule, micro_batches))))
        for schedule, options in OPTIONS:
            name = tmp_path / f"{model}-{schedule}-{options['checkpoint']}"
            pipe = planned(model, ranks, schedule, 2 * ranks, **options)
            folders.append(str(written(name, model, pipe)))
    results = tmp_path / "results"
    arguments = (ranks, str(tmp_path / "meeting"), tuple(folders), str(results))
    torch.multiprocessing.spawn(pipeline_models.run_folders, args=arguments, nprocs=ranks)
    for name, report in json.loads(results.read_text()).items():
        check(name, report, ranks)


def test_ranks_agree_and_fail_together(tmp_path: Path) -> None:
    """Two pipelines side by side, from a program that seeds no rank as another."""
    results = tmp_path / "result"
    arguments = (4, str(tmp_path / "meeting"), str(results))
    torch.multiprocessing.spawn(pipeline_models.run_probes, args=arguments, nprocs=4)
    found = [json.loads(Path(f"{results}-{rank}").read_text()) for rank in range(4)]
    names = pipeline_models.sometimes()[0].state_dict().keys()
    for first, second in (found[:2], found[2:]):
        assert set(first["names"]) | set(second["names"]) == names
        assert first["shared"] == second["shared"]
        assert first["gradient"] == second["gradient"]
        assert first["choice"] and second["choice"], "no gradient is none, and not zeros"
        assert "error[IRC493]: rank" in first["failures"][0]
        assert second["failures"][0] == "no loss today"
        assert all("error[IRC491]" in rank["failures"][1] for rank in (first, second))


def check(name: str, report: Any, ranks: int) -> None:
    assert report["failures"] == [], name
    assert len(report["ranks"]) == ranks
    for rank in report["ranks"]:
        assert rank["measured_bytes"] <= rank["predicted_bytes"] <= rank["budget_bytes"], name
        assert rank["gradient_difference"] <= 1e-5 * rank["gradient_scale"], name
        assert rank["gradient_scale"] > 0
    assert report["losses"] == pytest.approx(report["original_losses"], rel=1e-6), name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_one_process_runs_what_was_planned_for_several(model: str, schedule: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "out", model, planned(model, 2, schedule, 4))
    report = run_pipeline(folder, 2, with_original=True)
    assert report.is_alone and report.failures == []
    assert report.ranks[0].gradient_difference is not None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
def test_less_memory_takes_more_time_and_fits(schedule: str) -> None:
    wide = planned("translator", 2, schedule, 4).plan
    budget = round(max(wide.peak_bytes) * 0.93)
    tight = planned("translator", 2, schedule, 4, str(budget)).plan
    assert max(tight.peak_bytes) <= budget
    assert tight.step_seconds >= tight.bound_seconds
    assert wide.step_seconds >= wide.bound_seconds


def test_a_plan_that_computes_again_has_the_same_numbers(tmp_path: Path) -> None:
    least = irc_minimum("tied")
    pipe = planned("tied", 2, "gpipe", 4, str(least))
    assert any(stage.again_seconds for stage in pipe.plan.stages)
    report = run_pipeline(written(tmp_path / "out", "tied", pipe), 2, with_original=True)
    assert report.failures == []


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_modes_of_checkpointing_trade_time_for_memory(schedule: str) -> None:
    plans = [
        planned("translator", 2, schedule, 4, checkpoint=mode).plan
        for mode in ("always", "except_last", "never")
    ]
    peaks = [max(plan.peak_bytes) for plan in plans]
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]
    seconds = [plan.step_seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[1] > seconds[-1]
    assert plans[0].bound_seconds <= seconds[-1]


def test_all_but_the_last_micro_batch_are_computed_again() -> None:
    stages = planned("tied", 2, "gpipe", 4, checkpoint="except_last").stages
    for schedule, last in zip(stages.schedules, stages.last_schedules, strict=True):
        assert len(schedule.computed) > len(set(schedule.computed))
        assert len(last.computed) == len(set(last.computed))


def test_a_mode_of_checkpointing_that_does_not_fit_is_refused() -> None:
    most = max(planned("tied", 2, "gpipe", 4, checkpoint="never").plan.peak_bytes)
    assert max(planned("tied", 2, "gpipe", 4, str(most), checkpoint="never").plan.peak_bytes) <= most
    with pytest.raises(irc.BudgetError, match=r"IRC486.*needs at least"):
        planned("tied", 2, "gpipe", 4, str(most // 2), checkpoint="never")


def test_the_faster_device_takes_more_of_the_model() -> None:
    plan = planned("tied", 2, "1f1b", 8, ["64MiB@0.25", "64MiB"], link="1TB").plan
    assert sorted(plan.speeds) == [0.25, 1.0]
    whole = [stage.operations for stage in plan.stages]
    fast = plan.speeds.index(1.0)
    assert whole[fast] > 2 * whole[1 - fast]
    assert plan.step_seconds >= plan.bound_seconds


def test_orders_of_devices_are_looked_at_until_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight different devices have 40320 orders."""
    model, args = pipeline_models.tied()
    captured = captured_micro_batch(model, micro_batches_of(args, 16)[0], None)
    request = PipelineRequest(8, 16, [f"64MiB@{1 + k / 8}" for k in range(8)], profile="cpu")
    micro_batch = MicroBatch.measured(captured, request)
    partition = LinePartition(micro_batch.line, request.order(), devices_of(request), micro_batch.updates)
    looked_at: list[Devices] = []

    def seconds(self: LinePartition) -> float:
        looked_at.append(self.devices)
        return float(len(looked_at) != 3)

    monkeypatch.setattr(LinePartition, "seconds", seconds)
    assert device_order(partition, deadline=0.0) == tuple(range(8)) and len(looked_at) == 1
    looked_at.clear()
    monkeypatch.setattr(time, "monotonic", lambda: float(len(looked_at)))
    assert device_order(partition, deadline=9.0) == (0, 1, 2, 3, 4, 5, 7, 6) and len(looked_at) == 9


def test_each_device_keeps_to_its_own_budget_wherever_it_is_put() -> None:
    wide = planned("tied", 2, "1f1b", 4).plan
    small = round(min(wide.peak_bytes) * 0.8)
    for budgets in ([f"cpu={small}", "64MiB"], ["64MiB", f"cpu={small}"]):
        plan = planned("tied", 2, "1f1b", 4, budgets).plan
        assert sorted(plan.budget_bytes) == [small, 64 << 20]
        assert plan.device_names[plan.budget_bytes.index(small)] == "cpu"
        assert all(peak <= budget for peak, budget in zip(plan.peak_bytes, plan.budget_bytes, strict=True))


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_no_stage_is_cut_off_from_the_others(schedule: str) -> None:
    """BatchNorm counts batches before all else, and nothing reads the number."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
    model, x = torch.nn.Sequential(*layers), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    pipe = pipeline(
        model, (x,), "64MiB", stages=4, micro_batches=1, schedule=schedule, profile="cpu", time_limit=0.5
    )
    pipe.start().step(x)
    twin(x).square().mean().backward()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
    for mine, its in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_optimizer_of_a_plan_steps_as_on_one_device(schedule: str) -> None:
    model, args = pipeline_models.tied()
    twin = copy.deepcopy(model)
    pipe = pipeline(
        model,
        args,
        "64MiB",
        stages=2,
        micro_batches=4,
        schedule=schedule,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        profile=False,
        time_limit=0.5,
    )
    trainer = pipe.start()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for _ in range(5):
        trainer.step(*args)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        for part in micro_batches_of(args, 4):
            (twin(*part) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, its)


def test_an_optimizer_may_put_parameters_into_groups(tmp_path: Path) -> None:
    """Such as matrices, and the rest without decay: another order than that of the parameters."""

    def in_groups(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)

    model, args = pipeline_models.tied()
    twin, again = copy.deepcopy(model), copy.deepcopy(model)
    options: dict[str, Any] = {"micro_batches": 4, "profile": False, "time_limit": 0.5}
    trainer = pipeline(model, args, "64MiB", stages=2, optimizer=in_groups, **options).start()
    optimizer = in_groups(list(twin.parameters()))
    for step in range(3):
        trainer.step(*args)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        trainer.save(tmp_path / str(step))
        trainer = pipeline(again, args, "64MiB", stages=3, optimizer=in_groups, **options).start()
        trainer.load(tmp_path / str(step))
        for part in micro_batches_of(args, 4):
            (twin(*part) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, its in zip(again.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, its)


def test_a_rank_that_trains_nothing_has_an_optimizer(tmp_path: Path) -> None:
    """The first of two stages is frozen: on two ranks each has an optimizer, which saves, loads and steps."""
    model, args = pipeline_models.half_frozen()
    pipe = pipeline(
        model,
        args,
        "64MiB",
        stages=2,
        micro_batches=4,
        partition="uniform",
        optimizer=ADAM,
        profile=False,
        time_limit=0.5,
    )
    first, second = (
        {entry.target for entry in schedule.graph.inputs if entry.requires_grad}
        for schedule in pipe.stages.schedules
    )
    assert not first and second
    folder = written(tmp_path / "pipe", "half_frozen", pipe)
    pipe.start().save(tmp_path / "begin")
    arguments = (2, str(tmp_path / "meet"), str(folder), str(tmp_path / "begin"), str(tmp_path / "end"))
    torch.multiprocessing.spawn(pipeline_models.go_on, args=arguments, nprocs=2)
    twin = copy.deepcopy(model)
    pipe.start().load(tmp_path / "end")
    for part in micro_batches_of(args, 4):
        (twin(*part) / 4).backward()
    ADAM([parameter for parameter in twin.parameters() if parameter.requires_grad]).step()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, its)


def test_a_planned_optimizer_takes_no_more_than_its_largest_step() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(12)))
    x = torch.randn(2, 64)
    options: dict[str, Any] = {"stages": 1, "micro_batches": 2, "profile": "cpu", "time_limit": 0.5}
    pipe = pipeline(model, (x,), "64MiB", optimizer=lambda p: torch.optim.Adam(p, foreach=True), **options)
    trainer = pipe.start()

    def step() -> None:
        trainer.step(x)
        trainer.optimizer.step()

    step()
    weights = 12 * 64 * 64 * 4
    assert 4 * weights + peak_bytes(step) <= pipe.plan.peak_bytes[0]


def test_the_state_of_an_optimizer_counts() -> None:
    without = planned("tied", 1, "1f1b", 4).plan
    with_state = planned("tied", 1, "1f1b", 4, optimizer=ADAM).plan
    model = pipeline_models.tied()[0]
    more = sum(2 * parameter.nbytes + 4 for parameter in model.parameters())
    assert with_state.peak_bytes[0] - without.peak_bytes[0] == more
    assert with_state.optimizer == "adamw:lr=0.01" and without.optimizer is None
    assert with_state.step_seconds > without.step_seconds
    assert with_state.bound_seconds > without.bound_seconds


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"checkpoint": "sometimes"}, "IRC495.*no mode 'sometimes'"),
        ({"checkpoint": "never", "strategy": "ilp"}, "IRC495.*exclude each other"),
        ({"budget": "1GiB@0"}, "IRC482.*speed of a device is '0'"),
        ({"budget": "1GiB@fast"}, "IRC482.*speed of a device is 'fast'"),
        ({"budget": "nowhere=1GiB"}, "IRC482.*no device 'nowhere'"),
        ({"budget": "50%"}, "IRC482.*part of what"),
        ({"budget": ["1GiB", "1GiB", "1GiB"]}, "IRC482.*3 budgets for 2 devices"),
        ({"link": "fast"}, "IRC401.*'fast'"),
    ],
)
def test_malformed_requests_are_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(irc.UsageError, match=code):
        planned("tied", 2, "1f1b", 4, **options)


def test_no_optimizer_was_planned() -> None:
    trainer = planned("tied", 2, "1f1b", 4).start()
    with pytest.raises(irc.UsageError, match="IRC496"):
        _ = trainer.optimizer


def test_a_function_that_makes_an_optimizer_is_not_written(tmp_path: Path) -> None:
    pipe = planned("tied", 2, "1f1b", 4, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(irc.UnsupportedError, match=r"IRC434.*made by a function"):
        written(tmp_path / "out", "tied", pipe)
    assert not (tmp_path / "out").exists()


def irc_minimum(model: str) -> int:
    """The budget that a refusal names; it is enough."""
    with pytest.raises(irc.BudgetError, match="IRC486") as refused:
        planned(model, 2, "gpipe", 4, "64KiB")
    assert any("a plan was found" in note for note in refused.value.__notes__)
    return refused.value.minimum_bytes


def test_dropout_is_taken_apart_where_it_has_to_be() -> None:
    """The bound stays that of the model; numbers are those of the original."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.25))
    model = torch.nn.Sequential(*(copy.deepcopy(layer) for _ in range(6) for layer in layers))
    twin, x = copy.deepcopy(model), torch.randn(256, 64)
    options: dict[str, Any] = {"stages": 2, "micro_batches": 2, "schedule": "gpipe", "profile": "cpu"}
    wide = pipeline(model, (x,), "64MiB", time_limit=0.5, **options)
    least = wide.plan.peak_bytes
    for part in range(19, 0, -1):
        budgets = [round(nbytes * part / 20) for nbytes in least]
        pipe = pipeline(model, (x,), budgets, time_limit=0.5, **options)
        ops = [node.op for schedule in pipe.stages.schedules for node in schedule.graph.nodes]
        if "aten.mul.Tensor" in ops:
            break
    else:
        raise AssertionError("dropout stayed whole")
    assert pipe.plan.bound_seconds == pytest.approx(wide.plan.bound_seconds)
    assert pipe.plan.single_seconds == pytest.approx(wide.plan.single_seconds)
    assert all(peak <= budget for peak, budget in zip(pipe.plan.peak_bytes, budgets, strict=True))
    trainer = pipe.start()
    torch.manual_seed(1)
    trainer.step(x)
    torch.manual_seed(1)
    for part in x.split(128):
        (twin(part).square().mean() / 2).backward()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


def test_one_device_that_holds_all_takes_no_longer_than_the_bound() -> None:
    """Gradients are added up in each micro-batch: partitions, bounds and plans count that alike."""
    plan = planned("skips", 1, "gpipe", 4).plan
    assert plan.step_seconds == pytest.approx(plan.bound_seconds)
    assert plan.step_seconds == pytest.approx(plan.single_seconds)


def test_a_program_trains_by_its_own_loss() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
    twin = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 6)

    class WithTarget(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"found": self.inner(x)}

    pipe = pipeline(
        WithTarget(model),
        (x, y),
        "1MiB",
        stages=2,
        micro_batches=2,
        loss=lambda result, x, y: (result["found"] - y).square().mean(),
        profile=False,
    )
    trainer = pipe.start()
    losses = trainer.step(x, y)
    expected = (twin(x) - y).square().mean()
    expected.backward()
    assert sum(losses) / 2 == pytest.approx(expected.item(), rel=1e-6)
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        torch.testing.assert_close(mine.grad, its.grad)
    assert trainer.state_dict().keys() == {f"inner.{name}" for name in model.state_dict()}
    assert {id(p) for p in trainer.parameters()} == {id(p) for p in model.parameters()}


class _Halves(torch.nn.Module):
    """Casts of parameters are cut from where they are read; gradients of biases join where they are small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = torch.tanh(layer(x))
        return x.float().square().mean()


def test_other_stages_may_change_what_a_stage_exchanges() -> None:
    torch.manual_seed(0)
    model = _Halves()
    twin, x = copy.deepcopy(model), torch.randn(8, 8)
    pipe = pipeline(
        model, (x,), "64MiB", stages=2, micro_batches=4, schedule="zbv", profile=False, time_limit=1.0
    )
    losses = pipe.start().step(x)
    parts = [twin(part) for part in x.split(2)]
    (torch.stack(parts).sum() / 4).backward()
    assert losses == [part.item() for part in parts]
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


class _Returns(torch.nn.Module):
    """Returns what it was given, beside what it computes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("seen", torch.full((4,), 2.0))
        self.kind = kind

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        if self.kind == "parameter":
            return h, cast("torch.nn.Linear", self.layers[0]).weight
        if self.kind == "written":
            return h, y.mul_(2)
        seen = self.get_buffer("seen")
        if self.kind == "counter":
            seen.add_(1)
            return h, seen
        first = cast("torch.nn.Linear", self.layers[0])
        return h, y, y[:, 1:], seen, first.weight.detach()


def test_results_may_be_arguments_and_buffers() -> None:
    torch.manual_seed(0)
    model = _Returns("arguments")
    twin, x, y = copy.deepcopy(model), torch.randn(8, 4), torch.randn(8, 4)

    def loss(result: Any, *_: torch.Tensor) -> torch.Tensor:
        h, whole, part, seen, weight = result
        return ((h - whole) * seen * weight.sum()).square().mean() + (h[:, 1:] * part).mean()

    pipe = pipeline(model, (x, y), "64MiB", stages=2, micro_batches=4, loss=loss, profile=False)
    losses = pipe.start().step(x, y)
    parts = [loss(twin(a, b)) for a, b in zip(x.split(2), y.split(2), strict=True)]
    (torch.stack(parts).sum() / 4).backward()
    assert losses == pytest.approx([part.item() for part in parts], rel=1e-6)
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("parameter", "returns parameter layers.0.weight, and the pipeline takes no gradient"),
        ("written", "writes into argument 1"),
        ("counter", "returns buffer seen, which its forward writes"),
    ],
)
def test_results_that_one_stage_cannot_hand_out_are_refused(kind: str, said: str) -> None:
    x = torch.randn(8, 4)
    with pytest.raises(irc.UnsupportedError, match=f"IRC489.*{said}"):
        pipeline(_Returns(kind), (x, x.clone()), "64MiB", stages=2, micro_batches=4, profile=False)


def test_stages_that_disagree_about_what_they_exchange_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", "tied", planned("tied", 2, "1f1b", 4))
    file = folder / "stage-1.irc"
    text = file.read_text()
    key = text.split('irc.receive("')[1].split('"')[0]
    file.write_text(re.sub(rf"\b{re.escape(key)}\b", "renamed", text))
    with pytest.raises(irc.VerificationError, match=rf"IRC142.*stage 0 and stage 1 disagree about {key}"):
        read_pipeline(folder)


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    pipe = planned("tied", 2, "zb-h1", 4)
    folder = written(tmp_path / "out", "tied", pipe)
    again = read_pipeline(folder)
    assert again.stages.plan == pipe.plan and again.stages.order == pipe.stages.order
    assert again.stages.texts() == pipe.stages.texts()
    first = read_pipeline(folder, 0)
    assert first.state.keys() < again.state.keys()


@pytest.mark.parametrize(
    ("arguments", "code", "status"),
    [
        (["--stages", "2", "--micro-batches", "3"], "IRC487", 2),
        (["--stages", "99", "--micro-batches", "4"], "IRC485", 2),
        (["--stages", "2", "--micro-batches", "4", "--schedule", "none"], "IRC467", 2),
        (["--stages", "0", "--micro-batches", "4"], "IRC469", 2),
        (["--stages", "2"], "IRC400", 2),
        (["--stages", "2", "--micro-batches", "4", "--swap", "params"], "IRC423", 2),
        (["--stages", "2", "--micro-batches", "4", "--budget", "1MiB,1MiB,1MiB"], "IRC482", 2),
        (["--stages", "2", "--micro-batches", "4", "--budget", "50%"], "IRC482", 2),
        (["--stages", "2", "--micro-batches", "4", "--budget", "4KiB"], "IRC486", 3),
    ],
)
def test_refusals(
    arguments: list[str], code: str, status: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = source_of("translator").model
    target = tmp_path / "out"
    common = ["optimize", model, "--no-profile", "--time-limit", "1", "--budget", "1MiB", "-o", str(target)]
    assert main([*common, *arguments]) == status
    said = capsys.readouterr().err
    assert f"error[{code}]" in said and "help: " in said
    assert not target.exists()


def test_batches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(irc.UsageError, match=r"IRC487.*a batch of 10 does not divide into 4"):
        micro_batches_of((torch.zeros(10, 2),), 4)
    trainer = planned("skips", 2, "1f1b", 4).start()
    with pytest.raises(irc.UsageError, match=r"IRC487.*is float32\[2, 3, 8, 8\] on cpu"):
        trainer.step(torch.zeros(8, 3, 8, 8))
    assert all(parameter.grad is None for parameter in trainer.parameters())


class _Shares(torch.nn.Module):
    """One parameter is read first and last, there as a sum; the others' gradients are also their layers'."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = torch.nn.Parameter(torch.rand(4, 6))
        self.added = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(2, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.ends.mean()
        for added in self.added:
            x = torch.tanh(x) * 1.1 + added
        return (x + self.ends.sum()).square().mean()


def test_parts_of_a_gradient_may_be_expanded_numbers() -> None:
    torch.manual_seed(0)
    model, x = _Shares(), torch.randn(8, 8)
    twin = copy.deepcopy(model)
    pipeline(model, (x,), "64MiB", stages=2, micro_batches=4, profile=False).start().step(x)
    (torch.stack([twin(part) for part in x.split(2)]).sum() / 4).backward()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


def test_gradients_that_are_on_their_way_are_not_added_to() -> None:
    """The next micro-batch is added to `.grad` in place, while a neighbour may still read what was sent."""
    graph = captured_micro_batch(_Shares(), (torch.randn(2, 8),), None).graph
    line = Dataflow(graph).forward
    sent = 0
    for place in range(1, len(line)):
        stages = {node: int(k >= place) for k, node in enumerate(line)}
        for stage in cut(graph, stages, 2):
            nodes = release_gradients(stage.graph).operations
            exchanged = {
                v.storage for n in nodes if n.op in (SEND, RECEIVE) for v in (*n.operands, *n.values)
            }
            kept = {node.operands[1].storage for node in nodes if node.op == ACCUMULATE_GRADIENT}
            assert exchanged.isdisjoint(kept), place
            sent += len(exchanged)
    assert sent


class _Called(torch.nn.Module):
    """Takes what a call may get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, named: dict[str, torch.Tensor], twice: bool) -> torch.Tensor:
        h = named["x"]
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h.square().mean() * (2 if twice else 1)


def test_calls_unlike_the_planned_one_are_refused() -> None:
    model, x = _Called(), torch.randn(8, 4)
    pipe = pipeline(model, ({"x": x}, True), "64MiB", stages=2, micro_batches=2, profile=False)
    trainer = pipe.start()

    def refused(code: str, said: str, *args: Any) -> None:
        with pytest.raises(irc.UsageError, match=rf"{code}.*{said}"):
            trainer.step(*args)

    refused("IRC490", "an argument is False; it was True at planning", {"x": x}, False)
    refused("IRC490", "nest otherwise", {"x": x, "y": x}, True)
    refused("IRC487", r"is float64\[4, 4\] on cpu; .* for float32\[4, 4\] on cpu", {"x": x.double()}, True)
    refused("IRC487", r"with strides \[1, 8\]", {"x": torch.randn(4, 8).T}, True)
    with torch.no_grad():
        refused("IRC490", "without gradients", {"x": x}, True)
    with torch.autocast("cpu", torch.bfloat16):
        refused("IRC490", "autocast", {"x": x}, True)
    model.layers[1].eval()
    refused("IRC490", r"module layers.1 is no longer in train\(\)", {"x": x}, True)
    model.train()
    model.layers[1].bias.requires_grad_(False)
    refused("IRC490", "requires_grad of parameter layers.1.bias", {"x": x}, True)
    model.layers[1].bias.requires_grad_(True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(trainer.step({"x": x}, True)) == 2


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_a_batch_counts_once(micro_batches: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    batch = torch.randn(64, 4096, 4)
    pipe = pipeline(model, (batch,), "1GiB", stages=2, micro_batches=micro_batches, profile=False)
    graph = pipe.stages.schedules[0].graph
    (held,) = [entry.value.storage for entry in graph.inputs if entry.role is InputRole.INPUT]
    assert held.nbytes * micro_batches == batch.nbytes


def test_a_batch_is_let_go_when_its_step_ends() -> None:
    trainer = planned("skips", 2, "1f1b", 4).start()
    batch = torch.randn(16, 3, 8, 8)
    held = StorageWeakRef(batch.untyped_storage())
    trainer.step(batch)
    del batch
    gc.collect()
    assert held.expired()


def test_arguments_that_require_gradients_are_refused() -> None:
    model, (x,) = pipeline_models.skips()
    with pytest.raises(irc.UnsupportedError, match="IRC483"):
        pipeline(model, (x.requires_grad_(),), "1MiB", stages=2, micro_batches=2, profile=False)


def test_a_rank_that_dies_takes_the_others_down(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", "tied", planned("tied", 2, "1f1b", 4))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    running = subprocess.Popen(
        [*command, "-m", "irc", "run", str(folder), "--steps", "1000000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        ranks = _children(running.pid, 2)
        time.sleep(5)  # they train by then
        os.kill(ranks[-1], signal.SIGKILL)
        _, said = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode != 0
    assert f"Signal 9 (SIGKILL) received by PID {ranks[-1]}" in said


def _children(parent: int, count: int) -> list[int]:
    """The processes that a process started, once there are so many."""
    for _ in range(300):
        found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if len(found) >= count:
            return [int(child) for child in found]
        time.sleep(0.1)
    raise AssertionError("the ranks do not start")


def test_plans_for_accelerators_are_not_run(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", "skips", planned("skips", 2, "1f1b", 4))
    for stage in folder.glob("stage-*.irc"):
        stage.write_text(re.sub(r"(storage @\S+ \d+) cpu", r"\1 meta", stage.read_text()))
    with pytest.raises(irc.UnsupportedError, match="IRC494"):
        run_pipeline(folder, 1, with_original=False)
