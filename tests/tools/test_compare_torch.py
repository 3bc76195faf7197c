"""PyTorch's methods and irc on one tiny model, at the same peak."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from irc.tools.compare_torch import block_checkpointed, compare_model, compiled_with_budget, main
from irc.tools.loading import Loaded
from irc.tools.measure_plans import Settings, compare_step

QUICK = Settings(time_limit=2.0, repeats=1, profile=None)


@pytest.fixture(autouse=True)
def quiet_compiler() -> Iterator[None]:
    """torch's compiler warns about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.compiler.reset()


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.GELU())
            for _ in range(6)
        ]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def tiny() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Tiny(), (torch.randn(4, 8, 32, 32),)


def test_blocks_are_checkpointed_on_a_copy() -> None:
    module, args = tiny()
    other = block_checkpointed(module)
    assert other is not None and other is not module
    numbers = compare_step(module, other, args)
    assert numbers.gradients == 0 and numbers.outputs == 0
    assert numbers.buffers > 0  # recomputing BatchNorm moves its statistics twice
    assert block_checkpointed(nn.Linear(2, 2)) is None


def test_the_compiled_copy_has_the_names_and_numbers_of_the_original() -> None:
    module, args = tiny()
    compiled = compiled_with_budget(module, 0.5)
    assert [name for name, _ in compiled.named_parameters()] == [
        name for name, _ in module.named_parameters()
    ]
    assert compare_step(module, compiled, args).agrees


def test_irc_is_measured_at_the_peak_of_pytorch() -> None:
    module, args = tiny()
    points = list(compare_model("tiny", Loaded(module, args), [0.5], QUICK))
    assert [point.method for point in points] == ["checkpoint per block", "activation_memory_budget 0.5"]
    for point in points:
        assert point.torch_numbers is not None and point.torch_time is not None
        assert 0 < point.static_bytes < point.torch_bytes < point.original_bytes
        if point.refusal is None:
            assert point.failures == ()
            assert point.irc_numbers is not None and point.irc_numbers.bit_equal
            assert point.irc_bytes <= point.predicted_bytes <= point.torch_bytes
    assert points[1].refusal is None


def test_the_command_writes_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "factory.py"
    file.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        layers = (nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))\n"
        "        self.layers = nn.Sequential(*layers)\n"
        "    def forward(self, x):\n"
        "        return self.layers(x).square().mean()\n"
        "def model():\n"
        "    return Model(), (torch.randn(512, 32),)\n"
    )
    out, table = tmp_path / "out.json", tmp_path / "out.md"
    arguments = ["--models", f"{file}:model", "--settings", "0.8", "--no-blocks", "--repeats", "1"]
    assert main([*arguments, "--no-profile", "--json", str(out), "--markdown", str(table)]) in (0, 1)
    [point] = json.loads(out.read_text())["rows"]
    assert point["method"] == "activation_memory_budget 0.8" and point["torch_bytes"] > 0
    assert table.read_text().startswith("| model") and "points" in capsys.readouterr().out


def test_settings_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--settings", "2"]) == 2
    assert "IRC400" in capsys.readouterr().err
