"""`irc estimate` and `irc max-batch`: what they print, and their exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from irc.tools.cli import main

CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    **{"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 100, "n_positions": 64},
    **{"bos_token_id": 0, "eos_token_id": 0},
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_an_estimate_of_a_configuration(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", "--config", config, "--batch", "2", "--sequence", "16", "--machine", "h100"]
    assert main([*command, "--optimizer", "adamw", "--train", "lora:r=4"]) == 0
    text = capsys.readouterr().out
    for part in (
        "optimizer state",
        "smallest budget",
        "fits as it is",
        "tokens a second",
        "trained",
    ):
        assert part in text
    assert "h100: a described machine, whose steps were not measured" in text


def test_ci_has_a_status_of_its_own(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", "--config", config, "--sequence", "16", "-q", "--budget", "1KiB"]
    assert main(command) == 0
    assert main([*command, "--ci"]) == 3
    assert not capsys.readouterr().out


def test_a_factory_is_estimated(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", f"{models}:mlp", "--machine", "cpu", "--ci"]) == 0
    assert "samples a second" in capsys.readouterr().out
    assert main(["estimate", f"{models}:mlp", "--machine", "h100", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["items"] > 0 and data["machine"] == "h100" and data["fits"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "IRC400.*either MODEL or --config"),
        (["m.py:f", "--config", "c.json"], "IRC400.*either MODEL or --config"),
        (["m.py:f", "--dtype", "float32"], "IRC400.*--dtype is for --config"),
        (["--config", "{config}", "--batch", "0"], "IRC400.*1 or more"),
        (["--config", "{config}", "--machine", "h200x"], "IRC410"),
        (["--config", "{config}", "--optimizer", "lion"], "IRC453"),
        (["--config", "{config}", "--budget", "4Gb"], "IRC401"),
    ],
)
def test_wrong_use_is_one_message(
    arguments: list[str], message: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", *(part.format(config=config) for part in arguments)]) == 2
    error = capsys.readouterr().err
    assert len([line for line in error.splitlines() if line.startswith("error[")]) == 1
    code, _, text = message.partition(".*")
    assert code in error and text in error


@pytest.mark.slow
def test_the_largest_batch_of_a_configuration(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["max-batch", "--config", config, "--costs", "cpu", "--time-limit", "0.3", "--json"]
    assert main([*command, "--sequence", "8", "--budget", "1000KiB"]) == 0
    batch = json.loads(capsys.readouterr().out)
    assert batch["size"] > 1 and batch["peak_bytes"] <= 1000 << 10 and batch["unit"] == "tokens"
    assert main([*command, "--axis", "sequence", "--budget", "1000KiB", "--measure"]) == 0
    sequence = json.loads(capsys.readouterr().out)
    assert 1 < sequence["size"] <= 64
    assert sequence["measured_peak_bytes"] <= sequence["peak_bytes"]
    assert main([*command, "--budget", "1KiB"]) == 3


def test_the_largest_batch_of_a_factory(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["max-batch", f"{models}:mlp", "--costs", "cpu", "--time-limit", "1", "--budget", "300KB"]
    assert main(command) == 0
    assert "largest batch" in capsys.readouterr().out
    assert main([*command[:-1], "60%"]) == 2
    assert "IRC401" in capsys.readouterr().err
