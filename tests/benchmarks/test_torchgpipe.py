"""AmoebaNet-D and torchgpipe's tables: what is published, what is planned of it, and that it trains."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import irc
from benchmarks import amoebanet_plans, torchgpipe_speed
from benchmarks.amoebanet_plans import Row, Setting, rows_of, settings
from benchmarks.models import amoebanet_d, resnet18
from benchmarks.models.stacked_unet import StackedUNet, stacked_unet
from benchmarks.torchgpipe.programs import Simulation, model_bytes
from benchmarks.torchgpipe_speed import Experiment, experiments, row_of
from irc.compiler.pipeline.api import pipeline
from irc.compiler.pipeline.micro_batches import micro_batches_of
from irc.compiler.pipeline.plan import captured_micro_batch
from irc.ir import same_graph
from irc.passes import SplitConvolutions

torch.set_num_threads(1)

small = functools.partial(amoebanet_d, size=64, classes=10, layers=3, filters=16)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ------------------------------------------------------------------------------------ training


def test_a_pipeline_of_amoebanet_trains_as_the_original() -> None:
    model, args = small(batch=8)
    original = copy.deepcopy(model)
    pipe = pipeline(
        model, args, "1GiB", stages=2, micro_batches=4, schedule="zbv", costs="analytic", time_limit=0.5
    )
    losses = pipe.start().step(*args)
    for batch, loss in zip(micro_batches_of(args, 4), losses, strict=True):
        expected = original(*batch)
        (expected / 4).backward()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    for (name, own), its in zip(model.named_parameters(), original.parameters(), strict=True):
        assert own.grad is not None and its.grad is not None, name
        assert float((own.grad - its.grad).abs().max()) <= 1e-5 * float(its.grad.abs().max()) + 1e-9, name
    assert all(map(torch.equal, model.buffers(), original.buffers()))


# ------------------------------------------------------------------------------------ without data


def tiny(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return resnet18(batch=batch, size=32, classes=10, width=4, depths=(1, 1))


def test_a_model_without_data_is_captured_as_one_with_data() -> None:
    module, args = tiny(2)
    program = Simulation.of(lambda: tiny(2)).program
    program = replace(program, graph=captured_micro_batch(module, args, None).graph, costs=None)
    split = SplitConvolutions(transpose=False).run(program)
    assert same_graph(Simulation.of(lambda: tiny(2)).program.graph, split.graph)


def test_a_pipeline_is_planned_without_memory_for_the_model() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, args = tiny(4)
    plan = pipeline(model, args, "1GiB", stages=2, micro_batches=2, costs="p40", time_limit=0.5).plan
    assert sum(stage.parameter_bytes for stage in plan.stages) == 4 * parameters(model)
    assert plan.costs == "analytic:p40" and plan.step_seconds >= plan.bound_seconds


def test_the_model_of_all_devices_takes_twelve_bytes_a_parameter_with_rmsprop() -> None:
    simulation = Simulation.of(lambda: tiny(1))
    planned = simulation.planned([1 << 30] * 2, 4, optimizer_steps=simulation.rmsprop(), time_limit=0.5)
    model = model_bytes(planned)
    assert sum(model) == 12 * parameters(tiny(1)[0])
    assert all(peak > model for peak, model in zip(planned.peak_bytes, model, strict=True))
    bare = simulation.planned([1 << 30] * 2, 4, time_limit=0.5)
    assert planned.step_seconds > bare.step_seconds


# ------------------------------------------------------------------------------------ AmoebaNet-D's table


def test_the_published_settings_are_five() -> None:
    known = {setting.name: setting for setting in settings()}
    assert [s.devices for s in known.values()] == [1, 1, 2, 4, 8]
    assert [s.micro_batches for s in known.values()] == [1, 128, 128, 128, 128]
    assert known["baseline"].torchgpipe_bytes is None
    assert known["baseline"].published_bytes == 6_260_000_000
    assert known["pipeline-8"].published_bytes == round(10.83 * 2**30)


def test_a_setting_is_planned_within_what_is_published_or_told_what_it_needs() -> None:
    wide, tight = rows_of(Setting("pipeline-2", 3, 16, 1, 1), time_limit=0.5)
    model = parameters(amoebanet_d(layers=3, filters=16)[0])
    assert wide.fits and wide.parameters == model
    assert wide.activation_bytes == sum(wide.peak_bytes) - 12 * model > 0
    assert wide.step_seconds >= wide.bound_seconds > 0
    assert not tight.fits and tight.peak_bytes[0] > max(tight.budget_bytes)


def test_the_page_says_what_the_journal_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    arguments = ["--settings", "pipeline-2", "--journal", str(journal), "--markdown", str(page)]
    about = {
        "irc": irc.__version__,
        "machine": amoebanet_plans.MACHINE.to_json(),
        "time_limit": 60.0,
    }
    gib = 2**30
    row = Row("all", 1000, [4 * gib, 5 * gib], [3 * gib, 4 * gib], True, 2.0, 1.5, 0.25, 3.0, 7.0)
    entries = [{"key": "pipeline-2", "entries": [{f: getattr(row, f) for f in Row.__slots__}]}]
    lines = [{"format": "irc-amoebanet-plans-1", "options": about}, *entries]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert amoebanet_plans.main(arguments) == 1, "7 GiB are more than is published"
    text = page.read_text()
    assert "| pipeline-2 | (18, 544) | 2       | 1,000" in text and "25.0%" in text
    assert "over torchgpipe's peak; devices take 3.00, 4.00 GiB, of budgets of 4.00, 5.00 GiB" in text
    assert amoebanet_plans.main(["--settings", "pipeline-3"]) == 2
    assert "choose some of baseline, pipeline-1" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ the tables of speed


@pytest.mark.parametrize(
    ("depth", "base", "published"),
    [(6, 72, 362.2e6), (11, 128, 2.21e9), (24, 128, 4.99e9), (24, 160, 7.80e9), (48, 160, 15.82e9)],
)
def test_stacked_unet_has_the_parameters_of_torchgpipe(depth: int, base: int, published: float) -> None:
    with torch.device("meta"):
        found = parameters(StackedUNet(depth, base))
    digits = 1e5 if published < 1e9 else 1e7
    assert abs(found - published) <= digits / 2


def test_each_experiment_has_its_baseline_first() -> None:
    names = [(e.network, e.name) for e in experiments()]
    assert next(name for network, name in names if network == "unet") == "baseline"
    assert names[0] == ("resnet101", "baseline") and len(names) == 10
    assert {e.size for e in experiments() if e.network == "resnet101"} == {118, 110, 15, 22, 36}


def test_computing_all_again_takes_a_forward_longer_but_for_the_last_micro_batch() -> None:
    def make(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        return stacked_unet(batch=batch, size=64, depth=1, base=4)

    alone, half, one, two = (
        row_of(Experiment("unet", name, 2 * count, count, 1.0), make, 0.5)
        for name, count in (("baseline", 1), ("pipeline-1", 2), ("pipeline-1", 8), ("pipeline-2", 8))
    )
    assert one.theirs < half.theirs < half.ours < alone.ours, "half of the micro-batches, or most, run again"
    assert two.theirs > one.theirs and two.ours > two.theirs
    assert one.our_again == 0.0
    assert torchgpipe_speed.main(["--networks", "vgg"]) == 2
