"""The examples run, and what they train within a budget is, bit for bit, what the original trains."""

from __future__ import annotations

import sys
from collections.abc import Generator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain_loop": {"time_limit": 1, "costs": "analytic"},
    "lightning_module": {"time_limit": 1},
    "torch_compile": {"time_limit": 0.3},
    "qlora": {"time_limit": 1},
    "dynamic_padding": {"time_limit": 1},
    "peft_lora": {"time_limit": 1},
    "trl_sft": {"time_limit": 1},
    "diffusers_unet": {"time_limit": 1},
    "accelerate_accumulation": {"time_limit": 1},
}
MODELS = ("gpt2", "bert", "vit", "t5", "llama", "mamba")

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]


def example(name: str) -> Any:
    if name not in sys.modules:
        spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def test_all_examples_are_tested() -> None:
    tested = {*OPTIONS, "hugging_face_trainer"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


@pytest.mark.parametrize("name", OPTIONS)
def test_an_example_ends_with_the_same_weights(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example(name).main(**OPTIONS[name]) is True
    assert "predicted peak" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "accumulation"), [*((name, 1) for name in MODELS), ("gpt2", 2)])
def test_a_trainer_of_hugging_face_ends_with_the_same_weights(name: str, accumulation: int) -> None:
    found = example("hugging_face_trainer")
    assert tuple(found.MODELS) == MODELS
    # Unmeasured, the workspace of a convolution is only bounded, and too high for so tight a budget.
    costs = "measured" if name in ("vit", "mamba") else "analytic"
    assert found.main([name], "90%", accumulation, time_limit=1, costs=costs) == {name: True}
