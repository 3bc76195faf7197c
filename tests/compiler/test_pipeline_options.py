"""What a pipeline may be asked for: budgets, modes of checkpointing, devices, optimizers."""

from __future__ import annotations

import copy
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.multiprocessing
from support import pipeline_models
from support.planned_pipelines import planned, source_of, written

import irc
from irc.compiler.optimizers import parse_optimizer
from irc.compiler.pipeline.api import pipeline
from irc.compiler.pipeline.micro_batches import micro_batches_of
from irc.compiler.pipeline.plan import MicroBatch, baseline_bytes, captured_micro_batch, devices_of
from irc.compiler.pipeline.request import PipelineRequest
from irc.compiler.pipeline.run import run_pipeline
from irc.ir import Compute
from irc.passes.costs.allocations import peak_bytes
from irc.passes.pipeline import Devices, LinearPartition
from irc.passes.pipeline.device_order import device_order
from irc.passes.remat import candidates
from irc.tools.cli import main

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

ADAM = parse_optimizer("adamw:lr=1e-2")


def test_a_percentage_is_of_an_equal_share_of_one_device(tmp_path: Path) -> None:
    """One device that trains the whole batch at once, as the original does."""
    model, args = pipeline_models.wide()
    state_bytes = 8 * sum(p.nbytes for p in model.parameters()) // 4 + 4 * len(list(model.parameters()))
    whole_bytes = baseline_bytes(captured_micro_batch(model, args, None), ADAM)
    step_bytes = peak_bytes(lambda: model(*args).square().mean().backward())
    held_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *args)) + state_bytes
    assert whole_bytes == pytest.approx(step_bytes + held_bytes, rel=0.02)
    made = pipeline(
        model,
        args,
        ["90%", "120%@0.5"],
        stages=2,
        micro_batches=4,
        costs="analytic",
        optimizer=ADAM,
        time_limit=1,
    ).plan
    assert sorted(made.budget_bytes) == [int(whole_bytes // 2 * part / 100) for part in (90, 120)]
    assert all(peak <= most for peak, most in zip(made.peak_bytes, made.budget_bytes, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
def test_less_memory_takes_more_time_and_fits(schedule: str) -> None:
    wide = planned("translator", 2, schedule, 4).plan
    budget = round(max(wide.peak_bytes) * 0.93)
    tight = planned("translator", 2, schedule, 4, str(budget)).plan
    assert max(tight.peak_bytes) <= budget
    assert tight.step_seconds >= tight.bound_seconds
    assert wide.step_seconds >= wide.bound_seconds


@pytest.mark.slow
def test_a_plan_that_computes_again_has_the_same_numbers(tmp_path: Path) -> None:
    least = irc_minimum("tied")
    pipe = planned("tied", 2, "gpipe", 4, str(least))
    assert any(stage.again_seconds for stage in pipe.plan.stages)
    report = run_pipeline(written(tmp_path / "out", "tied", pipe), 2, with_original=True)
    assert report.failures == []


@pytest.mark.slow
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


def test_a_mode_of_checkpointing_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: Any, **__: Any) -> None:
        raise AssertionError("each mode is one schedule")

    monkeypatch.setattr(candidates, "evict_greedily", search)
    plan = planned("tied", 2, "gpipe", 4, checkpoint="except_last").plan
    assert plan.peak_bytes


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
    request = PipelineRequest(8, 16, [f"64MiB@{1 + k / 8}" for k in range(8)], costs="cpu")
    micro_batch = MicroBatch.measured(captured, request)
    partition = LinearPartition(
        micro_batch.linear_order, request.order(), devices_of(request), micro_batch.optimizer_steps
    )
    looked_at: list[Devices] = []

    def seconds(self: LinearPartition) -> float:
        looked_at.append(self.devices)
        return float(len(looked_at) != 3)

    monkeypatch.setattr(LinearPartition, "seconds", seconds)
    assert device_order(partition, deadline=0.0) == tuple(range(8)) and len(looked_at) == 1
    looked_at.clear()
    monkeypatch.setattr(time, "thread_time", lambda: float(len(looked_at)))
    assert device_order(partition, deadline=9.0) == (0, 1, 2, 3, 4, 5, 7, 6) and len(looked_at) == 9


@pytest.mark.slow
def test_each_device_keeps_to_its_own_budget_wherever_it_is_put() -> None:
    wide = planned("tied", 2, "1f1b", 4).plan
    small = round(min(wide.peak_bytes) * 0.8)
    for budgets in ([f"cpu={small}", "64MiB"], ["64MiB", f"cpu={small}"]):
        plan = planned("tied", 2, "1f1b", 4, budgets).plan
        assert sorted(plan.budget_bytes) == [small, 64 << 20]
        assert plan.device_names[plan.budget_bytes.index(small)] == "cpu"
        assert all(peak <= budget for peak, budget in zip(plan.peak_bytes, plan.budget_bytes, strict=True))


@pytest.mark.slow
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
        costs="analytic",
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


@pytest.mark.slow
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
    options: dict[str, Any] = {"micro_batches": 4, "costs": "analytic", "time_limit": 0.5}
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


@pytest.mark.slow
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
        costs="analytic",
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
    options: dict[str, Any] = {"stages": 1, "micro_batches": 2, "costs": "cpu", "time_limit": 0.5}
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
    assert with_state.bubble == pytest.approx(0.0), "one device waits for none"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"checkpoint": "sometimes"}, "IRC495.*no mode 'sometimes'"),
        ({"checkpoint": "never", "strategy": "ilp"}, "IRC495.*exclude each other"),
        ({"budget": "1GiB@0"}, "IRC482.*speed of a device is '0'"),
        ({"budget": "1GiB@fast"}, "IRC482.*speed of a device is 'fast'"),
        ({"budget": "nowhere=1GiB"}, "IRC482.*no device 'nowhere'"),
        ({"budget": "meta=1GiB"}, "IRC482.*no device 'meta'"),
        ({"budget": "cuda:300=1GiB"}, "IRC482.*no device 'cuda:300'"),
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


@pytest.mark.slow
def test_masks_are_drawn_again_where_they_have_to_be() -> None:
    """The bound stays that of the model; numbers are those of the original."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.25))
    model = torch.nn.Sequential(*(copy.deepcopy(layer) for _ in range(6) for layer in layers))
    twin, x = copy.deepcopy(model), torch.randn(256, 64)
    options: dict[str, Any] = {"stages": 2, "micro_batches": 2, "schedule": "gpipe", "costs": "cpu"}
    wide = pipeline(model, (x,), "64MiB", time_limit=0.5, **options)
    least = wide.plan.peak_bytes
    for part in range(19, 0, -1):
        budgets = [round(nbytes * part / 20) for nbytes in least]
        pipe = pipeline(model, (x,), budgets, time_limit=0.5, **options)
        steps = [step for schedule in pipe.stages.schedules for step in schedule.instructions]
        runs = Counter(step.node for step in steps if isinstance(step, Compute))
        if any(count > 1 and node.generator_state is not None for node, count in runs.items()):
            break
    else:
        raise AssertionError("no mask was drawn again")
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


@pytest.mark.parametrize(
    ("arguments", "code", "status"),
    [
        (["--stages", "2", "--micro-batches", "3"], "IRC487", 2),
        pytest.param(["--stages", "99", "--micro-batches", "4"], "IRC485", 2, marks=pytest.mark.slow),
        (["--stages", "2", "--micro-batches", "4", "--schedule", "none"], "IRC467", 2),
        (["--stages", "0", "--micro-batches", "4"], "IRC469", 2),
        (["--stages", "2"], "IRC400", 2),
        (["--stages", "2", "--micro-batches", "4", "--swap", "params"], "IRC423", 2),
        (["--stages", "2", "--micro-batches", "4", "--budget", "1MiB,1MiB,1MiB"], "IRC482", 2),
        (["--stages", "2", "--micro-batches", "4", "--budget", "0%"], "IRC401", 2),
        pytest.param(
            ["--stages", "2", "--micro-batches", "4", "--budget", "4KiB"], "IRC486", 3, marks=pytest.mark.slow
        ),
    ],
)
def test_refusals(
    arguments: list[str], code: str, status: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = source_of("translator").model
    target = tmp_path / "out"
    common = [
        "optimize",
        model,
        "--costs",
        "analytic",
        "--time-limit",
        "1",
        "--budget",
        "1MiB",
        "-o",
        str(target),
    ]
    assert main([*common, *arguments]) == status
    said = capsys.readouterr().err
    assert f"error[{code}]" in said and "help: " in said
    assert not target.exists()


def test_the_batch_of_an_onnx_file_is_divided(tmp_path: Path) -> None:
    """Without --batch it is that of the file."""
    layers = [f"layer{k}" for k in range(4)]
    nodes = [
        onnx.helper.make_node("Gemm", [before, f"{name}.weight"], [name])
        for before, name in zip(["x", *layers], layers, strict=False)
    ]
    weights = [onnx.numpy_helper.from_array(np.full((4, 4), 0.3, np.float32), f"{n}.weight") for n in layers]
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [8, 4]) for n in ("x", "layer3"))
    graph = onnx.helper.make_graph(nodes, "chain", [x], [y], weights)
    file = tmp_path / "chain.onnx"
    onnx.save(onnx.helper.make_model(graph), file)
    given = [
        "--stages",
        "2",
        "--micro-batches",
        "4",
        "--budget",
        "1MiB",
        "--costs",
        "analytic",
        "--time-limit",
        "1",
    ]
    assert main(["optimize", str(file), *given, "-o", str(tmp_path / "out"), "-q"]) == 0
    assert main(["run", str(tmp_path / "out"), "--check", "--trust", "-q"]) == 0
