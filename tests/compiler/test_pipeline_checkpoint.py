"""What one cut of a model has trained, another goes on with: parameters, buffers and optimizer state."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from safetensors.torch import load_file, save_file
from support import pipeline_models

import irc
from irc.compiler.optimizers import DescribedOptimizer, parse_optimizer
from irc.compiler.pipeline.api import Pipeline, pipeline
from irc.compiler.pipeline.artifact import write_pipeline
from irc.compiler.pipeline.micro_batches import micro_batches_of
from irc.compiler.pipeline.weights import write_weights
from irc.compiler.source import Source
from irc.tools.cli import main

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

ADAM = parse_optimizer("adamw:lr=1e-2")


def planned(
    model: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    stages: int,
    schedule: str,
    optimizer: DescribedOptimizer = ADAM,
) -> Pipeline:
    return pipeline(
        model,
        args,
        "64MiB",
        stages=stages,
        micro_batches=4,
        schedule=schedule,
        optimizer=optimizer,
        costs="analytic",
        time_limit=0.5,
    )


def train(trainer: Any, args: tuple[torch.Tensor, ...], steps: int) -> None:
    for _ in range(steps):
        trainer.step(*args)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()


def trained_alone(
    model: torch.nn.Module, args: tuple[torch.Tensor, ...], steps: int
) -> dict[str, torch.Tensor]:
    optimizer = ADAM(list(model.parameters()))
    for _ in range(steps):
        for part in micro_batches_of(args, 4):
            out = model(*part)
            loss = out if out.dim() == 0 else out.square().mean()
            (loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "skips"])
def test_a_checkpoint_of_some_stages_loads_into_others(name: str, tmp_path: Path) -> None:
    """Three stages in one process, then two ranks, then two stages of another schedule."""
    model, args = getattr(pipeline_models, name)()
    expected = trained_alone(copy.deepcopy(model), args, 4)
    fresh, again = copy.deepcopy(model), copy.deepcopy(model)
    first = planned(model, args, 3, "1f1b").start()
    train(first, args, 2)
    first.save(tmp_path / "first")
    folder = tmp_path / "pipe"
    write_pipeline(folder, planned(fresh, args, 2, "zbv"), Source(f"{pipeline_models.__file__}:{name}"), args)
    meeting = str(tmp_path / "meeting")
    arguments = (2, meeting, str(folder), str(tmp_path / "first"), str(tmp_path / "second"))
    torch.multiprocessing.spawn(pipeline_models.go_on, args=arguments, nprocs=2)
    last = planned(again, args, 2, "gpipe").start()
    last.load(tmp_path / "second")
    train(last, args, 1)
    found = again.state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], msg=key)


@pytest.mark.slow
def test_checkpoints_of_other_models_are_refused_and_change_nothing(tmp_path: Path) -> None:
    model, args = pipeline_models.tied()
    planned(model, args, 2, "1f1b").start().save(tmp_path / "tied")
    other, its_args = pipeline_models.skips()
    before = {key: tensor.clone() for key, tensor in other.state_dict().items()}
    trainer = planned(other, its_args, 2, "1f1b").start()
    with pytest.raises(irc.UsageError, match=r"IRC497.*has no tensor"):
        trainer.load(tmp_path / "tied")
    with pytest.raises(irc.UsageError, match=r"IRC497.*is not a checkpoint"):
        trainer.load(tmp_path / "nothing")
    x = torch.randn(8, 4)
    larger = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    planned(larger, (x,), 2, "1f1b").start().save(tmp_path / "larger")
    with pytest.raises(irc.UsageError, match=r"IRC497.*the model has no 3\.bias"):
        planned(larger[:3], (x,), 2, "1f1b").start().load(tmp_path / "larger")
    with pytest.raises(irc.UsageError, match=r"IRC497.*missing"):
        trainer.load_state_dict(model.state_dict())
    strange = dict(before) | {"no.such": torch.zeros(1)}
    with pytest.raises(irc.UsageError, match=r"IRC497.*the model has no no\.such"):
        trainer.load_state_dict(strange)
    short = dict(before)
    key = next(key for key, tensor in before.items() if tensor.dim() > 1)
    short[key] = short[key][:1]
    with pytest.raises(irc.UsageError, match=r"IRC497.*has shape"):
        trainer.load_state_dict(short)
    assert all(torch.equal(tensor, before[key]) for key, tensor in other.state_dict().items())


@pytest.mark.slow
def test_state_of_another_optimizer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model, args = pipeline_models.skips()
    trainer = planned(copy.deepcopy(model), args, 2, "1f1b").start()
    train(trainer, args, 1)
    trainer.save(tmp_path / "adam")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for described in ("sgd", "sgd:lr=0.1,momentum=0.9", "adam:amsgrad=true", "adafactor"):
        other = planned(model, args, 2, "1f1b", parse_optimizer(described)).start()
        with pytest.raises(irc.UsageError, match=r"IRC497.*keeps exp_avg, exp_avg_sq, step for a parameter"):
            other.load(tmp_path / "adam")
        assert not other.optimizer.state
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model, args = pipeline_models.tied()
    trainer = planned(model, args, 2, "1f1b").start()
    trainer.save(tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(irc.UsageError, match=r"IRC497.*cannot be read") as refused:
        trainer.load(tmp_path)
    assert "Traceback" not in str(refused.value)
    assert not any(parameter.any() for parameter in model.parameters())
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(irc.UsageError, match=r"IRC430") as refused:
        trainer.save(tmp_path / "file")
    assert "Traceback" not in str(refused.value)


@pytest.mark.slow
def test_ranks_refuse_a_checkpoint_or_a_batch_together(tmp_path: Path) -> None:
    """The last rank alone has another layer; nobody waits for it."""
    model, args = pipeline_models.wide()
    planned(model, args, 2, "1f1b").start().save(tmp_path / "wide")
    source = Source(f"{pipeline_models.__file__}:narrow")
    write_pipeline(tmp_path / "pipe", planned(pipeline_models.narrow()[0], args, 2, "1f1b"), source, args)
    results = str(tmp_path / "result")
    arguments = (2, str(tmp_path / "meeting"), str(tmp_path / "pipe"), str(tmp_path / "wide"), results)
    torch.multiprocessing.spawn(pipeline_models.refuse_together, args=arguments, nprocs=2)
    found = [json.loads(Path(f"{results}-{rank}").read_text()) for rank in (0, 1)]
    (first, same, waiting), (last, same_too, refused) = found
    assert same and same_too
    assert "error[IRC487]" in refused and "error[IRC487]: another rank refuses its step" in waiting
    assert "error[IRC497]" in last and "10.weight is float32[64, 64] in the checkpoint" in last
    assert "error[IRC497]: another rank refuses the checkpoint: 10.weight is" in first


@pytest.mark.slow
def test_a_checkpoint_takes_the_place_of_an_earlier_one_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args = pipeline_models.tied()
    trainer = planned(model, args, 2, "1f1b").start()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(irc.UsageError, match=r"IRC430.*not a checkpoint is there"):
        trainer.save(mine)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    folder = tmp_path / "checkpoint"
    trainer.save(folder)
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    train(trainer, args, 1)
    trainer.save(folder)
    after = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(dcp, "save", full)
    train(trainer, args, 1)
    with pytest.raises(irc.UsageError, match=r"IRC430.*no space left"):
        trainer.save(folder)
    trainer.load(folder)
    assert all(torch.equal(tensor, after[name]) for name, tensor in trainer.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "mine"]


@pytest.mark.slow
def test_what_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    model, args = pipeline_models.tied()
    trainer = planned(model, args, 2, "1f1b").start()
    train(trainer, args, 1)
    mine = tmp_path / ".kept.part"
    mine.mkdir()
    trainer.save(tmp_path / "kept")
    assert mine.is_dir()
    (first, *_) = trainer.optimizer.state.values()
    first["past"] = [torch.zeros(2)]
    with pytest.raises(
        irc.UsageError, match=r"IRC430.*cannot hold the optimizer's state: of .* it keeps 'past', a list"
    ):
        trainer.save(tmp_path / "other")
    with pytest.raises(irc.UsageError, match=r"IRC430.*cannot be written"):
        planned(model, args, 2, "1f1b").start().save(tmp_path / ("long" * 100))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".kept.part", "kept"]


def test_weights_in_any_layout_are_written(tmp_path: Path) -> None:
    tensor = torch.randn(4, 3).T
    write_weights(tmp_path / "weights", {"tensor": tensor})
    assert torch.equal(load_file(tmp_path / "weights")["tensor"], tensor)


@pytest.mark.slow
def test_a_state_dict_is_taken_over() -> None:
    model, args = pipeline_models.skips()
    other = pipeline_models.skips()[0]
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.add_(1)
    trainer = planned(model, args, 2, "1f1b").start()
    trainer.load_state_dict(other.state_dict())
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key
    assert trainer.state_dict().keys() == model.state_dict().keys()


@pytest.mark.slow
def test_weights_of_one_cut_begin_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = f"{pipeline_models.__file__}:tied"
    usual = ["--budget", "64MiB", "--micro-batches", "4", "--costs", "cpu", "--time-limit", "1", "-q"]
    for stages in ("2", "3"):
        assert main(["optimize", source, "--stages", stages, *usual, "-o", str(tmp_path / stages)]) == 0
    weights = tmp_path / "weights.safetensors"
    assert main(["run", str(tmp_path / "2"), "--steps", "2", "--save-weights", str(weights)]) == 0
    model = pipeline_models.tied()[0]
    model.load_state_dict(load_file(weights))
    assert (
        main(["run", str(tmp_path / "3"), "--steps", "1", "--weights", str(weights), "--check", "--trust"])
        == 0
    )
    assert "original" in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob(".*")] == []
    tensors = load_file(weights)
    del tensors["blocks.0.norm.weight"]
    save_file(tensors, weights)
    assert main(["run", str(tmp_path / "3"), "--weights", str(weights)]) == 2
    assert "has no blocks.0.norm.weight" in capsys.readouterr().err
    (tmp_path / "text").write_text("no weights")
    assert main(["run", str(tmp_path / "3"), "--weights", str(tmp_path / "text")]) == 2
    assert "error[IRC497]" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "3")
    assert main(["run", str(tmp_path / "2"), "--save-weights", str(tmp_path / "3" / "w.safetensors")]) == 2
    assert "error[IRC435]" in capsys.readouterr().err
