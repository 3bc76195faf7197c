"""`irc run --check`: it passes where it should, and it can fail."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.model_files import planned_folder
from torch import nn

from irc.compiler.artifact import read_folder
from irc.compiler.run import check_folder
from irc.compiler.training import compare, measured_peak_bytes
from irc.ir import Rounding
from irc.tools import cli

QUICK = ("--budget", "90%", "--time-limit", "1")


@pytest.fixture
def optimize(models: Path) -> Path:
    return planned_folder(models, "mlp", *QUICK)


@pytest.mark.parametrize("name", ["noisy", "tied", "nested"])
def test_numbers_and_memory_hold(models: Path, name: str) -> None:
    written = read_folder(planned_folder(models, name, *QUICK))
    before = torch.get_rng_state()
    report = check_folder(written, 3, with_original=True)
    assert torch.equal(before, torch.get_rng_state())
    assert report.failures == () and report.comparison is not None and report.comparison.is_equal
    assert len(report.steps) == 3 and len({step.loss for step in report.steps}) == 3
    assert report.measured_bytes <= report.predicted_bytes <= report.budget_bytes
    slack = 0.1 if name == "nested" else 0.005  # its outputs alias each other, which is counted from above
    assert report.predicted_bytes - report.measured_bytes <= slack * report.predicted_bytes
    assert report.original_bytes is not None and report.original_bytes > report.measured_bytes


def test_a_changed_original_is_noticed(
    models: Path, optimize: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.write_text(models.read_text().replace("nn.GELU()", "nn.SiLU()"))
    assert cli.main(["run", str(optimize), "--check", "--trust"]) == 1
    found = capsys.readouterr()
    assert "not bit-equal" in found.out
    match = re.search(r"error\[IRC130\]: the numbers differ .* gradients by ([0-9.e-]+)", found.err)
    assert match is not None and float(match[1]) > 0
    assert cli.main(["run", str(optimize), "--check", "--trust", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failures"] and not report["bit_equal"] and report["loss_difference"] > 0


def test_the_code_that_a_folder_names_runs_if_the_user_says_so(
    models: Path, optimize: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    models.write_text(f"open({str(ran)!r}, 'w').close()\n" + models.read_text())
    assert cli.main(["run", str(optimize), "--check"]) == 2
    refused = capsys.readouterr().err
    assert "error[IRC436]" in refused and f"{models}:mlp" in refused and "--trust" in refused
    assert cli.main(["run", str(optimize), "--steps", "1"]) == 0 and not ran.exists()
    assert cli.main(["run", str(optimize), "--steps", "1", "--trust"]) == 0 and not ran.exists()
    assert cli.main(["run", str(optimize), "--original", f"{models}:mlp"]) == 2 and not ran.exists()
    assert cli.main(["run", str(optimize), "--check", "--original", f"{models}:mlp"]) == 0 and ran.exists()
    ran.unlink()
    plan = json.loads((optimize / "plan.json").read_text())
    for damaged in ({"model": 3}, {"model": "x", "batch": "y"}, {}):
        (optimize / "plan.json").write_text(json.dumps(plan | {"source": damaged}))
        assert cli.main(["run", str(optimize), "--check", "--trust"]) == 2
        assert "error[IRC431]" in capsys.readouterr().err


def test_an_original_of_another_shape_or_gone(
    models: Path, optimize: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = models.read_text()
    models.write_text(text.replace("range(8)", "range(7)"))
    assert cli.main(["run", str(optimize), "--check", "--trust"]) == 2
    assert "error[IRC432]" in (err := capsys.readouterr().err) and "14.weight" in err
    models.write_text(text.replace("torch.randn(64, 32)", "torch.randn(63, 32)"))
    assert cli.main(["run", str(optimize), "--check", "--trust"]) == 2
    assert "takes other inputs" in capsys.readouterr().err
    models.unlink()
    assert cli.main(["run", str(optimize), "--check", "--trust"]) == 2
    assert "error[IRC420]: there is no file" in capsys.readouterr().err
    assert cli.main(["run", str(optimize)]) == 0, "the program itself needs no original"


def test_a_peak_over_the_plan_is_a_failure(optimize: Path) -> None:
    written = read_folder(optimize)
    plan = replace(written.plan, peak_bytes=written.plan.peak_bytes - 100, budget_bytes=1000)
    report = check_folder(replace(written, plan=plan), 1, with_original=False)
    predicted, budget = report.failures
    assert f"of {report.measured_bytes} bytes is over the predicted {plan.peak_bytes}" in predicted
    assert "over the budget of 1000" in budget
    assert "<=" not in report.text()


@pytest.mark.parametrize(
    ("tensors", "is_named"), [((), False), (("0.weight",), False), (("0.bias",), True), (None, True)]
)
def test_a_difference_passes_if_the_plan_names_the_tensor(
    models: Path, optimize: Path, tensors: tuple[str, ...] | None, is_named: bool
) -> None:
    """The gradient of one bias of the original is off by a rounding."""
    spoilt = "layers[0].bias.register_hook(lambda gradient: gradient * (1 + 3e-7))\n    return nn.Sequential"
    models.write_text(models.read_text().replace("return nn.Sequential", spoilt, 1))
    written = read_folder(optimize)
    plan = replace(written.plan, roundings=(Rounding("a reason", tensors),))
    report = check_folder(replace(written, plan=plan), 1, with_original=True)
    assert report.comparison is not None and [*report.comparison.numbers[0].off] == ["0.bias"]
    expected = "the plan keeps the bits of the original, and those of 0.bias differ"
    assert report.failures == (() if is_named else (expected,))


def test_a_plan_file_that_claims_less_fails(optimize: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads((optimize / "plan.json").read_text())
    plan["peak_bytes"] -= 100
    (optimize / "plan.json").write_text(json.dumps(plan))
    assert cli.main(["run", str(optimize)]) == 1
    assert "error[IRC129]" in capsys.readouterr().err


# ---------------------------------------------------------------------- comparing


class Scaled(nn.Module):
    def __init__(self, factor: float = 1.0, noise: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(4))
        self.seen: torch.Tensor
        self.factor, self.noise = factor, noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(self.noise)
        self.seen.add_(x.detach())
        return (self.weight * x * self.factor).sum()


def test_equal_modules_compare_equal() -> None:
    seen = compare(Scaled(), Scaled(), [torch.ones(4)], 2)
    assert seen.is_equal and seen.time_ratio > 0 and seen.gradient_scale == 1


def test_each_difference_counts() -> None:
    x = torch.ones(4)
    assert not compare(Scaled(), Scaled(1.01), [x], 1).agrees
    assert not compare(Scaled(), Scaled(noise=3), [x], 1).same_generator
    frozen = Scaled()
    frozen.unused.data.fill_(2)
    frozen.seen.fill_(1)
    assert compare(Scaled(), frozen, [x], 1).buffer_difference == 1
    other = Scaled()
    other.weight.requires_grad_(False)
    other.unused.requires_grad_()
    wide = compare(Scaled(), other, [x.clone().requires_grad_()], 1)
    assert not wide.same_gradients and not wide.agrees


def test_not_a_number_is_no_agreement() -> None:
    seen = compare(Scaled(), Scaled(math.nan), [torch.ones(4)], 1)
    assert seen.gradient_difference == math.inf and not seen.agrees
    both = compare(Scaled(math.nan), Scaled(math.nan), [torch.ones(4)], 1)
    assert both.gradient_difference == 0 and both.agrees


def test_measuring_leaves_no_trace() -> None:
    module, x = Scaled(), torch.ones(4, requires_grad=True)
    module(x)
    before, generator = module.seen.clone(), torch.get_rng_state()
    assert measured_peak_bytes(module, [x], 1000) > 1000
    assert module.weight.grad is None and x.grad is None
    assert torch.equal(module.seen, before) and torch.equal(generator, torch.get_rng_state())


def test_a_small_gradient_that_is_wrong_does_not_hide_behind_a_large_one() -> None:
    class Two(nn.Module):
        def __init__(self, slope: float) -> None:
            super().__init__()
            self.large = nn.Parameter(torch.ones(4))
            self.small = nn.Parameter(torch.ones(4))
            self.slope = slope

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            still = self.small.detach()  # the same loss, another slope
            small = still + self.slope * (self.small - still)
            return (1e3 * x * self.large + 1e-2 * x * small).sum()

    x = torch.ones(4)
    assert compare(Two(1.0), Two(1.0), (x,), 2).agrees
    wrong = compare(Two(1.0), Two(2.0), (x,), 1)
    assert wrong.gradient_difference <= 1e-5 * wrong.gradient_scale  # within one tolerance for all
    assert not wrong.agrees
