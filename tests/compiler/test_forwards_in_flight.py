"""`forwards_in_flight` from Python and on the command line, and in what is written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import irc
from irc import Plan
from irc.compiler.artifact import read_folder
from irc.compiler.run import check_folder
from irc.tools import cli

FAST = ["--costs", "analytic", "--time-limit", "1"]


def net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = (layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh()))
    return nn.Sequential(*layers), torch.randn(64, 16)


def optimize(budget: int | str = "100%", **options: Any) -> Any:
    module, x = net()
    return irc.optimize(module, x, budget, costs="analytic", time_limit=1, **options)


@pytest.mark.slow
def test_the_budget_covers_so_many_forwards() -> None:
    plans: list[Plan] = [optimize(forwards_in_flight=count, strategy="keep-all").plan for count in (1, 2, 3)]
    input_bytes = 64 * 16 * 4
    assert [plan.forwards_in_flight for plan in plans] == [1, 2, 3]
    assert [plan.static_bytes - plans[0].static_bytes for plan in plans] == [0, input_bytes, 2 * input_bytes]
    assert plans[0].peak_bytes < plans[1].peak_bytes < plans[2].peak_bytes
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)
    accumulated: Plan = optimize(forwards_in_flight=2, accumulate_gradients=True).plan
    assert (accumulated.forwards_in_flight, accumulated.gradients) == (2, "accumulated")
    assert "2 forwards, then their backwards in any order" in accumulated.summary()


@pytest.mark.parametrize("count", [0, True, 2.0, "2", None])
def test_a_wrong_number_is_refused(count: Any) -> None:
    with pytest.raises(irc.UsageError, match=r"IRC565"):
        optimize(forwards_in_flight=count)


def test_several_forwards_beside_an_optimizer_in_backward_are_refused() -> None:
    with pytest.raises(irc.UsageError, match=r"IRC565.*the first backward updates the parameters"):
        optimize(forwards_in_flight=2, optimizer_in_backward=torch.optim.SGD)


def command(*argv: object) -> int:
    return cli.main([str(argument) for argument in argv])


@pytest.mark.slow
def test_a_written_folder_is_held_to_so_many_forwards(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ["--budget", "80%", "--time-limit", 1, "--forwards-in-flight", 3]
    assert command("optimize", f"{models}:mlp", *options, "-o", out) == 0
    assert "3 forwards, then their backwards in any order" in capsys.readouterr().out
    plan = Plan.load(out / "plan.json")
    assert plan.forwards_in_flight == 3 and plan.peak_with_gradients_bytes is not None
    written = read_folder(out)
    assert written.schedule.graph.forwards_in_flight == written.module().program.forwards_in_flight == 3
    report = check_folder(written, 2, with_original=True)
    assert report.failures == () and report.comparison is not None and report.comparison.is_equal
    assert 0.995 * plan.peak_bytes <= report.measured_bytes <= plan.peak_bytes
    assert report.original_bytes is not None and report.original_bytes > report.measured_bytes
    changed = json.loads((out / "plan.json").read_text()) | {"forwards_in_flight": 2}
    (out / "plan.json").write_text(json.dumps(changed))
    with pytest.raises(
        irc.VerificationError, match=r"IRC129.*counts 3 forwards in flight, not the 2 claimed"
    ):
        read_folder(out)


@pytest.mark.slow
def test_the_option_becomes_a_pass(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["optimize", f"{models}:mlp", "--budget", "80%", "--print-passes", *FAST]
    assert command(*argv, "--forwards-in-flight", 2) == 0
    text = capsys.readouterr().out.strip()
    assert text.startswith("hold-forwards{count=2},")
    assert command("optimize", f"{models}:mlp", "--passes", text, "--json") == 0
    assert json.loads(capsys.readouterr().out)["forwards_in_flight"] == 2
    assert command(*argv) == 0 and "hold-forwards" not in capsys.readouterr().out
    assert command("optimize", f"{models}:mlp", "--passes", text, "--forwards-in-flight", 2) == 2
    assert "error[IRC400]: --passes and --forwards-in-flight" in capsys.readouterr().err
    assert command(*argv, "--forwards-in-flight", 0) == 2
    assert "error[IRC565]: 0 forwards in flight" in capsys.readouterr().err
