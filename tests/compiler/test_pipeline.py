"""Pipelines on several ranks train as the original on one device, within the memory that was predicted."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.multiprocessing
from support import pipeline_models
from support.killed_ranks import kill_ranks
from support.planned_pipelines import planned, written

import irc
from irc.backends.distributed.results import Results
from irc.backends.torch import Program
from irc.compiler.optimizers import parse_optimizer
from irc.compiler.pipeline.api import pipeline
from irc.compiler.pipeline.artifact import read_pipeline
from irc.compiler.pipeline.plan import captured_micro_batch
from irc.compiler.pipeline.run import run_pipeline
from irc.ir import ACCUMULATE_GRADIENT, RECEIVE, SEND
from irc.ir.pipeline.memory import borrowed_storages, device_peak_bytes, stage_memory
from irc.passes.pipeline.placement import Dataflow
from irc.passes.pipeline.stage_graphs import cut_graph
from irc.passes.rewrites.release_gradients import release_gradients

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


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_as_one_device(ranks: int, tmp_path: Path) -> None:
    """All in one test: the ranks are started once. Two ranks train all models, four one model a schedule."""
    orders: list[tuple[str, int, dict[str, Any]]] = [
        *((schedule, micro_batches, {}) for count, schedule, micro_batches in CASES if count == ranks),
        *((schedule, 2 * ranks, options) for schedule, options in OPTIONS),
    ]
    folders: list[str] = []
    for index, (schedule, micro_batches, options) in enumerate(orders):
        for model in MODELS if ranks == 2 else (MODELS[index % len(MODELS)],):
            name = tmp_path / f"{model}-{schedule}-{micro_batches}-{options.get('checkpoint')}"
            pipe = planned(model, ranks, schedule, micro_batches, **options)
            folders.append(str(written(name, model, pipe)))
    results = tmp_path / "results"
    arguments = (ranks, str(tmp_path / "meeting"), tuple(folders), str(results))
    torch.multiprocessing.spawn(pipeline_models.run_folders, args=arguments, nprocs=ranks)
    for name, report in json.loads(results.read_text()).items():
        check(name, report, ranks)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_one_process_runs_what_was_planned_for_several(model: str, schedule: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "out", model, planned(model, 2, schedule, 4))
    report = run_pipeline(folder, 2, with_original=True)
    assert report.is_alone and report.failures == []
    assert report.ranks[0].gradient_difference is not None


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_no_stage_is_cut_off_from_the_others(schedule: str) -> None:
    """BatchNorm counts batches before all else, and nothing reads the number."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
    model, x = torch.nn.Sequential(*layers), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    pipe = pipeline(
        model, (x,), "64MiB", stages=4, micro_batches=1, schedule=schedule, costs="cpu", time_limit=0.5
    )
    pipe.start().step(x)
    twin(x).square().mean().backward()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
    for mine, its in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, its)


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


class _HeadInSinglePrecision(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.body(x))
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float()).square().mean()


def test_backward_of_a_step_under_autocast_runs_outside_of_it() -> None:
    torch.manual_seed(0)
    model = _HeadInSinglePrecision()
    twin, x = copy.deepcopy(model), torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        pipe = pipeline(
            model, (x,), "64MiB", stages=2, micro_batches=4, schedule="1f1b", costs="analytic", time_limit=1.0
        )
        pipe.start().step(x)
        losses = [twin(part) for part in x.split(2)]
    for loss in losses:
        (loss / 4).backward()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-6, atol=0)


def test_other_stages_may_change_what_a_stage_exchanges() -> None:
    torch.manual_seed(0)
    model = _Halves()
    twin, x = copy.deepcopy(model), torch.randn(8, 8)
    pipe = pipeline(
        model, (x,), "64MiB", stages=2, micro_batches=4, schedule="zbv", costs="analytic", time_limit=1.0
    )
    losses = pipe.start().step(x)
    parts = [twin(part) for part in x.split(2)]
    (torch.stack(parts).sum() / 4).backward()
    assert losses == [part.item() for part in parts]
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


@pytest.mark.slow
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
    pipeline(model, (x,), "64MiB", stages=2, micro_batches=4, costs="analytic").start().step(x)
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
        for stage in cut_graph(graph, stages, 2):
            nodes = release_gradients(stage.graph).operations
            exchanged = {
                v.storage for n in nodes if n.op in (SEND, RECEIVE) for v in (*n.operands, *n.values)
            }
            kept = {node.operands[1].storage for node in nodes if node.op == ACCUMULATE_GRADIENT}
            assert exchanged.isdisjoint(kept), place
            sent += len(exchanged)
    assert sent


@pytest.mark.slow
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
        time.sleep(5)  # on a quiet machine they train by then; on any, the others must end
        os.kill(ranks[-1], signal.SIGKILL)
        _, said = running.communicate(timeout=300)
    finally:
        running.kill()
    assert running.returncode != 0
    assert f"Signal 9 (SIGKILL) received by PID {ranks[-1]}" in said


@pytest.mark.slow
def test_all_other_ranks_name_one_that_is_lost(tmp_path: Path) -> None:
    """`python -m support.killed_ranks` tries more kills."""
    folder = written(tmp_path / "out", "tied", planned("tied", 4, "1f1b", 8))
    for kill in kill_ranks(folder, 4, kills=3, seed=0, most_seconds=2.0):
        assert kill.is_clean, kill


def _children(parent: int, count: int) -> list[int]:
    """The processes that a process started, once there are so many."""
    for _ in range(3000):
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


@pytest.mark.slow
def test_what_a_stage_hands_over_on_its_device_counts_once() -> None:
    """The encoder's states are held by both stages of the last device."""
    stages = planned("translator", 2, "zbv", 4).stages
    first, second = stages.schedules[1:3]
    borrowed = borrowed_storages(first, second)
    whole, less = (stage_memory(second, {}, 4, borrowed=given) for given in ((), borrowed))
    assert borrowed and less.held_bytes < whole.held_bytes
    plain = [stage_memory(schedule, {}, 4) for schedule in stages.schedules]
    sharing = [*plain[:2], replace(whole, borrowing=less), plain[3]]
    before, after = (device_peak_bytes(stages.order, memory) for memory in (plain, sharing))
    assert after[0] == before[0] and after[1] < before[1]


def test_the_loss_that_stays_until_the_end_of_a_step_takes_a_number() -> None:
    """`mse_loss` leaves its scalar in memory of the size of its input."""
    x = torch.randn(64, 64)
    mse_loss = torch.nn.functional.mse_loss
    program = cast("Program", SimpleNamespace(tangents=[]))
    results = Results(program, (), lambda _: x, lambda value, _: mse_loss(value, x), 1.0)
    results.deliver(0, [], [])
    nbytes = results.loss(0).untyped_storage().nbytes()
    assert nbytes == x.element_size() < mse_loss(x, x).untyped_storage().nbytes()
