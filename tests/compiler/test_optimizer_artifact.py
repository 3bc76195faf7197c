"""`--optimizer`: what is planned, written, read and trained takes the steps of an ordinary loop."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.model_files import planned_folder

from irc.backends.torch import StandaloneModule
from irc.compiler.artifact import Written, read_folder
from irc.compiler.model_source import load, training_loss
from irc.compiler.optimizers import parse_optimizer
from irc.compiler.run import check_folder
from irc.compiler.source import Source
from irc.compiler.training import compare, measured_peak_bytes, optimizer_of_all
from irc.ir import Gradients, Plan, UsageError, VerificationError
from irc.tools import cli

WIDE = '''
import torch
from torch import nn


def wide():
    """More weights than activations, a buffer that changes, dropout, and an input that wants a gradient."""
    torch.manual_seed(0)
    layers = []
    for _ in range(4):
        layers += [nn.Linear(96, 96), nn.BatchNorm1d(96), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers), (torch.randn(8, 96, requires_grad=True),)


def unused():
    """Two weights that no loss reaches, one of them frozen."""
    torch.manual_seed(0)

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare, self.frozen = (nn.Linear(8, 8) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.frozen(torch.tanh(self.used(x))), self.spare(x).detach()

    return Unused(), (torch.randn(4, 8),)


def frozen():
    """Nothing to train but an input."""
    torch.manual_seed(0)
    return nn.Linear(8, 8).requires_grad_(False), (torch.randn(4, 8, requires_grad=True),)
'''

FAST = ("--costs", "analytic", "--time-limit", "1")
AMPLE = ("--costs", "analytic", "--time-limit", "60")
"""A search for homes that is cut short may find nothing; one of this model ends by itself."""


@pytest.fixture
def here(models: Path) -> Path:
    models.write_text(models.read_text() + WIDE)
    return models


def optimized(
    here: Path, name: str, *options: str, budget: str = "90%", search: Sequence[str] = FAST
) -> Path:
    return planned_folder(here, name, "--budget", budget, *search, *options)


@pytest.fixture(scope="module")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of less than parameters and the state of their optimizers take, with models.py beside it."""
    here = tmp_path_factory.mktemp("swapped") / "models.py"
    here.write_text(WIDE)
    swap = "--swap", f"disk:{here.parent}:64MiB", "--swap", "params,optimizer"
    return optimized(here, "wide", "--optimizer", "adamw:lr=1e-2", *swap, budget="45%", search=AMPLE)


def ordinary(here: Path, name: str, text: str, steps: int) -> dict[str, torch.Tensor]:
    """What an ordinary loop makes of parameters and buffers; the generator is as the factory leaves it."""
    loaded = load(Source(f"{here}:{name}"))
    one = parse_optimizer(text)([p for p in loaded.module.parameters() if p.requires_grad])
    for _ in range(steps):
        one.zero_grad()
        training_loss(loaded.module(*loaded.args)).backward()
        one.step()
    return loaded.module.state_dict()


# ---------------------------------------------------------------------- the whole way


@pytest.mark.slow
def test_a_model_larger_than_its_budget_trains(
    swapped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, here = swapped, swapped.parent / "models.py"
    plan = Plan.load(out / "plan.json")
    module = load(Source(f"{here}:wide")).module
    held_bytes = 3 * sum(parameter.nbytes for parameter in module.parameters())  # AdamW keeps two moments
    assert plan.peak_bytes <= plan.budget_bytes < held_bytes and plan.offloaded_bytes > 0
    trained = tmp_path / "trained.safetensors"
    assert (
        cli.main(["run", str(out), "--steps", "3", "--check", "--trust", "--save-weights", str(trained)]) == 0
    )
    text = capsys.readouterr().out
    assert text.startswith("optimizer: adamw:lr=0.01, within backward\nstep 1: loss ")
    assert "largest parameter difference 0 (" in text and ": bit-equal\n" in text
    assert f"<= predicted {plan.peak_bytes:,} <= budget {plan.budget_bytes:,} bytes" in text
    found, wanted = load_file(trained), ordinary(here, "wide", "adamw:lr=1e-2", 3)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    before = module.state_dict()
    assert not any(torch.equal(found[name], before[name]) for name in before)
    assert cli.main(["run", str(out), "--steps", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["optimizer"] == "adamw:lr=0.01" and len(set(report["losses"])) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("noisy", "sgd:lr=0.1,momentum=0.9,nesterov=true"),
        ("tied", "adam:lr=1e-2,betas=0.8/0.9"),
        ("nested", "rmsprop"),
        ("unused", "adagrad:lr=0.1"),
    ],
)
def test_steps_on_the_device_are_those_of_an_ordinary_loop(here: Path, name: str, text: str) -> None:
    written = read_folder(optimized(here, name, "--optimizer", text, budget="100%"))
    assert str(written.optimizer) == str(parse_optimizer(text))
    assert written.program.kind is Gradients.APPLIED and not written.plan.tiers
    report = check_folder(written, 3, with_original=True)
    assert report.failures == () and report.comparison is not None and report.comparison.is_equal
    assert report.comparison.parameters is not None and report.comparison.parameters.scale > 0
    wanted = ordinary(here, name, text, 3)
    assert report.state.keys() <= wanted.keys()
    assert all(torch.equal(found, wanted[key]) for key, found in report.state.items())


def test_without_parameters_to_train_there_is_no_optimizer(here: Path) -> None:
    written = read_folder(optimized(here, "frozen", "--optimizer", "adamw", budget="100%"))
    assert written.optimizer is None
    report = check_folder(written, 2, with_original=True)
    assert report.failures == () and report.optimizer == ""
    assert report.comparison is not None and report.comparison.parameters is None


@pytest.mark.slow
def test_a_described_optimizer_lets_a_fitted_module_be_pickled(here: Path) -> None:
    loaded, factory = load(Source(f"{here}:mlp")), parse_optimizer("adamw:lr=1e-2")
    import irc

    fitted = irc.optimize(
        loaded.module, loaded.args, "100%", costs="analytic", time_limit=1, optimizer_in_backward=factory
    )
    again = pickle.loads(pickle.dumps(fitted))
    again(
        *(argument[:8] for argument in loaded.args)
    ).sum().backward()  # another call, planned by what was read
    assert len(again.irc_plans) == 2


# ---------------------------------------------------------------------- memory


@pytest.mark.slow
def test_what_lives_in_a_tier_is_there_before_the_first_step(swapped: Path) -> None:
    written = read_folder(swapped)
    offloaded_parameters = {
        c.offloaded.parameter: c
        for c in written.program.copies.tensors
        if c.offloaded and not c.offloaded.is_state
    }
    assert offloaded_parameters
    state = {name: tensor.clone() for name, tensor in written.state.items()}
    module = StandaloneModule(
        written.program, state, written.deliveries, written.plan, written.tier_configs, written.optimizer
    )
    assert module.tiers.held_bytes["disk"] >= sum(copied.nbytes for copied in offloaded_parameters.values())
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, state[name])
        assert (parameter.data_ptr() != state[name].data_ptr()) == (name in offloaded_parameters)
    held_bytes = module.tiers.held_bytes["disk"]
    report = check_folder(written, 1, with_original=False)
    assert report.failures == () and report.measured_bytes <= report.predicted_bytes
    for name, tensor in load_file(swapped / "weights.safetensors").items():
        assert name.startswith("irc.") or torch.equal(written.state[name], tensor), "it is the file's own"
    training_loss(module(*written.examples)).backward()
    assert module.tiers.held_bytes["disk"] > held_bytes, "the first step makes the state"


@pytest.mark.slow
def test_the_originals_peak_is_that_of_its_whole_step(swapped: Path) -> None:
    report = check_folder(read_folder(swapped), 1, with_original=True)
    module = load(Source(f"{swapped.parent / 'models.py'}:wide")).module
    parameter_bytes = sum(parameter.nbytes for parameter in module.parameters())
    assert report.original_bytes is not None and report.original_bytes > 4 * parameter_bytes


def test_measuring_a_step_with_its_optimizer_leaves_no_trace() -> None:
    module, x = torch.nn.Linear(64, 64), torch.randn(2, 64)
    one = optimizer_of_all(parse_optimizer("adamw"), module)
    training_loss(module(x)).backward()
    one.step()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = {key: value.clone() for key, value in one.state[module.weight].items()}
    with_step = measured_peak_bytes(module, [x], 0, optimizer=one)
    assert with_step > measured_peak_bytes(module, [x], 0), "the step takes memory of its own"
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(torch.equal(value, state[key]) for key, value in one.state[module.weight].items())
    assert module.weight.grad is None


# ---------------------------------------------------------------------- what does not hold


def test_a_changed_original_is_noticed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = optimized(here, "mlp", "--optimizer", "adamw")
    here.write_text(here.read_text().replace("nn.GELU()", "nn.SiLU()"))
    assert cli.main(["run", str(out), "--check", "--trust"]) == 1
    found = capsys.readouterr()
    assert "not bit-equal" in found.out and "parameters by " in found.err and "error[IRC130]" in found.err


def test_another_rate_is_noticed(here: Path) -> None:
    written = read_folder(optimized(here, "mlp", "--optimizer", "sgd:lr=1e-2"))
    loaded = load(Source(f"{here}:mlp"))
    seen = compare(loaded.module, written.module(), loaded.args, 1, optimizer=parse_optimizer("sgd:lr=2e-2"))
    assert seen.loss_difference == seen.output_difference == 0, "both have the same first forward"
    assert seen.parameters is not None and seen.parameters.largest > 0 and not seen.agrees


def test_outputs_and_their_number_count(here: Path) -> None:
    class Two(torch.nn.Module):
        def __init__(self, *factors: float) -> None:
            super().__init__()
            self.weight, self.factors = torch.nn.Parameter(torch.ones(4)), factors

        def forward(self, x: torch.Tensor) -> Any:
            return [self.weight * x * factor for factor in self.factors]

    x = torch.ones(4)
    assert compare(Two(1.0, -1.0), Two(1.0, -1.0), [x], 1).is_equal
    other = compare(Two(1.0, -1.0), Two(-1.0, 1.0), [x], 1)  # the loss is the mean square
    assert other.loss_difference == 0 and other.output_difference == 2 and not other.agrees
    assert compare(Two(1.0), Two(1.0, 0.0), [x], 1).output_difference == float("inf")


def test_state_that_is_larger_than_planned_is_a_failure(here: Path) -> None:
    written = read_folder(optimized(here, "mlp", "--optimizer", "sgd:lr=1e-2"))
    larger: Written = replace(written, optimizer=parse_optimizer("adamw"))
    failures = check_folder(larger, 1, with_original=False).failures
    assert any("the state of adamw takes" in failure for failure in failures)


def edit(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda plan: plan.update(changes)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (edit(optimizer="lion"), "no optimizer 'lion'"),
        (edit(optimizer="adamw:lr=fast"), "lr=fast of adamw is not a number"),
        (edit(optimizer="adamw:lr=-1"), "Invalid learning rate"),
        (edit(optimizer=["adamw"]), "AttributeError"),
        (edit(optimizer=None), "the program applies gradients, and no optimizer is named"),
        (lambda plan: plan.pop("optimizer"), "the program applies gradients, and no optimizer is named"),
    ],
)
def test_a_damaged_description(here: Path, damage: Callable[[dict[str, Any]], object], text: str) -> None:
    out = optimized(here, "mlp", "--optimizer", "adamw")
    plan = json.loads((out / "plan.json").read_text())
    damage(plan)
    (out / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UsageError, match=text) as caught:
        read_folder(out)
    assert caught.value.code == "IRC431" and "plan.json is damaged" in caught.value.message


def test_folders_without_an_optimizer(here: Path) -> None:
    out = optimized(here, "mlp")
    plan = json.loads((out / "plan.json").read_text())
    assert plan["optimizer"] is None
    for key in ("optimizer", "offloaded_bytes"):  # as earlier versions wrote it
        del plan[key]
    (out / "plan.json").write_text(json.dumps(plan))
    assert check_folder(read_folder(out), 2, with_original=True).failures == ()
    (out / "plan.json").write_text(json.dumps({**plan, "optimizer": "adamw"}))
    with pytest.raises(UsageError, match="optimizer adamw is named, and the program applies no") as caught:
        read_folder(out)
    assert caught.value.code == "IRC431"


@pytest.mark.slow
def test_a_plan_that_claims_other_bytes_in_tiers(swapped: Path, tmp_path: Path) -> None:
    out = shutil.copytree(swapped, tmp_path / "out")
    plan = json.loads((out / "plan.json").read_text())
    plan["offloaded_bytes"] += 1
    (out / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(VerificationError, match="live in tiers between steps") as caught:
        read_folder(out)
    assert caught.value.code == "IRC129"


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("--optimizer lion", "IRC453"),
        ("--optimizer adamw:rate=1", "IRC454"),
        ("--optimizer adamw:lr=fast", "IRC455"),
        ("--optimizer adamw:lr=-1", "IRC456"),
        ("--swap params,optimizer", "IRC423"),
        ("--optimizer adamw --forwards-in-flight 2", "IRC565"),
    ],
)
def test_wrong_options(here: Path, options: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["optimize", f"{here}:mlp", "--budget", "60%", *options.split()]) == 2
    assert f"error[{code}]" in capsys.readouterr().err


def test_a_pipeline_as_text_has_no_optimizer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["optimize", f"{here}:mlp", "--optimizer", "adamw", "--passes", "cost,plan-memory"]
    assert cli.main(argv) == 2
    assert "error[IRC400]: --passes and --optimizer exclude each other" in capsys.readouterr().err


def test_the_pipeline_is_that_of_the_interface_for_python(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["optimize", f"{here}:mlp", "--budget", "60%", "--costs", "analytic", "--optimizer", "adamw"]
    assert cli.main([*argv, "--swap", "disk", "--swap", "params,optimizer", "--print-passes"]) == 0
    names = re.findall(r"(?:^|,)([a-z-]+)(?:\{[^}]*\})?(?=,|$)", capsys.readouterr().out.strip())
    rewrites = ["replay-draws", "split-convolutions", "write-in-place", "release-gradients"]
    assert names == [*rewrites, "cost", "offer-tiers", "plan-memory"]
